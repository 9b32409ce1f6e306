"""Hang detection: a pure decision over observations of a training loop, and where a thread is.

No function here reads a clock. A look that comes late counts for little, one that comes very late
for nothing: then it was this process that did not run (SIGSTOP, a suspended machine), not the loop.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from lightck.types import Failure

SLACK_S = 0.5
"""Seconds beyond `hang_steps` steps; the rest of the promised second is to look and to save."""
_SAMPLES = 9
"""Number of last steps whose median is the usual step time."""
_LATE_S = 2.0
"""A look later than this beyond twice its period means that the process was stopped."""
_CLOSE_S = 0.1
"""Seconds between looks while a thread waits in a collective."""
_DEPTH = 64
"""The number of innermost frames that identify a thread's position."""


class Progress(Protocol):
    """The progress of a training loop, as its hooks report it."""

    @property
    def step(self) -> int:
        """Return the last complete step."""

    @property
    def updating(self) -> bool:
        """Tell whether the loop is inside an update."""

    @property
    def inside(self) -> bool:
        """Tell whether the loop is inside an iteration."""

    @property
    def ticks(self) -> int:
        """Return a count that grows with every hook."""

    @property
    def step_s(self) -> float | None:
        """Return the seconds of the last step; None if not known yet."""

    @property
    def thread(self) -> int:
        """Return the identifier of the training thread."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a thread inside a collective."""

    text: str
    """A description for people: the function, and the line of the user's code that called it."""
    mark: tuple[int, ...]
    """A value that changes when the thread moves on, as far as frames show."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A hang that was found.

    Attributes:
        still_s: seconds without progress, as far as they were observed.
        limit_s: seconds after which a lack of progress counts as a hang there.
        place: the collective that the loop is inside; None: it is in none.
        stays: it was in that collective all the time, so that the hang is over once it leaves it.
    """

    still_s: float
    limit_s: float
    place: Place | None
    stays: bool = False


@dataclass(eq=False)
class HangWatch:
    """The hang detection of one training loop, looked at every `period_s` or more often."""

    failure: Failure
    period_s: float
    suspected: Suspicion | None = None
    """The hang that the loop is in; None if it is in none."""
    counted_s: float = 0.0
    """Seconds that the last look has counted."""
    _seen_s: float | None = None
    _marks: tuple[object, ...] = ()
    _still_s: float = 0.0
    _waits_s: float = 0.0
    """The last part of `_still_s`, which was spent in one and the same collective."""
    _place: Place | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a usual step; None if not known yet."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def elsewhere_s(self) -> float:
        """Return the seconds without progress that are a hang wherever the loop is."""
        return max(self.failure.hang_s, self.failure.hang_steps * (self.step_s or 0.0))

    @property
    def waiting_s(self) -> float:
        """Return the seconds without progress that are a hang inside a collective.

        They are `elsewhere_s` until a usual step time is known.
        """
        usual_s = self.step_s
        if usual_s is None:
            return self.elsewhere_s
        return self.failure.hang_steps * usual_s + SLACK_S

    def has_stood(self, progress: Progress) -> bool:
        """Tell whether the loop has not moved for as long as the shortest hang. Any thread."""
        stood = self.suspected is not None or self._still_s >= self.waiting_s
        return stood and _marks_of(progress) == self._marks

    def is_stuck(self, progress: Progress) -> bool:
        """Tell whether the loop hangs and waits for no other rank. Any thread."""
        found = self.suspected
        return found is not None and found.place is None and _marks_of(progress) == self._marks

    def look(self, now_s: float, progress: Progress, place: Place | None) -> Suspicion | None:
        """Record an observation of the loop.

        Args:
            now_s: seconds of a monotonic clock.
            progress: the loop's progress.
            place: the collective that its thread is inside, None if it is in none.

        Returns:
            A hang, once when it is found; afterwards it is in `suspected`, until the loop goes on.
        """
        passed_s = self._counted(now_s)
        self.counted_s = passed_s or 0.0
        marks, hang = _marks_of(progress), self.suspected
        same = place is not None and self._place is not None and place.mark == self._place.mark
        self._place = place
        if marks != self._marks or (hang is not None and hang.stays and not same):
            self._go_on(marks, progress)
            return None
        if passed_s is None:
            self._still_s = self._waits_s = 0.0
            return None
        self._still_s += passed_s
        self._waits_s = self._waits_s + passed_s if same else 0.0
        if self.suspected is None:
            self.suspected = self._judge()
            return self.suspected
        return None

    def due_in_s(self) -> float:
        """Return the seconds until the next look: fewer while the thread waits in a collective."""
        waits = self._waits_s > 0 and self.suspected is None
        return min(self.period_s, _CLOSE_S) if waits else self.period_s

    def _counted(self, now_s: float) -> float | None:
        """Return the seconds since the last look that count; None if the process did not run."""
        before, self._seen_s = self._seen_s, now_s
        if before is None or now_s - before > 2 * self.period_s + _LATE_S:
            return None
        return min(now_s - before, 2 * self.period_s)

    def _go_on(self, marks: tuple[object, ...], progress: Progress) -> None:
        stepped = not self._marks or marks[0] != self._marks[0]
        if stepped and progress.step_s is not None:
            self._steps.append(progress.step_s)
        self._marks = marks
        self._still_s = self._waits_s = 0.0
        self.suspected = None

    def _judge(self) -> Suspicion | None:
        if self._waits_s >= self.waiting_s:
            return Suspicion(self._waits_s, self.waiting_s, self._place, stays=True)
        if self._still_s >= self.elsewhere_s:
            return Suspicion(self._still_s, self.elsewhere_s, self._place)
        return None


