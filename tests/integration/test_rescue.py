"""A snapshot just in time: the last complete step, wherever the training is, on any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck.policy import AtSteps
from lightck.region.native_region import FORWARD, STEP_END
from support import faults, internals
from support.loops import Loop, adam_loop, digest, of_stored, steps_at, with_peers

SOON_S = 100.0


class Never:
    """A policy by which no step is ever due."""

    def due(self, moment: Any) -> bool:
        return False


class Broken(Exception):
    """Code that fails in these tests raises this."""


class Counting(nn.Module):
    """A linear layer beside a buffer that each training forward changes, and one it replaces."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("last", torch.zeros(width))
        self.fails: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
            self.last = self.last * 0.5 + x.detach().mean(0)
        self.fails()
        return self.inner(x)


def counting_loop() -> Loop:
    model = Counting()
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)


def attach(path: Path, loop: Loop, **settings: Any) -> lightck.Handle:
    settings = {"policy": Never(), "failure": "jit", **settings}
    return lightck.attach(loop.model, list(loop.optimizers), path, **settings)


def check(path: Path, loop: Loop, step: int) -> None:
    """The newest snapshot is of this step, and is what the loop saw at its boundary."""
    assert steps_at(path)[-1] == step
    stored = of_stored(path, step)
    assert stored == loop.seen[step]


def test_an_exception_in_the_forward_saves_what_was_there_before_it(run_dir: Path) -> None:
    loop = counting_loop()

    def fail() -> None:
        raise Broken

    with pytest.raises(Broken), attach(run_dir, loop):
        loop.run(3)
        loop.model.fails = fail
        loop.forward()
    check(run_dir, loop, 3)
    assert not _record(run_dir).early


def test_an_exception_in_the_backward_saves_the_step_before_it(run_dir: Path) -> None:
    loop = counting_loop()

    def fail(gradient: torch.Tensor) -> None:
        raise Broken

    with pytest.raises(Broken), attach(run_dir, loop):
        loop.run(3)
        loss = loop.forward()
        next(loop.model.parameters()).register_hook(fail)
        loss.backward()
    check(run_dir, loop, 3)


def test_an_exception_before_the_forward_saves_an_early_snapshot(run_dir: Path) -> None:
    loop = counting_loop()
    with pytest.raises(Broken), attach(run_dir, loop):
        loop.run(3)
        loop.note()
        raise Broken
    check(run_dir, loop, 3)
    assert _record(run_dir).early


