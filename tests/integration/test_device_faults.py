"""Devices that are late, fail or hang, and who else uses them meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated import EmulatedDevice, Event, devices
from emulated_job import Job, value

from lightck.capture.arrange import Arrangement
from lightck.errors import WaitTimeoutError
from lightck.failure import slots
from lightck.region.writer import SlotWriter


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
    monkeypatch.setattr(slots, "_FETCHED_BYTES", 1000)
    job = Job(device, buffers=buffers)
    handle = job.attach(run_dir, placement="host")
    for _ in range(2):
        job.step()
    handle.wait(timeout=100)
    recorder = handle._recorder
    region, pool = recorder.pipeline.region, recorder.pipeline.pool
    with recorder.lock:
        gate = Event()
        if not buffers:  # their private copies are made by what computes
            device.compute.follow(gate)  # a collective that a dead rank has left
        arrangement = Arrangement(region)
        lives = recorder.inventory.shared()
        writer = SlotWriter.open(region, pool, arrangement.update(lives, 4096))
        assert writer is not None
        assert any(part.device is not None for part in arrangement.parts)
        slots.copy(writer, arrangement, time.monotonic() + 100)
        names = [entry.name for entry in writer.layout.entries]
        i = names.index("model/3.weight")
        there = recorder.pipeline.offload.ways.extents(
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
    recorder = handle._recorder
    region, pool = recorder.pipeline.region, recorder.pipeline.pool
    with recorder.lock:
        gate = Event()
        device.copying.follow(gate)
        arrangement = Arrangement(region)
        plan = arrangement.update(recorder.inventory.shared(), 4096)
        writer = SlotWriter.open(region, pool, plan)
        assert writer is not None
        with pytest.raises(WaitTimeoutError, match="emulated:0"):
            slots.copy(writer, arrangement, time.monotonic() + 0.1)
        writer.abandon()
        gate.reach()
    handle.close()
