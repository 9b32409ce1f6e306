"""The method finds what an engine costs, exactly, when the clock is one that only we advance."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from bench.definition import Contender, Method
from bench.engines.none import Nothing
from bench.measures import Job, training
from bench.measures.loop import Loop
from bench.work import Training, Work

_STEP = 2.0  # s, of which the update takes half
_EXACT = pytest.approx


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Steps(Training):
    """Steps that take time on the clock only."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.begun = 0

    def compute(self) -> None:
        """Takes a second; every tenth time ten more, as steps do on a shared machine."""
        self.begun += 1
        self.clock.now += _STEP / 2 + (10 if self.begun % 10 == 0 else 0)

    def update(self) -> None:
        """Takes a second."""
        self.clock.now += _STEP / 2


class _Costs(Nothing):
    """Makes training wait when a snapshot begins and before the update.

    Then there is work left behind: whoever comes first pays for it, the next step or a drain.
    """

    def __init__(self, clock: _Clock, begin: float, fence: float, rest: float) -> None:
        self.clock, self.costs = clock, (begin, fence, rest)
        self._open = self._behind = False

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self.drain()
        super().begin(step)
        self._open = self._behind = True
        self.clock.now += self.costs[0]

    def before_update(self) -> None:
        """See `Engine`."""
        if self._open:
            self.clock.now += self.costs[1]
            self._open = False
        else:
            self.drain()

    def drain(self) -> None:
        """See `Engine`."""
        if self._behind:
            self.clock.now += self.costs[2]
            self._behind = False


def _found(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    costs: tuple[float, float, float],
    interval: int = 1,
) -> tuple[Any, list[float], int]:
    clock = _Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    method = Method(policy=policy, block=4, least=20, most=20, settle=1)
    job = Job("training", Contender("x", "none"), Work("tiny"), method, {}, Path(), lambda _: None)
    engine = _Costs(clock, *costs)
    engine.interval = interval
    loop = Loop(_Steps(clock), engine)
    loop.attach(Path())

    def yardstick() -> float:
        assert not engine._behind, "the yardstick is timed while nothing else runs"
        clock.now += 0.5
        return 0.5

    one = training._pair if policy == "pairs" else training._block
    series, copies, _ = training._collect(job, loop, yardstick, one)  # type: ignore[arg-type]
    return series, copies, engine.finish().complete


def test_pairs_find_what_a_snapshot_costs_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    series, copies, _ = _found(monkeypatch, "pairs", (0.25, 0.125, 0.0))
    assert training.trimmed_mean(series.extra) == _EXACT(0.375)
    assert training.trimmed_mean(series.without) == _EXACT(_STEP)
    assert copies == [0.5] * 4, "before, after the 8th and the 16th, and at the end"


def test_blocks_count_what_goes_on_behind_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    series, _, complete = _found(monkeypatch, "blocks", (0.25, 0.125, 3.0))
    expected = 0.25 + 0.125 + 3.0
    assert min(abs(extra - expected) for extra in series.extra) == _EXACT(0)
    assert complete == 4 * 21 + 4, "20 blocks, one to settle, and one for each use of the yardstick"


def test_blocks_cost_per_snapshot_when_not_every_step_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    series, _, complete = _found(monkeypatch, "blocks", (0.6, 0.0, 0.0), interval=3)
    # Blocks of 6 steps with 2 snapshots each.
    assert series.overhead_scale == _EXACT(1 / 3)
    assert complete == 2 * 21 + 4
    assert any(extra == _EXACT(0.6) for extra in series.extra)


def test_an_engine_that_costs_nothing_is_found_to_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for policy in ("pairs", "blocks"):
        series, _, _ = _found(monkeypatch, policy, (0.0, 0.0, 0.0))
        assert sorted(series.extra)[len(series.extra) // 2] == _EXACT(0)
