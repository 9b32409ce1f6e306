"""Snapshots of tensors that a device holds: every byte is of its step, whatever runs when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.device.lookup import holder
from lightck.errors import TornSnapshotError
from lightck.pipeline import device_offload, device_placement, device_transfer, pipeline
from support import internals
from support.emulated import EmulatedDevice, Event, Stream, devices
from support.emulated_job import Job, value, write, wrong
from support.loops import steps_at

WAYS = ("host", "direct", "device")
SPARE = 16 << 20


def slow() -> EmulatedDevice:
    """Its copies take long beside its updates."""
    made = EmulatedDevice()
    made.copy_s, made.spare_bytes = 0.002, SPARE
    return made


@pytest.fixture(autouse=True)
def peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the peak be known from the first snapshot on."""
    monkeypatch.setattr(device_offload, "PEAK_STEPS", 0)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One device, known to lightck."""
    made = slow()
    with devices(made):
        yield made


def assert_exact(job: Job, path: Path, steps: list[int]) -> None:
    """These snapshots are there, and every tensor of each is of its step."""
    assert steps_at(path) == steps
    assert {step: wrong(job, path, step) for step in steps} == {step: [] for step in steps}


def untroubled(handle: lightck.handle.Handle, way: str) -> None:
    """It went that way, and nothing else happened."""
    stats = handle.stats()
    assert (stats.device_mode, stats.torn, stats.failed, stats.slipped) == (way, 0, 0, 0)
    assert stats.bytes_from_device > 0, stats


@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_exact_though_updates_follow_at_once(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement=way)
    for _ in range(6):
        job.step()
        handle.wait(timeout=100)
    handle.close()
    untroubled(handle, way)
    assert_exact(job, run_dir, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("way", ["host", "direct"])
def test_the_cpu_runs_ahead_of_a_device_that_does_nothing_yet(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement=way)
    job.step()  # its end settles what there is
    gate = Event()
    device.compute.follow(gate)
    for _ in range(4):
        job.step()  # would wait for ever if the CPU waited for the device
    assert handle.last_captured_step is None
    gate.reach()
    handle.close()
    untroubled(handle, way)
    assert_exact(job, run_dir, [1, 2, 3, 4, 5])


def test_a_copy_on_the_device_lets_the_cpu_run_ahead_and_the_next_snapshot_slip(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BEHIND_S", 0.01)
    job = Job(device)
    handle = job.attach(run_dir, placement="device")
    job.step()
    gate = Event()
    device.compute.follow(gate)
    for _ in range(3):
        job.step()
    assert handle.stats().slipped == 2  # the copy of step 1 has not left the device
    gate.reach()
    handle.close()
    stats = handle.stats()
    assert (stats.device_mode, stats.torn, stats.failed) == ("device", 0, 0)
    assert_exact(job, run_dir, [1, 4])


@pytest.mark.parametrize("way", WAYS)
def test_several_devices_and_optimizers_have_their_own_fences(run_dir: Path, way: str) -> None:
    one, two = slow(), slow()
    two.name = "emulated:1"
    with devices(one, two):
        job = Job(one, two, layers=6, optimizers=2)
        handle = job.attach(run_dir, placement=way)
        for _ in range(4):
            job.step()
            handle.wait(timeout=100)
        handle.close()
        untroubled(handle, way)
        assert_exact(job, run_dir, [1, 2, 3, 4])


@pytest.mark.parametrize("way", WAYS)
def test_the_update_may_run_on_a_stream_of_its_own(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement=way)
    side = Stream("side")
    for _ in range(4):
        job.model(torch.zeros(1))
        side.follow(device.compute.record())
        with device.on(side):
            job.optimizers[0].step()
        device.compute.follow(side.record())
        handle.wait(timeout=100)
    handle.close()
    side.queue(None)
    untroubled(handle, way)
    assert_exact(job, run_dir, [1, 2, 3, 4])


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_the_loop_lets_go_of_is_not_reused_under_a_copy(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement=way)
    for step in range(1, 5):
        job.step()
        # After the update: the next snapshot's memory is new, that of the last one is let go of.
        for layer in job.layers:
            fresh = device.empty(layer.weight.shape)
            layer.weight.data = fresh
            write(device, layer.weight, value(f"{layer.name}.weight", step, fresh.shape), 0.0)
            del fresh
    handle.close()
    stats = handle.stats()
    assert (stats.torn, stats.failed) == (0, 0)
    steps = steps_at(run_dir)
    assert steps[-1] == 4
    assert_exact(job, run_dir, steps)


def test_a_ring_smaller_than_the_state_is_bounded_and_loses_nothing(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 16384)
    device.copy_s = 0.0
    job = Job(device, layers=9)
    handle = job.attach(run_dir, placement="host", threads=1)
    internals.pipeline(handle).pool.pace(0)  # workers read what somebody waits for, nothing else
    for _ in range(8):
        job.step()
    handle.wait(timeout=100)
    assert handle.stats().ring_bytes == 16384
    handle.close()
    untroubled(handle, "host")
    assert_exact(job, run_dir, [*range(1, 9)])
    assert handle.stats().bytes_from_device > 40 * 16384


def test_a_driver_that_does_not_register_the_region_means_the_ring(
    device: EmulatedDevice, run_dir: Path
) -> None:
    device.refuses, device.spare_bytes = "out of pages to pin (800)", 0
    job = Job(device)
    handle = job.attach(run_dir, placement="direct")
    for _ in range(3):
        job.step()
        handle.wait(timeout=100)
    handle.close()
    untroubled(handle, "host")
    assert "out of pages to pin (800)" in handle.stats().device_why
    assert device.said.count("register") == 1, "asked again"
    assert_exact(job, run_dir, [1, 2, 3])


def test_what_is_registered_is_given_back(device: EmulatedDevice, run_dir: Path) -> None:
    job = Job(device)
    with job.attach(run_dir, placement="direct") as handle:
        job.step()
        handle.wait(timeout=100)
        job.step()
        assert sum(device.registered.values()) >= handle.region.info.size
    assert not device.registered


@pytest.mark.parametrize("way", ["direct", "device"])
def test_no_copy_lies_over_the_edge_of_a_registered_piece(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(device_placement, "PIECE_BYTES", 12288)
    job = Job(device)
    handle = job.attach(run_dir, placement=way)
    for _ in range(3):
        job.step()
        handle.wait(timeout=100)
    assert device.said.count("register") > 50
    handle.close()
    untroubled(handle, way)
    assert_exact(job, run_dir, [1, 2, 3])
    assert not any(size <= 12288 for size in device.registered.values())


def test_a_region_that_is_registered_in_part_only_is_not_at_all(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_placement, "PIECE_BYTES", 12288)
    device.most_pieces = 7
    job = Job(device)
    with job.attach(run_dir, placement="direct") as handle:
        for _ in range(3):
            job.step()
            handle.wait(timeout=100)
        untroubled(handle, "host")
        assert not any(size == 12288 for size in device.registered.values())
    assert_exact(job, run_dir, [1, 2, 3])


def test_an_ordinary_file_is_reached_through_the_ring(
    device: EmulatedDevice, disk_dir: Path
) -> None:
    job = Job(device)
    handle = job.attach(disk_dir, placement="direct")
    for _ in range(3):
        job.step()
        handle.wait(timeout=100)
    handle.close()
    untroubled(handle, "host")
    assert "file" in handle.stats().device_why
    assert_exact(job, disk_dir, [1, 2, 3])


def test_auto_prefers_spare_memory_then_the_region_then_the_ring(
    device: EmulatedDevice, run_dir: Path
) -> None:
    found = []
    for k, (spare, refuses) in enumerate([(SPARE, ""), (0, ""), (0, "no")]):
        device.spare_bytes, device.refuses = spare, refuses
        job, path = Job(device), run_dir.with_name(f"{k}")
        with job.attach(path) as handle:
            job.step()
            job.step()
            handle.wait(timeout=100)
            found.append(handle.stats().device_mode)
    assert found == ["device", "direct", "host"]


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_changes_in_the_window_is_torn(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job, heard = Job(device), []
    handle = job.attach(run_dir, placement=way, on_error=heard.append)
    job.step()
    job.model(torch.zeros(1))
    write(device, job.layers[2].weight, value("2.weight", 77, job.layers[2].weight.shape), 0.0)
    job.optimizers[0].step()
    internals.pipeline(handle).await_abandoned()
    job.step()
    with pytest.raises(TornSnapshotError):
        handle.close()
    (error,) = heard
    assert isinstance(error, TornSnapshotError)
    assert error.names == ("model/2.weight",)
    assert handle.stats().torn == 1
    assert_exact(job, run_dir, [2, 3])


@pytest.mark.parametrize("way", WAYS)
def test_proof_compares_every_byte_with_what_the_device_holds(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job, heard = Job(device), []
    handle = job.attach(run_dir, placement=way, on_error=heard.append, proof=True)
    job.step()
    job.model(torch.zeros(1))
    weight, pipeline = job.layers[3].weight, internals.pipeline(handle)
    assert pipeline.window is not None
    assert pipeline.offload.arrived(pipeline.window.transfers, 100)  # before, it is what is copied
    device.overwrite(weight, value("3.weight", 78, weight.shape))  # around the counters
    job.optimizers[0].step()
    pipeline.await_abandoned()
    job.step()
    with pytest.raises(TornSnapshotError):
        handle.close()
    assert [type(error) for error in heard] == [TornSnapshotError]
    assert handle.stats().torn == 1
    assert_exact(job, run_dir, [2, 3])


def test_a_device_that_fails_costs_snapshots_and_is_told(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job, heard = Job(device), []
    handle = job.attach(run_dir, placement="host", on_error=heard.append)
    job.step()
    job.step()
    handle.wait(timeout=100)
    device.broken = "an illegal address (700)"
    for _ in range(3):
        job.step()
    with pytest.raises(lightck.errors.DeviceError, match="illegal address"):
        handle.close()
    device.broken = ""
    assert len(heard) == 1, heard  # what has failed is not asked again
    assert "illegal address" in str(heard[0])
    assert handle.stats().failed > 0
    assert_exact(job, run_dir, [1])


@pytest.mark.parametrize("way", WAYS)
def test_replays_between_marks_are_updates(device: EmulatedDevice, run_dir: Path, way: str) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement=way)
    job.step()
    update = job.optimizers[0]
    for _ in range(3):
        job.model(torch.zeros(1))
        handle.before_update()
        update.replay()
        handle.after_update()
        handle.wait(timeout=100)
    handle.close()
    untroubled(handle, way)
    assert_exact(job, run_dir, steps_at(run_dir))
    assert steps_at(run_dir)[-1] == 4


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_graph_records_is_no_step(
    device: EmulatedDevice, run_dir: Path, inside: bool
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement="host")
    job.step()
    if inside:  # the window of step 1
        job.model(torch.zeros(1))
    device.in_graph = True
    for _ in range(3):
        job.step()
    device.in_graph = False
    if inside:
        job.optimizers[0].step()
    job.step()
    handle.close()
    stats = handle.stats()
    assert (stats.torn, stats.failed, stats.slipped) == (0, 0, 0)
    assert_exact(job, run_dir, [1, 2, 3][: 2 + inside])


def test_marks_inside_a_recording_cost_the_snapshot(device: EmulatedDevice, run_dir: Path) -> None:
    job, heard = Job(device), []
    handle = job.attach(run_dir, placement="host", on_error=heard.append)
    job.step()
    job.model(torch.zeros(1))
    device.in_graph = True
    handle.before_update()
    device.in_graph = False
    job.optimizers[0].step()
    handle.after_update()
    with pytest.raises(lightck.errors.LightckError, match="records a graph"):
        handle.close()
    assert len(heard) == 1


@pytest.mark.parametrize("way", WAYS)
def test_restore_fills_the_device_and_training_goes_on(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    with job.attach(run_dir, placement=way) as handle:
        for _ in range(3):
            job.step()
            handle.wait(timeout=100)
    resumed = Job(device)
    resumed.step()  # so that its state is there; of no account
    info = lightck.restore(resumed.model, resumed.optimizers, run_dir)
    assert info is not None
    assert info.step == 3
    found: dict[str, Any] = {}
    for k, layer in enumerate(resumed.layers):
        found[f"{layer.name}.weight"] = device.read(layer.weight)
        found[f"{layer.name}.seen"] = device.read(layer.seen)
        state = resumed.optimizers[0].state[layer.weight]
        found[f"0/{k}/momentum"] = device.read(state["momentum"])
        found[f"0/{k}/step"] = state["step"]
    for name, tensor in job.expected(3).items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("inference", [False, True])
def test_state_that_was_saved_on_the_cpu_goes_to_the_device_of_its_parameter(
    device: EmulatedDevice, run_dir: Path, inference: bool
) -> None:
    """By its kind this device is a CPU; an optimizer that has not stepped has no state yet."""
    job = Job(device)
    with job.attach(run_dir, placement="host") as handle:
        for _ in range(3):
            job.step()
            handle.wait(timeout=100)
    resumed = Job(device)
    with torch.inference_mode(inference):
        optimizers = None if inference else resumed.optimizers
        info = lightck.restore(resumed.model, optimizers, run_dir)
    assert info is not None and info.step == 3
    expected = job.expected(3)
    for k, layer in enumerate(resumed.layers):
        assert torch.equal(device.read(layer.weight), expected[f"{layer.name}.weight"])
        if not inference:
            state = resumed.optimizers[0].state[layer.weight]
            assert holder(state["momentum"]) is device
            assert torch.equal(device.read(state["momentum"]), expected[f"0/{k}/momentum"])
            assert holder(state["step"]) is None  # as optimizers that loop count


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_save_on_another_thread_goes_round_a_stream_that_hangs(
    device: EmulatedDevice, run_dir: Path, way: str, buffers: bool
) -> None:
    job = Job(device, buffers=buffers)
    failure = lightck.Failure(signals=())
    handle = job.attach(run_dir, placement=way, policy=1000, failure=failure)
    for _ in range(3):
        job.step()
    job.model(torch.zeros(1))
    gate = Event()
    device.compute.follow(gate)  # a collective that the others have left
    device.hangs = True  # a driver may wait for it when it is asked for memory
    with ThreadPoolExecutor(1) as other:
        saved = other.submit(handle.snapshot_now, "hang").result()
    assert (saved.step, saved.fresh, saved.early) == (3, True, False), saved
    assert "side_stream" in device.said
    # Who saves beside a hang asks no device for memory.
    assert handle.stats().device_mode == {"device": "host"}.get(way, way)
    device.hangs = False
    gate.reach()
    job.optimizers[0].step()
    handle.detach()
    assert_exact(job, run_dir, [3])


def test_a_save_on_another_thread_holds_the_update_back(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job, side = Job(device, buffers=False), Stream("side")
    failure = lightck.Failure(signals=())
    handle = job.attach(run_dir, placement="host", policy=1000, failure=failure)
    side.follow(device.compute.record())
    with device.on(side), ThreadPoolExecutor(1) as other:
        for _ in range(3):
            job.step()
        job.model(torch.zeros(1))
        saving = other.submit(handle.snapshot_now, "word")
        while "side_stream" not in device.said:
            time.sleep(0.001)
        job.optimizers[0].step()
        assert saving.result().step == 3
        device.compute.follow(side.record())
    handle.detach()
    side.queue(None)
    assert_exact(job, run_dir, [3])


def test_what_has_arrived_is_sealed_without_the_training_thread(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement="direct")
    job.step()
    job.step()
    until = time.monotonic() + 60
    while handle.last_captured_step is None and time.monotonic() < until:
        time.sleep(0.01)  # the property asks nobody
    assert handle.last_captured_step == 1
    handle.close()
