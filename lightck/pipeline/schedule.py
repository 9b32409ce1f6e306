"""Release schedules: they decide when, and how many bytes, may be copied, never which."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightck.events import event
from lightck.types import ReleaseSchedule

FORWARD_SHARE = 1 / 3
"""The part released when the snapshot opens: a forward takes about a third of forward +
backward."""
LAST_TICK = 0.8
"""The part of the expected ticks after which all is released, so that the last copies end before
the fence."""
ROUNDS = 5
"""The number of windows per candidate in a comparison, and of unusual ones in a row that begin
another."""
CHANGED = 1.4
"""A window is unusual when it is this many times longer or shorter."""


@dataclass
class Eager:
    """Releases everything at once, when the snapshot opens."""

    total_bytes: int = 0

    def open(self, total_bytes: int) -> int:
        """Release all bytes."""
        self.total_bytes = total_bytes
        return total_bytes

    def tick(self) -> int:
        """Return all bytes: nothing is held back."""
        return self.total_bytes

    def flies(self, share: float) -> int:
        """Return all bytes: nothing is held back."""
        return self.total_bytes

    def waits(self) -> int:
        """Return all bytes: nothing is held back."""
        return self.total_bytes

    def close(self) -> None:
        """Learn nothing."""


@dataclass
class Backward:
    """Releases a first part for the forward, the rest in equal steps as layers end their backward.

    The number of ticks in a window (layers times micro-batches) is learned from the last window.
    """

    layers: int
    """The number of ticks expected before a window has been seen."""
    total_bytes: int = field(default=0, init=False)
    ticks: int = field(default=0, init=False)
    expected: int = field(default=0, init=False)
    waited: bool = field(default=False, init=False)
    """True once all is released in this window."""

    def open(self, total_bytes: int) -> int:
        """Release the forward's part."""
        self.total_bytes, self.ticks, self.waited = total_bytes, 0, False
        self.expected = max(1, self.expected or self.layers)
        return int(total_bytes * FORWARD_SHARE)

    def tick(self) -> int:
        """Release one more part, for a layer whose gradient is ready."""
        self.ticks += 1
        return self._due()

    def _due(self) -> int:
        if self.waited:
            return self.total_bytes
        done = min(1.0, self.ticks / (LAST_TICK * self.expected))
        return int(self.total_bytes * (FORWARD_SHARE + (1 - FORWARD_SHARE) * done))

    def flies(self, share: float) -> int:
        """Return what is released so far: communication changes nothing."""
        return self._due()

    def waits(self) -> int:
        """Release all bytes: the backward is over, so that there is nothing to pace by."""
        self.waited = True
        return self.total_bytes

    def close(self) -> None:
        """Learn the window's number of ticks."""
        if self.ticks:
            self.expected = self.ticks


@dataclass
class Comm:
    """Releases nothing while the training thread computes alone, and all while it only waits.

    In between, while buckets of gradients are under way and the backward goes on, it releases as
    large a part as that of the gradients under way. A window in which nothing was communicated
    makes the next one like `Backward`, so that it serves where no communication is seen, too.
    """

    layers: int
    """The number of ticks expected before a window has been seen, as for `Backward`."""
    total_bytes: int = field(default=0, init=False)
    seen: bool = field(default=False, init=False)
    """True if the last window had communication."""

    def __post_init__(self) -> None:
        """Pace by layers until communication has been seen."""
        self._plain = Backward(self.layers)
        self._released = 0
        self._heard = False

    def open(self, total_bytes: int) -> int:
        """Hold everything back if communication is to come, else begin as `Backward` does."""
        self.total_bytes, self._released, self._heard = total_bytes, 0, False
        return self._rise(self._plain.open(total_bytes), paced=True)

    def tick(self) -> int:
        """Release nothing for a layer alone, if communication is to come."""
        return self._rise(self._plain.tick(), paced=True)

    def flies(self, share: float) -> int:
        """Release as large a part as `share`, that of the gradients under way."""
        self._heard = True
        return self._rise(int(self.total_bytes * min(1.0, share)))

    def waits(self) -> int:
        """Release all bytes: the training thread only waits."""
        self._heard = True
        return self._rise(self.total_bytes)

    def _rise(self, to: int, *, paced: bool = False) -> int:
        if not (paced and self.seen):
            self._released = max(self._released, to)
        return self._released

    def close(self) -> None:
        """Learn whether there was communication, and the window's number of ticks."""
        self._plain.close()
        self.seen = self._heard


@dataclass
class Auto:
    """Tries schedules in turn, keeps the one with the shorter window, compares again on a change.

    A window, from the snapshot's opening to the end of its fence, is all that a schedule can
    lengthen: forward and backward beside the copies, and the wait for what is left.
    """

    candidates: tuple[ReleaseSchedule, ...]
    clock: Callable[[], float] = time.monotonic
    trials: list[list[float]] = field(init=False)
    """The seconds of each candidate's windows in this comparison."""
    chosen: int = field(default=0, init=False)
    usual_s: float = field(default=0.0, init=False)
    """The seconds of a window with the chosen candidate; 0 while comparing."""
    _began_s: float = field(default=0.0, init=False)
    _odd: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Plan to ignore the first window: caches and allocators are cold."""
        self.trials = [[] for _ in self.candidates]
        self._cold = True

    def open(self, total_bytes: int) -> int:
        """Open a window with the candidate whose turn it is."""
        self._began_s = self.clock()
        return self.candidates[self.chosen].open(total_bytes)

    def tick(self) -> int:
        """Tick the candidate whose turn it is."""
        return self.candidates[self.chosen].tick()

    def flies(self, share: float) -> int:
        """Tell communication to the candidate whose turn it is."""
        return self.candidates[self.chosen].flies(share)

    def waits(self) -> int:
        """Tell the wait to the candidate whose turn it is."""
        return self.candidates[self.chosen].waits()

    def close(self) -> None:
        """Learn the window's length; it may decide a comparison, or begin a new one."""
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
    """Make the schedule that a setting names.

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
