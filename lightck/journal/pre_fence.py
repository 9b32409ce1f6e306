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

from lightck.journal.boundary_state import BoundaryState, user_code
from lightck.pipeline.copy_plan import versions_of
from lightck.state import boundary_blob

EXAMINE_EVERY = 32
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
    is_steady: bool = False
    """True if nothing changed between last gradient and fence when that was last examined."""
    _gradients: int = 0
    """Number of gradients since the last fence."""
    _iterations: int = 0
    """Number of iterations since attach; what a job did before it was resumed does not count."""
    _last_gradients: int = 0
    """Number of gradients of the last iteration."""
    _examines: bool = True
    _at_last_gradient: Any = field(default=None, repr=False)

    def gradient(self) -> bool | None:
        """Count one more gradient.

        Returns:
            While `is_steady`, True for an iteration's last gradient, and False should one more come
            after that; else None.
        """
        self._gradients += 1
        beyond = (
            self._gradients - self._last_gradients
            if self._iterations
            else self._gradients % self.layers
        )
        if beyond not in (0, 1):
            return None
        if self._examines:
            with self.lock:
                self._at_last_gradient = self._rank_local_state() if beyond == 0 else None
        return beyond == 0 if self.is_steady else None

    def fence(self, step: int) -> None:
        """Learn from the iteration: the update to `step` begins. Under the lock."""
        if self._examines:
            self.is_steady = self._at_last_gradient is not None and _is_same(
                self._at_last_gradient, self._rank_local_state()
            )
        elif self._gradients != self._last_gradients:
            self.is_steady = False
        self._last_gradients, self._gradients, self._at_last_gradient = self._gradients, 0, None
        self._iterations += 1
        self._examines = self._iterations <= _FIRST or step % EXAMINE_EVERY == 0

    def skip_fence(self) -> None:
        """Note that the iteration has ended without an update. Under the lock."""
        self._gradients, self._at_last_gradient = 0, None

    def is_state_of_fence(self, where: BaseException | FrameType) -> bool:
        """Tell whether all that is a rank's own is what it would be at the fence.

        Args:
            where: the error that leaves the iteration, or the frame that its thread is in.
        """
        if not self.is_steady or self._gradients != self._last_gradients:
            return False
        if isinstance(where, BaseException):
            return not _is_from_changing_code(where)
        return not any(map(_changes, _stack(where)))

    def _rank_local_state(self) -> Any:
        """Take what may change before the fence; None: that failed."""
        try:
            with user_code():
                collected = self.boundary_state.inventory.collect_cached()
            trees = [self.boundary_state.step_end_now(), collected.tree["extras"]]
            changing = [live.tensor for live in collected.lives if live.sync]
            return trees, versions_of(changing)
        except Exception:  # noqa: BLE001 - the user's; the next instant reports it
            return None


def _is_same(before: Any, now: Any) -> bool:
    try:
        same = now is not None and before[1] == now[1]
        return same and boundary_blob.closed(before[0]) == boundary_blob.closed(now[0])
    except Exception:  # noqa: BLE001 - as in `_rank_local_state`
        return False


def _is_from_changing_code(error: BaseException | None) -> bool:
    """Tell whether the error, or one that led to it, was raised inside a forward or a draw."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _trace_changes(error.__traceback__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _trace_changes(trace: TracebackType | None) -> bool:
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
