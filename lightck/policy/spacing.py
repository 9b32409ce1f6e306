"""Decide, alike for all policies with an interval, whether it has passed."""

from __future__ import annotations

from lightck.types import Moment

_QUIET_STEPS = 64
"""Steps after which one without a snapshot beside it must be seen."""
_LOST_SHARE = 4
_RETRY_STEPS = 16
"""Steps until a first snapshot is tried again that was lost before it could be measured."""


def may_be_due(moment: Moment) -> bool:
    """Return whether a policy that goes by measured costs may take a snapshot at all.

    Not while the loss is no number: the slots hold the last good states. Not when each of the last
    steps had a snapshot beside it: what one costs shows in comparison with steps without only.
    """
    return moment.finite and moment.quiet_age < _QUIET_STEPS


def was_lost(moment: Moment) -> bool:
    """Return whether the last due snapshot is none that counts, and will be none."""
    if moment.last_step is None or moment.in_flight:
        return False
    return moment.saved_step is None or moment.saved_step < moment.last_step


def interval_has_passed(moment: Moment, every_s: float | None) -> bool:
    """Return whether an interval has passed since the last due snapshot, to the nearest step.

    The first step is due. After a snapshot that was lost a quarter of the interval has to pass;
    else a rank that always slips would bring a storm of snapshots.

    Args:
        moment: the moment that a policy is asked about.
        every_s: seconds between snapshots; None: not known yet. Then the first step is the only
            due one, but a lost one is tried again after some steps.
    """
    if not may_be_due(moment):
        return False
    if moment.last_time_s is None:
        return True
    lost = was_lost(moment)
    if every_s is None:
        return lost and moment.step - (moment.last_step or 0) >= _RETRY_STEPS
    step_s = moment.quiet_s or moment.step_s or 0.0
    since_s = moment.time_s - moment.last_time_s
    return since_s >= (every_s / _LOST_SHARE if lost else every_s) - step_s / 2
