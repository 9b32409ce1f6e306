"""Just-in-time snapshots of the last complete step, on any thread, wherever the training is.

Everything is done under the checkpointer's lock. The forward hook takes it at forward start, and an
update begins with the fence, which takes it: while it is held, and no update has begun, parameters
are those of the last complete step. Before forward start all state is live, and the snapshot is
`early`: it is not made while other tensors stand in for the weights
(`journal/weight_guard.py`). After forward start, state that a forward changes comes from the copies
made then (`journal/step_journal.py`). Inside an update the state is mixed: another thread waits for
its end, the training thread cannot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from lightck.errors import LightckError
from lightck.failure.hang import HangWatch
from lightck.journal.boundary_state import holding
from lightck.journal.device_lag import PreUpdateState
from lightck.loop.checkpointer import Checkpointer
from lightck.pipeline.copy_plan import versions_of
from lightck.pipeline.pipeline import InflightSnapshot
from lightck.region.native_region import RECORD_EARLY, RECORD_JIT, Record
from lightck.region.region import Slot
from lightck.state.inventory import CollectedState
from lightck.types import Saved

# ---- what a save waits for, and the step that devices have if they hang --------------------------
# The training thread queues updates, and counts them. A device that hangs in the collective before
# an update has the state before it, and keeps it; one that is only behind comes to the newest
# soon.

DEVICE_PATIENCE_S = 1.0
"""Seconds without progress, and three steps, after which a device is taken to hang.

At most half of the time left.
"""
_STEPS = 3.0


class WaitFor(Enum):
    """The condition that a save waits for."""

    TRAINING = auto()
    """The training thread has to go on."""
    SLOT = auto()
    """A slot has to become free."""
    DEVICE = auto()
    """A device has to make the updates that training has queued."""


class RetryLater(Exception):  # noqa: N818 - no error
    """The save cannot be made now: another condition has to hold first."""

    def __init__(self, why: str, waits: WaitFor) -> None:
        super().__init__(why)
        self.waits = waits


@dataclass(eq=False)
class DeviceWait:
    """The observation of a checkpointer's devices for one save."""

    checkpointer: Checkpointer
    most: float
    """The time of `time.monotonic` at which it stops waiting."""
    _first: tuple[int, PreUpdateState | None] | None = None
    """The step and the devices' state at the first look."""
    _last: PreUpdateState | None = None
    _since: float = field(default_factory=time.monotonic)
    """The time since which the devices have `_last`."""

    def before(self, *, hangs: bool) -> PreUpdateState | None:
        """Return the state that hanging devices have; None if training's state is the one to save.

        Called under the checkpointer's lock.

        Args:
            hangs: training hangs, as far as is known already.

        Raises:
            Later: devices may yet make the updates that training has queued.
            DeviceError: a device has failed.
        """
        behind, step = self.checkpointer.device_lag, self.checkpointer.steps.step
        if behind is None:
            return None
        before = behind.there()
        if before is None and behind.offload.is_reached:
            return None
        now = time.monotonic()
        if self._first is None:
            self._first, self._last = (step, before), before
        if step != self._first[0] and before is not self._first[1]:
            return None  # both go on: the devices are about to have the wanted state
        if before is not self._last:
            self._last, self._since = before, now
        step_s = max(behind.pace_s, self.checkpointer.due_check.step_s or 0.0)
        patience = max(DEVICE_PATIENCE_S, _STEPS * step_s)
        known = hangs or before is behind.taken
        if before is None or (not known and now < min(self._since + patience, self.most)):
            raise RetryLater(f"a device has not come to the end of step {step}", WaitFor.DEVICE)
        return before

    def take(self, before: PreUpdateState | None) -> None:
        """Claim a state of hanging devices: a snapshot of it is committed or being written."""
        if before is not None and self.checkpointer.device_lag is not None:
            self.checkpointer.device_lag.take(before)


POLL_S = 0.002
# ---- the saver -----------------------------------------------------------------------------------

