"""A device hangs before updates that training has queued: the step that it still has is saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_devices import assert_exact

import lightck
from lightck.distributed.topology import Topology
from lightck.errors import TornSnapshotError
from lightck.failure import jit_save
from lightck.failure.whole_save import WholeSaver
from lightck.types import Saved
from support import internals
from support.emulated import EmulatedDevice, Event, Stream, devices
from support.emulated_job import Job

WAYS = ("host", "direct", "device")
SPARE = 16 << 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """One device, known to lightck; that it hangs is believed soon."""
    monkeypatch.setattr(jit_save, "DEVICE_WAIT_S", 0.1)
    monkeypatch.setattr(jit_save, "_STEPS", 0.0)
    made = EmulatedDevice()
    made.spare_bytes = SPARE
    with devices(made):
        yield made


def attached(job: Job, path: Path, **settings: Any) -> lightck.handle.Handle:
    """No snapshot is ever due."""
    failure = lightck.Failure(signals=())
    return job.attach(path, **{"policy": 1000, "failure": failure, **settings})


def ahead(job: Job, *, forward: bool = False) -> Event:
    """One more step; the device hangs in a collective of its backward, until the event."""
    gate = Event()
    job.model(torch.zeros(1))
    for device in job.devices:
        device.compute.follow(gate)
    for optimizer in job.optimizers:
        optimizer.step()
    if forward:
        job.model(torch.zeros(1))
    return gate


def save(handle: lightck.handle.Handle, reason: str = "hang") -> Saved:
    """Save on another thread than training's."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(handle.snapshot_now, reason).result()


class Once(list[Any]):
    """Layers, that are gone through in another way."""

    def __init__(self, way: Iterator[Any], layers: list[Any]) -> None:
        super().__init__(layers)
        self.way = way

    def __iter__(self) -> Iterator[Any]:
        return self.way


class Average:
    """An extra whose state a device holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"average": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Nothing is restored here."""


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_the_device_has_is_saved_though_training_has_queued_the_update(
    device: EmulatedDevice, run_dir: Path, way: str, buffers: bool, forward: bool
) -> None:
    job = Job(device, buffers=buffers)
    handle = attached(job, run_dir, placement=way)
    for _ in range(3):
        job.step()
    gate = ahead(job, forward=forward)
    device.hangs = True
    saved = save(handle)
    assert (saved.step, saved.fresh, saved.early, saved.why) == (3, True, False, "")
    # Who saves beside a hang asks no device for memory.
    assert handle.stats().device_mode == {"device": "host"}.get(way, way)
    device.hangs = False
    gate.reach()
    handle.detach()
    assert_exact(job, run_dir, [3])


def test_several_steps_optimizers_and_devices_are_behind_at_once(run_dir: Path) -> None:
    made = [EmulatedDevice("emulated:0"), EmulatedDevice("emulated:1")]
    with devices(*made):
        job = Job(*made, optimizers=3)
        handle = attached(job, run_dir, placement="direct")
        job.step()
        job.step()
        gate = ahead(job)
        job.step()
        job.step()
        saved = save(handle)
        assert (saved.step, saved.fresh) == (2, True), saved
        gate.reach()
        job.step()
        assert save(handle).step == 6
        handle.detach()
        assert_exact(job, run_dir, [2, 6])


