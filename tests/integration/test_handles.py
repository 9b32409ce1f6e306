"""Several handles on one model, its restore beside them, and handles in forked children."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import lightck
from support import faults, internals, processes
from support.loops import adam_loop, attach, of_live, of_stored, steps_at


def test_restore_under_an_attached_handle_is_refused_and_changes_nothing(run_dir: Path) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, slots=4)
    loop.run(3)
    loop.note()
    handle.wait(3)
    with pytest.raises(lightck.LightckError, match=r"close\(\) or detach\(\) the handle first"):
        lightck.restore(loop.model, list(loop.optimizers), run_dir, step=1)
    assert of_live(loop.model, loop.optimizers) == loop.seen[3]
    assert handle.step == 3
    handle.detach()
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir, step=1)
    assert info is not None and of_live(loop.model, loop.optimizers) == loop.seen[1]
    loop.step = 1
    loop.seen = {1: loop.seen[1]}
    with attach(run_dir, loop, slots=4) as handle:
        assert handle.step == 1
        loop.run(2)
        loop.note()
        handle.wait()
    loop.check(run_dir, [1, 2, 3])


def test_an_attach_that_fails_does_not_refuse_restore(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop):
        loop.run(1)
        loop.note()
    with monkeypatch.context() as patch:
        patch.setattr("lightck.loop.hooks.Hooks.install", lambda hooks, *given, **more: [][0])
        with pytest.raises(IndexError):
            attach(run_dir, loop)
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir)
    assert info is not None and info.step == 1


def test_a_handle_that_joins_another_one_goes_on_from_its_step(run_dir: Path) -> None:
    loop, other_dir = adam_loop(), run_dir.with_name("other")
    one = attach(run_dir, loop, policy=1000)
    loop.run(3)
    other = attach(other_dir, loop)
    assert other.step == 3
    loop.run(1)
    assert (one.step, other.step) == (4, 4)
    one.close()
    loop.run(1)
    third = attach(run_dir, loop, policy=1000)
    assert (one.step, other.step, third.step) == (4, 5, 5)
    loop.note()
    other.close()
    third.close()
    loop.check(other_dir, [4, 5])
    loop.check(run_dir, [4])


def test_a_forked_child_gets_a_clear_error_or_what_the_parent_knew_and_closing_does_nothing(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop)
    loop.run(2)
    handle.wait(1)
    known = handle.stats()
    loop.forward()  # a snapshot is open at the fork

    def child() -> None:
        for call in (
            handle.wait,
            handle.snapshot,
            handle.fence,
            handle.before_update,
            handle.after_update,
            handle.epoch,
        ):
            with pytest.raises(lightck.LightckError, match="a forked child must not write"):
                call()
        assert handle.stats() == known
        assert (handle.step, handle.last_captured_step, handle.last_committed_step) == (2, 1, 1)
        assert handle.survives == "process death"
        loop.run(2)
        assert handle.step == 2
        handle.close()
        handle.detach()
        with handle:
            pass
        with pytest.raises(KeyError), handle:
            raise KeyError("the user's")
        lightck.restore(loop.model, list(loop.optimizers), run_dir)

    processes.run(child)
    loop.model.zero_grad()
    loop.run(1)
    loop.note()
    handle.close()
    loop.check(run_dir, [2, 3])


def test_a_forked_child_does_not_wait_for_a_lock_that_a_thread_of_the_parent_held(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with internals.checkpointer(handle).lock:
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def child() -> None:
        assert internals.checkpointer(handle).lock.acquire(timeout=100)
        loop.run(1)
        handle.close()

    try:
        processes.run(child)
    finally:
        let_go.set()
        thread.join()
    handle.close()


def test_a_forked_child_is_not_told_the_parents_pending_error(run_dir: Path) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, on_error="raise")
    loop.run(2)
    handle.wait()
    faults.arm(faults.COMMIT)
    with pytest.raises(lightck.RegionIOError):
        handle.snapshot().result(timeout=100)  # on its own thread

    def child() -> None:
        handle.detach()
        handle.close()

    processes.run(child)
    with pytest.raises(lightck.RegionIOError):
        handle.close()


def test_two_handles_record_one_model_and_restore_waits_for_both(run_dir: Path) -> None:
    loop, other_dir = adam_loop(), run_dir.with_name("other")
    one, other = attach(run_dir, loop), attach(other_dir, loop, policy=2)
    loop.run(3)
    for handle in (one, other):
        with pytest.raises(lightck.LightckError, match="handle first"):
            lightck.restore(loop.model, list(loop.optimizers), run_dir)
        handle.close()
    assert steps_at(run_dir) == [2, 3] and steps_at(other_dir) == [2, 3]
    for path in (run_dir, other_dir):
        info = lightck.restore(loop.model, list(loop.optimizers), path)
        assert info is not None and info.step == 3
        assert of_stored(path, 2) == loop.seen[2]
