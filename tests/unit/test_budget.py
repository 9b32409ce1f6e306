"""A just-in-time snapshot that does not fit into the grace period is told of, with advice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.failure.budget import SnapshotCost, shortfall, usable_s

POSITIVE = st.floats(1e3, 1e12)


def test_what_fits_is_not_mentioned() -> None:
    assert shortfall(SnapshotCost(1_500_000_000, 10e9), grace_s=30) is None


def test_what_does_not_fit_is_said_with_numbers_and_what_to_do() -> None:
    text = shortfall(SnapshotCost(40_000_000_000, 10e9, 1e9, 0.5, step_s=2.0), grace_s=30)
    assert text is not None
    assert "40 GB" in text and "44.5 s" in text and "grace_s = 30" in text and "29 s" in text
    assert "a policy of 23 steps (46 s)" in text


def test_without_a_step_time_the_advice_has_no_number() -> None:
    text = shortfall(SnapshotCost(40_000_000_000, 1e9), grace_s=30)
    assert text is not None and "shorten the policy's interval" in text


def test_no_grace_fits_nothing_but_nothing() -> None:
    assert shortfall(SnapshotCost(0, 1e9), grace_s=0) is None
    assert shortfall(SnapshotCost(1, 1e9), grace_s=0) is not None


@given(st.integers(0, 10**15), POSITIVE, POSITIVE, st.floats(0, 1e4), st.floats(0, 1e6))
def test_it_fits_exactly_when_the_time_needed_is_there(
    size: int, copy: float, medium: float, commit_s: float, grace_s: float
) -> None:
    measured = SnapshotCost(size, copy, medium, commit_s)
    assert (shortfall(measured, grace_s) is None) == (measured.needed_s <= usable_s(grace_s))


@given(st.integers(1, 10**13), POSITIVE, st.floats(1e-3, 1e4))
def test_the_policy_that_is_advised_can_be_kept_up_with(
    size: int, copy: float, step_s: float
) -> None:
    text = shortfall(SnapshotCost(size, copy, step_s=step_s), grace_s=0)
    assert text is not None
    steps = re.search(r"a policy of (\d+) steps", text)
    assert steps is not None
    needed_s = SnapshotCost(size, copy).needed_s
    assert int(steps[1]) * step_s >= needed_s * (1 - 1e-9)
    assert (int(steps[1]) - 1) * step_s < needed_s * (1 + 1e-9)


@pytest.mark.parametrize("grace_s", [0.5, 10.0, 30.0, 3600.0])
def test_time_is_left_for_ending_the_process(grace_s: float) -> None:
    assert 0 < grace_s - usable_s(grace_s) <= 1.0
