"""Several ranks decide alike: by reported metrics, by losses, and by what rank 0 has learned."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightck.examine import contents
from lightck.loop.policy_state import parsed
from lightck.policy import Auto, Budget, EverySteps, OnBest
from lightck.types import Moment, Policy
from support.distributed import ranks
from support.distributed.islands import Islands
from support.distributed.resumed import attach, begin, losses_of, restore, same, state_of
from support.loops import steps_at

AUTO = Auto(watch=False)


def _recovered(path: Path) -> list[bool]:
    """Return of each failure that rank 0 knows whether it was recovered."""
    values = parsed(contents(path).learned)
    assert values is not None
    return [each[2] for each in values["failures"]["failures"]]


@pytest.mark.parametrize("policy", [OnBest("loss"), OnBest("loss") | EverySteps(1000)], ids=str)
def test_a_best_metric_saves_the_evaluated_state_on_every_rank(
    region_dir: Path, policy: Policy
) -> None:
    reported = {2: 0.5, 4: 0.7, 5: 0.4, 7: 0.4}

    def train(me: ranks.Me) -> Any:
        training, seen = begin(me), {}
        with attach(training, region_dir, policy=policy) as handle:
            for step in range(1, 9):
                losses_of(training, 1)
                if step in reported:
                    seen[step] = state_of(training)
                    handle.report(loss=reported[step])
            handle.wait()
            dist.barrier()
            whole = handle.stats().committed
        return seen, whole

    with ranks.started(2, train) as job:
        found = job.results()
    assert [whole for _, whole in found] == [2, 2]
    assert {*steps_at(region_dir)} == {2, 5, 8}

    def again(me: ranks.Me) -> Any:
        training = begin(me)
        info = restore(training, region_dir, step=5)
        assert info is not None
        return state_of(training)

    with ranks.started(2, again) as job:
        for rank, state in enumerate(job.results()):
            seen = found[rank][0][5]
            assert same(state, {**seen, "rng": state["rng"], "data": state["data"]})


@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_a_step_that_was_announced_is_given_up_when_the_loss_is_no_number(
    region_dir: Path, where: tuple[int, ...]
) -> None:
    """Wherever the announced step is by then: also one that rank 0 knows nothing bad of."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        handle = attach(training, region_dir, policy=Budget(1.0))
        while not handle.stats().committed:
            losses_of(training, 1)
            handle.wait()
            dist.barrier()
        for _ in range(40):
            losses_of(training, 1)
        handle.wait()
        dist.barrier()
        last = handle.step
        for _ in range(200):
            if me.rank in where:
                loss = training.model(training.batch()).square().mean() * math.nan
            else:
                loss = training.model(training.batch()).square().mean()
            loss.backward()  # no update: whatever is saved of it would be good, but must not be
            handle.before_update()
            handle.after_update()
        handle.wait()
        dist.barrier()
        handle.detach()
        return last, handle.step

    with ranks.started(2, train) as job:
        (last, after), _ = job.results()
    assert after == last + 200
    assert max(steps_at(region_dir)) <= last + 1


def _lives(where: Path | Islands, world: int, *, dies: bool = False) -> list[Any]:
    """Go on on so many ranks, until a snapshot of the policy's is whole; all may be killed then."""

    def train(me: ranks.Me) -> Any:
        path = Path(where.enter(me.rank)) if isinstance(where, Islands) else where
        training = begin(me)
        info = restore(training, path)
        with attach(training, path, policy=AUTO) as handle:
            while not handle.stats().committed:
                losses_of(training, 3)
                handle.wait()
                dist.barrier()
            if dies:
                me.send("ready")
                me.pause()
        return info and info.step

    with ranks.started(world, train) as job:
        if not dies:
            return job.results()
        for rank in range(world):
            job.receive(rank)
        for rank in range(world):
            job.kill(rank)
        return []


def test_a_restarted_rank_0_goes_on_with_what_the_job_has_learned(region_dir: Path) -> None:
    for failures in (1, 2):
        _lives(region_dir, 2, dies=True)
        _lives(region_dir, 2)
        assert _recovered(region_dir) == [False] * failures


def test_a_host_of_rank_0_that_is_lost_is_a_failure_that_nothing_recovered(
    region_dir: Path,
) -> None:
    islands = Islands(region_dir / "nodes", 2, 2)
    _lives(islands, 2)
    shutil.rmtree(islands.node(0) / "run")
    _lives(islands, 2)
    assert _recovered(islands.node(0) / "run") == [False]


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_goes_on_with_it_as_well(region_dir: Path, world: int) -> None:
    _lives(region_dir, 2, dies=True)
    _lives(region_dir, 2)
    assert _recovered(region_dir) == [False]
    _lives(region_dir, world)
    assert _recovered(region_dir) == [False]


class _Warned:
    """A policy that is due while failures threaten more often than every quarter of an hour."""

    needs = frozenset({"hazard", "health"})

    def __init__(self, probe: _Told) -> None:
        self.watch = (probe,)

    def due(self, moment: Moment) -> bool:
        return moment.hazard is not None and moment.hazard.unrecoverable > 1 / 900

    def __str__(self) -> str:
        return "warned"


class _Told:
    """A probe of one rank's device, which sees what the test says."""

    name, period_s = "told", 0.1

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        return self.found


def test_a_symptom_on_another_rank_makes_a_step_due(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training, probe = begin(me), _Told()
        with attach(training, region_dir, policy=_Warned(probe)) as handle:
            losses_of(training, 30)
            handle.wait()
            before, began_s = handle.stats().committed, time.monotonic()
            if me.rank == 1:
                probe.found = {"gpu_action": 1.0}
            while not handle.stats().committed:
                losses_of(training, 3)
                time.sleep(0.05)  # as long as real steps take
                handle.wait()
                dist.barrier()
            return before, time.monotonic() - began_s

    with ranks.started(2, train) as job:
        found = job.results()
    print(f"seconds from the symptom to a snapshot: {[s for _, s in found]}")
    assert [before for before, _ in found] == [0, 0]
