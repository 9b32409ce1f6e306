"""One way against another, decided by trying: no rate predicts either on a busy machine.

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
"""A trial is won by what costs at most this part of what the first way did."""
LOOKS = 3
"""Costs that a decision rests on."""
PATIENCE = 64
"""Costs after a lost trial before the next one; doubles every time."""


class Turn(Enum):
    """What a cost has led to."""

    DOUBT = auto()
    """The first way costs too much: `begin` when the other is ready, or `lose`."""
    WON = auto()
    LOST = auto()


@dataclass(eq=False)
class Contest:
    """Knows costs only, in any unit."""

    other: bool = False
    """The other way is in use, on trial or for good."""
    first_cost: float = 0.0
    """What the first way cost when it was doubted."""
    other_cost: float = 0.0
    """What the other did, on its trial."""
    _trying: bool = False
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))
    _quiet: int = 0
    """Costs until the next trial may begin."""
    _patience: int = PATIENCE

    def saw(self, cost: float, limit: Callable[[], float]) -> Turn | None:
        """Learn what the way in use has cost once more.

        Args:
            cost: of one use.
            limit: what the first way may cost; asked when that is to be judged.
        """
        self._costs.append(cost)
        self._quiet = max(0, self._quiet - 1)
        if len(self._costs) < LOOKS:
            return None
        median = statistics.median(self._costs)
        if self._trying:
            self.other_cost, self._trying = median, False
            if median <= WORTH * self.first_cost:
                return Turn.WON
            self.lose()
            return Turn.LOST
        if self.other or self._quiet or median <= limit():
            return None
        self.first_cost = median
        return Turn.DOUBT

    def begin(self) -> None:
        """The other way is in use from now on, on trial."""
        self.other = self._trying = True
        self._costs.clear()

    def lose(self) -> None:
        """Back to the first way, for longer than the last time."""
        self.other = self._trying = False
        self._costs.clear()
        self._quiet, self._patience = self._patience, 2 * self._patience
