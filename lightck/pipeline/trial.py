"""Choose between two ways by trial (A/B): no rate predicts either on a busy machine.

The way in use is watched. When it costs more than it should, the other one is tried, and stays if
it costs at most a part of what the first did. A lost trial is repeated, ever more rarely.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

WORTH = 0.5
"""A trial is won at a cost of at most this fraction of the first way's."""
LOOKS = 3
"""Number of costs that a decision rests on, by their median."""
PATIENCE = 64
"""Number of costs between a lost trial and the next one; doubles every time."""


class TrialResult(Enum):
    """Decision that follows from a cost."""

    DOUBT = auto()
    """The first way costs too much: `begin` when the other is ready, or `lose`."""
    WON = auto()
    LOST = auto()


@dataclass(eq=False)
class ABTrial:
    """Trial of two ways; it knows only what they cost, in any unit."""

    other: bool = False
    """True while the other way is in use, on trial or for good."""
    first_cost: float = 0.0
    """Cost of the first way when it was found too high."""
    other_cost: float = 0.0
    """Cost of the other way on its trial."""
    _trying: bool = False
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))
    _quiet: int = 0
    """Number of costs until the next trial may begin."""
    _patience: int = PATIENCE

    def saw(self, cost: float, limit: Callable[[], float]) -> TrialResult | None:
        """Note what the way in use has cost once more, and return what follows, if anything.

        Args:
            cost: the cost of one use.
            limit: returns what the first way may cost; called when that is to be judged.
        """
        self._costs.append(cost)
        self._quiet = max(0, self._quiet - 1)
        if len(self._costs) < LOOKS:
            return None
        median = statistics.median(self._costs)
        if self._trying:
            self.other_cost, self._trying = median, False
            if median <= WORTH * self.first_cost:
                return TrialResult.WON
            self.lose()
            return TrialResult.LOST
        if self.other or self._quiet or median <= limit():
            return None
        self.first_cost = median
        return TrialResult.DOUBT

    def begin(self) -> None:
        """Use the other way from now on, on trial."""
        self.other = self._trying = True
        self._costs.clear()

    def lose(self) -> None:
        """Return to the first way, for longer than the last time."""
        self.other = self._trying = False
        self._costs.clear()
        self._quiet, self._patience = self._patience, 2 * self._patience
