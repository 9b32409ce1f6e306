"""Predict whether a rank changes state of its own between its last gradient and its first update.

An exception may leave an iteration when the rank's part of the allreduce is complete, or the rank
may hang there, or be killed: its peers go on to the new step, and the journal entry that it has
written counts as that of its own fence. This is right only if nothing of its own would still have
changed: a draw, another forward, a counter. Nobody knows what the loop would have done, but a few
iterations before are examined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from threading import RLock
from types import FrameType, TracebackType
from typing import Any

from lightck.journal.boundary_state import BoundaryState, users_code
from lightck.pipeline.copy_plan import versions_of
from lightck.state import boundary_blob

EVERY = 32
"""One iteration in so many is examined, at the cost of taking the state of extras twice."""
_FIRST = 3
_CHANGING = (("nn", "modules", "module.py"), ("utils", "data", "dataloader.py"))
"""Source files of torch: while a frame is in one, a forward or a draw is half done."""


@dataclass(eq=False)
class PreFencePredictor:
    """Predictor for one loop, which learns from the iterations that it examines."""

    boundary_state: BoundaryState
    lock: RLock
    """Held while the state is examined."""
    layers: int
    """Number of gradients in a backward in which every layer gets one; a first iteration has this
    number, or a multiple."""
    quiet: bool = False
    """True if nothing changed between last gradient and fence when that was last examined."""
    _count: int = 0
    """Number of gradients since the last fence."""
    _seen: int = 0
    """Number of iterations since attach; what a job did before it was resumed does not count."""
    _whole: int = 0
    """Number of gradients of the last iteration."""
    _looks: bool = True
    _then: Any = field(default=None, repr=False)

    def gradient(self) -> bool | None:
        """Count one more gradient.

        Returns:
            While `quiet`, True for an iteration's last gradient, and False should one more come
            after that; else None.
        """
        self._count += 1
        behind = self._count - self._whole if self._seen else self._count % self.layers
        if behind not in (0, 1):
            return None
        if self._looks:
            with self.lock:
                self._then = self._own() if behind == 0 else None
        return behind == 0 if self.quiet else None

    def fence(self, step: int) -> None:
        """Learn from the iteration: the update to `step` begins. Under the lock."""
        if self._looks:
            self.quiet = self._then is not None and _alike(self._then, self._own())
        elif self._count != self._whole:
            self.quiet = False
        self._whole, self._count, self._then = self._count, 0, None
        self._seen += 1
        self._looks = self._seen <= _FIRST or step % EVERY == 0

    def no_fence(self) -> None:
        """Note that the iteration has ended without an update. Under the lock."""
        self._count, self._then = 0, None

    def at_fence(self, where: BaseException | FrameType) -> bool:
        """Tell whether all that is a rank's own is what it would be at the fence.

        Args:
            where: the error that leaves the iteration, or the frame that its thread is in.
        """
        if not self.quiet or self._count != self._whole:
            return False
        if isinstance(where, BaseException):
            return not _is_in_between(where)
        return not any(map(_changes, _stack(where)))

    def _own(self) -> Any:
        """Take what may change before the fence; None: that failed."""
        try:
            with users_code():
                collected = self.boundary_state.inventory.collect_cached()
            trees = [self.boundary_state.standing(), collected.tree["extras"]]
            changing = [live.tensor for live in collected.lives if live.sync]
            return trees, versions_of(changing)
        except Exception:  # noqa: BLE001 - the user's; the next instant reports it
            return None


def _alike(then: Any, now: Any) -> bool:
    try:
        same = now is not None and then[1] == now[1]
        return same and boundary_blob.closed(then[0]) == boundary_blob.closed(now[0])
    except Exception:  # noqa: BLE001 - as in `_own`
        return False


def _is_in_between(error: BaseException | None) -> bool:
    """Tell whether the error, or one that led to it, was raised inside a forward or a draw."""
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
