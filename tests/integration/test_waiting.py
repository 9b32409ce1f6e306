"""Tests wait for early snapshots and for those that found no slot, and close meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from support import faults, internals
from support.loops import Loop, adam_loop, of_live, of_stored, restored, steps_at


def attach(path: Path, loop: Loop, **settings: Any) -> lightck.Handle:
    return lightck.attach(loop.model, list(loop.optimizers), path, **settings)


def clip(loop: Loop) -> None:
    """Clip the weights, as a loop does between a step and its forward."""
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.clamp_(-0.01, 0.01)


def early(path: Path, step: int) -> bool:
    """Say whether the snapshot of the step is early."""
    rows = lightck.snapshots(path).to_pylist()
    (found,) = [row["early"] for row in rows if row["step"] == step]
    return bool(found)


def wait(handle: lightck.Handle) -> None:
    handle.wait(handle.step)


def save(handle: lightck.Handle) -> None:
    assert handle.snapshot_now("for the test").early


@pytest.mark.parametrize("ask", [wait, save])
@pytest.mark.parametrize("slots", [2, 3])
def test_what_was_waited_for_and_then_closed_is_exact(
    run_dir: Path, ask: Callable[[lightck.Handle], None], slots: int
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, slots=slots) as handle:
        loop.run(3)
        ask(handle)
        assert early(run_dir, 3)
        clip(loop)
        loop.note()
    info, again = restored(run_dir)
    assert info is not None and (info.step, info.early) == (3, False)
    assert of_live(again.model, again.optimizers) == loop.seen[3]


def test_a_close_inside_the_next_forward_makes_what_was_waited_for_exact(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        handle.wait(3)
        clip(loop)
        loop.forward()
    info, again = restored(run_dir)
    assert info is not None and (info.step, info.early) == (3, False)
    assert of_live(again.model, again.optimizers) == loop.seen[3]


def test_an_early_snapshot_that_nothing_exact_can_follow_stays(run_dir: Path) -> None:
    """The failure path is off: what the forward began with is kept nowhere."""
    loop = adam_loop()
    with attach(run_dir, loop, failure="off") as handle:
        loop.run(3)
        handle.wait(3)
        loop.forward()
    assert handle.stats().captured == 3, "not copied twice"
    assert steps_at(run_dir)[-1] == 3


def slipping(path: Path, loop: Loop, **settings: Any) -> lightck.Handle:
    """Train to a step whose snapshot found no slot at its forward; the medium answers again."""
    handle = attach(path, loop, **settings)
    loop.run(1)
    faults.hold(faults.SYNC)
    while handle.stats().slipped == 0:
        loop.run(1)
        assert loop.step < 1000, "every step found a slot"
    while internals.checkpointer(handle).outcomes.slipped_step != loop.step:
        loop.forward().backward()
        if internals.checkpointer(handle).outcomes.slipped_step != loop.step:
            loop.update()
    faults.release(faults.SYNC)
    return handle


def test_waiting_for_a_step_that_found_no_slot_takes_it_as_it_was_at_its_forward(
    disk_dir: Path,
) -> None:
    loop = adam_loop()
    with slipping(disk_dir, loop) as handle:
        step = handle.step
        handle.wait(step)
        assert handle.last_committed_step == step
        assert of_stored(disk_dir, step) == loop.seen[step]
        assert not early(disk_dir, step)
        captured = handle.stats().captured
        handle.wait(step)
        assert handle.stats().captured == captured, "it is there"
        loop.update()
        loop.run(2)
        handle.wait(step + 1)


def test_a_slipped_step_that_was_waited_for_is_not_made_up_for_by_the_next(
    disk_dir: Path,
) -> None:
    loop = adam_loop()
    with slipping(disk_dir, loop, policy=2) as handle:
        step = handle.step
        handle.wait(step)
        loop.update()
        due = [s for s in (step + 1, step + 2) if s % 2 == 0]
        loop.run(2)
        handle.wait(step + 1)
        assert [s for s in steps_at(disk_dir) if s > step] == [s for s in due if s < handle.step]


class Normalized(nn.Sequential):
    """A forward changes its buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.BatchNorm1d(16))


def test_waiting_for_a_slipped_step_whose_buffers_are_gone_says_why(disk_dir: Path) -> None:
    model = Normalized()
    loop = Loop(model, torch.optim.AdamW(model.parameters()), width=16)
    with slipping(disk_dir, loop, failure="off") as handle:
        step = handle.step
        text = rf"no snapshot of step {step} or newer is open \(a forward has changed the buffers\)"
        with pytest.raises(lightck.WaitTimeoutError, match=text):
            handle.wait(step)
        loop.update()


def test_waiting_for_a_slipped_step_while_readers_hold_every_slot_says_so(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, slots=2) as handle:
        loop.run(3)
        handle.wait(2)
        held = [lightck.load(run_dir, step) for step in steps_at(run_dir)]
        loop.forward().backward()
        with pytest.raises(lightck.WaitTimeoutError, match=r"\(every slot is busy\)"):
            handle.wait(3)
        del held
        gc.collect()
        handle.wait(3)
        assert of_stored(run_dir, 3) == loop.seen[3]
        loop.update()
