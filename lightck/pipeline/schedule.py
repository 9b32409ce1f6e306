"""Release schedules: they decide when, and how many bytes, may be copied, never which."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightck.types import ReleaseSchedule

FORWARD_SHARE = 1 / 3
"""The part released when the snapshot opens: a forward takes about a third of forward +
backward."""
LAST_TICK = 0.8
"""The part of the expected ticks after which all is released, so that the last copies end before
the fence."""


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

    def communicates(self, share: float) -> int:
        """Return all bytes: nothing is held back."""
        return self.total_bytes

    def training_waits(self) -> int:
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
    """True once the training thread waits in this window: all is released then."""

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

    def communicates(self, share: float) -> int:
        """Return what is released so far: communication changes nothing."""
        return self._due()

    def training_waits(self) -> int:
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
    makes the next one like `Eager`, so that it serves where no communication is seen, too.
    """

    total_bytes: int = field(default=0, init=False)
    released_bytes: int = field(default=0, init=False)
    seen: bool = field(default=False, init=False)
    """True if the last window had communication."""
    _communicated: bool = field(default=False, init=False)

    def open(self, total_bytes: int) -> int:
        """Hold everything back if communication is to come, else release all."""
        self.total_bytes, self._communicated = total_bytes, False
        self.released_bytes = 0 if self.seen else total_bytes
        return self.released_bytes

    def tick(self) -> int:
        """Release nothing for a layer alone."""
        return self.released_bytes

    def communicates(self, share: float) -> int:
        """Release as large a part as `share`, that of the gradients under way."""
        self._communicated = True
        part = int(self.total_bytes * min(1.0, share))
        self.released_bytes = max(self.released_bytes, part)
        return self.released_bytes

    def training_waits(self) -> int:
        """Release all bytes: the training thread only waits."""
        self._communicated, self.released_bytes = True, self.total_bytes
        return self.total_bytes

    def close(self) -> None:
        """Learn whether there was communication."""
        self.seen = self._communicated


def schedule(name: str, layers: int, *, communicates: bool = False) -> ReleaseSchedule:
    """Make the schedule that a setting names; `auto` names `comm` or `eager`.

    Args:
        name: of the setting.
        layers: number of modules with parameters.
        communicates: gradients are seen on their way to other ranks: `auto` is `comm` then.
    """
    if name == "auto":
        name = "comm" if communicates else "eager"
    if name == "backward":
        return Backward(layers)
    if name == "comm":
        return Comm()
    assert name == "eager", name
    return Eager()
