from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lightck.policy.spacing import interval_has_passed, was_lost
from lightck.types import Moment

_AFTER = Moment(
    step=100, time_s=50.0, last_step=80, last_time_s=40.0, saved_step=80, quiet_s=0.5, step_s=9.0
)
"""Ten seconds, and twenty steps, after a snapshot that is saved."""


@pytest.mark.parametrize(
    ("finite", "quiet_age", "first", "known", "lost"),
    list(
        itertools.product((True, False), (0, 63, 64), (True, False), (True, False), (True, False))
    ),
)
def test_the_truth_table_of_the_rule(
    finite: bool, quiet_age: int, first: bool, known: bool, lost: bool
) -> None:
    moment = replace(_AFTER, finite=finite, quiet_age=quiet_age, saved_step=60 if lost else 80)
    if first:
        moment = replace(moment, last_step=None, last_time_s=None)
    # Ten seconds are more than a quarter of 30, and less than 30.
    expected = finite and quiet_age < 64 and (first or lost)
    assert interval_has_passed(moment, 30.0 if known else None) is expected


@pytest.mark.parametrize(("every_s", "due"), [(10.0, True), (10.25, True), (10.26, False)])
def test_an_interval_has_passed_to_the_nearest_step(every_s: float, due: bool) -> None:
    assert interval_has_passed(_AFTER, every_s) is due


def test_half_a_step_is_that_of_the_last_steps_while_no_quiet_one_was_seen() -> None:
    assert interval_has_passed(replace(_AFTER, quiet_s=None), 14.5)
    assert not interval_has_passed(replace(_AFTER, quiet_s=None, step_s=None), 10.1)


@pytest.mark.parametrize(
    ("saved", "in_flight", "lost"),
    [
        (None, False, True),
        (79, False, True),
        (79, True, False),  # its fate is not known yet
        (None, True, False),
        (80, False, False),
        (85, False, False),  # a snapshot that the user asked for came later
    ],
)
def test_a_snapshot_is_lost_when_it_neither_counts_nor_may_come_to_count(
    saved: int | None, in_flight: bool, lost: bool
) -> None:
    assert was_lost(replace(_AFTER, saved_step=saved, in_flight=in_flight)) is lost


def test_a_quarter_of_the_interval_is_enough_after_a_lost_snapshot() -> None:
    lost = replace(_AFTER, saved_step=None)
    assert interval_has_passed(lost, 41.0)
    assert not interval_has_passed(lost, 41.1)


def test_a_first_snapshot_that_was_lost_is_tried_again_after_some_steps() -> None:
    lost = replace(_AFTER, saved_step=None)
    assert interval_has_passed(replace(lost, step=96), None)
    assert not interval_has_passed(replace(lost, step=95), None)
    assert not interval_has_passed(replace(lost, in_flight=True), None)
