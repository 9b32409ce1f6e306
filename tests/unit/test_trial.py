"""One way stands against another: what they cost decides which is on."""

from __future__ import annotations

import numpy as np

from lightck.pipeline.trial import LOOKS, PATIENCE, ABTrial, TrialResult


def run(contest: ABTrial, count: int, first: float, other: float, limit: float) -> list[bool]:
    """Return whether the other way was on, use by use; it is ready whenever it is wanted."""
    on = []
    for _ in range(count):
        on.append(contest.other)
        if contest.saw(other if contest.other else first, lambda: limit) is TrialResult.DOUBT:
            contest.begin()
    return on


def test_a_way_within_its_limit_is_never_doubted() -> None:
    assert not any(run(ABTrial(), 500, 1.0, 0.0, 1.0))


def test_a_way_over_its_limit_gives_way_to_one_of_half_its_cost_for_good() -> None:
    on = run(ABTrial(), 500, 2.0, 1.0, 1.5)
    assert on == [False] * LOOKS + [True] * (500 - LOOKS)


def test_a_way_that_is_little_better_is_tried_ever_more_rarely() -> None:
    contest = ABTrial()
    on = run(contest, 2000, 2.0, 1.01, 1.5)
    begun = [i for i in range(1, len(on)) if on[i] and not on[i - 1]]
    gaps = np.diff(begun)
    assert sum(on) == LOOKS * len(begun) and len(begun) >= 3
    assert gaps[0] >= PATIENCE and (gaps[1:] > 1.5 * gaps[:-1]).all(), gaps
    assert (contest.first_cost, contest.other_cost) == (2.0, 1.01)


def test_one_odd_cost_in_three_decides_nothing() -> None:
    contest = ABTrial()
    assert not any(contest.saw(cost, lambda: 98.0) for cost in (1.0, 99.0, 1.0) * 100)


def test_what_is_doubted_stays_until_the_other_is_ready() -> None:
    contest = ABTrial()
    turns = [contest.saw(2.0, lambda: 1.0) for _ in range(LOOKS + 2)]
    assert turns == [None] * (LOOKS - 1) + [TrialResult.DOUBT] * 3
    assert not contest.other
    contest.lose()  # it cannot be had
    assert not any(contest.saw(2.0, lambda: 1.0) for _ in range(PATIENCE - 1))
    assert contest.saw(2.0, lambda: 1.0) is TrialResult.DOUBT
