"""The steps that are due on every rank: a fixed period, or steps that rank 0 announces ahead.

A policy in seconds or by cost would answer differently on each rank, so only rank 0 asks it. A step
that would be due at once there is announced as due a few steps later everywhere, so that every rank
has read the announcement by then. A rank that passes an announced step without having known it
reports the step lost, and rank 0 looks further ahead from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 64  # due steps whose keys are deleted together: one more message per rank and 64 snapshots
POLL_S = (0.05, 2.0)  # seconds between two polls for an announcement: the least, and the most
_SHARE = 16  # polls between two announcements
_MOST_AHEAD = 1024  # steps between an announcement and the announced step, at most


@dataclass(frozen=True, slots=True)
class DueStep:
    """A step that every rank shall snapshot.

    Attributes:
        step: the step.
        ordinal: its index among the due steps of its source; consecutive from 0 on every rank.
        source: `p` for steps that a fixed period gives, `a` for announced ones, `r` for one that
            the loop requested on every rank. A requested step is a block of its own, since a rank
            may not have requested it.
    """

    step: int
    ordinal: int
    source: str = "p"

    @property
    def block(self) -> str:
        """Return the name of the block of due steps that it belongs to."""
        # Ranks may have counted their requests differently: a block must mean the same step to all.
        within = self.step if self.source == "r" else self.ordinal // BLOCK
        return f"{self.source}{within}"

    @property
    def block_size(self) -> int:
        """Return the number of due steps in that block."""
        return 1 if self.source == "r" else BLOCK


def announcement_key(ordinal: int) -> str:
    """Return the store key of an announcement."""
    return f"due/{ordinal}"


@dataclass
class DueCalendar:
    """The due steps that this rank knows.

    Thread: the training thread asks `at` once per step; a background thread calls `learn`. The
    caller holds one lock around every call.
    """

    every: int | None = None
    """The period of an int policy; None if the policy is not a fixed period."""
    announced: bool = True
    """True if rank 0 may announce steps; if so, every other rank polls for them."""
    start: int = 0
    """The step of attach; the same on every rank."""
    learned: int = 0
    """Number of announcements known here, which is the ordinal of the next one."""
    _ahead: dict[int, DueStep] = field(default_factory=dict)
    _passed: int = -1
    _last_s: float | None = None

    def __post_init__(self) -> None:
        self._passed = self.start

    @property
    def ahead(self) -> list[tuple[int, int, str]]:
        """The announced steps that are still to come: step, ordinal, source."""
        return [(due.step, due.ordinal, due.source) for due in self._ahead.values()]

    def rejoin(self, step: int, learned: int, ahead: Sequence[Sequence[Any]]) -> None:
        """Go on behind `step` with what another rank has learned, for one that replaces a rank."""
        self._passed, self.learned = step, learned
        every = (DueStep(int(at), int(ordinal), str(source)) for at, ordinal, source in ahead)
        self._ahead = {due.step: due for due in every if due.step > step}

    def periodic(self, step: int) -> DueStep | None:
        """Return the due step that the period gives at `step`; every rank computes the same."""
        if self.every is None or step <= self.start or step % self.every:
            return None
        return DueStep(step, step // self.every - self.start // self.every - 1)

    def next_steps(self, step: int) -> range:
        """Return the steps of the next two periods after `step` at which one may be due."""
        every = self.every or 1
        first = (step // every + 1) * every
        return range(first, first + 2 * every + 1, every)

    def at(self, step: int) -> DueStep | None:
        """Return the due step if `step`, which ends now here, is due; called once for each step."""
        if step <= self._passed:
            raise ValueError(f"step {step} has been asked for already; the last was {self._passed}")
        self._passed = step
        return self.periodic(step) or self._ahead.pop(step, None)

    def learn(self, step: int, now_s: float) -> DueStep | None:
        """Record the next announcement; return it if it came too late to be kept on this rank."""
        due = DueStep(step, self.learned, "a")
        self.learned += 1
        self._last_s = now_s
        if step <= self._passed:
            return due
        self._ahead[step] = due
        return None

    def poll_s(self, now_s: float) -> float:
        """Return the seconds until the next poll for an announcement.

        They are a sixteenth of the time since the last announcement: rare snapshots cost few polls,
        and the delay it causes is small beside the interval.
        """
        since = now_s - self._last_s if self._last_s is not None else 0.0
        return min(max(since / _SHARE, POLL_S[0]), POLL_S[1])


@dataclass
class DueAnnouncer:
    """The choice, on rank 0, of the steps to announce."""

    calendar: DueCalendar
    count: int = 0
    """Number of announcements made, which is the ordinal of the next one."""
    _latest: int = -1
    _margin: int = 1
    _last_s: float | None = None

    def choose(self, step: int, step_s: float | None, now_s: float) -> int | None:
        """Pick the step that becomes due everywhere because `step`, which ends now, would be due.

        Args:
            step: the step that ends on rank 0.
            step_s: seconds of one step; None while unknown.
            now_s: now, on the monotonic clock.

        Returns:
            The step to publish; None if a step that every rank knows is due no later.
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
