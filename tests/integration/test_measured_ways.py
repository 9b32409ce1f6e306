"""A region that a device is slow to store into: the ring is tried; every byte is of its step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import GARBAGE, EmulatedDevice, devices
from emulated_job import Job
from test_devices import assert_exact

from lightck.pipeline import device_offload, device_placement, device_transfer, trial
from lightck.pipeline.trial import LOOKS

SPARE = 16 << 20
SLOW, FAST = 0.0, 1e9
"""Stores into the region may cost this, in plain copies: less than they do, more than they do."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """Make a device whose transfers have many loads; any trial is won."""
    monkeypatch.setattr(device_transfer, "LOAD_BYTES", 4096)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 65536)
    monkeypatch.setattr(trial, "WORTH", 1e9)
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
    ring = handle._checkpointer.pipeline.offload.transfers._free
    assert any("through the ring" in why for _, why in went) is any(
        bool((place != GARBAGE).any()) for place in ring
    ), "what is said is not what was done"
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
    went = train(Job(device), run_dir, 10, "auto")
    assert [way for way, _ in went] == ["direct"] * LOOKS + ["host"] * (10 - LOOKS)
    assert "ring not known" in went[LOOKS][1]
    assert went[-1][1].count("GB/s") == 3
    assert "device_ring" in caplog.text


def test_updates_of_less_than_one_load_each_are_judged_together(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "LOAD_BYTES", 32768)
    monkeypatch.setattr(device_placement, "TOO_SLOW", SLOW)
    went = [way for way, _ in train(Job(device, optimizers=5), run_dir, 6, "auto")]
    assert went == ["direct"] * LOOKS + ["host"] * (6 - LOOKS)


@pytest.mark.parametrize("placement", ["auto", "device"])
def test_a_copy_on_the_device_leaves_it_through_the_better_way_too(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.setattr(device_placement, "TOO_SLOW", SLOW)
    device.spare_bytes = SPARE
    went = train(Job(device), run_dir, 8, placement)
    assert {way for way, _ in went} == {"device"}
    through = ["through the ring" in why for _, why in went]
    assert through == [False] * LOOKS + [True] * (8 - LOOKS)


def test_a_ring_that_does_not_help_is_given_up(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_placement, "TOO_SLOW", SLOW)
    monkeypatch.setattr(trial, "WORTH", 0.0)
    went = [way for way, _ in train(Job(device), run_dir, 10, "auto")]
    assert went == ["direct"] * LOOKS + ["host"] * LOOKS + ["direct"] * (10 - 2 * LOOKS)


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
