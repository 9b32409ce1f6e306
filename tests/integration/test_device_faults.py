"""Devices that are late, fail or hang, and who else uses them meanwhile."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.device import cuda
from lightck.errors import DeviceError, LightckError, WaitTimeoutError
from lightck.failure import whole_save
from lightck.pipeline import device_transfer, pipeline
from lightck.pipeline import device_transfer as transfer
from lightck.pipeline.copy_plan import CopyPlan
from lightck.region.native_pool import SNAP_COMMITTED, NativeSnapshot
from lightck.region.slot_writer import SlotWriter
from support import internals
from support.emulated import EmulatedDevice, Event, devices
from support.emulated_job import Job, value, wrong


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One device, known to lightck."""
    made = EmulatedDevice()
    made.copy_s = 0.002
    with devices(made):
        yield made


@pytest.mark.parametrize("buffers", [False, True])
def test_a_survivor_copies_what_a_device_holds(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch, buffers: bool
) -> None:
    monkeypatch.setattr(whole_save, "_FETCHED_BYTES", 1000)
    job = Job(device, buffers=buffers)
    handle = job.attach(run_dir, placement="host")
    for _ in range(2):
        job.step()
    handle.wait(timeout=100)
    checkpointer = internals.checkpointer(handle)
    region, pool = checkpointer.pipeline.region, checkpointer.pipeline.pool
    with checkpointer.lock:
        gate = Event()
        if not buffers:  # their private copies are made by what computes
            device.compute.follow(gate)  # a collective that a dead rank has left
        plan = CopyPlan(region)
        lives = checkpointer.inventory.shared()
        writer = SlotWriter.open(region, pool, plan.update(lives, 4096))
        assert writer is not None
        assert any(part.device is not None for part in plan.groups)
        whole_save.copy(writer, plan, time.monotonic() + 100)
        names = [entry.name for entry in writer.layout.entries]
        i = names.index("model/3.weight")
        there = checkpointer.pipeline.offload.placement.extents(
            writer.layout.offsets.tolist(), writer.layout.lengths.tolist()
        )[i]
        wanted = value("3.weight", 2, job.layers[3].weight.shape)
        assert torch.equal(there.view(torch.float32), wanted.reshape(-1))
        writer.abandon()
        gate.reach()
    handle.close()


def test_a_survivor_does_not_wait_for_a_device_past_its_deadline(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device, buffers=False)
    handle = job.attach(run_dir, placement="host")
    job.step()
    handle.wait(timeout=100)
    checkpointer = internals.checkpointer(handle)
    region, pool = checkpointer.pipeline.region, checkpointer.pipeline.pool
    with checkpointer.lock:
        gate = Event()
        device.copying.follow(gate)
        plan = CopyPlan(region)
        writer = SlotWriter.open(region, pool, plan.update(checkpointer.inventory.shared(), 4096))
        assert writer is not None
        with pytest.raises(WaitTimeoutError, match="emulated:0"):
            whole_save.copy(writer, plan, time.monotonic() + 0.1)
        writer.abandon()
        gate.reach()
    handle.close()


def test_large_tensors_are_copied_on_the_device_in_parts(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MOST_BYTES", 2048)
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 4096)
    device.spare_bytes, device.copy_s = 16 << 20, 0.0
    job = Job(device)
    with job.attach(run_dir, placement="device") as handle:
        device.most_bytes = 4097  # a load is a chunk
        for _ in range(3):
            job.step()
            handle.wait(timeout=100)
        assert handle.stats().device_mode == "device"
    assert [wrong(job, run_dir, step) for step in (1, 2, 3)] == [[], [], []]


