"""What a rank does of its own between its last gradient and its first update, by habit.

An exception may leave an iteration when the rank's part of the allreduce is complete, or the rank
may hang there, or be killed: its peers go on to the new step, and what it leaves stands for what it
would have had at its own fence. That is so only if nothing of its own would still have changed: a
draw, another forward, a counter. Nobody knows what the loop would have done; what it did in the
iterations before is looked at in a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any

from lightck.capture import parcel
from lightck.capture.arrange import versions_of
from lightck.capture.instants import Instants, users_code

EVERY = 32
"""One iteration of so many is looked at: it costs what taking the state of extras twice does."""
_FIRST = 3
_CHANGING = (("nn", "modules", "module.py"), ("utils", "data", "dataloader.py"))
"""Of torch: inside of these a forward, or a draw, is half done."""


@dataclass(eq=False)
class Habit:
    """Of one loop."""

    instants: Instants
    lock: Callable[[], AbstractContextManager[Any]]
    """Held while the state is looked at."""
    layers: int
    """Gradients of a backward in which every layer gets one: what a first iteration has, once or
    some times."""
    on_last: Callable[[bool], None] = lambda last: None
    """Hears under the lock, while `quiet`, of the last gradient of an iteration (True); and, should
    one come after that, that it was not the last (False)."""
    quiet: bool = False
    """Nothing has changed there, the last time that it was looked at."""
    _count: int = 0
    """Gradients since the last fence."""
    _seen: int = 0
    """Iterations since attach: a job that goes on has habits of its own to learn."""
    _whole: int = 0
    """Those of the last iteration."""
    _looks: bool = True
    _then: Any = field(default=None, repr=False)

    def gradient(self) -> None:
        """One more has come."""
        self._count += 1
        behind = self._count - self._whole if self._seen else self._count % self.layers
        if behind in (0, 1) and (self._looks or self.quiet):
            with self.lock():
                if self._looks:
                    self._then = self._own() if behind == 0 else None
                if self.quiet:
                    self.on_last(behind == 0)

    def fence(self, step: int) -> None:
        """The update to `step` begins; under the lock."""
        if self._looks:
            self.quiet = self._then is not None and _alike(self._then, self._own())
        elif self._count != self._whole:
            self.quiet = False
        self._whole, self._count, self._then = self._count, 0, None
        self._seen += 1
        self._looks = self._seen <= _FIRST or step % EVERY == 0

    def no_fence(self) -> None:
        """The iteration has ended without an update; under the lock."""
        self._count, self._then = 0, None

    def at_fence(self, where: BaseException | FrameType) -> bool:
        """All that is a rank's own is what it would be at the fence.

        Args:
            where: the error that leaves the iteration, or the frame in which its thread stands.
        """
        if not self.quiet or self._count != self._whole:
            return False
        if isinstance(where, BaseException):
            return not _is_in_between(where)
        return not any(map(_changes, _stack(where)))

    def _own(self) -> Any:
        """What may change there; None: it cannot be told."""
        try:
            with users_code():
                collected = self.instants.inventory.glance()
            trees = [self.instants.standing(), collected.tree["extras"]]
            changing = [live.tensor for live in collected.lives if live.sync]
            return trees, versions_of(changing)
        except Exception:  # noqa: BLE001 - the user's; the next instant tells of it
            return None


def _alike(then: Any, now: Any) -> bool:
    try:
        same = now is not None and then[1] == now[1]
        return same and parcel.closed(then[0]) == parcel.closed(now[0])
    except Exception:  # noqa: BLE001 - as in `_own`
        return False


def _is_in_between(error: BaseException | None) -> bool:
    """It was raised inside a forward or a draw, or because of what was."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _passes(error.__traceback__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _passes(trace: TracebackType | None) -> bool:
    while trace is not None:
        if _changes(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _changes(frame: FrameType) -> bool:
    return PurePath(frame.f_code.co_filename).parts[-3:] in _CHANGING
