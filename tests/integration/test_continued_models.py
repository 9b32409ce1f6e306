"""A live model may go on at a path if it was restored from there or recorded there."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lightck
from support import processes
from support.loops import Loop, adam_loop, attach, mlp, restored, steps_at, train


def refused(path: Path, loop: Loop, steps: str) -> None:
    """Attach is refused in these words, and nothing at the path has changed."""
    file = path / "region-00000.lck"
    before = file.read_bytes()
    with pytest.raises(lightck.UnrestoredError, match=rf"snapshots of steps \[{steps}\]") as caught:
        attach(path, loop)
    for hint in ("lightck.restore(model, ...)", "made anew", "another path", "overwrite=True"):
        assert hint in str(caught.value)
    assert file.read_bytes() == before


def test_a_cell_run_twice_does_not_overwrite_what_its_first_run_recorded(run_dir: Path) -> None:
    """It makes a new model, trains it, and forgets to restore."""
    first = adam_loop()
    train(run_dir, first, 3)
    refused(run_dir, adam_loop(), "2, 3")
    first.check(run_dir, [2, 3])
    anew = adam_loop()
    train(run_dir, anew, 1, overwrite=True)
    anew.check(run_dir, [1])


def test_a_cell_run_twice_is_refused_when_its_first_model_is_gone(run_dir: Path) -> None:
    loop = adam_loop()
    train(run_dir, loop, 3)
    del loop
    gc.collect()
    refused(run_dir, adam_loop(), "2, 3")


def test_a_model_that_is_made_anew_goes_on_once_it_is_restored(run_dir: Path) -> None:
    first = adam_loop()
    train(run_dir, first, 3)
    info, again = restored(run_dir)
    assert info is not None and info.step == 3
    again.seen = first.seen
    train(run_dir, again, 1)
    again.check(run_dir, [3, 4])


def test_a_model_goes_on_where_it_was_recorded_as_often_as_it_is_attached(run_dir: Path) -> None:
    loop = adam_loop()
    for _ in range(3):
        train(run_dir, loop, 2)
    loop.check(run_dir, [5, 6])


def test_a_model_is_refused_where_another_one_has_gone_on_from_it(run_dir: Path) -> None:
    """Both are of one process; the first one's state is that of an older step by then."""
    first = adam_loop()
    train(run_dir, first, 3)
    _, second = restored(run_dir)
    second.seen = first.seen
    train(run_dir, second, 2)
    refused(run_dir, first, "4, 5")
    second.check(run_dir, [4, 5])


def test_a_model_restored_from_another_run_does_not_go_on_in_the_first(region_dir: Path) -> None:
    """The live state is what was restored last."""
    one, other = region_dir / "one", region_dir / "other"
    train(one, adam_loop(), 3)
    train(other, adam_loop(), 2)
    _, loop = restored(one)
    assert lightck.restore(loop.model, list(loop.optimizers), other) is not None
    refused(one, loop, "2, 3")
    attach(other, loop).detach()


