"""The commit barrier of a rank over any store, without a region and a training loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightck.config import Config
from lightck.distributed.commit.distributed_barrier import DistributedBarrier
from lightck.distributed.divergence import ReplicaSamples
from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.store import KeyValueStore
from lightck.policy import AtSteps, EverySteps
from lightck.types import Fate, Moment

NEVER = AtSteps([10**9])  # steps are due if they were announced


def barrier(
    store: KeyValueStore,
    rank: int,
    world: int,
    *,
    every: int | None = 1,
    start: int = 0,
    timeline: int = 0,
    restored: tuple[int, int] | None = None,
    **limits: float,
) -> DistributedBarrier:
    """Start the barrier of one rank."""
    region: Any = SimpleNamespace(slots=[], timeline=timeline)
    config = Config(policy=NEVER if every is None else EverySteps(every))
    ranks, samples = Rendezvous("attach", rank, world), ReplicaSamples(list, lambda lives: set())
    made = DistributedBarrier(ranks, region, config, start, samples, **limits)
    made.start(store, timeline, restored)
    return made


def due(rank: DistributedBarrier, step: int) -> bool:
    """End a step; return whether it is due."""
    return rank.due(Moment(step=step, time_s=0.0), NEVER)


def open_step(rank: DistributedBarrier, step: int) -> None:
    """End a step that is due, and open its snapshot."""
    assert due(rank, step)
    why = rank.opening(step)
    assert why is None, why


def lose(rank: DistributedBarrier, step: int, why: str, *, for_good: bool = False) -> None:
    """End a step that is due, and lose it."""
    assert due(rank, step)
    rank.lost(step, why, for_good=for_good)


def wait(rank: DistributedBarrier, step: int, seconds: float) -> Fate:
    """Wait for a step's fate."""
    rank.wait(step, seconds)
    return rank.fate(step)
