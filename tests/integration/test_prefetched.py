"""`Prefetched`: the batch that was in hand comes again; loops that it is not for are refused."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightck


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def draw() -> torch.Tensor:
    """Draw from all global generators."""
    return torch.randn(4) + float(np.random.random()) + random.random()


class Loop:
    """nanoGPT's: the next batch is taken behind the forward."""

    def __init__(self, path: Path, fn: Any = draw, **extras: Any) -> None:
        self.model, self.optimizer = fresh()
        self.batches = lightck.Prefetched(fn)
        self.extras = {"data": self.batches, **extras}
        self.path = path
        self.seen: list[list[float]] = []

    def restore(self) -> lightck.RestoreInfo | None:
        return lightck.restore(self.model, self.optimizer, self.path, extras=self.extras)

    def attach(self) -> lightck.Handle:
        return lightck.attach(
            self.model, self.optimizer, self.path, extras=self.extras, on_error="raise"
        )

    def run(self, steps: int, x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            self.seen.append(x.tolist())
            loss = self.model(x).sum()
            x = next(self.batches)
            loss.backward()
            self.optimizer.step()
        return x


def test_batch_in_hand_comes_again_and_the_generators_go_on(run_dir: Path) -> None:
    def noisy(source: torch.Generator) -> Any:
        return lambda: draw() + torch.rand(4, generator=source)

    own = torch.Generator().manual_seed(3)
    first = Loop(run_dir, noisy(own), own=own)
    with first.attach():
        x = first.run(3, next(first.batches))
    expected = x.tolist(), draw().tolist(), torch.rand(2, generator=own).tolist()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    own = torch.Generator()
    second = Loop(run_dir, noisy(own), own=own)
    info = second.restore()
    assert info is not None and info.step == 3
    again = next(second.batches)
    assert (again.tolist(), draw().tolist(), torch.rand(2, generator=own).tolist()) == expected


def test_example_of_the_docstring_runs(run_dir: Path) -> None:
    lines = inspect.getdoc(lightck.Prefetched).splitlines()  # type: ignore[union-attr]
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    model, optimizer = fresh()
    names = {
        "lightck": lightck, "get_batch": lambda split: (draw(), draw()), "path": run_dir,
        "model": lambda x, y: model(x).sum(), "optimizer": optimizer,
    }  # fmt: skip
    exec(code.replace("(model,", "(module,"), names | {"module": model})
    assert lightck.snapshots(run_dir)["step"].to_pylist().count(10) == 1


def test_loop_that_takes_its_batch_before_the_forward_is_refused_in_its_second_step(
    run_dir: Path,
) -> None:
    loop = Loop(run_dir)
    with pytest.raises(lightck.StateError, match="leave Prefetched out and call its function"):
        with loop.attach():
            for _ in range(2):
                loop.model(next(loop.batches)).sum().backward()
                loop.optimizer.step()


@pytest.fixture
def interrupted(run_dir: Path) -> Path:
    loop = Loop(run_dir)
    with loop.attach():
        loop.run(2, next(loop.batches))
    return run_dir


def test_batch_that_was_drawn_before_restore_is_refused(interrupted: Path) -> None:
    loop = Loop(interrupted)
    x = next(loop.batches)
    loop.restore()
    with pytest.raises(lightck.StateError, match=r"restore before the first next\(batches\)"):
        with loop.attach():
            loop.run(1, x)


def test_loop_that_takes_another_batch_than_the_one_in_hand_is_refused(interrupted: Path) -> None:
    loop = Loop(interrupted)
    loop.restore()
    with pytest.raises(lightck.StateError, match=r"take the first batch with next\(batches\)"):
        with loop.attach():
            loop.model(draw()).sum().backward()
            loop.optimizer.step()


@pytest.mark.parametrize("told", [lightck.at_step, lightck.at_forward, None])
def test_extra_that_moves_where_the_batch_is_made_is_an_error_before_a_snapshot_has_it(
    run_dir: Path, told: Any
) -> None:
    counters = {"drawn": 0}

    def counting() -> torch.Tensor:
        counters["drawn"] += 1
        return draw()

    loop = Loop(run_dir, counting, counters=told(counters) if told else counters)
    with pytest.raises(lightck.StateError, match=r"extras\['counters'\].*ahead of its step"):
        with loop.attach():
            loop.run(2, next(loop.batches))
    assert lightck.snapshots(run_dir).num_rows == 0


def test_position_that_moves_where_the_batch_is_made_is_an_error(run_dir: Path) -> None:
    sampler = lightck.ResumableSampler(range(40))
    loader = torch.utils.data.DataLoader(range(40), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    batches = iter(loader)
    loop = Loop(run_dir, lambda: next(batches).float(), position=sampler)
    with pytest.raises(lightck.StateError, match=r"extras\['position'\].*ahead of its step"):
        with loop.attach():
            loop.run(2, next(loop.batches))
    assert lightck.snapshots(run_dir).num_rows == 0


def test_what_the_loop_changes_elsewhere_is_no_movement(run_dir: Path) -> None:
    counters = {"seen": 0}
    loop = Loop(run_dir, counters=lightck.at_forward(counters))
    with loop.attach() as handle:
        x = next(loop.batches)
        for _ in range(6):
            x = loop.run(1, x)
            counters["seen"] += 1
        assert handle.stats().moved_in_draws == 0


def test_state_from_outside_may_come_with_another_batch(interrupted: Path) -> None:
    loop = Loop(interrupted)
    loop.restore()
    with loop.attach() as handle:
        handle.replaced(7)
        loop.run(2, next(loop.batches))
        handle.replaced(3)
        loop.run(2, next(loop.batches))
    assert 5 in lightck.snapshots(interrupted)["step"].to_pylist()


def test_other_state_is_refused() -> None:
    with pytest.raises(lightck.RestoreMismatchError, match="found {'at': 3}"):
        lightck.Prefetched(draw).load_state_dict({"at": 3})