@pytest.mark.parametrize(("steps", "restored"), [(2, 1), (3, 3)])
def test_restore_warns_of_an_early_snapshot_and_names_the_exact_one(
    run_dir: Path, steps: int, restored: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Only step 1 is due. If that is near, it is what restore takes, and nothing is to be said."""
    loop = counting_loop()
    with pytest.raises(Broken), attach(run_dir, loop, policy=AtSteps([1])):
        loop.run(steps)
        loop.note()
        raise Broken
    assert steps_at(run_dir) == [1, steps]
    again = counting_loop()
    caplog.clear()
    info = lightck.restore(again.model, list(again.optimizers), run_dir)
    assert info is not None and (info.step, info.early) == (restored, restored == steps)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == info.early
    assert all("of the exact ones step 1 is the newest" in text for text in warned)
    exact = lightck.restore(again.model, list(again.optimizers), run_dir, step="exact")
    assert exact is not None and (exact.step, exact.early) == (1, False)


def test_where_only_an_early_snapshot_is_there_it_is_restored_though_an_exact_one_is_wanted(
    run_dir: Path,
) -> None:
    loop = counting_loop()
    with pytest.raises(Broken), attach(run_dir, loop, policy=AtSteps([9])):
        loop.run(3)
        loop.note()
        raise Broken
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir, step="exact")
    assert info is not None and (info.step, info.early) == (3, True)


def test_an_exception_inside_the_update_saves_nothing(run_dir: Path) -> None:
    loop = counting_loop()

    def fail(*_: Any) -> None:
        raise Broken

    with pytest.raises(Broken), attach(run_dir, loop) as handle:
        loop.run(2)
        loop.note()
        assert handle.snapshot_now("first").fresh
        loop.run(1)
        loop.optimizers[0].register_step_pre_hook(fail)
        loop.run(1)
    check(run_dir, loop, 2)


def test_a_step_is_saved_once_however_many_triggers_come(run_dir: Path) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loss = loop.forward()
        first = handle.snapshot_now("one")
        copied = handle.stats().bytes_copied
        second = handle.snapshot_now("two")
        assert (first.step, first.fresh, first.early, first.why) == (3, True, False, "")
        assert (second.step, second.fresh, second.reason) == (3, True, "two")
        assert handle.stats().bytes_copied == copied
        loss.backward()
        loop.update()
    assert handle.last_committed_step == 4


def test_another_thread_saves_while_the_training_thread_stands(run_dir: Path) -> None:
    loop = counting_loop()
    found: list[lightck.types.Saved] = []

    def save() -> None:
        worker = threading.Thread(target=lambda: found.append(handle.snapshot_now("thread")))
        worker.start()
        worker.join(SOON_S)

    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.model.fails = save
        loss = loop.forward()
        loop.model.fails = lambda: None
        check(run_dir, loop, 3)
        loss.backward()
        loop.update()
    assert [(s.step, s.fresh, s.early) for s in found] == [(3, True, False)]


def test_another_thread_waits_for_the_end_of_an_update(run_dir: Path) -> None:
    loop = counting_loop()
    found: list[lightck.types.Saved] = []
    began = threading.Event()

    def save() -> None:
        began.set()
        found.append(handle.snapshot_now("thread"))

    def inside(*_: Any) -> None:
        worker.start()
        began.wait(SOON_S)

    worker = threading.Thread(target=save)
    with attach(run_dir, loop) as handle:
        loop.run(2)
        hook = loop.optimizers[0].register_step_pre_hook(inside)
        loop.run(1)
        hook.remove()
        loop.forward()
        worker.join(SOON_S)
        check(run_dir, loop, 3)
    assert [(s.step, s.fresh, s.early) for s in found] == [(3, True, False)]


def test_the_window_that_is_open_is_finished_not_copied_again(run_dir: Path) -> None:
    loop = counting_loop()
    with attach(run_dir, loop, policy=1, schedule="backward") as handle:
        loop.run(3)
        handle.wait()
        before = handle.stats().captured
        loss = loop.forward()
        saved = handle.snapshot_now("now")
        assert (saved.step, saved.fresh, saved.early) == (3, True, False)
        assert handle.stats().captured == before + 1
        loss.backward()
        loop.update()
    check_all = steps_at(run_dir)
    loop.note()
    loop.check(run_dir, check_all)


def test_a_save_that_finds_the_open_window_torn_tells_and_counts_it_as_any_fence(
    run_dir: Path,
) -> None:
    loop = counting_loop()
    told: list[BaseException] = []
    with attach(run_dir, loop, policy=1, schedule="backward", on_error=told.append) as handle:
        loop.run(3)
        handle.wait()
        loss = loop.forward()
        with torch.no_grad():
            loop.model.inner.bias.add_(1)
        saved = handle.snapshot_now("now")
        assert not saved.fresh and "model/inner.bias" in saved.why
        assert handle.stats().torn == 1
        assert [type(error) for error in told] == [lightck.TornSnapshotError]
        loss.backward()
        loop.update()
        with pytest.raises(lightck.TornSnapshotError, match=r"model/inner\.bias"):
            handle.close()


def test_a_slot_that_persists_is_finished_first(disk_dir: Path) -> None:
    loop = counting_loop()
    with attach(disk_dir, loop, policy=2) as handle:
        loop.run(2)
        loop.forward().backward()
        faults.delay(faults.SYNC, 0.1)
        loop.update()
        loop.forward()
        saved = handle.snapshot_now("now")
        assert (saved.step, saved.fresh) == (3, True)
        loop.check(disk_dir, [2, 3])


def test_what_persists_is_kept_when_the_deadline_passes(disk_dir: Path) -> None:
    loop = counting_loop()
    with attach(disk_dir, loop, policy=1, close_timeout_s=0.2) as handle:
        loop.run(2)
        handle.wait()
        assert handle.last_committed_step == 1  # in the one slot; the other one is wanted now
        faults.hold(faults.SYNC)
        loop.run(1)
        loop.forward()
        saved = handle.snapshot_now("now")
        assert (saved.step, saved.fresh) == (1, False)
        assert "no slot became free" in saved.why
        faults.release(faults.SYNC)
        handle.wait(2)
        assert steps_at(disk_dir) == [1, 2]
        handle.detach()
    loop.check(disk_dir, [1, 2])


def test_a_slot_that_nobody_writes_is_waited_for_a_moment_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may hold it, or a step of open fate, for good: not until a far deadline."""
    monkeypatch.setattr("lightck.failure.jit_save.NO_SLOT_S", 0.05)
    loop = counting_loop()
    with attach(run_dir, loop, policy=1, close_timeout_s=1e6) as handle:
        loop.run(3)
        handle.wait()
        assert steps_at(run_dir) == [1, 2]
        held = lightck.load(run_dir, 1)
        loop.forward()
        saved = handle.snapshot_now("now")
        assert (saved.step, saved.fresh) == (2, False)
        assert "every slot is busy" in saved.why
        assert held["step"] == 1
        handle.detach()


def test_a_changed_parameter_is_not_saved_just_in_time(run_dir: Path) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loss = loop.forward()
        with torch.no_grad():
            loop.model.inner.bias.add_(1)
        saved = handle.snapshot_now("now")
        assert not saved.fresh and "model/inner.bias" in saved.why
        assert saved.step is None
        loss.backward()
        loop.update()


def test_a_replaced_parameter_is_not_saved_just_in_time(run_dir: Path) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.forward()
        loop.model.inner.bias = nn.Parameter(torch.ones(16))
        saved = handle.snapshot_now("now")
        assert not saved.fresh and "set of tensors" in saved.why


def test_nothing_is_saved_before_the_first_step_is_complete(run_dir: Path) -> None:
    loop = counting_loop()
    with pytest.raises(Broken), attach(run_dir, loop) as handle:
        assert handle.snapshot_now("at once").why == "no step is complete yet"
        loop.forward()
        raise Broken
    assert steps_at(run_dir) == []


def test_what_was_restored_is_not_written_again(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        loop.forward()
        assert handle.snapshot_now("first").step == 2
        handle.detach()
    again = adam_loop()
    assert lightck.restore(again.model, list(again.optimizers), run_dir) is not None
    with attach(run_dir, again) as handle:
        again.forward()
        saved = handle.snapshot_now("at once")
        assert (saved.step, saved.fresh) == (2, True)
        assert handle.stats().captured == 0
        handle.detach()


def test_the_journal_has_both_instants_of_the_last_step(run_dir: Path) -> None:
    from lightck.journal.entry import decode_entry

    loop = counting_loop()
    with with_peers(attach(run_dir, loop)) as handle:
        loop.run(3)
        loop.note()
        native = handle.region.native
        entry = native.read_journal()
        assert entry is not None
        assert (entry.kind, entry.step, entry.early) == (STEP_END, 3, True)
        seen, last = loop.model.seen.clone(), loop.model.last.clone()
        loop.forward()
        entry = native.read_journal()
        assert entry is not None
        assert (entry.kind, entry.step, entry.early) == (FORWARD, 3, False)
        assert entry.timeline == handle.region.timeline
        found = decode_entry(entry, context="test")
        held = {live.name: live.tensor for live in found.lives}
        assert torch.equal(held["model/seen"], seen) and torch.equal(held["model/last"], last)
        assert digest(loop.model.seen) != digest(seen)
        handle.detach()


def test_attach_says_what_is_too_large_to_be_kept_and_saves_before_the_forward(
    run_dir: Path,
) -> None:
    loop = counting_loop()
    loop.model.register_buffer("large", torch.zeros(3 << 20))
    with pytest.warns(UserWarning, match="too much to be kept"):
        handle = attach(run_dir, loop)
    loop.run(2)
    loop.note()
    assert handle.snapshot_now("before").fresh
    check(run_dir, loop, 2)
    loop.run(1)
    loop.forward()
    saved = handle.snapshot_now("after")
    assert not saved.fresh and "the set of tensors" in saved.why  # a buffer was replaced
    handle.detach()


def test_a_closed_or_unarmed_handle_refuses(run_dir: Path) -> None:
    loop = adam_loop()
    with (
        lightck.attach(loop.model, list(loop.optimizers), run_dir, failure="off") as handle,
        pytest.raises(lightck.LightckError, match="failure"),
    ):
        handle.snapshot_now("now")
    with pytest.raises(lightck.LightckError, match="closed"):
        handle.snapshot_now("now")


def test_on_failure_hears_what_was_saved_and_the_exception_goes_on(run_dir: Path) -> None:
    loop = counting_loop()
    heard: list[lightck.types.Saved] = []
    failure = lightck.types.Failure(on_failure=lambda saved: heard.append(saved) or True)
    with pytest.raises(Broken), attach(run_dir, loop, failure=failure):
        loop.run(2)
        loop.forward()
        raise Broken
    assert [(s.reason, s.step, s.fresh) for s in heard] == [("Broken", 2, True)]


@contextmanager
def _region(path: Path) -> Iterator[Any]:
    from lightck.region import location
    from lightck.region.region import Region

    region = Region.open(location.locate(path, 0, create=False), writable=False)
    try:
        yield region
    finally:
        region.close()


def _record(path: Path) -> Any:
    with _region(path) as region:
        return region.recover().candidates[0].record


def test_an_early_instant_has_the_rate_of_its_own_schedule(run_dir: Path) -> None:
    """A rate that is a tensor: behind the step the schedule writes it, and no forward does."""
    net, rate = nn.Linear(4, 4), torch.tensor(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    extras = {"schedule": lightck.at_forward(schedule)}
    handle = lightck.attach(net, optimizer, run_dir, policy=1000, extras=extras)
    journal = internals.checkpointer(handle).step_journal
    assert journal is not None
    for epoch in range(2):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        schedule.step()
        net(torch.ones(1, 4))
        for early, power in ((True, epoch), (False, epoch + 1)):
            kept = journal.as_of_boundary(early=early)
            assert kept.forward_values["extras"]["schedule"]["last_epoch"] == power
            (live,) = [each for each in kept.collected.lives if each.name.endswith("/lr")]
            assert live.tensor.item() == 0.5**power
    handle.close()


def test_a_save_as_of_a_step_s_end_holds_nothing_of_the_scaler_in_the_middle_of_its_step(
    run_dir: Path,
) -> None:
    """Within the step a fused optimizer has the scale and a flag from it, and loses both again."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    extras = {"scaler": scaler}
    handle = lightck.attach(net, optimizer, run_dir, policy=Never(), failure="jit", extras=extras)
    with_peers(handle)
    for _ in range(2):
        scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    net(torch.ones(1, 4))
    rescue: Any = handle._rescue
    saved = rescue.save("a peer", time.monotonic() + SOON_S, early=True)
    assert saved is not None and (saved.step, saved.fresh, saved.early) == (2, True, True)
    handle.detach()
    weights = digest(net.weight)
    again = torch.optim.AdamW(net.parameters(), fused=True)
    info = lightck.restore(net, again, run_dir, extras=extras)
    assert (
        info is not None and (info.step, info.early) == (2, True) and digest(net.weight) == weights
    )
    assert not {"grad_scale", "found_inf"} & {*vars(again)}