def _marks_of(progress: Progress) -> tuple[object, ...]:
    """Return values that change when the loop moves."""
    return progress.step, progress.updating, progress.inside, progress.ticks


# ---- where a thread is ---------------------------------------------------------------------------

_BETWEEN = ("torch._ops", "torch.autograd.function", "torch.utils._contextlib", "contextlib")
"""Modules whose frames lie between a collective and the C code that waits."""
_TALKS = ("torch.distributed", "torch.nn.parallel.distributed")
_NOT_THERE = ("torch.distributed.checkpoint", "torch.distributed.elastic")
_BACKWARD = ("torch.autograd.graph", "_engine_run_backward")
"""From here on there is C++ code: DDP waits inside it for the last reduction.

Looked for only with several ranks.
"""


def collective(thread: int) -> Place | None:
    """Return the collective that a thread is inside, judged by its innermost frames; None if none.

    It takes a few microseconds. For jobs of several ranks: a backward counts as a collective.
    `work.wait()` in the user's own code and waits for a GPU do not show, since they are C code that
    no function of torch's has called.
    """
    innermost = sys._current_frames().get(thread)
    frame = innermost
    while frame is not None and _in(frame, _BETWEEN):
        frame = frame.f_back
    if frame is None:
        return None
    talks = _in(frame, _TALKS) and not _in(frame, _NOT_THERE)
    if not talks and (_module(frame), frame.f_code.co_name) != _BACKWARD:
        return None
    return Place(_described(frame), _mark(innermost))


def _mark(frame: FrameType | None) -> tuple[int, ...]:
    found: list[int] = []
    while frame is not None and len(found) < 2 * _DEPTH:
        found += (id(frame), frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _described(inside: FrameType) -> str:
    line = _line(inside)
    return f"{inside.f_code.co_name}, called from {line}" if line else inside.f_code.co_name


def standing(thread: int) -> str:
    """Return the line of the user's code that a thread is at; empty if there is none."""
    return _line(sys._current_frames().get(thread))


def _line(frame: FrameType | None) -> str:
    while frame is not None and _module(frame).split(".")[0] in ("torch", "lightck"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = _module(frame)
    return any(name == each or name.startswith(each + ".") for each in modules)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
