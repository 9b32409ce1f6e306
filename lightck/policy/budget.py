"""The policy that takes as many snapshots as fit into a share of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightck.policy import checks
from lightck.policy.combination import Combinable
from lightck.policy.quantities import exact_percent, in_percent, in_units
from lightck.policy.spacing import interval_has_passed, may_be_due
from lightck.types import Moment

_MOST_STEPS = 1e15


@dataclass(frozen=True)
class Budget(Combinable):
    """A policy that is due as often as fits into a share of the training's time.

    The number of steps from one snapshot to the next is the least whose snapshots cost that share
    at most, as measured: the training thread's stall, and what a copy slows down the steps beside
    it. It is computed anew at every step and goes up and down with what is measured; it is never
    less than a snapshot takes to be committed. That is CheckFreq's rule (Mohan, Phanishayee,
    Chidambaram, FAST 2021, Algorithm 1), whose number of steps only grows. The first step that
    ends is due; until a cost is known it is the only one.

    Args:
        share: of the training's time, above 0, 1 at most. With 1 a snapshot follows the other.

    Raises:
        ConfigError: `share` is not such a number.
    """

    share: float = 0.035
    """The default: CheckFreq's authors ask for at most 3.5 %."""

    def __post_init__(self) -> None:
        checks.share("budget", self.share)

    @property
    def needs(self) -> frozenset[str]:
        """Return what the moment must hold: the loss, for nothing is due while it is no number."""
        return frozenset({"loss"})

    def steps(self, moment: Moment) -> int | None:
        """Return the steps from one snapshot to the next; None while not known."""
        step_s = moment.quiet_s or moment.step_s
        if moment.cost_s is None or not step_s:
            return None
        at_least_s = max(moment.cost_s / self.share, moment.persist_s or 0.0)
        return max(1, math.ceil(min(at_least_s / step_s, _MOST_STEPS) - 1e-9))

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next; None while not known."""
        steps = self.steps(moment)
        return None if steps is None else steps * (moment.quiet_s or moment.step_s or 0.0)

    def due(self, moment: Moment) -> bool:
        """Return whether so many steps have passed; see `Policy.due`."""
        steps = self.steps(moment)
        if moment.last_step is None or steps is None:
            return interval_has_passed(moment, None)
        return moment.step - moment.last_step >= steps and may_be_due(moment)

    def why(self, moment: Moment) -> str:
        """Return a sentence: how often, and what asks for it."""
        steps, cost_s = self.steps(moment), moment.cost_s
        if steps is None or cost_s is None:
            return "what a snapshot costs is not known yet"
        bound = f"at most {in_percent(self.share)} of the time"
        if (moment.persist_s or 0.0) > cost_s / self.share:
            bound = f"one takes {in_units(moment.persist_s or 0.0)} to be committed"
        return f"every {steps} steps: one costs {in_units(cost_s)}, {bound}"

    def __str__(self) -> str:
        return exact_percent(self.share)