def test_an_update_that_is_half_queued_changes_nothing_yet(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(device)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
    stuck, goes_on = threading.Event(), threading.Event()

    def full_queue() -> Iterator[Any]:
        """Stop after the second layer of five, in what is queued and in what is done at once."""
        yield from job.layers[:2]
        stuck.set()
        assert goes_on.wait(60)
        yield from job.layers[2:]

    saved: list[Saved] = []

    def watchdog() -> None:
        assert stuck.wait(60)
        saved.append(handle.snapshot_now("hang"))
        gate.reach()
        goes_on.set()

    other = threading.Thread(target=watchdog)
    gate = Event()
    job.model(torch.zeros(1))
    device.compute.follow(gate)
    other.start()
    job.optimizers[0].layers = Once(full_queue(), job.layers)
    job.optimizers[0].step()
    other.join()
    job.optimizers[0].layers = job.layers
    assert (saved[0].step, saved[0].fresh, saved[0].early) == (3, True, False), saved
    job.model(torch.zeros(1))
    device.compute.finish()  # a device that is behind still has step 3
    assert save(handle).step == 4
    handle.detach()
    assert_exact(job, run_dir, [3, 4])


def test_a_device_that_is_only_behind_is_waited_for(device: EmulatedDevice, run_dir: Path) -> None:
    job = Job(device)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
    gate = ahead(job, forward=True)
    with ThreadPoolExecutor(1) as other:
        saving = other.submit(handle.snapshot_now, "word")
        time.sleep(0.02)
        gate.reach()
        saved = saving.result()
    assert saved.fresh and saved.step in (3, 4), saved  # 3: it took longer than the patience
    handle.detach()
    assert_exact(job, run_dir, [saved.step])


def test_training_that_goes_on_is_not_waited_for(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_save, "DEVICE_WAIT_S", 1000.0)
    job = Job(device)
    handle = attached(job, run_dir, close_timeout_s=900.0)  # by then the test has failed
    for _ in range(3):
        job.step()
    with ThreadPoolExecutor(1) as other:
        saving: Future[Saved] = other.submit(handle.snapshot_now, "word")
        queued = [device.compute.record()]
        while not saving.done():
            job.step()
            queued.append(device.compute.record())
            queued.pop(0).synchronize()  # a queue has an end
        saved = saving.result()
    assert saved.fresh and not saved.why, saved
    handle.detach()
    assert_exact(job, run_dir, [saved.step])


def test_an_update_that_the_device_has_begun_is_no_step(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    handle = attached(job, run_dir, close_timeout_s=2.0)
    for _ in range(3):
        job.step()
    job.model(torch.zeros(1))
    gate, write = Event(), device.overwrite

    def then_hang(*args: Any) -> None:
        write(*args)
        device.overwrite = write  # type: ignore[method-assign]
        device.compute.follow(gate)

    device.overwrite = then_hang  # type: ignore[assignment, method-assign]
    job.optimizers[0].step()
    saved = save(handle)
    assert not saved.fresh and saved.step is None and saved.why, saved
    gate.reach()
    handle.detach()


def test_what_goes_on_while_it_is_copied_is_not_kept(device: EmulatedDevice, run_dir: Path) -> None:
    device.copy_s = 0.01
    job = Job(device)
    handle = attached(job, run_dir, placement="direct")
    for _ in range(3):
        job.step()
    gate = ahead(job, forward=True)
    copies = 0
    copy = device.copy

    def counted(*args: Any) -> Event:
        nonlocal copies
        copies += 1
        if copies == 1:
            gate.reach()  # a collective that was only slow
        return copy(*args)

    device.copy = counted  # type: ignore[method-assign]
    saved = save(handle)
    assert copies > 1, "nothing was copied before it went on"
    assert (saved.step, saved.fresh) == (4, True), saved
    handle.detach()
    assert_exact(job, run_dir, [4])


def test_a_weight_that_the_loop_changes_in_the_window_costs_the_step(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    handle = attached(job, run_dir, close_timeout_s=2.0)
    for _ in range(3):
        job.step()
    gate = Event()
    job.model(torch.zeros(1))
    with torch.no_grad():
        torch.autograd.graph.increment_version(job.layers[1].weight)
    device.compute.follow(gate)
    job.optimizers[0].step()
    saved = save(handle)
    assert not saved.fresh and saved.step is None and saved.why, saved
    gate.reach()
    handle.detach()


@pytest.mark.parametrize("replaces", [False, True])
def test_state_that_the_loop_has_replaced_since_the_last_look_up_costs_the_step(
    device: EmulatedDevice, run_dir: Path, replaces: bool
) -> None:
    """A restart of the momentum: the tensor that lightck knows is not the optimizer's any more."""
    job = Job(device)
    handle = attached(job, run_dir, close_timeout_s=2.0)
    for _ in range(9):  # tensors that were the same for some steps are not looked up at each
        job.step()
    if replaces:
        state = job.optimizers[0].state[job.layers[0].weight]
        state["momentum"] = device.empty(state["momentum"].shape)
    gate = ahead(job)
    saved = save(handle)
    assert (saved.step, saved.fresh) == ((None, False) if replaces else (9, True)), saved
    assert ("the set of tensors has changed" in saved.why) == replaces
    gate.reach()
    handle.detach()


@pytest.mark.parametrize("way", ["host", "direct"])
def test_copies_of_a_later_step_that_wait_cost_it(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    handle = attached(job, run_dir, placement=way, policy=4, close_timeout_s=2.0)
    for _ in range(3):
        job.step()
    gate = ahead(job, forward=True)  # step 4 is due, and its copies are queued
    saved = save(handle)
    assert not saved.fresh and saved.step is None, saved
    assert "copies of a later step" in saved.why
    gate.reach()
    handle.wait(timeout=100)
    handle.detach()
    assert_exact(job, run_dir, [4])


def test_a_step_that_was_due_is_there_already(device: EmulatedDevice, run_dir: Path) -> None:
    job = Job(device)
    handle = attached(job, run_dir, placement="direct", policy=1)
    for _ in range(3):
        job.step()
    gate = ahead(job, forward=True)  # every step is due: 3 was copied before the hang, 4 waits
    saved = save(handle)
    assert (saved.step, saved.fresh) == (3, True), saved
    gate.reach()
    handle.detach()
    assert_exact(job, run_dir, [1, 2, 3, 4])


def test_the_early_instant_of_it_is_known_too(device: EmulatedDevice, run_dir: Path) -> None:
    job = Job(device)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
    gate = ahead(job)
    rescue: Any = handle._rescue
    with ThreadPoolExecutor(1) as other:
        until = time.monotonic() + 60
        saved = other.submit(rescue.save, "a peer", until, early=True).result()
    assert (saved.step, saved.fresh, saved.early) == (3, True, True), saved
    steps = [rescue.last_step]
    gate.reach()
    job.step()
    device.compute.finish()
    assert [*steps, rescue.last_step] == [3, 5]
    handle.detach()
    assert_exact(job, run_dir, [3])


def test_what_has_been_found_once_is_not_waited_for_again(
    device: EmulatedDevice, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(device)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
    gate = ahead(job)
    assert save(handle).step == 3

    def waits(*_: Any) -> None:
        raise AssertionError("it waits again")

    monkeypatch.setattr(jit_save, "RetryLater", waits)
    saved = save(handle, "SIGTERM")
    assert (saved.step, saved.fresh, saved.why) == (3, True, "")
    gate.reach()
    handle.detach()


def test_what_forwards_change_in_dram_is_of_that_step(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device, buffers=False)
    forwards = torch.zeros(3)
    job.model.register_buffer("forwards", forwards)

    def count(module: torch.nn.Module, args: Any) -> None:
        forwards.add_(1)

    job.model.register_forward_pre_hook(count)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
    gate = ahead(job)
    job.step()
    job.model(torch.zeros(1))
    assert save(handle).step == 3
    gate.reach()
    handle.detach()
    found = lightck.load(run_dir, 3)["model"]
    assert torch.equal(found["forwards"], torch.full((3,), 3.0)), found["forwards"]
    assert torch.equal(found["2.weight"], job.expected(3)["2.weight"])


def test_who_saves_the_step_whole_for_a_dead_rank_takes_that_step(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    handle = attached(job, run_dir)
    checkpointer = internals.checkpointer(handle)
    for _ in range(3):
        job.step()
    gate = ahead(job)
    topology = Topology(0, 2, peers=(0, 1))
    live = WholeSaver.create(checkpointer, topology, process_durable=False)
    assert live._step == 4, "no save has looked"
    assert save(handle).step == 3
    before = live._pre_update
    assert before is not None and live._step == 3
    before.require_instant(False)
    counts = before.dram_copies.by_name()
    assert len(counts) == 5 and all(int(count) == 3 for count in counts.values())
    gate.reach()
    device.compute.finish()
    assert live._step == 4 and live._pre_update is None
    with pytest.raises(TornSnapshotError, match="updated meanwhile"):
        before.require_instant(False)
    handle.detach()


def test_an_extra_that_has_changed_on_the_device_since_costs_the_step(
    device: EmulatedDevice, run_dir: Path
) -> None:
    """It may have been queued to a stream that does not hang."""
    job = Job(device)
    average = device.empty((1 << 15,))
    extra = Average(average)
    handle = attached(
        job, run_dir, extras={"average": lightck.at_forward(extra)}, close_timeout_s=2.0
    )
    for _ in range(3):
        job.step()
    gate = ahead(job)
    torch.autograd.graph.increment_version(average)
    saved = save(handle)
    assert not saved.fresh and "average" in saved.why, saved
    gate.reach()
    handle.detach()


def test_options_in_dram_are_of_that_step_too(device: EmulatedDevice, run_dir: Path) -> None:
    job = Job(device)
    lr = job.optimizers[0].param_groups[0]["lr"] = torch.tensor(1.0)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
        lr.mul_(0.5)  # a scheduler's
        device.compute.finish()  # far behind a CPU this early it would give an older step
    gate = ahead(job)
    lr.mul_(0.5)
    saved = save(handle)
    assert (saved.step, saved.fresh) == (3, True), saved
    gate.reach()
    handle.detach()
    held = lightck.load(run_dir, 3)["optimizers"][0]["param_groups"][0]["lr"]
    assert float(held) == 0.125


def test_a_window_on_a_stream_of_its_own_is_closed_by_a_save_when_its_copies_are_made(
    device: EmulatedDevice, run_dir: Path
) -> None:
    device.copy_s = 0.01
    job, side = Job(device, buffers=False), Stream("side")
    handle = attached(job, run_dir, placement="direct", policy=3)
    with device.on(side), ThreadPoolExecutor(1) as other:
        for _ in range(3):
            job.step()
        job.model(torch.zeros(1))  # step 3 is due, and its copies are queued
        saving = other.submit(handle.snapshot_now, "word")
        while internals.window(handle) is not None:
            time.sleep(0.001)
        job.optimizers[0].step()
        saved = saving.result()
        device.compute.follow(side.record())
    assert (saved.step, saved.fresh) == (3, True), saved
    handle.detach()
    side.queue(None)
    assert_exact(job, run_dir, [3])


def test_the_training_thread_finds_what_was_saved_for_it(
    device: EmulatedDevice, run_dir: Path
) -> None:
    job = Job(device)
    handle = attached(job, run_dir)
    for _ in range(3):
        job.step()
    gate = ahead(job)
    assert save(handle).step == 3
    for _ in range(2):
        saved = handle.snapshot_now("an exception")
        assert (saved.step, saved.fresh, saved.why) == (3, True, "")
    gate.reach()
    handle.detach()


@pytest.mark.parametrize("way", WAYS)
def test_the_training_thread_saves_it_itself_and_every_byte_is_compared(
    device: EmulatedDevice, run_dir: Path, way: str
) -> None:
    job = Job(device)
    handle = attached(job, run_dir, placement=way, proof=True)
    for _ in range(3):
        job.step()
    gate = ahead(job)
    saved = handle.snapshot_now("an exception")
    assert (saved.step, saved.fresh, saved.why) == (3, True, ""), saved
    gate.reach()
    handle.detach()
    assert_exact(job, run_dir, [3])