def test_two_engines_of_one_process_do_not_take_each_others_paths(region_dir: Path) -> None:
    one, other = region_dir / "one", region_dir / "other"
    loops = {path: adam_loop() for path in (one, other)}
    for path, loop in loops.items():
        train(path, loop, 2)
    refused(one, loops[other], "1, 2")
    refused(other, loops[one], "1, 2")
    for path, loop in loops.items():
        train(path, loop, 1)
        loop.check(path, [2, 3])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        checkpoint_wrapper,
        lambda model: torch.compile(checkpoint_wrapper(model), backend="eager"),
    ],
    ids=["compile", "checkpointing", "both"],
)
def test_a_model_that_is_wrapped_after_the_restore_goes_on(
    run_dir: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    first = adam_loop()
    train(run_dir, first, 3)
    _, again = restored(run_dir)
    with lightck.attach(wrap(again.model), list(again.optimizers), run_dir) as handle:
        assert handle.step == 3
        again.run(1)
        again.note()
    again.check(run_dir, [3, 4])


def test_a_restored_model_goes_on_when_its_optimizer_is_found_later(run_dir: Path) -> None:
    first = adam_loop()
    train(run_dir, first, 3)
    loop = adam_loop()
    assert lightck.restore(loop.model, path=run_dir) is not None
    with lightck.attach(loop.model, path=run_dir) as handle:
        first.run(1)
        loop.run(1)
        handle.wait(4)
    assert [4, *steps_at(run_dir)][-1] == 4
    for one, two in zip(first.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("which", [0, 1], ids=["the first", "the second"])
def test_of_two_models_together_both_must_be_those_of_the_run(run_dir: Path, which: int) -> None:
    def optimizers(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def steps(models: list[nn.Module], handle: lightck.Handle) -> None:
        for _ in range(2):
            sum(model(torch.ones(1, 4)).sum() for model in models).backward()  # type: ignore[union-attr]
            for optimizer in both:
                optimizer.step()
            handle.wait()

    models: list[nn.Module] = [mlp(4, 1), mlp(4, 1)]
    both = optimizers(models)
    with lightck.attach(models, both, run_dir) as handle:
        steps(models, handle)
    mixed = [*models]
    mixed[which] = mlp(4, 1)
    with pytest.raises(lightck.UnrestoredError, match=r"steps \[1, 2\]"):
        lightck.attach(mixed, optimizers(mixed), run_dir)
    with lightck.attach(models, both, run_dir) as handle:
        steps(models, handle)
    assert steps_at(run_dir) == [3, 4]


def test_a_child_goes_on_from_what_its_parent_restored_and_then_the_parent_may_not(
    run_dir: Path,
) -> None:
    train(run_dir, adam_loop(), 3)
    _, loop = restored(run_dir)

    def job() -> list[int]:
        train(run_dir, loop, 1)
        return steps_at(run_dir)

    assert processes.run(job) == [3, 4]
    refused(run_dir, loop, "3, 4")


def test_a_restore_of_nothing_that_is_whole_lets_only_its_model_go_on(run_dir: Path) -> None:
    """There is nothing at the path yet: any model may begin there, and only one goes on."""
    one, two = adam_loop(), adam_loop()
    for loop in (one, two):
        assert lightck.restore(loop.model, list(loop.optimizers), run_dir) is None
    train(run_dir, one, 2)
    refused(run_dir, two, "1, 2")


def test_a_model_of_which_nothing_fits_is_not_taken_for_the_runs_without_strict_either(
    run_dir: Path,
) -> None:
    """It would be attached as if it had been restored, and overwrite the run."""
    first = adam_loop()
    train(run_dir, first, 3)
    other = Loop(nn.Sequential(OrderedDict(another=nn.Linear(3, 3))), width=3)
    with pytest.raises(lightck.RestoreMismatchError, match="step 3 has nothing of this model"):
        lightck.restore(other.model, path=run_dir, strict=False)
    refused(run_dir, other, "2, 3")
    first.check(run_dir, [2, 3])


def test_extras_that_a_run_had_and_attach_is_not_given_are_told(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next snapshots are without them: who restores one has lost them."""
    loop, mine = adam_loop(), {"schedule": {"at": 1}, "progress": {"epoch": 2}}
    train(run_dir, loop, 1, extras=mine)
    train(run_dir, loop, 1, extras=mine)
    assert "left_out" not in caplog.text
    train(run_dir, loop, 1, extras={"progress": mine["progress"]})
    assert "extras_left_out" in caplog.text and "names=['schedule']" in caplog.text
    caplog.clear()
    _, again = restored(run_dir)
    train(run_dir, again, 1)
    assert "extras_left_out" in caplog.text and "names=['progress']" in caplog.text
    caplog.clear()
    train(run_dir, again, 1)
    train(run_dir.with_name("other"), again, 1)
    assert "left_out" not in caplog.text
