"""Several ranks keep a history: all of them the same steps, and each item whole over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightck
from lightck.history import history, item
from support.distributed import ranks
from support.distributed.resumed import attach, begin, losses_of, restore, same, state_of
from support.histories import kept_steps, metrics_at, settle

KEEP = "newest 2 or best loss"


def train(path: Path, world: int, losses: dict[int, float], steps: int = 8, **more: Any) -> Any:
    """State of each rank after each step; every step is reported, and kept or not."""

    def job(me: ranks.Me) -> dict[int, Any]:
        training, seen = begin(me), {}
        with attach(training, path, keep=KEEP, **more) as handle:
            for step in range(1, steps + 1):
                losses_of(training, 1)
                seen[step] = state_of(training)
                if step in losses:
                    handle.report(loss=losses[step])
                    handle.snapshot()
                handle.wait()
                settle(handle)
                dist.barrier()
        return seen

    with ranks.started(world, job) as running:
        return running.results()


def test_items_are_whole_over_all_ranks_and_restore_bit_for_bit(region_dir: Path) -> None:
    seen = train(region_dir, 2, {2: 0.2, 4: 0.5, 6: 0.9}, policy=1)
    assert kept_steps(region_dir) == [2, 7, 8]
    assert metrics_at(region_dir)[2] == {"loss": 0.2}

    def job(me: ranks.Me) -> Any:
        training = begin(me)
        info = restore(training, region_dir, step=2)
        assert info is not None
        return info.path, state_of(training)

    with ranks.started(2, job) as running:
        for rank, (path, state) in enumerate(running.results()):
            assert path == region_dir / "history" / "step-2"
            assert same(state, seen[rank][2])
    assert lightck.load(region_dir, step=2)["step"] == 2


def test_the_best_of_steps_that_are_not_due_is_kept_on_all_ranks(region_dir: Path) -> None:
    train(region_dir, 2, {2: 0.4, 4: 0.1, 6: 0.3}, policy=100)
    assert 4 in kept_steps(region_dir)
    assert all(each.is_whole for each in item.every_item(region_dir))


def test_a_rank_that_copies_slowly_copies_the_same_steps(
    region_dir: Path, monkeypatch: Any
) -> None:
    real = history.copy_snapshot

    def slow(*given: Any, **named: Any) -> None:
        if dist.get_rank() == 1:
            torch.ones(1)
            import time

            time.sleep(0.05)
        real(*given, **named)

    monkeypatch.setattr(history, "copy_snapshot", slow)

    def job(me: ranks.Me) -> None:
        training = begin(me)
        with attach(training, region_dir, keep=9, policy=1):
            losses_of(training, 30)

    with ranks.started(2, job) as running:
        running.results()
    found = item.every_item(region_dir)
    assert found and all(each.is_whole for each in found)
