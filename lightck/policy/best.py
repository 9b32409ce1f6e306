"""The policy that saves the state with the best value of a reported metric."""

from __future__ import annotations

from dataclasses import dataclass

from lightck.policy import checks
from lightck.policy.combination import Combinable
from lightck.types import Moment


@dataclass(frozen=True)
class OnBest(Combinable):
    """A policy that is due when a metric given to `handle.report` is better than ever before.

    The first value is the best so far; one that is no number never is. Report it between a step's
    end and the next forward, and the snapshot has the state as evaluated.

    Args:
        metric: the name under which `handle.report` is given it.
        mode: `min` (less is better) or `max`.

    Raises:
        ConfigError: one of these is something else.
    """

    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        checks.metric("on_best", self.metric, self.mode)

    def due(self, moment: Moment) -> bool:
        """Return whether what was reported last is the best; see `Policy.due`."""
        value = moment.metrics.get(self.metric)
        if value is None or value != value:
            return False
        before = moment.extremes.get(self.metric)
        if before is None:
            return True
        return value < before[0] if self.mode == "min" else value > before[1]

    def __str__(self) -> str:
        return f"best {self.metric}" if self.mode == "min" else f"best max {self.metric}"
