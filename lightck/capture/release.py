"""When copies may run: release schedules decide how many bytes are free to go, never which."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightck.types import ReleaseSchedule

FORWARD_SHARE = 1 / 3
"""Part released when the snapshot opens: a forward takes about a third of forward + backward."""
LAST_TICK = 0.8
"""All is released when this part of the expected ticks has come, so that the last copies end before
the fence."""


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


def schedule(name: str, layers: int) -> ReleaseSchedule:
    """The schedule that a setting names; `layers` is the number of modules with parameters."""
    return Eager() if name == "eager" else Backward(layers)
