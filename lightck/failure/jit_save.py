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
from lightck.failure.budget import SnapshotCost, measure
from lightck.failure.hang import CollectivePosition, HangWatch, LoopProgress
from lightck.journal.boundary_state import with_copies
from lightck.journal.device_lag import PreUpdateState
from lightck.journal.step_journal import BoundaryCapture
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

DEVICE_WAIT_S = 1.0
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
    until_s: float
    """The time of `time.monotonic` at which it stops waiting."""
    _first: tuple[int, PreUpdateState | None] | None = None
    """The step and the devices' state at the first look."""
    _last: PreUpdateState | None = None
    _since: float = field(default_factory=time.monotonic)
    """The time since which the devices have `_last`."""

    def state_to_save(self, *, hangs: bool) -> PreUpdateState | None:
        """Return the state that hanging devices have; None if training's state is the one to save.

        Called under the checkpointer's lock.

        Args:
            hangs: training hangs, as far as is known already.

        Raises:
            RetryLater: devices may yet make the updates that training has queued.
            DeviceError: a device has failed.
        """
        behind, step = self.checkpointer.device_lag, self.checkpointer.steps.step
        if behind is None:
            return None
        pre_update = behind.hung_state()
        if pre_update is None and behind.offload.is_reached:
            return None
        now = time.monotonic()
        if self._first is None:
            self._first, self._last = (step, pre_update), pre_update
        if step != self._first[0] and pre_update is not self._first[1]:
            return None  # both go on: the devices are about to have the wanted state
        if pre_update is not self._last:
            self._last, self._since = pre_update, now
        step_s = max(behind.longest_step_s, self.checkpointer.due_check.step_s or 0.0)
        patience_s = max(DEVICE_WAIT_S, _STEPS * step_s)
        known = hangs or pre_update is behind.claimed
        if pre_update is None or (not known and now < min(self._since + patience_s, self.until_s)):
            raise RetryLater(f"a device has not come to the end of step {step}", WaitFor.DEVICE)
        return pre_update

    def claim(self, pre_update: PreUpdateState | None) -> None:
        """Claim a state of hanging devices: a snapshot of it is committed or being written."""
        if pre_update is not None and self.checkpointer.device_lag is not None:
            self.checkpointer.device_lag.claim(pre_update)


# ---- the wait for a slot, and those that may be held for good ------------------------------------

LOST_OUTCOME_S = 1.0
"""Seconds without a slot while nothing is written, after which an open outcome is taken as lost.

A rank that is killed or frozen between its commit and its report takes the outcome with it.
"""
NO_SLOT_S = 3.0
"""Seconds without a slot while nothing is written, after which a save gives up."""
HISTORY_S = 1.0
"""Seconds that a copy of the history may hold the slot that a save needs."""


@dataclass(eq=False)
class SlotWait:
    """The wait of one save for a slot; it lets go of those that may be held for good."""

    checkpointer: Checkpointer
    _idle_since: float | None = None
    """The time since which nothing is written and there is no slot."""

    def poll(self, waits: WaitFor) -> bool:
        """Let go of slots that may be held for good; return whether none came for too long.

        Returns at once. `waits`: what the save waits for now.
        """
        pipeline, history = self.checkpointer.pipeline, self.checkpointer.outcomes.history
        if waits is WaitFor.SLOT and history is not None:
            history.slot_needed(held_s=HISTORY_S)  # a copy that hangs may hold the last one
        now = time.monotonic()
        if waits is not WaitFor.SLOT or pipeline.persisting:
            self._idle_since = None
            return False
        self._idle_since = self._idle_since or now
        if now > self._idle_since + LOST_OUTCOME_S:
            # The oldest alone, and the next only if that frees no slot: the others' content counts
            # at restore, should this save not come to its end.
            for snapshot in pipeline.awaiting[:1]:
                pipeline.barrier.abandon(snapshot.step)
        return now > self._idle_since + NO_SLOT_S


# ---- the saver -----------------------------------------------------------------------------------

POLL_S = 0.002
FORWARD_WAIT_S = 1.0
"""Seconds that another thread waits for forward start before it takes an early snapshot.

At forward start a snapshot is exact. The wait is at most a quarter of the time left.
"""


