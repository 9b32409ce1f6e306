"""A save sees a step's end, or its first one's planning, wholly or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rescue import SOON_S, attach, counting_loop

import lightck
from lightck.types import Saved
from support import internals
from support.loops import Loop, mlp


def owned(handle: lightck.Handle) -> bool:
    """This thread holds the checkpointer's lock."""
    return bool(internals.checkpointer(handle).lock._is_owned())  # type: ignore[attr-defined]


def ends_by_step(handle: lightck.Handle, loop: Loop) -> None:
    loop.run(1)


def ends_by_mark(handle: lightck.Handle, loop: Loop) -> None:
    loop.forward().backward()
    handle.before_update()
    handle.after_update()


def ends_by_skip(handle: lightck.Handle, loop: Loop) -> None:
    loop.forward().backward()
    internals.checkpointer(handle).update_skipped(loop.optimizers[0])


@pytest.mark.parametrize("ends", [ends_by_step, ends_by_mark, ends_by_skip])
def test_a_step_ends_under_the_lock_of_saves(
    run_dir: Path, ends: Callable[[lightck.Handle, Loop], None]
) -> None:
    """Whoever holds it sees the old step with the old boundary, or the new one with the new."""
    loop, held, seen = counting_loop(), threading.Event(), list[Any]()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        checkpointer = internals.checkpointer(handle)
        kept, done = checkpointer.step_journal, threading.Event()
        assert kept is not None

        def observe() -> None:
            with checkpointer.lock:
                held.set()
                done.wait(0.2)  # long enough for a step that does not wait
                seen.append((checkpointer.steps.step, kept.step, done.is_set()))

        observer = threading.Thread(target=observe)
        take = checkpointer._take_step_end
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                checkpointer, "_take_step_end", lambda: (seen.append(owned(handle)), take())
            )
            loss = Loop.forward
            patched.setattr(
                Loop, "forward", lambda own: (loss(own), observer.start(), held.wait(SOON_S))[0]
            )
            ends(handle, loop)
        done.set()
        observer.join(SOON_S)
        handle.detach()
    assert seen == [(2, 2, False), True]


@pytest.mark.parametrize("given", [0, 1])
def test_the_room_for_what_the_first_steps_make_is_planned_under_the_lock(
    run_dir: Path, given: int
) -> None:
    """Room is planned so, too, when an optimizer that was not given steps for the second time."""
    loop, found = counting_loop(), list[bool]()
    spare = torch.nn.Parameter(torch.zeros(3))
    loop.model.register_parameter("spare", spare)  # held by none: more optimizers may come
    optimizers = list(loop.optimizers)[:given]
    with attach(run_dir, Loop(loop.model, *optimizers)) as handle:
        pipeline = internals.pipeline(handle)
        prepare = pipeline.prepare

        def prepared(*given: Any) -> None:
            found.append(owned(handle))
            prepare(*given)

        pipeline.prepare = prepared  # type: ignore[method-assign]
        loop.run(3)
        handle.detach()
    assert found and all(found)


def test_a_save_from_inside_of_what_the_lock_guards_refuses(run_dir: Path) -> None:
    """A handler, or a function of the user's, may run while a snapshot opens, and save."""
    model, found = mlp(16, 2), list[Saved]()
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), width=16)
    with attach(run_dir, loop, policy=1) as handle:
        loop.run(1)
        pipeline = internals.pipeline(handle)
        opens = pipeline.open

        def inside(*given: Any, **named: Any) -> Any:
            found.append(handle.snapshot_now("inside"))
            return opens(*given, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pipeline, "open", inside)
            loss = loop.forward()
        loss.backward()
        loop.update()
        loop.note()
        handle.wait()
        handle.detach()
    (saved,) = found
    assert not saved.fresh and "half done" in saved.why
    loop.check(run_dir, [1])
