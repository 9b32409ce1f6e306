"""A device's stores into the region are measured once; every byte is of its step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_devices import assert_exact

from lightck.pipeline import device_offload, device_placement, device_transfer
from support import internals
from support.emulated import GARBAGE, EmulatedDevice, devices
from support.emulated_job import Job

SPARE = 16 << 20
SLOW, FAST = 0.0, 1e9
"""Values of TOO_SLOW with which every device is too slow, and none is."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """Make a device whose transfers have many chunks."""
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 65536)
    monkeypatch.setattr(device_offload, "PEAK_STEPS", 0)
    made = EmulatedDevice()
    with devices(made):
        yield made


def train(job: Job, path: Path, steps: int, placement: str) -> list[tuple[str, str]]:
    """Return how so many snapshots went, and why; all are exact."""
    handle, went = job.attach(path, placement=placement), []
    job.step()
    for _ in range(steps):
        job.step()  # its forward opens the snapshot of the step before
        handle.wait(timeout=100)
        stats = handle.stats()
        went.append((stats.device_mode, stats.device_why))
    ring = internals.pipeline(handle).offload.engine._free
    used = sum(bool((place != GARBAGE).any()) for place in ring)
    through_ring = any("through the ring" in why for _, why in went)
    assert (used > 1) is through_ring, "what is said is not what was done"  # one is measured with
    handle.close()
    stats = handle.stats()
    assert (stats.torn, stats.failed, stats.slipped) == (0, 0, 0)
    assert_exact(job, path, [*range(1, steps + 2)])
    return went


def test_a_region_that_is_slow_to_store_into_is_left_for_the_ring(
    device: EmulatedDevice,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "lightck")
    monkeypatch.setattr(device_placement, "TOO_SLOW", SLOW)
    went = train(Job(device), run_dir, 5, "auto")
    assert [way for way, _ in went] == ["host"] * 5
    assert went[-1][1].count("GB/s") == 2
    (measured,) = [r.lightck for r in caplog.records if r.lightck_event == "device_rates"]
    assert measured["ring"] and measured["region"] > 0 and measured["pinned"] > 0


@pytest.mark.parametrize("placement", ["auto", "device"])
def test_a_copy_on_the_device_leaves_it_through_the_better_way_too(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.setattr(device_placement, "TOO_SLOW", SLOW)
    device.spare_bytes = SPARE
    went = train(Job(device), run_dir, 8, placement)
    assert {way for way, _ in went} == {"device"}
    assert all("through the ring" in why for _, why in went)


@pytest.mark.parametrize(("placement", "limit"), [("auto", FAST), ("direct", SLOW)])
def test_a_region_that_is_fast_and_a_way_that_was_asked_for_are_kept(
    device: EmulatedDevice,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    limit: float,
) -> None:
    monkeypatch.setattr(device_placement, "TOO_SLOW", limit)
    went = train(Job(device), run_dir, 8, placement)
    assert [way for way, _ in went] == ["direct"] * 8


def test_less_than_one_chunk_is_not_measured(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(device_placement, "TOO_SLOW", SLOW)
    went = train(Job(device), run_dir, 3, "auto")
    assert [way for way, _ in went] == ["direct"] * 3


def test_spare_memory_is_taken_beside_a_known_peak_and_let_go_when_that_grows(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_offload, "PEAK_STEPS", 1)
    device.spare_bytes = SPARE
    job, went = Job(device), []
    handle = job.attach(run_dir, placement="device")
    job.step()
    for step in range(1, 6):
        device.short = step == 4
        job.step()
        handle.wait(timeout=100)
        went.append((handle.stats().device_mode, handle.stats().device_copy_bytes > 0))
    assert went == [("host", False), *[("device", True)] * 2, *[("host", False)] * 2]
    handle.close()
    assert_exact(job, run_dir, [*range(1, 7)])


def test_a_limit_on_writes_keeps_devices_from_storing_into_the_region(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement="direct", write_limit=1_000_000_000)
    job.step()
    job.step()
    handle.wait(timeout=100)
    stats = handle.stats()
    assert stats.device_mode == "host" and "write limit" in stats.device_why
    assert "register" not in device.said
    handle.close()