def test_a_thread_that_does_not_start_costs_snapshots_and_hangs_nothing(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, heard = Job(device), []
    handle = job.attach(run_dir, placement="host", on_error=heard.append)
    start, left = threading.Thread.start, ["lightck-queue", "lightck-feed"]

    def refuse(thread: threading.Thread) -> None:
        if left and thread.name == left[0]:
            del left[0]
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(4):
        job.step()
        internals.pipeline(handle).await_abandoned()
    assert len(heard) == 2, heard
    with pytest.raises(LightckError, match="new thread"):
        handle.close()
    assert wrong(job, run_dir, 3) == []
    assert not left


def test_who_waits_for_all_of_a_transfer_sleeps(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    taken = NativeSnapshot.taken

    def noted(snapshot: NativeSnapshot, batch: int, end: int, wait_s: float, help: bool) -> bool:
        waits.append(wait_s)
        return taken(snapshot, batch, end, wait_s, help)

    job = Job(device, buffers=False)
    handle = job.attach(run_dir, placement="host")
    job.optimizers[0].step()
    job.model(torch.zeros(1))
    monkeypatch.setattr(NativeSnapshot, "taken", noted)
    with internals.checkpointer(handle).lock:
        (each, *_) = internals.window(handle).transfers
        assert internals.pipeline(handle).offload.engine.arrived(each, None)
        assert waits
        assert all(wait_s > 0 for wait_s in waits), waits
    handle.close()


def test_who_waits_for_a_snapshot_from_a_device_waits_as_long_as_asked(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool takes longer than one look at it lasts."""
    taken, looks, here = NativeSnapshot.taken, [0], threading.get_ident()

    def late(snapshot: NativeSnapshot, *arguments: Any) -> bool:
        looks[0] += threading.get_ident() == here
        return looks[0] > 3 and taken(snapshot, *arguments)

    job = Job(device)
    handle = job.attach(run_dir, placement="host")
    monkeypatch.setattr(NativeSnapshot, "taken", late)
    for _ in range(2):
        job.step()
    internals.checkpointer(handle).poll(100.0)
    assert looks[0] > 3 and handle.last_committed_step == 1
    handle.close()


@pytest.fixture
def fast_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit what has come from a device before the next snapshot opens, on a busy machine, too.

    Only the product waits for the device itself.
    """
    lag_wait_s = pipeline.Pipeline.lag_wait_s

    def settled(pipe: pipeline.Pipeline) -> float:
        seconds = lag_wait_s(pipe)
        for snapshot in pipe.persisting:
            if snapshot.sealed:
                assert snapshot.writer.snapshot.wait(100.0) == SNAP_COMMITTED, "the medium is stuck"
        return seconds

    monkeypatch.setattr(pipeline.Pipeline, "lag_wait_s", settled)


@pytest.mark.usefixtures("fast_medium")
@pytest.mark.parametrize("way", ["host", "direct", "device"])
def test_no_due_snapshot_slips_because_the_cpu_runs_ahead(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(pipeline, "BEHIND_S", 100.0)
    device.spare_bytes = 16 << 20
    job = Job(device)
    slots = lightck.Config().slots
    handle = job.attach(run_dir, placement=way, slots=slots)
    done: list[Event] = []
    for _ in range(12):
        job.step()
        done.append(device.compute.record())
        if len(done) > 2:
            done[-3].synchronize()  # as a full queue of launches makes it: two steps ahead
    assert handle.stats().slipped == 0
    handle.close()
    stats = handle.stats()
    assert (stats.slipped, stats.torn, stats.failed) == (0, 0, 0)
    assert wrong(job, run_dir, 12) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), LightckError),
        (RuntimeError("CUDA error: out of memory"), LightckError),  # of pinned memory
        (
            RuntimeError("CUDA error: operation not permitted when stream is capturing"),
            LightckError,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceError),
        (RuntimeError("CUDA error: unspecified launch failure\n# 1 capture_end"), DeviceError),
    ],
)
def test_a_device_without_memory_or_with_a_recording_has_not_failed(
    error: RuntimeError, kind: type
) -> None:
    with pytest.raises(LightckError, match="cuda:3") as raised, cuda._told("cuda:3", "copying"):
        raise error
    assert type(raised.value) is kind


def test_private_copies_are_on_the_cpu_whatever_the_default_device_is(run_dir: Path) -> None:
    model = torch.nn.BatchNorm1d(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lightck.attach(model, optimizer, run_dir) as handle:
        torch.set_default_device("meta")
        try:
            model(torch.ones(3, 5, device="cpu")).sum().backward()
            optimizer.step()
            model(torch.ones(3, 5, device="cpu")).sum().backward()
            handle.wait(timeout=100)
        finally:
            torch.set_default_device(None)
        assert handle.stats().failed == 0
    assert lightck.load(run_dir, 1)["model"]["num_batches_tracked"] == 1


def test_a_snapshot_is_not_freed_while_its_places_are_asked_for(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 8192)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 16384)
    asks, go_on, freed = threading.Event(), threading.Event(), threading.Event()
    taken, free = NativeSnapshot.taken, NativeSnapshot.free

    def asked(snapshot: NativeSnapshot, batch: int, end: int, wait_s: float, help: bool) -> bool:
        if threading.current_thread().name == "lightck-feed":
            if not wait_s:  # to ask is to be served soon: the last place would be free already
                return False
            asks.set()
            assert go_on.wait(100)
        return taken(snapshot, batch, end, wait_s, help)

    def let_go(snapshot: NativeSnapshot) -> None:
        freed.set()
        free(snapshot)

    monkeypatch.setattr(NativeSnapshot, "taken", asked)
    monkeypatch.setattr(NativeSnapshot, "free", let_go)
    job = Job(device, layers=9, buffers=False)
    handle = job.attach(run_dir, placement="host", threads=1)
    pipe = internals.pipeline(handle)
    pipe.pool.pace(0)  # the ring is full, and is not read before somebody asks
    job.optimizers[0].step()
    job.model(torch.zeros(1))
    assert asks.wait(100)
    freed.clear()
    with internals.checkpointer(handle).lock:
        pipe.drop()
    try:
        assert not freed.wait(0.5), "freed under the thread that asks for its places"
    finally:
        go_on.set()
    pipe.await_abandoned()
    assert freed.is_set()
    handle.close()


