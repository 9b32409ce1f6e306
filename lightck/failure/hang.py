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

from lightck.types import Failure

LOOK_S = 0.25
"""Seconds between looks at a loop of several ranks, where hangs are found in seconds."""
ALONE_LOOK_S = 1.0
"""Seconds between looks with one rank, for which only `hang_s` counts."""
SLACK_S = 0.5
"""Seconds beyond `hang_steps` steps; the rest of the promised second is to look and to save."""
_SAMPLES = 9
"""Number of last steps whose median is the usual step time."""
_LATE_S = 2.0
"""A look later than this beyond twice its period means that the process was stopped."""
_WAITING_LOOK_S = 0.1
"""Seconds between looks while a thread waits in a collective."""
_DEPTH = 64
"""The number of innermost frames that identify a thread's position."""


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """The progress of a training loop, as its hooks report it.

    Attributes:
        step: the last complete step.
        updating: inside an update, or between those of several optimizers.
        inside: the next iteration's forward has begun.
        ticks: grows with every hook.
        step_s: seconds of the last step; None: not known yet.
        thread: the identifier of the training thread.
    """

    step: int
    updating: bool
    inside: bool
    ticks: int
    step_s: float | None
    thread: int


@dataclass(frozen=True, slots=True)
class CollectivePosition:
    """The position of a thread inside a collective."""

    text: str
    """A description for people: the function, and the line of the user's code that called it."""
    mark: tuple[int, ...]
    """A value that changes when the thread moves on, as far as frames show."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A hang that was found.

    Attributes:
        idle_s: seconds without progress, as far as they were observed.
        limit_s: seconds after which a lack of progress counts as a hang there.
        position: the collective that the loop is inside; None: it is in none.
        in_collective: it was there all the time: the hang is over once it leaves the collective.
    """

    idle_s: float
    limit_s: float
    position: CollectivePosition | None
    in_collective: bool = False


