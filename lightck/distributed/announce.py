"""Which steps are due on every rank: a pure period, or steps that rank 0 publishes ahead.

A policy of seconds or cost would answer differently on each rank, so only rank 0 asks it. What is
due at once there becomes due a few steps later everywhere, so that the key has been read by then.
A rank that passes an announced step without having known it reports the step lost, and rank 0
looks further ahead from then on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BLOCK = 64  # due steps whose keys are deleted together: one more message per rank and 64 snapshots
POLL_S = (0.05, 2.0)  # between two looks for an announcement: the least, and the most
_SHARE = 16  # looks between two announcements
_MOST_AHEAD = 1024  # steps


@dataclass(frozen=True, slots=True)
class Due:
    """A step that every rank shall snapshot.

    Attributes:
        step: the step.
        ordinal: its place among the due steps of its source; consecutive from 0 on every rank.
        source: `p` for steps that a pure policy gives, `a` for announced ones, `r` for one that
            the loop asked for on every rank; that is a block of its own, since a rank may not have.
    """

    step: int
    ordinal: int
    source: str = "p"

    @property
    def block(self) -> str:
        """The block of due steps it belongs to."""
        # Ranks may have counted their requests differently: a block must mean the same step to all.
        within = self.step if self.source == "r" else self.ordinal // BLOCK
        return f"{self.source}{within}"

    @property
    def block_size(self) -> int:
        """Number of due steps in that block."""
        return 1 if self.source == "r" else BLOCK


def key(ordinal: int) -> str:
    """The key of an announcement."""
    return f"due/{ordinal}"


@dataclass
class Calendar:
    """The due steps that this rank knows.

    Thread: the training thread asks `at` once per step; a background thread calls `learn`. The
    caller holds one lock around every call.
    """

    every: int | None = None
    """Period of an int policy; None: there is none."""
    announced: bool = True
    """Rank 0 may announce steps: every other rank looks for them."""
    start: int = 0
    """The step of attach; the same on every rank."""
    learned: int = 0
    """Announcements known; the ordinal of the next."""
    _ahead: dict[int, Due] = field(default_factory=dict)
    _passed: int = -1
    _last_s: float | None = None

    def __post_init__(self) -> None:
        self._passed = self.start

    def periodic(self, step: int) -> Due | None:
        """The due step that the period gives; every rank computes the same."""
        if self.every is None or step <= self.start or step % self.every:
            return None
        return Due(step, step // self.every - self.start // self.every - 1)

    def at(self, step: int) -> Due | None:
        """Say whether `step`, which ends now on this rank, is due; called for each step once."""
        if step <= self._passed:
            raise ValueError(f"step {step} has been asked for already; the last was {self._passed}")
        self._passed = step
        return self.periodic(step) or self._ahead.pop(step, None)

    def learn(self, step: int, now_s: float) -> Due | None:
        """Take in the next announcement; return it if it comes too late to be kept here."""
        due = Due(step, self.learned, "a")
        self.learned += 1
        self._last_s = now_s
        if step <= self._passed:
            return due
        self._ahead[step] = due
        return None

    def poll_s(self, now_s: float) -> float:
        """Seconds until the next look for an announcement.

        A sixteenth of the time since the last one: few looks for rare snapshots, and the delay it
        causes is small beside the interval.
        """
        since = now_s - self._last_s if self._last_s is not None else 0.0
        return min(max(since / _SHARE, POLL_S[0]), POLL_S[1])


@dataclass
class Announcer:
    """Rank 0's choice of the steps to announce."""

    calendar: Calendar
    count: int = 0
    """Announcements made; the ordinal of the next."""
    _latest: int = -1
    _margin: int = 1
    _last_s: float | None = None

    def choose(self, step: int, step_s: float | None, now_s: float) -> int | None:
        """Pick the step that becomes due everywhere because `step`, which ends now, would be.

        Args:
            step: the step that ends on rank 0.
            step_s: seconds of one step; None while unknown.
            now_s: monotonic clock.

        Returns:
            The step to publish; None if one that is known to all is due no later.
        """
        since = now_s - self._last_s if self._last_s is not None else POLL_S[1] * _SHARE
        poll = min(max(since / _SHARE, POLL_S[0]), POLL_S[1])
        lead = self._margin + (math.ceil(2 * poll / step_s) if step_s else 1)
        target = step + min(lead, _MOST_AHEAD)
        periodic = any(self.calendar.periodic(s) for s in range(step + 1, target + 1))
        if periodic or self._latest > step:
            return None
        self._latest, self._last_s = target, now_s
        self.count += 1
        return target

    def came_late(self) -> None:
        """Note that a rank passed an announced step without having known it."""
        self._margin = min(2 * self._margin, _MOST_AHEAD)
