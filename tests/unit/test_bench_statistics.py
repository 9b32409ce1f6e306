"""Statistics of the benchmarks against vectors worked out by hand or known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.engines.checkfreq import Profile, interval
from bench.statistics import Enough, Estimate, estimate, ratio, trimmed_mean


def test_trimmed_mean_cuts_a_fifth_at_each_end() -> None:
    assert trimmed_mean([1, 2, 3, 4, 100]) == 3
    assert trimmed_mean([100, -50, 1, 2, 3, 4, 5, 6, 7, 8]) == 4.5  # two at each end go
    assert trimmed_mean([7]) == 7


def test_trimmed_mean_of_few_samples_is_the_mean() -> None:
    assert trimmed_mean([1, 2, 6]) == 3


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        trimmed_mean([])


def test_one_sample_has_no_bounds() -> None:
    assert estimate([2.0]) == Estimate(2.0, -math.inf, math.inf)


def test_equal_samples_have_no_spread() -> None:
    assert estimate([3.0] * 10) == Estimate(3.0, 3.0, 3.0)


def test_the_interval_of_given_samples_never_changes() -> None:
    samples = [0.1, 0.4, 0.2, 0.3, 0.9, 0.25]
    assert estimate(samples) == estimate(samples)


def test_the_interval_is_as_wide_as_theory_says_for_normal_samples() -> None:
    # The trimmed mean's asymptotic variance at 20 % is 1.24 / n for a normal of variance 1.
    samples = np.random.default_rng(1).normal(size=2000)
    expected = 1.96 * math.sqrt(1.24 / samples.size)
    assert estimate(samples.tolist()).half_width == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("count", [2, 3, 4, 40])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(2)
    found = [estimate(rng.normal(5, 1, count).tolist()) for _ in range(200)]
    assert 0.90 <= np.mean([each.low <= 5 <= each.high for each in found]) <= 0.985


def test_outliers_do_not_move_the_estimate() -> None:
    calm = estimate([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.02, 0.98, 1.0])
    hit = estimate([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.02, 0.98, 60.0])
    assert hit.value == pytest.approx(calm.value, abs=0.02)


def test_a_ratio_pairs_the_worst_with_the_worst() -> None:
    found = ratio(Estimate(100, 90, 120), Estimate(5, 4, 6))
    assert found == Estimate(20, 15, 30)


def test_a_ratio_to_what_may_be_nothing_has_no_upper_bound() -> None:
    found = ratio(Estimate(100, 90, 120), Estimate(1, -1, 3))
    assert found == Estimate(100, 30, math.inf)


def test_a_ratio_of_nothing_to_nothing_is_not_known() -> None:
    assert math.isnan(ratio(Estimate(-1, -2, 1), Estimate(-3, -4, -2)).value)


def test_sampling_stops_when_the_interval_is_narrow_or_at_a_cap() -> None:
    narrow, wide = [1.0, 1.01] * 4, [0.0, 2.0] * 4
    enough = Enough(half_width=0.1, relative=0.0, least=4, most=20, seconds=60)
    assert enough.done(narrow, 1)
    assert not enough.done(narrow[:3], 1), "fewer than the least"
    assert not enough.done(wide, 1)
    assert enough.done(wide, 60), "out of time"
    assert enough.done(wide * 3, 1), "as many as allowed"
    assert not enough.narrow(wide)


def test_checkfreq_chooses_the_interval_of_the_paper() -> None:
    # The vector of prior-systems.md, F5, worked out there: k = 12.25, kmin = 5.
    profile = Profile(iteration=0.2, update=0.02, copy=0.5, storage=2, on_device=0.05)
    assert interval(profile, 0.05) == 13


def test_checkfreq_keeps_within_the_budget_when_the_snapshot_cannot_hide() -> None:
    # On a CPU: To = 0.5 - (0.2 - 0.02) = 0.32, k = (2.5 - 0.32) / 0.2 = 10.9, kmin = 32.
    assert interval(Profile(iteration=0.2, update=0.02, copy=0.5, storage=2), 0.05) == 32


def test_checkfreq_saves_every_iteration_when_everything_hides() -> None:
    assert interval(Profile(iteration=1.0, update=0.1, copy=0.1, storage=0.2), 0.05) == 1
