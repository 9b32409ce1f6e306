"""When copies may run: release schedules decide how many bytes are free to go, never which."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightck.events import event
from lightck.types import ReleaseSchedule

FORWARD_SHARE = 1 / 3
"""Part released when the snapshot opens: a forward takes about a third of forward + backward."""
LAST_TICK = 0.8
"""All is released when this part of the expected ticks has come, so that the last copies end before
the fence."""
ROUNDS = 5
"""Windows per candidate in a comparison, and unusual ones in a row that begin another."""
CHANGED = 1.4
"""A window is unusual when it is this many times longer or shorter."""


@dataclass
class Eager:
    """Everything at once, when the snapshot opens."""

    total_bytes: int = 0

    def open(self, total_bytes: int) -> int:
        """Release all."""
        self.total_bytes = total_bytes
        return total_bytes

    def tick(self) -> int:
        """Nothing is held back."""
        return self.total_bytes

    def close(self) -> None:
        """Nothing to learn."""


@dataclass
class Backward:
    """A first part for the forward, the rest in equal steps as layers finish their backward.

    The number of ticks in a window (layers times micro-batches) is learned from the last window.
    """

    layers: int
    """Expected ticks before a window has been seen."""
    total_bytes: int = field(default=0, init=False)
    ticks: int = field(default=0, init=False)
    expected: int = field(default=0, init=False)

    def open(self, total_bytes: int) -> int:
        """Release the forward's part."""
        self.total_bytes, self.ticks = total_bytes, 0
        self.expected = max(1, self.expected or self.layers)
        return int(total_bytes * FORWARD_SHARE)

    def tick(self) -> int:
        """One more share."""
        self.ticks += 1
        done = min(1.0, self.ticks / (LAST_TICK * self.expected))
        return int(self.total_bytes * (FORWARD_SHARE + (1 - FORWARD_SHARE) * done))

    def close(self) -> None:
        """Learn the window's number of ticks."""
        if self.ticks:
            self.expected = self.ticks


@dataclass
class Auto:
    """Tries schedules in turn, keeps the one with the shorter window, looks again on a change.

    A window, from the snapshot's opening to the end of its fence, is all that a schedule can
    lengthen: forward and backward beside the copies, and the wait for what is left.
    """

    candidates: tuple[ReleaseSchedule, ...]
    clock: Callable[[], float] = time.monotonic
    trials: list[list[float]] = field(init=False)
    """Seconds of the windows that each candidate has had in this comparison."""
    chosen: int = field(default=0, init=False)
    usual_s: float = field(default=0.0, init=False)
    """A window with the chosen one; 0 while comparing."""
    _began_s: float = field(default=0.0, init=False)
    _odd: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """The first window is thrown away: caches and allocators are cold."""
        self.trials = [[] for _ in self.candidates]
        self._cold = True

    def open(self, total_bytes: int) -> int:
        """As the candidate whose turn it is."""
        self._began_s = self.clock()
        return self.candidates[self.chosen].open(total_bytes)

    def tick(self) -> int:
        """As the candidate whose turn it is."""
        return self.candidates[self.chosen].tick()

    def close(self) -> None:
        """Learn the window's length; it may decide, or begin a new comparison."""
        self.candidates[self.chosen].close()
        spent_s = self.clock() - self._began_s
        if self._cold:
            self._cold = False
        elif self.usual_s:
            self._watch(spent_s)
        else:
            self._compare(spent_s)

    def _compare(self, spent_s: float) -> None:
        self.trials[self.chosen].append(spent_s)
        if all(len(seen) == ROUNDS for seen in self.trials):
            medians = [statistics.median(seen) for seen in self.trials]
            self.usual_s = min(medians)
            self.chosen = medians.index(self.usual_s)
            event("schedule", chosen=type(self.candidates[self.chosen]).__name__, window_s=medians)
        else:
            self.chosen = (self.chosen + 1) % len(self.candidates)

    def _watch(self, spent_s: float) -> None:
        odd = not self.usual_s / CHANGED <= spent_s <= self.usual_s * CHANGED
        self._odd = self._odd + 1 if odd else 0
        if self._odd == ROUNDS:
            self._odd, self.usual_s = 0, 0.0
            self.trials = [[] for _ in self.candidates]


def schedule(name: str, layers: int) -> ReleaseSchedule:
    """The schedule that a setting names; `layers` is the number of modules with parameters."""
    if name == "auto":
        return Auto((Eager(), Backward(layers)))
    return Eager() if name == "eager" else Backward(layers)