def test_a_device_is_made_ready_once_before_it_can_hang(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    with job.attach(run_dir, placement="host") as handle:
        for _ in range(3):
            job.step()
            handle.wait(timeout=100)
    assert device.said.count("preload") == 1


def test_no_place_of_the_ring_is_waited_for_that_could_not_be_pinned(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(size: int) -> torch.Tensor:
        raise LightckError(f"{device.name} had no memory while DRAM was pinned")

    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", refused)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 0)  # two places
    told: list[BaseException] = []
    job = Job(device)
    handle = job.attach(run_dir, placement="host", on_error=told.append)
    for _ in range(4):  # more than there are places
        job.step()
    assert told and all("had no memory" in str(error) for error in told)
    monkeypatch.setattr(device, "pinned", pinned)
    job.step()
    with pytest.raises(LightckError, match="had no memory"):  # of before, told once more
        handle.close()
    assert wrong(job, run_dir, 5) == []


def test_the_places_of_a_snapshot_that_failed_are_the_next_one_s(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is full of a snapshot whose region goes away, and the next one waits for a place."""
    monkeypatch.setattr(device_transfer, "CHUNK_BYTES", 24576)
    monkeypatch.setattr(device_transfer, "RING_BYTES", 0)  # two places
    told: list[BaseException] = []
    job = Job(device, layers=2, buffers=False)
    handle = job.attach(run_dir, placement="host", policy=1, failure="off", on_error=told.append)
    for _ in range(2):
        job.step()
    handle.wait(timeout=100)
    gate = Event()
    device.compute.follow(gate)
    job.step()
    engine = internals.pipeline(handle).offload.engine
    assert engine.made == engine.most_places == 2 and not engine._free
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(job.step)
        end = time.monotonic() + 100
        while not engine._place_wanted and time.monotonic() < end:
            time.sleep(0.01)
        (region,) = run_dir.glob("region-*.lck")
        os.truncate(region, 1 << 21)
        gate.reach()
        waits.result(100)
    handle.detach()
    assert any("was cut while it was open" in str(error) for error in told), told


def test_a_copy_that_fails_keeps_no_place_of_the_ring(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(targets: Any, sources: Any) -> Any:
        raise LightckError(f"{device.name} had no memory while copies were queued")

    monkeypatch.setattr(device_transfer, "RING_BYTES", 0)  # two places
    copy, told = device.copy, list[BaseException]()
    job = Job(device)
    handle = job.attach(run_dir, placement="host", on_error=told.append)
    monkeypatch.setattr(device, "copy", refused)
    for _ in range(4):  # more than there are places
        job.step()
    assert told and all("had no memory" in str(error) for error in told)
    monkeypatch.setattr(device, "copy", copy)
    job.step()
    with pytest.raises(LightckError, match="had no memory"):  # of before, told once more
        handle.close()
    assert wrong(job, run_dir, 5) == []


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_lost_device_had_pinned_is_never_freed(
    device: EmulatedDevice, run_dir: Path, lost: bool
) -> None:
    job = Job(device)
    handle = job.attach(run_dir, placement="host", on_error=lambda error: None)
    for _ in range(3):
        job.step()
    handle.wait(timeout=100)
    ring = internals.pipeline(handle).offload.engine
    places = [weakref.ref(place) for place in ring._free]
    assert places
    if lost:
        device.broken = "an illegal memory access was encountered"
    handle.detach()
    gc.collect()
    assert [place() is not None for place in places] == [lost] * len(places)
