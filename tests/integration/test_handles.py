"""Several handles on one model, and the model's own restore beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from loops import adam_loop, attach, of_live, of_stored, steps_at

import lightck


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
        patch.setattr("lightck.capture.hooks.Hooks.install", lambda hooks: [][0])
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