@dataclass(eq=False)
class HangWatch:
    """The hang detection of one training loop, looked at every `period_s` or more often."""

    failure: Failure
    period_s: float
    suspected: Suspicion | None = None
    """The hang that the loop is in; None if it is in none."""
    counted_s: float = 0.0
    """Seconds that the last look has counted."""
    _looked_s: float | None = None
    _last_marks: tuple[object, ...] = ()
    _idle_s: float = 0.0
    _waiting_s: float = 0.0
    """The last part of `_idle_s`, which was spent in one and the same collective."""
    _position: CollectivePosition | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @classmethod
    def of_world(cls, failure: Failure, world: int) -> HangWatch:
        """Begin to watch a loop of one of `world` ranks; nothing has been observed yet."""
        return cls(failure, LOOK_S if world > 1 else ALONE_LOOK_S)

    @property
    def step_s(self) -> float | None:
        """Return the seconds of a usual step; None if not known yet."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def outside_limit_s(self) -> float:
        """Return the seconds without progress that are a hang wherever the loop is."""
        return max(self.failure.hang_s, self.failure.hang_steps * (self.step_s or 0.0))

    @property
    def collective_limit_s(self) -> float:
        """Return the seconds without progress that are a hang inside a collective.

        They are `outside_limit_s` until a usual step time is known.
        """
        usual_s = self.step_s
        if usual_s is None:
            return self.outside_limit_s
        return self.failure.hang_steps * usual_s + SLACK_S

    def has_not_moved(self, progress: LoopProgress) -> bool:
        """Tell whether the loop has not moved for as long as the shortest hang. Any thread."""
        stopped = self.suspected is not None or self._idle_s >= self.collective_limit_s
        return stopped and _marks(progress) == self._last_marks

    def is_stuck(self, progress: LoopProgress) -> bool:
        """Tell whether the loop hangs and waits for no other rank. Any thread."""
        found = self.suspected
        return found is not None and found.position is None and _marks(progress) == self._last_marks

    def observe(
        self, now_s: float, progress: LoopProgress, position: CollectivePosition | None
    ) -> Suspicion | None:
        """Record an observation of the loop.

        Args:
            now_s: seconds of a monotonic clock.
            progress: the loop's progress.
            position: the collective that its thread is inside, None if it is in none.

        Returns:
            A hang, once when it is found; afterwards it is in `suspected`, until the loop goes on.
        """
        passed_s = self._counted(now_s)
        self.counted_s = passed_s or 0.0
        marks, hang = _marks(progress), self.suspected
        same = (
            position is not None
            and self._position is not None
            and position.mark == self._position.mark
        )
        self._position = position
        if marks != self._last_marks or (hang is not None and hang.in_collective and not same):
            self._moved(marks, progress)
            return None
        if passed_s is None:
            self._idle_s = self._waiting_s = 0.0
            return None
        self._idle_s += passed_s
        self._waiting_s = self._waiting_s + passed_s if same else 0.0
        if self.suspected is None:
            self.suspected = self._find()
            return self.suspected
        return None

    def next_look_s(self) -> float:
        """Return the seconds until the next look: fewer while the thread waits in a collective."""
        waits = self._waiting_s > 0 and self.suspected is None
        return min(self.period_s, _WAITING_LOOK_S) if waits else self.period_s

    def _counted(self, now_s: float) -> float | None:
        """Return the seconds since the last look that count; None if the process did not run."""
        before, self._looked_s = self._looked_s, now_s
        if before is None or now_s - before > 2 * self.period_s + _LATE_S:
            return None
        return min(now_s - before, 2 * self.period_s)

    def _moved(self, marks: tuple[object, ...], progress: LoopProgress) -> None:
        stepped = not self._last_marks or marks[0] != self._last_marks[0]
        if stepped and progress.step_s is not None:
            self._steps.append(progress.step_s)
        self._last_marks = marks
        self._idle_s = self._waiting_s = 0.0
        self.suspected = None

    def _find(self) -> Suspicion | None:
        if self._waiting_s >= self.collective_limit_s:
            return Suspicion(
                self._waiting_s, self.collective_limit_s, self._position, in_collective=True
            )
        if self._idle_s >= self.outside_limit_s:
            return Suspicion(self._idle_s, self.outside_limit_s, self._position)
        return None


def _marks(progress: LoopProgress) -> tuple[object, ...]:
    """Return values that change when the loop moves."""
    return progress.step, progress.updating, progress.inside, progress.ticks


# ---- where a thread is ---------------------------------------------------------------------------

_WRAPPERS = (
    "torch.futures",
    "torch._ops",
    "torch.autograd.function",
    "torch.utils._contextlib",
    "contextlib",
)
"""Modules whose frames lie between a collective and the C code that waits."""
_COLLECTIVES = (
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "lightck.inplace",
)
_EXCLUDED = ("torch.distributed.checkpoint", "torch.distributed.elastic")
_BACKWARD = ("torch.autograd.graph", "_engine_run_backward")
"""From here on there is C++ code: DDP waits inside it for the last reduction.

Looked for only with several ranks.
"""


def current_collective(thread: int) -> CollectivePosition | None:
    """Return the collective that a thread is inside, judged by its innermost frames; None if none.

    It takes a few microseconds. For jobs of several ranks: a backward counts as a collective.
    `work.wait()` in the user's own code and waits for a GPU do not show, since they are C code that
    no function of torch's has called.
    """
    innermost = sys._current_frames().get(thread)
    frame = innermost
    while frame is not None and _is_in(frame, _WRAPPERS):
        frame = frame.f_back
    if frame is None:
        return None
    communicates = _is_in(frame, _COLLECTIVES) and not _is_in(frame, _EXCLUDED)
    if not communicates and (_module(frame), frame.f_code.co_name) != _BACKWARD:
        return None
    return CollectivePosition(_description(frame), _mark(innermost))


def _mark(frame: FrameType | None) -> tuple[int, ...]:
    parts: list[int] = []
    while frame is not None and len(parts) < 2 * _DEPTH:
        parts += (id(frame), frame.f_lasti)
        frame = frame.f_back
    return tuple(parts)


def _description(inside: FrameType) -> str:
    line = _line(inside)
    return f"{inside.f_code.co_name}, called from {line}" if line else inside.f_code.co_name


def user_line(thread: int) -> str:
    """Return the line of the user's code that a thread is at; empty if there is none."""
    return _line(sys._current_frames().get(thread))


def _line(frame: FrameType | None) -> str:
    while frame is not None and _module(frame).split(".")[0] in ("torch", "lightck"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _is_in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = _module(frame)
    return any(name == each or name.startswith(each + ".") for each in modules)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
