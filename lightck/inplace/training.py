"""The training loop as recovery sees it, and the hooks' listener that follows it.

The listener stands before the checkpointer. At each step's first update it has all ranks commit the
iteration, before the checkpointer's fence; it notes at which collective each step ended and each
forward began.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch.optim import Optimizer

from lightck.distributed.commit.distributed_barrier import DistributedBarrier
from lightck.failure.jit_save_ranks import RankJitSaver
from lightck.inplace.communicator import Communicator
from lightck.loop.hooks import Listener
from lightck.tracing.trace import now_ns

SAVE_S = 120.0
"""Seconds that the save of a step may take."""
STILL_S = 0.1
"""Seconds in which a training thread that has not moved is taken to stand in its collective."""


class Training(Protocol):
    """The training of this rank. Any thread."""

    @property
    def step(self) -> int:
        """The last complete step."""
        ...

    @property
    def left(self) -> str:
        """Why the training is over; empty while it is not."""
        ...

    def stands(self) -> bool:
        """Tell whether the training thread has not moved for a while."""
        ...

    def save(self, reason: str, step: int) -> str:
        """Save the last step, where it is not saved; return why that failed, or nothing."""
        ...

    def progress(self) -> Any:
        """Return what a replacement's commit barrier goes on from, as JSON values."""
        ...

    def recovered(self, ranks: Sequence[int], began_ns: int) -> None:
        """Note that all ranks go on: lost ones are replaced, or connections were made anew.

        Args:
            ranks: the replaced ones.
            began_ns: when the recovery began here, by the clock of `now_ns`.
        """
        ...


@dataclass(eq=False)
class HandleTraining:
    """The training of the one handle of this process."""

    rescue: RankJitSaver
    left: str = ""
    _seen: tuple[Any, ...] = ()
    _since: float = 0.0

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.rescue.checkpointer.steps.step

    def close_begins(self) -> None:
        """Take the close for the forward start behind the last step, which never comes.

        A rank that was lost before it came here follows from what the loop did here up to now.
        """
        checkpointer = self.rescue.checkpointer
        with checkpointer.lock:
            if checkpointer.step_journal is not None and not checkpointer.inside:
                checkpointer.step_journal.forward_started(self.step, seen=False, full=True)

    def leave(self, why: str) -> None:
        """Note that the training is over."""
        self.left = why

    def updates(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer is one of this training; there may be others, which are not."""
        checkpointer = self.rescue.checkpointer
        if any(optimizer is each for each in checkpointer.inventory.optimizers):
            return True
        checkpointer.watched.refresh()
        return checkpointer.watched.owns(optimizer)

    @property
    def path(self) -> str:
        """Return the path of the job's regions."""
        return os.fspath(self.rescue.checkpointer.pipeline.region.place.path)

    def stands(self) -> bool:
        """Tell whether the training thread has not moved for a while."""
        checkpointer = self.rescue.checkpointer
        frame = sys._current_frames().get(checkpointer.thread)
        at = (id(frame), frame.f_lasti if frame is not None else 0, checkpointer.ticks)
        now = time.monotonic()
        if at != self._seen:
            self._seen, self._since = at, now
        return now - self._since >= STILL_S

    def save(self, reason: str, step: int) -> str:
        """Save the last step, where it is not saved; return why that failed, or nothing."""
        saved = self.rescue.save_for_peer(reason, time.monotonic() + SAVE_S)
        return "" if saved.fresh and saved.step == step else saved.why or f"step {saved.step}"

    def progress(self) -> Any:
        """Return what a replacement's commit barrier goes on from, as JSON values."""
        barrier = self.rescue.checkpointer.pipeline.barrier
        return barrier.progress() if isinstance(barrier, DistributedBarrier) else None

    def recovered(self, ranks: Sequence[int], began_ns: int) -> None:
        """Note that all ranks go on: lost ones are replaced, or connections were made anew.

        The training thread is in the collective that it was in, and a replacement has its part of
        the minibatch still to compute: it is not waited for since before it was there.
        """
        self.rescue.checkpointer.note_progress()
        for rank in ranks:
            self.rescue.rejoined(rank)
        trace = self.rescue.checkpointer.pipeline.trace
        if trace is not None:
            lost = ", ".join(map(str, ranks))
            what = f"rank {lost} replaced" if ranks else "connections made anew"
            trace.note("recovery", what, began_ns, now_ns())


@dataclass(eq=False)
class InPlaceListener:
    """Passes everything on to the checkpointer, and commits iterations over all ranks."""

    listener: Listener
    communicator: Communicator
    training: HandleTraining

    @property
    def _steps(self) -> Any:
        return self.training.rescue.checkpointer.steps

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Commit the iteration at its first update, then pass on that it begins."""
        if self.training.updates(optimizer):
            self._commit()
        self.listener.update_begins(optimizer, frame, unseen=unseen)

    def mark_begin(self) -> None:
        """Commit the iteration at its first update, then pass on that it begins."""
        self._commit()
        self.listener.mark_begin()

    def _commit(self) -> None:
        if not self._steps.between_updates and not self._steps.updating:
            self.communicator.commit(self._steps.step + 1)

    def update_ends(self, optimizer: Optimizer) -> None:
        """Pass on that an update has ended; the step may have ended, too."""
        self._ended(lambda: self.listener.update_ends(optimizer))

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Commit the iteration, then pass on that the gradient scaler left its update out."""
        if self.training.updates(optimizer):
            self._commit()
        self._ended(lambda: self.listener.update_skipped(optimizer))

    def mark_end(self) -> None:
        """Pass on that an update has ended which the loop marks itself."""
        self._ended(self.listener.mark_end)

    def _ended(self, pass_on: Callable[[], None]) -> None:
        before = self._steps.step
        pass_on()
        step = self._steps.step
        if step != before:
            with self.communicator.changed:
                self.communicator.window.step_ended(step)

    def forward(self, training: bool) -> None:
        """Note the first collective behind a forward start, and pass on that a forward begins."""
        self.listener.forward(training)
        if training and not self._steps.updating:
            self.communicator.forward_started(self._steps.step)

    def evaluation(self) -> None:
        """Pass on that an evaluation begins."""
        self.listener.evaluation()

    def gradient(self, layer: str) -> None:
        """Pass on that a layer's gradient is ready."""
        self.listener.gradient(layer)

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Pass on that a loader is iterated, or draws."""
        self.listener.iterating(loader, drawing)

    def drawn(self) -> None:
        """Pass on that a batch has been drawn."""
        self.listener.drawn()

    def drawing_ahead(self, iterator: Any) -> None:
        """Pass on that a loader draws a batch ahead."""
        self.listener.drawing_ahead(iterator)
