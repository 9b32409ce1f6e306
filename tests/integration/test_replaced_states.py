"""`handle.replaced(step)`: the state comes from outside, and snapshots count from there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from support import faults, internals
from support.loops import Loop, adam_loop, attach, mlp, of_live, of_stored, steps_at

FAILURES = ["jit", "off"]


def state_of(loop: Loop) -> list[dict[str, Any]]:
    """Copy a loop's state, as a peer sends it, or a file has it."""
    return copy.deepcopy([each.state_dict() for each in (loop.model, *loop.optimizers)])


def load(loop: Loop, state: list[dict[str, Any]], step: int) -> None:
    """Replace the state of a loop."""
    for each, held in zip((loop.model, *loop.optimizers), state, strict=True):
        each.load_state_dict(copy.deepcopy(held))
    loop.step = step


def run(loop: Loop, handle: lightck.Handle, steps: int) -> None:
    """Train; every snapshot finds a slot."""
    for _ in range(steps):
        loop.run(1)
        handle.wait()


def another(steps: int) -> list[dict[str, Any]]:
    """The state of a loop that began with other weights."""
    torch.manual_seed(99)
    model = mlp(16, 2)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)
    loop.run(steps)
    return state_of(loop)


def check_restore(path: Path, loop: Loop, step: int) -> None:
    """Check that restore takes what the loop had at the start of that step's next forward."""
    again = adam_loop()
    info = lightck.restore(again.model, list(again.optimizers), path)
    assert info is not None and (info.step, info.early) == (step, False)
    assert of_live(again.model, again.optimizers) == loop.seen[step]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("inside", [False, True])
def test_later_snapshots_are_of_the_step_that_was_said(
    run_dir: Path, inside: bool, failure: str
) -> None:
    """`inside`: while the snapshot of step 3 is being copied, as torchft heals."""
    state, loop = another(2), adam_loop()
    with attach(run_dir, loop, failure=failure, slots=3) as handle:
        loop.run(3)
        if inside:
            loss = loop.forward()
            loss.backward()
        load(loop, state, 20)
        handle.replaced(20)
        assert handle.step == 20
        if inside:
            loop.update()
            run(loop, handle, 2)
        else:
            run(loop, handle, 3)
        assert handle.step == loop.step == 23
        assert steps_at(run_dir)[-2:] == [21, 22]
        loop.note()
    stats = handle.stats()
    assert (stats.torn, stats.failed) == (0, 0)
    for step in steps_at(run_dir):
        assert of_stored(run_dir, step) == loop.seen[step]
    check_restore(run_dir, loop, 23)


@pytest.mark.parametrize("failure", FAILURES)
def test_what_is_open_is_given_up_and_whoever_waits_is_told(run_dir: Path, failure: str) -> None:
    state, loop = another(2), adam_loop()
    with attach(run_dir, loop, failure=failure, policy=1000) as handle:
        loop.run(2)
        loop.forward().backward()
        handle.replaced(2)
        future = handle.snapshot()
        loop.update()
        load(loop, state, 9)
        handle.replaced(9)
        assert not future.done(), "it is of the next boundary"
        loop.note()
        loop.forward()
        loop.model.zero_grad()
        handle.wait(9)
        assert future.result(timeout=100) == 9
        assert of_stored(run_dir, 9) == loop.seen[9]
        loop.forward().backward()
        loop.update()
    assert handle.stats().torn == 0


def test_a_window_that_is_open_counts_as_nothing(run_dir: Path) -> None:
    """Its copies have read some of both states."""
    state, loop = another(2), adam_loop()
    with attach(run_dir, loop) as handle:
        run(loop, handle, 2)
        loop.forward().backward()
        snapshot = internals.window(handle)
        assert snapshot is not None and snapshot.step == 2
        load(loop, state, 7)
        handle.replaced(7)
        assert internals.window(handle) is None
        loop.update()
        loop.note()
    assert handle.stats().torn == 0
    assert 2 not in steps_at(run_dir)
    check_restore(run_dir, loop, 8)


@pytest.mark.parametrize("failure", FAILURES)
def test_going_back_keeps_what_is_there_until_there_is_a_newer_one(
    run_dir: Path, failure: str
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, failure=failure)
    loop.run(3)
    state = state_of(loop)
    run(loop, handle, 4)
    assert steps_at(run_dir) == [5, 6]
    load(loop, state, 3)
    loop.seen = {step: seen for step, seen in loop.seen.items() if step < 3}
    handle.replaced(3)
    assert handle.last_committed_step is None
    assert steps_at(run_dir) == [5, 6], "nothing is lost yet"
    with pytest.raises(lightck.WaitTimeoutError, match="step 4"):
        handle.wait(4)
    run(loop, handle, 2)
    handle.detach()
    # The older step is the newer state.
    check_restore(run_dir, loop, 4)


@pytest.mark.parametrize("inside", [False, True])
def test_going_back_commits_what_was_sealed_and_gives_up_what_is_open(
    disk_dir: Path, inside: bool
) -> None:
    loop = adam_loop()
    with attach(disk_dir, loop) as handle:
        run(loop, handle, 3)
        state = state_of(loop)
        with faults.delayed(faults.SYNC, 0.2):
            loop.run(1)
            if inside:
                loop.forward().backward()
            load(loop, state, 1)
            handle.replaced(1)
        assert steps_at(disk_dir)[-1] == 3
        loop.seen.clear()
        if inside:
            loop.update()
        else:
            loop.run(1)
        loop.note()
    check_restore(disk_dir, loop, 2)


def test_a_save_of_the_same_step_again_is_of_the_new_state(run_dir: Path) -> None:
    state, loop = another(2), adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        assert handle.snapshot_now("before").fresh
        load(loop, state, 2)
        loop.seen.clear()
        handle.replaced(2)
        saved = handle.snapshot_now("after")
        assert (saved.step, saved.fresh, saved.why) == (2, True, "")
        loop.note()
    check_restore(run_dir, loop, 2)


def test_inside_an_iteration_nothing_can_be_saved_until_the_step_ends(run_dir: Path) -> None:
    state, loop = another(2), adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        loop.forward().backward()
        load(loop, state, 8)
        handle.replaced(8)
        saved = handle.snapshot_now("for the test")
        assert not saved.fresh and "replaced inside an iteration" in saved.why
        loop.update()
        assert handle.snapshot_now("for the test").step == 9


def test_half_an_update_cannot_be_replaced(run_dir: Path) -> None:
    model = mlp(16, 2)
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    loop = Loop(model, *halves, width=16)
    with attach(run_dir, loop) as handle:
        loop.run(1)
        loop.forward().backward()
        halves[0].step()
        with pytest.raises(lightck.LightckError, match="after step 1 is half done"):
            handle.replaced(5)
        halves[1].step()
        assert handle.step == 2
        for wrong in (-1, 2.0, "3", True):
            with pytest.raises(lightck.ConfigError, match="number of a step"):
                handle.replaced(wrong)  # type: ignore[arg-type]
        handle.replaced(5)
        loop.step = 5
        loop.run(1)
        assert handle.step == 6
    with pytest.raises(lightck.LightckError, match="is closed"):
        handle.replaced(7)