PATIENCE_S = 1.0
"""Seconds that another thread waits for forward start before it takes an early snapshot.

At forward start a snapshot is exact. The wait is at most a quarter of the time left.
"""
FATES_S = 3.0
"""Seconds to wait for a slot while nothing is written.

With a dead rank, an open outcome may never be settled.
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the training loop, as its hooks report it.

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


@dataclass(eq=False)
class JitSaver:
    """Just-in-time saves of the last complete step of one handle. Any thread."""

    checkpointer: Checkpointer
    leaving: bool = False
    """True if the training thread is closing the handle, so that it will make no more progress."""
    hang: HangWatch | None = None
    """The hang detection of the training thread."""
    _pid: int = field(default_factory=os.getpid)

    @property
    def last_step(self) -> int:
        """Return the last complete step, or the step that hanging devices have, if it was saved."""
        behind = self.checkpointer.device_lag
        taken = behind.taken if behind is not None else None
        return self.checkpointer.steps.step if taken is None else taken.step

    def progress(self) -> Progress:
        """Return the progress of the training loop; takes no lock."""
        checkpointer = self.checkpointer
        return Progress(
            checkpointer.steps.step,
            checkpointer.mixed,
            checkpointer.inside,
            checkpointer.ticks,
            checkpointer.due_check.step_s,
            checkpointer.thread,
        )

    def hold(self, until: float | None) -> None:
        """Let training go no further than it must until the given time; None: release it.

        Any thread.
        """
        if until is None:
            self.checkpointer.pause.end()
        else:
            self.checkpointer.pause.begin(until, at_fence=self.checkpointer.pipeline.barrier.alone)

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        """Commit the last complete step, unless it is committed; return by the deadline.

        State that is captured or committed is not copied again, so that any number of triggers may
        come for one step. A snapshot that is being persisted already is finished first, and kept.

        Args:
            reason: for `Saved`.
            deadline: a time of `time.monotonic`; what is sealed is still written after it.
            early: save the state at the step's end, even if the next forward has begun.

        An expected failure is not raised: `Saved.why` states it.
        """
        began, why, asked = time.monotonic(), "", self.checkpointer.steps.step
        try:
            if os.getpid() != self._pid:
                raise LightckError("a forked child must not write")
            step, snapshot = self._captured(deadline, early)
            asked = min(asked, step)
            if snapshot is not None and not self._durable(snapshot, deadline):
                why = f"step {snapshot.step} was not committed by the deadline"
        except LightckError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - user's code: state_dict, on_error
            why = f"the state cannot be taken: {error!r}"
        return self._saved(reason, why, began, asked)

    def _saved(self, reason: str, why: str, began: float, asked: int) -> Saved:
        """Describe the outcome of a save from the snapshots that are there now."""
        newest = self._newest()
        step = newest.step if newest is not None else None
        fresh = not why and step is not None and step >= asked
        if not fresh and not why:
            why = f"step {self.last_step} has no snapshot"
        return Saved(
            reason=reason,
            step=step,
            fresh=fresh,
            early=fresh and newest is not None and newest.early,
            why=why,
            seconds=time.monotonic() - began,
        )

    def _newest(self) -> Record | None:
        """Return the newest record that is committed on this rank and counts."""
        records = [slot.record for slot in self.checkpointer.pipeline.region.slots if slot.record]
        return max(records, key=lambda record: record.sequence, default=None)

    # ---- capture ---------------------------------------------------------------------------

    def _captured(self, deadline: float, early: bool) -> tuple[int, InflightSnapshot | None]:
        """Return the last complete step and its sealed snapshot; None if it is committed already.

        Raises:
            LightckError: it cannot be saved; says why.
        """
        here = threading.get_ident() == self.checkpointer.thread
        began, left = time.monotonic(), deadline - time.monotonic()
        patience = began + (0.0 if here else min(PATIENCE_S, left / 4))
        standing = DeviceWait(self.checkpointer, began + left / 2)
        while True:
            hangs = self.hang is not None and self.hang.has_stood(self.progress())
            # Before the try: only progress made until then counts.
            leaving, stuck = self.leaving, self.checkpointer.mixed and self.is_stuck()
            try:
                with self._locked(deadline):
                    before = standing.before(hangs=hangs)
                    found = self._try(early, here, 0.0 if leaving else patience, before)
                    standing.take(before)
                    return found
            except RetryLater as later:
                training = later.waits is WaitFor.TRAINING
                idle = later.waits is WaitFor.SLOT and not self.checkpointer.pipeline.persisting
                gone = training and (here or leaving or stuck)
                gone = gone or (idle and time.monotonic() > began + FATES_S)
                if gone or time.monotonic() >= deadline:
                    self._finish_others(deadline)
                    why = ", and the training stands still" if stuck and training else ""
                    raise LightckError(f"{later}{why}") from None
            time.sleep(POLL_S)

    def is_stuck(self) -> bool:
        """Tell whether to wait no longer for an update that stands still: a peer may finish it."""
        return False

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        lock = self.checkpointer.lock
        # A signal's handler, or `on_error`, inside code that the lock guards: its state is half
        # done.
        if lock._is_owned():  # type: ignore[attr-defined]
            raise LightckError("it was asked for inside lightck itself, which is half done")
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LightckError("another thread was busy with a snapshot until the deadline")
        try:
            yield
        finally:
            lock.release()

    def _try(
        self, early: bool, here: bool, patience: float, before: PreUpdateState | None
    ) -> tuple[int, InflightSnapshot | None]:
        checkpointer, pipeline = self.checkpointer, self.checkpointer.pipeline
        if not checkpointer.enabled:
            raise LightckError("the handle is closed")
        checkpointer.poll()
        if pipeline.window is not None and (before is None or not self._waits()):
            # In any case: the fence of an update comes before it changes anything.
            with checkpointer.outcomes.reported():
                checkpointer.outcomes.fence(aside=not here)
        step = checkpointer.steps.step if before is None else before.step
        for snapshot in pipeline.in_flight:
            if snapshot.step == step and early <= bool(snapshot.flags & RECORD_EARLY):
                return step, snapshot
        if self._holds(step, early):
            return step, None
        self._check(step, before)
        room = pipeline.region.has_room(due=False) or (early and self._exact(step))
        if pipeline.blocked_by is not None or not room:
            raise RetryLater("no slot became free", WaitFor.SLOT)
        if before is not None:
            return step, self._open_before(before, early)
        if checkpointer.inside:
            return step, self._open_late(early)
        if time.monotonic() < patience:
            raise RetryLater(f"step {step} has not come to its boundary", WaitFor.TRAINING)
        return step, self._open_early(here)

    def _waits(self) -> bool:
        """Tell whether copies from devices wait for a device that hangs."""
        return self.checkpointer.pipeline.offload.engine.is_waiting

    def _holds(self, step: int, early: bool) -> bool:
        """Tell whether the step is committed since attach, or is the one that was restored.

        With `early`, an exact snapshot does not count.
        """
        region, began = self.checkpointer.pipeline.region, self.checkpointer.due_check.began
        restored = region.continued
        if not began and restored is not None and restored.step == step:
            return True
        records = [slot.record for slot in region.slots if slot.record is not None]
        alike = (r for r in records if r.step == step and r.timeline == region.timeline)
        return any(early <= record.early for record in alike)

    def _check(self, step: int, before: PreUpdateState | None) -> None:
        checkpointer, kept = self.checkpointer, self.checkpointer.step_journal
        assert kept is not None, "not armed"
        if step == 0:
            raise LightckError("no step is complete yet")
        if before is not None:
            if self._waits():
                why = "copies of a later step wait for it"
                raise RetryLater(
                    f"step {step} is what a device has that hangs, and {why}", WaitFor.DEVICE
                )
            return
        if not checkpointer.steps.settled:
            raise LightckError(f"at step {step} the optimizers are not all known yet")
        if checkpointer.steps.gave_up(checkpointer.thread):
            raise LightckError(f"the update after step {step} was given up half done")
        if checkpointer.mixed or kept.step != step:
            raise RetryLater(f"the update after step {step} is half done", WaitFor.TRAINING)
        if kept.ended is None and kept.begun is None:
            told = kept.unwritten or "the state was replaced inside an iteration"
            raise LightckError(f"step {step} has no boundary state: {told}")

    def _open_late(self, early: bool) -> InflightSnapshot:
        """Open a snapshot after the next forward has begun, of the state when it began."""
        kept = self.checkpointer.step_journal
        assert kept is not None
        instant = kept.late(early=early)
        blobs = self.checkpointer.boundary_state.encoded(instant.first, instant.second)
        moved = partial(kept.moved, early=instant.early)
        step, state = self.checkpointer.steps.step, instant.collected
        return self._sealed(self._opened(step, state, blobs, instant.flags, moved))

    def _open_before(self, before: PreUpdateState, early: bool) -> InflightSnapshot:
        """Open a snapshot of the state before an update that devices have not made.

        Training has queued that update, or is about to.

        Raises:
            Later: the state has changed.
        """
        if moved := before.moved():  # it will be the same afterwards: nothing is copied for that
            why = f"step {before.step}, which a device has: {moved} is not what it was"
            raise RetryLater(why, WaitFor.DEVICE)
        instant = before.instant(early=early)
        blobs = self.checkpointer.boundary_state.encoded(instant.first, instant.second)
        with self.checkpointer.pipeline.offload.as_of(before.standing):
            snapshot = self._opened(
                before.step, instant.collected, blobs, instant.flags, before.moved
            )
            return self._sealed(snapshot)

    def _open_early(self, here: bool) -> InflightSnapshot:
        """Open a snapshot before forward start.

        Another thread reads the state twice, as the loop may change it.

        Raises:
            Later: the loop changes the state, or other tensors stand in for the weights.
        """
        kept, step = self.checkpointer.step_journal, self.checkpointer.steps.step
        assert kept is not None
        moved = partial(kept.moved, early=True)
        state, blobs = self._before_forward()
        versions, name = _versions(state), moved()
        if name:
            why = f"{name} is not what it was when step {step} ended: its snapshot has to wait for"
            raise RetryLater(f"{why} the next forward", WaitFor.TRAINING)
        snapshot = self._opened(step, state, blobs, RECORD_EARLY, moved)
        try:
            again, said = (state, blobs) if here else self._before_forward()
            changed = not here and (_versions(again) != versions or said != blobs)
        except BaseException:
            self.checkpointer.pipeline.drop("the state cannot be taken")
            raise
        if changed:
            self.checkpointer.pipeline.drop("the loop has changed something meanwhile")
            raise RetryLater("the loop kept changing the state", WaitFor.TRAINING)
        return self._sealed(snapshot)

    def _exact(self, step: int) -> list[Slot]:
        """Return the slots of this rank's snapshots of the step that no other rank counts on.

        If the early instant is wanted, some rank has no exact snapshot and can have none: exact
        ones count nowhere, and the early one may replace one of them.
        """
        region = self.checkpointer.pipeline.region
        held = [(slot, slot.record) for slot in region.slots if slot.kept and slot.record]
        return [slot for slot, r in held if (r.timeline, r.step) == (region.timeline, step)]

    def _before_forward(self) -> tuple[CollectedState, tuple[bytes, bytes]]:
        """Return the state between step end and forward start, and its blobs.

        With one rank it is the live state. With several ranks, values and buffers are those of step
        end: a killed rank leaves only these, and a rank which has gone on to the forward has them,
        too. The loop's work between step end and forward start is then to be done on every rank.
        """
        checkpointer = self.checkpointer
        boundary_state, kept = checkpointer.boundary_state, checkpointer.step_journal
        if checkpointer.forward_unseen and kept is not None and kept.ended is not None:
            boundary_state.forward_missed(kept.ended.copies)  # the forward may have begun
        collected = boundary_state.collect()
        ended = kept.ended if kept is not None and not checkpointer.pipeline.barrier.alone else None
        if ended is None or ended.copies is None:
            return collected, boundary_state.encode(collected, checkpointer.steps.step, seen=False)
        return holding(collected, ended.copies), boundary_state.encoded(ended.first, ended.second)

    def _opened(
        self,
        step: int,
        state: CollectedState,
        blobs: tuple[bytes, bytes],
        flags: int,
        moved: Callable[[], str],
    ) -> InflightSnapshot:
        pipeline = self.checkpointer.pipeline
        if not pipeline.region.has_room(due=False):
            for slot in self._exact(step):
                pipeline.region.mark_aborted(slot)
        with pipeline.pacing:
            snapshot = pipeline.open(step, state, *blobs, flags=flags | RECORD_JIT)
        if isinstance(snapshot, str):
            raise RetryLater(f"step {step} has no snapshot: {snapshot}", WaitFor.SLOT)
        snapshot.moved = moved
        return snapshot

    def _sealed(self, snapshot: InflightSnapshot) -> InflightSnapshot:
        """Return the inflight snapshot with all of its copies made.

        Raises:
            Later: the loop has changed something meanwhile; it may succeed the next time.
        """
        if not self.checkpointer.pipeline.fence(None):
            first, more = snapshot.torn[0], len(snapshot.torn) - 1
            names = f"{first} and {more} more" if more else first
            why = f"step {snapshot.step}: {names} changed while it was copied"
            raise RetryLater(why, WaitFor.TRAINING)
        return snapshot

    # ---- commit ----------------------------------------------------------------------------

    def _durable(self, snapshot: InflightSnapshot, deadline: float) -> bool:
        """Wait for a sealed snapshot's commit on this rank; False at the deadline.

        Raises:
            LightckError: it failed.
        """
        pipeline = self.checkpointer.pipeline
        while not snapshot.durable_s:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._locked(deadline):
                self.checkpointer.poll()
                if not snapshot.durable_s and snapshot not in pipeline.persisting:
                    raise LightckError(f"step {snapshot.step} could not be written")
            time.sleep(min(POLL_S, left))  # the training thread may need the lock
        return True

    def _finish_others(self, deadline: float) -> None:
        """Wait for the snapshots that are sealed already: a restart finds the newest of them."""
        for snapshot in [*self.checkpointer.pipeline.persisting]:
            self._durable(snapshot, deadline)


def _versions(collected: CollectedState) -> list[tuple[str, int]]:
    names = [live.name for live in collected.lives]
    return list(zip(names, versions_of([live.tensor for live in collected.lives]), strict=True))