@dataclass(eq=False)
class JitSaver:
    """Just-in-time saves of the last complete step of one handle. Any thread."""

    checkpointer: Checkpointer
    hang: HangWatch | None = None
    """The hang detection of the training thread; None: hangs are not looked for."""
    write_limit: int = 0
    """Bytes per second that the user allows on the medium; 0 is no limit."""
    _closing: bool = False
    """True if the training thread is closing the handle, so that it will make no more progress."""
    _pid: int = field(default_factory=os.getpid)

    @property
    def last_step(self) -> int:
        """Return the last complete step, or the step that hanging devices have, if it was saved."""
        behind = self.checkpointer.device_lag
        claimed = behind.claimed if behind is not None else None
        return self.checkpointer.steps.step if claimed is None else claimed.step

    def progress(self) -> LoopProgress:
        """Return the progress of the training loop; takes no lock."""
        checkpointer = self.checkpointer
        return LoopProgress(
            checkpointer.steps.step,
            checkpointer.mixed,
            checkpointer.inside,
            checkpointer.ticks,
            checkpointer.due_check.step_s,
            checkpointer.thread,
        )

    def begin_close(self) -> None:
        """Wait no longer for training: its thread closes the handle. Any thread."""
        self._closing = True

    def pause_training(self, until: float | None) -> None:
        """Let training go no further than it must until the given time; None: let it go on."""
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
        began_s, why, wanted_step = time.monotonic(), "", self.checkpointer.steps.step
        try:
            if os.getpid() != self._pid:
                raise LightckError("a forked child must not write")
            step, snapshot = self._capture(deadline, early)
            wanted_step = min(wanted_step, step)
            if snapshot is not None and not self._await_commit(snapshot, deadline):
                why = f"step {snapshot.step} was not committed by the deadline"
        except LightckError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - user's code: state_dict, on_error
            why = f"the state cannot be taken: {error!r}"
        return self._outcome(reason, why, began_s, wanted_step)

    def _outcome(self, reason: str, why: str, began_s: float, wanted_step: int) -> Saved:
        """Describe the outcome of a save from the snapshots that are there now."""
        newest = self._newest_record()
        step = newest.step if newest is not None else None
        fresh = not why and step is not None and step >= wanted_step
        if not fresh and not why:
            why = f"step {self.last_step} has no snapshot"
        return Saved(
            reason=reason,
            step=step,
            fresh=fresh,
            early=fresh and newest is not None and newest.early,
            why=why,
            seconds=time.monotonic() - began_s,
        )

    def _newest_record(self) -> Record | None:
        """Return the newest record that is committed on this rank and counts."""
        records = [slot.record for slot in self.checkpointer.pipeline.region.slots if slot.record]
        return max(records, key=lambda record: record.sequence, default=None)

    def snapshot_cost(self, usable_s: float) -> SnapshotCost | None:
        """Return the cost of a snapshot that has to fit into `usable_s`; None: not known yet."""
        return measure(self.checkpointer, self.write_limit, usable_s)

    # ---- capture ---------------------------------------------------------------------------

    def _capture(self, deadline: float, early: bool) -> tuple[int, InflightSnapshot | None]:
        """Return the last complete step and its sealed snapshot; None if it is committed already.

        Raises:
            LightckError: it cannot be saved; says why.
        """
        on_training_thread = threading.get_ident() == self.checkpointer.thread
        began_s, left = time.monotonic(), deadline - time.monotonic()
        forward_until_s = began_s + (0.0 if on_training_thread else min(FORWARD_WAIT_S, left / 4))
        device_wait = DeviceWait(self.checkpointer, began_s + left / 2)
        slot_wait = SlotWait(self.checkpointer)
        while True:
            hangs = self.hang is not None and self.hang.has_not_moved(self.progress())
            # Before the try: only progress made until then counts.
            closing, stuck = self._closing, self.checkpointer.mixed and self.gives_up_update()
            try:
                with self._locked(deadline):
                    pre_update = device_wait.state_to_save(hangs=hangs)
                    found = self._open_last_step(
                        early, on_training_thread, 0.0 if closing else forward_until_s, pre_update
                    )
                    device_wait.claim(pre_update)
                    return found
            except RetryLater as later:
                for_training = later.waits is WaitFor.TRAINING
                hopeless = slot_wait.poll(later.waits)
                hopeless = hopeless or (for_training and (on_training_thread or closing or stuck))
                if hopeless or time.monotonic() >= deadline:
                    self._finish_others(deadline)
                    why = ", and the training stands still" if stuck and for_training else ""
                    raise LightckError(f"{later}{why}") from None
            time.sleep(POLL_S)

    # ---- other ranks, of which `RankJitSaver` knows ----------------------------------------------

    def new_peer_failure(self) -> str | None:
        """Return a failure on another rank since the last call; None: there is none. At once."""
        return None

    def is_settled(self) -> bool:
        """Tell, at once, whether no other rank can make this one save again."""
        return True

    def hung_device(self) -> CollectivePosition | None:
        """Return where a device may be waiting for other ranks, at once; None if none is."""
        return None

    def ends_hang(self, position: CollectivePosition | None) -> bool:
        """Tell whether others see to a hang that goes on, so that this process need not end."""
        return False

    def gives_up_update(self) -> bool:
        """Tell whether to wait no longer for an update that stands still: a peer may finish it."""
        return False

    # ---- inside ------------------------------------------------------------------------------

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

    def _open_last_step(
        self,
        early: bool,
        on_training_thread: bool,
        forward_until_s: float,
        pre_update: PreUpdateState | None,
    ) -> tuple[int, InflightSnapshot | None]:
        checkpointer, pipeline = self.checkpointer, self.checkpointer.pipeline
        if not checkpointer.enabled:
            raise LightckError("the handle is closed")
        checkpointer.poll()
        if pipeline.window is not None and (pre_update is None or not self._copies_wait()):
            # In any case: the fence of an update comes before it changes anything.
            with checkpointer.outcomes.reported():
                checkpointer.outcomes.fence(aside=not on_training_thread)
        step = checkpointer.steps.step if pre_update is None else pre_update.step
        for snapshot in pipeline.in_flight:
            if snapshot.step == step and early <= bool(snapshot.flags & RECORD_EARLY):
                return step, snapshot
        if self._has_snapshot(step, early):
            return step, None
        self._require_saveable(step, pre_update)
        room = pipeline.region.has_room(due=False) or (early and self._replaceable_slots(step))
        if pipeline.blocked_by is not None or not room:
            raise RetryLater("no slot became free", WaitFor.SLOT)
        if pre_update is not None:
            return step, self._open_pre_update(pre_update, early)
        if checkpointer.inside:
            return step, self._open_after_forward(early)
        if time.monotonic() < forward_until_s:
            raise RetryLater(f"step {step} has not come to its boundary", WaitFor.TRAINING)
        return step, self._open_before_forward(on_training_thread)

    def _copies_wait(self) -> bool:
        """Tell whether copies from devices wait for a device that hangs."""
        return self.checkpointer.pipeline.offload.engine.is_waiting

    def _has_snapshot(self, step: int, early: bool) -> bool:
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

    def _require_saveable(self, step: int, pre_update: PreUpdateState | None) -> None:
        checkpointer, journal = self.checkpointer, self.checkpointer.step_journal
        assert journal is not None, "not armed"
        if step == 0:
            raise LightckError("no step is complete yet")
        if pre_update is not None:
            if self._copies_wait():
                why = "copies of a later step wait for it"
                raise RetryLater(
                    f"step {step} is what a device has that hangs, and {why}", WaitFor.DEVICE
                )
            return
        if not checkpointer.steps.settled:
            raise LightckError(f"at step {step} the optimizers are not all known yet")
        if checkpointer.steps.gave_up(checkpointer.thread):
            raise LightckError(f"the update after step {step} was given up half done")
        if checkpointer.mixed or journal.step != step:
            raise RetryLater(f"the update after step {step} is half done", WaitFor.TRAINING)
        if journal.step_end is None and journal.forward_start is None:
            lost = journal.last_error or "the state was replaced inside an iteration"
            raise LightckError(f"step {step} has no boundary state: {lost}")

    def _open_after_forward(self, early: bool) -> InflightSnapshot:
        """Open a snapshot after the next forward has begun, of the state when it began."""
        journal = self.checkpointer.step_journal
        assert journal is not None
        instant = journal.as_of_boundary(early=early)
        changed = partial(journal.changed_weight, early=instant.early)
        return self._open_kept(self.checkpointer.steps.step, instant, changed)

    def _open_pre_update(self, pre_update: PreUpdateState, early: bool) -> InflightSnapshot:
        """Open a snapshot of the state before an update that devices have not made.

        Training has queued that update, or is about to.

        Raises:
            RetryLater: the state has changed.
        """
        if name := pre_update.changed_tensor():  # it stays so: nothing is copied for that
            why = f"step {pre_update.step}, which a device has: {name} is not what it was"
            raise RetryLater(why, WaitFor.DEVICE)
        instant = pre_update.as_of_boundary(early=early)
        with self.checkpointer.pipeline.offload.as_of(pre_update.forward_positions):
            return self._open_kept(pre_update.step, instant, pre_update.changed_tensor)

    def _open_kept(
        self, step: int, instant: BoundaryCapture, changed: Callable[[], str]
    ) -> InflightSnapshot:
        """Open a snapshot of an instant that the journal has kept, and make its copies."""
        trees = instant.step_end_values, instant.forward_values
        blobs = self.checkpointer.boundary_state.encode_trees(*trees)
        return self._finish_copies(
            self._open(step, instant.collected, blobs, instant.flags, changed)
        )

    def _open_before_forward(self, on_training_thread: bool) -> InflightSnapshot:
        """Open a snapshot before forward start.

        Another thread reads the state twice, as the loop may change it.

        Raises:
            RetryLater: the loop changes the state, or other tensors stand in for the weights.
        """
        journal, step = self.checkpointer.step_journal, self.checkpointer.steps.step
        assert journal is not None
        changed = partial(journal.changed_weight, early=True)
        state, blobs = self._state_before_forward()
        versions, name = _versions(state), changed()
        if name:
            why = f"{name} is not what it was when step {step} ended: its snapshot has to wait for"
            raise RetryLater(f"{why} the next forward", WaitFor.TRAINING)
        snapshot = self._open(step, state, blobs, RECORD_EARLY, changed)
        try:
            is_moving = False
            if not on_training_thread:
                again = self._state_before_forward()
                is_moving = _versions(again[0]) != versions or again[1] != blobs
        except BaseException:
            self.checkpointer.pipeline.drop("the state cannot be taken")
            raise
        if is_moving:
            self.checkpointer.pipeline.drop("the loop has changed something meanwhile")
            raise RetryLater("the loop kept changing the state", WaitFor.TRAINING)
        return self._finish_copies(snapshot)

    def _replaceable_slots(self, step: int) -> list[Slot]:
        """Return the slots of this rank's snapshots of the step that no other rank counts on.

        If the early instant is wanted, some rank has no exact snapshot and can have none: exact
        ones count nowhere, and the early one may replace one of them.
        """
        region = self.checkpointer.pipeline.region
        held = [(slot, slot.record) for slot in region.slots if slot.kept and slot.record]
        return [slot for slot, r in held if (r.timeline, r.step) == (region.timeline, step)]

    def _state_before_forward(self) -> tuple[CollectedState, tuple[bytes, bytes]]:
        """Return the state between step end and forward start, and its blobs.

        With one rank it is the live state. With several ranks, values and buffers are those of step
        end: a killed rank leaves only these, and a rank which has gone on to the forward has them,
        too. The loop's work between step end and forward start is then to be done on every rank.
        """
        checkpointer = self.checkpointer
        boundary_state, journal = checkpointer.boundary_state, checkpointer.step_journal
        if checkpointer.forward_unseen and journal is not None and journal.step_end is not None:
            boundary_state.forward_missed(journal.step_end.copies)  # the forward may have begun
        collected = boundary_state.collect()
        step_end = journal.step_end if journal is not None else None
        alone = checkpointer.pipeline.barrier.alone
        if alone or step_end is None or step_end.copies is None:
            return collected, boundary_state.encode(collected, checkpointer.steps.step, seen=False)
        blobs = boundary_state.encode_trees(step_end.step_end_values, step_end.forward_values)
        return with_copies(collected, step_end.kept_copies), blobs

    def _open(
        self,
        step: int,
        state: CollectedState,
        blobs: tuple[bytes, bytes],
        flags: int,
        changed: Callable[[], str],
    ) -> InflightSnapshot:
        pipeline = self.checkpointer.pipeline
        if not pipeline.region.has_room(due=False):
            for slot in self._replaceable_slots(step):
                pipeline.region.mark_aborted(slot)
        with pipeline.pacing:
            flags |= RECORD_JIT
            snapshot = pipeline.open(step, state, *blobs, flags=flags, changed=changed)
        if isinstance(snapshot, str):
            raise RetryLater(f"step {step} has no snapshot: {snapshot}", WaitFor.SLOT)
        return snapshot

    def _finish_copies(self, snapshot: InflightSnapshot) -> InflightSnapshot:
        """Return the inflight snapshot with all of its copies made.

        Raises:
            RetryLater: the loop has changed something meanwhile; it may succeed the next time.
        """
        if not self.checkpointer.pipeline.fence(None):
            first, more = snapshot.torn[0], len(snapshot.torn) - 1
            names = f"{first} and {more} more" if more else first
            why = f"step {snapshot.step}: {names} changed while it was copied"
            raise RetryLater(why, WaitFor.TRAINING)
        return snapshot

    # ---- commit ----------------------------------------------------------------------------

    def _await_commit(self, snapshot: InflightSnapshot, deadline: float) -> bool:
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
            self._await_commit(snapshot, deadline)


def _versions(collected: CollectedState) -> list[tuple[str, int]]:
    names = [live.name for live in collected.lives]
    return list(zip(names, versions_of([live.tensor for live in collected.lives]), strict=True))
