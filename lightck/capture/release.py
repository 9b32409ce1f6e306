"""When copies may run: release schedules decide how many bytes are free to go, never which."""

from __future__ import annotations

import logging
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

    def flies(self, share: float) -> int:
        """Nothing is held back."""
        return self.total_bytes

    def waits(self) -> int:
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
    waited: bool = field(default=False, init=False)
    """In this window: all is released."""

    def open(self, total_bytes: int) -> int:
        """Release the forward's part."""
        self.total_bytes, self.ticks, self.waited = total_bytes, 0, False
        self.expected = max(1, self.expected or self.layers)
        return int(total_bytes * FORWARD_SHARE)

    def tick(self) -> int:
        """One more share."""
        self.ticks += 1
        return self._due()

    def _due(self) -> int:
        if self.waited:
            return self.total_bytes
        done = min(1.0, self.ticks / (LAST_TICK * self.expected))
        return int(self.total_bytes * (FORWARD_SHARE + (1 - FORWARD_SHARE) * done))

    def flies(self, share: float) -> int:
        """Communication is nothing to it."""
        return self._due()

    def waits(self) -> int:
        """The backward is over: there is nothing to pace by."""
        self.waited = True
        return self.total_bytes

    def close(self) -> None:
        """Learn the window's number of ticks."""
        if self.ticks:
            self.expected = self.ticks


@dataclass
class Comm:
    """Nothing while the training thread computes alone; all that is left while it only waits.

    In between, while buckets of gradients are under way and the backward goes on, as large a part
    as that of the gradients under way. A window in which nothing was communicated makes the next
    one like `Backward`, so that it serves where no communication is seen, too.
    """

    layers: int
    """As for `Backward`."""
    total_bytes: int = field(default=0, init=False)
    seen: bool = field(default=False, init=False)
    """The last window had communication."""

    def __post_init__(self) -> None:
        """Paced by layers until communication has been seen."""
        self._plain = Backward(self.layers)
        self._released = 0
        self._heard = False

    def open(self, total_bytes: int) -> int:
        """Hold everything back if communication is to come."""
        self.total_bytes, self._released, self._heard = total_bytes, 0, False
        return self._rise(self._plain.open(total_bytes), paced=True)

    def tick(self) -> int:
        """A layer alone releases nothing."""
        return self._rise(self._plain.tick(), paced=True)

    def flies(self, share: float) -> int:
        """As large a part."""
        self._heard = True
        return self._rise(int(self.total_bytes * min(1.0, share)))

    def waits(self) -> int:
        """All."""
        self._heard = True
        return self._rise(self.total_bytes)

    def _rise(self, to: int, *, paced: bool = False) -> int:
        if not (paced and self.seen):
            self._released = max(self._released, to)
        return self._released

    def close(self) -> None:
        """Learn whether there was communication."""
        self._plain.close()
        self.seen = self._heard


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

    def flies(self, share: float) -> int:
        """As the candidate whose turn it is."""
        return self.candidates[self.chosen].flies(share)

    def waits(self) -> int:
        """As the candidate whose turn it is."""
        return self.candidates[self.chosen].waits()

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
            chosen = type(self.candidates[self.chosen]).__name__
            event("schedule", logging.DEBUG, chosen=chosen, window_s=medians)
        else:
            self.chosen = (self.chosen + 1) % len(self.candidates)

    def _watch(self, spent_s: float) -> None:
        odd = not self.usual_s / CHANGED <= spent_s <= self.usual_s * CHANGED
        self._odd = self._odd + 1 if odd else 0
        if self._odd == ROUNDS:
            self._odd, self.usual_s = 0, 0.0
            self.trials = [[] for _ in self.candidates]


def schedule(name: str, layers: int, *, communicates: bool = False) -> ReleaseSchedule:
    """The schedule that a setting names.

    Args:
        name: of the setting.
        layers: number of modules with parameters.
        communicates: gradients are seen on their way to other ranks.
    """
    every: dict[str, Callable[[], ReleaseSchedule]] = {
        "eager": Eager,
        "backward": lambda: Backward(layers),
        "comm": lambda: Comm(layers),
    }
    if name != "auto":
        return every[name]()
    tried = ["eager", "backward"] + ["comm"] * communicates
    return Auto(tuple(every[each]() for each in tried))
