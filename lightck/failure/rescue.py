"""A snapshot of the last complete step, just in time: on any thread, wherever the training is.

Everything is done under the recorder's lock. The forward hook takes it at forward start, and an
update begins with the fence, which takes it: while it is held, and no update has begun, parameters
are those of the last complete step. Before forward start everything is still live, and the snapshot
is `early`: it is not made while others stand in for the weights (`capture/weights.py`).
After forward start what a forward changes comes from what was kept then (`capture/journaled.py`).
Inside an update the state is mixed: another thread waits for its end, the training thread cannot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from lightck.capture.arrange import versions_of
from lightck.capture.behind import Before
from lightck.capture.flight import Flight
from lightck.capture.instants import holding
from lightck.capture.recorder import Recorder
from lightck.capture.state import Collected
from lightck.errors import LightckError
from lightck.failure.hang import HangWatch
from lightck.failure.standing import Later, Standing, Waits
from lightck.region.native import RECORD_EARLY, RECORD_JIT, Record
from lightck.region.slot import Slot
from lightck.types import Saved

POLL_S = 0.002
PATIENCE_S = 1.0
"""How long another thread waits for forward start, where a snapshot is exact, before it takes an
early one; a quarter of the time that there is at most."""
FATES_S = 3.0
"""How long it waits for a slot while nothing is written: with a dead rank no open fate may ever be
settled."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the training loop is, as its hooks have it.

    Attributes:
        step: the last complete step.
        updating: inside an update, or between those of several optimizers.
        inside: the next iteration's forward has begun.
        ticks: moves with every hook.
        step_s: seconds of the last step; None: not known yet.
        thread: the training thread.
    """

    step: int
    updating: bool
    inside: bool
    ticks: int
    step_s: float | None
    thread: int


@dataclass(eq=False)
class Rescue:
    """Saves the last complete step of one handle. Any thread."""

    recorder: Recorder
    leaving: bool = False
    """The training thread closes the handle: what it has to go on for does not come any more."""
    hang: HangWatch | None = None
    """Looks at the training thread."""
    _pid: int = field(default_factory=os.getpid)

    @property
    def last_step(self) -> int:
        """The last complete step: where devices hang, the one that they have."""
        behind = self.recorder.behind
        taken = behind.taken if behind is not None else None
        return self.recorder.steps.step if taken is None else taken.step

    def progress(self) -> Progress:
        """Where training is; takes no lock."""
        recorder = self.recorder
        return Progress(
            recorder.steps.step,
            recorder.mixed,
            recorder.inside,
            recorder.ticks,
            recorder.cadence.step_s,
            recorder.thread,
        )

    def hold(self, until: float | None) -> None:
        """Let training go no further than it must, until then; None: let it go on. Any thread."""
        if until is None:
            self.recorder.hold.end()
        else:
            self.recorder.hold.begin(until, at_fence=self.recorder.pipeline.barrier.alone)

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        """Commit the last complete step, unless it is; returns at the deadline at the latest.

        What is captured or committed is not copied again, so that any number of triggers may come
        for one step. A snapshot that persists already is finished first, and kept.

        Args:
            reason: for `Saved`.
            deadline: of `time.monotonic`; what is sealed goes on beyond it.
            early: as of the step's end, even if the next forward has begun.

        Never raises for what can go wrong: `Saved.why` says it.
        """
        began, why, asked = time.monotonic(), "", self.recorder.steps.step
        try:
            if os.getpid() != self._pid:
                raise LightckError("a forked child must not write")
            step, flight = self._captured(deadline, early)
            asked = min(asked, step)
            if flight is not None and not self._durable(flight, deadline):
                why = f"step {flight.step} was not committed by the deadline"
        except LightckError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - user's code: state_dict, on_error
            why = f"the state cannot be taken: {error!r}"
        return self._saved(reason, why, began, asked)

    def _saved(self, reason: str, why: str, began: float, asked: int) -> Saved:
        """In the words of what is there now."""
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
        """The newest record that is committed on this rank and counts."""
        records = [slot.record for slot in self.recorder.pipeline.region.slots if slot.record]
        return max(records, key=lambda record: record.sequence, default=None)

    # ---- capture ---------------------------------------------------------------------------

    def _captured(self, deadline: float, early: bool) -> tuple[int, Flight | None]:
        """The last complete step, and its flight, sealed; None if it is committed already.

        Raises:
            LightckError: it cannot be saved, and why.
        """
        here = threading.get_ident() == self.recorder.thread
        began, left = time.monotonic(), deadline - time.monotonic()
        patience = began + (0.0 if here else min(PATIENCE_S, left / 4))
        standing = Standing(self.recorder, began + left / 2)
        while True:
            hangs = self.hang is not None and self.hang.has_stood(self.progress())
            # Before the try: what the thread did until then counts.
            leaving, stuck = self.leaving, self.recorder.mixed and self.is_stuck()
            try:
                with self._locked(deadline):
                    before = standing.before(hangs=hangs)
                    found = self._try(early, here, 0.0 if leaving else patience, before)
                    standing.take(before)
                    return found
            except Later as later:
                training = later.waits is Waits.TRAINING
                idle = later.waits is Waits.SLOT and not self.recorder.pipeline.persisting
                gone = training and (here or leaving or stuck)
                gone = gone or (idle and time.monotonic() > began + FATES_S)
                if gone or time.monotonic() >= deadline:
                    self._finish_others(deadline)
                    why = ", and the training stands still" if stuck and training else ""
                    raise LightckError(f"{later}{why}") from None
            time.sleep(POLL_S)

    def is_stuck(self) -> bool:
        """The end of an update is not waited for: it stands still, and others may go on for it."""
        return False

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        lock = self.recorder.lock
        # A signal's handler, or `on_error`, inside of what the lock guards: half done.
        if lock._is_owned():  # type: ignore[attr-defined]
            raise LightckError("it was asked for inside lightck itself, which is half done")
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LightckError("another thread was busy with a snapshot until the deadline")
        try:
            yield
        finally:
            lock.release()

    def _try(
        self, early: bool, here: bool, patience: float, before: Before | None
    ) -> tuple[int, Flight | None]:
        recorder, pipeline = self.recorder, self.recorder.pipeline
        if not recorder.enabled:
            raise LightckError("the handle is closed")
        recorder.poll()
        if pipeline.window is not None and (before is None or not self._waits()):
            # Whatever has begun: the fence of an update comes before it changes anything.
            with recorder.outcomes.reported():
                pipeline.fence(None, aside=not here)
        step = recorder.steps.step if before is None else before.step
        for flight in pipeline.in_flight:
            if flight.step == step and early <= bool(flight.flags & RECORD_EARLY):
                return step, flight
        if self._holds(step, early):
            return step, None
        self._check(step, before)
        room = pipeline.region.has_room(due=False) or (early and self._exact(step))
        if pipeline.taken_up is not None or not room:
            raise Later("no slot became free", Waits.SLOT)
        if before is not None:
            return step, self._open_before(before, early)
        if recorder.inside:
            return step, self._open_late(early)
        if time.monotonic() < patience:
            raise Later(f"step {step} has not come to its boundary", Waits.TRAINING)
        return step, self._open_early(here)

    def _waits(self) -> bool:
        """What copies from devices waits for one that hangs, if any does."""
        return self.recorder.pipeline.offload.transfers.waits

    def _holds(self, step: int, early: bool) -> bool:
        """The step is committed: since attach, or it is the one that was restored.

        `early`: an exact snapshot does not do.
        """
        region, began = self.recorder.pipeline.region, self.recorder.cadence.began
        restored = region.continued
        if not began and restored is not None and restored.step == step:
            return True
        records = [slot.record for slot in region.slots if slot.record is not None]
        alike = (r for r in records if r.step == step and r.timeline == region.timeline)
        return any(early <= record.early for record in alike)

    def _check(self, step: int, before: Before | None) -> None:
        recorder, kept = self.recorder, self.recorder.journaled
        assert kept is not None, "not armed"
        if step == 0:
            raise LightckError("no step is complete yet")
        if before is not None:
            if self._waits():
                why = "copies of a later step wait for it"
                raise Later(f"step {step} is what a device has that hangs, and {why}", Waits.DEVICE)
            return
        if not recorder.settled:
            raise LightckError(f"at step {step} the optimizers are not all known yet")
        if recorder.steps.gave_up(recorder.thread):
            raise LightckError(f"the update after step {step} was given up half done")
        if recorder.mixed or kept.step != step:
            raise Later(f"the update after step {step} is half done", Waits.TRAINING)
        if kept.ended is None and kept.begun is None:
            told = kept.unwritten or "the state was replaced inside an iteration"
            raise LightckError(f"step {step} has no boundary state: {told}")

    def _open_late(self, early: bool) -> Flight:
        """The next forward has begun: as it was when that did."""
        kept = self.recorder.journaled
        assert kept is not None
        instant = kept.late(early=early)
        blobs = self.recorder.instants.encoded(instant.first, instant.second)
        moved = partial(kept.moved, early=instant.early)
        step, state = self.recorder.steps.step, instant.collected
        return self._sealed(self._opened(step, state, blobs, instant.flags, moved))

    def _open_before(self, before: Before, early: bool) -> Flight:
        """Devices have not made the update that training has queued, or is about to."""
        if moved := before.moved():  # as it will be afterwards: nothing is copied for that
            why = f"step {before.step}, which a device has: {moved} is not what it was"
            raise Later(why, Waits.DEVICE)
        instant = before.instant(early=early)
        blobs = self.recorder.instants.encoded(instant.first, instant.second)
        with self.recorder.pipeline.offload.back_at(before.standing):
            flight = self._opened(
                before.step, instant.collected, blobs, instant.flags, before.moved
            )
            return self._sealed(flight)

    def _open_early(self, here: bool) -> Flight:
        """Open a snapshot before forward start; another thread looks twice, as the loop may write.

        Raises:
            Later: it changes something, or others stand in for the weights.
        """
        kept, step = self.recorder.journaled, self.recorder.steps.step
        assert kept is not None
        moved = partial(kept.moved, early=True)
        state, blobs = self._before_forward()
        versions, name = _versions(state), moved()
        if name:
            why = f"{name} is not what it was when step {step} ended: its snapshot has to wait for"
            raise Later(f"{why} the next forward", Waits.TRAINING)
        flight = self._opened(step, state, blobs, RECORD_EARLY, moved)
        try:
            again, said = (state, blobs) if here else self._before_forward()
            changed = not here and (_versions(again) != versions or said != blobs)
        except BaseException:
            self.recorder.pipeline.drop("the state cannot be taken")
            raise
        if changed:
            self.recorder.pipeline.drop("the loop has changed something meanwhile")
            raise Later("the loop kept changing the state", Waits.TRAINING)
        return self._sealed(flight)

    def _exact(self, step: int) -> list[Slot]:
        """This rank's snapshots of the step for which no other rank was asked.

        Where the early instant is wanted, some rank has no exact one and can have none: these count
        nowhere, and the early one may take the place of one.
        """
        region = self.recorder.pipeline.region
        held = [(slot, slot.record) for slot in region.slots if slot.kept and slot.record]
        return [slot for slot, r in held if (r.timeline, r.step) == (region.timeline, step)]

    def _before_forward(self) -> tuple[Collected, tuple[bytes, bytes]]:
        """Return the state between step end and forward start, and its blobs.

        One rank's is as everything stands. Of several ranks values and buffers are those of step
        end: that is all that a killed one leaves, and a rank which has gone on to the forward has
        them, too. The loop's work between step end and forward start is then to be done on every
        rank.
        """
        recorder = self.recorder
        instants, kept = recorder.instants, recorder.journaled
        if recorder.forward_unseen and kept is not None and kept.ended is not None:
            instants.forward_missed(kept.ended.copies)  # it may have begun
        collected = instants.collect()
        ended = kept.ended if kept is not None and not recorder.pipeline.barrier.alone else None
        if ended is None or ended.copies is None:
            return collected, instants.encode(collected, recorder.steps.step, seen=False)
        return holding(collected, ended.copies), instants.encoded(ended.first, ended.second)

    def _opened(
        self,
        step: int,
        state: Collected,
        blobs: tuple[bytes, bytes],
        flags: int,
        moved: Callable[[], str],
    ) -> Flight:
        pipeline = self.recorder.pipeline
        if not pipeline.region.has_room(due=False):
            for slot in self._exact(step):
                pipeline.region.dead(slot)
        with pipeline.pacing:
            flight = pipeline.open(step, state, *blobs, flags=flags | RECORD_JIT)
        if isinstance(flight, str):
            raise Later(f"step {step} has no snapshot: {flight}", Waits.SLOT)
        flight.moved = moved
        return flight

    def _sealed(self, flight: Flight) -> Flight:
        """All of it is copied.

        Raises:
            Later: the loop has changed something meanwhile; it may be whole the next time.
        """
        if not self.recorder.pipeline.fence(None):
            first, more = flight.torn[0], len(flight.torn) - 1
            names = f"{first} and {more} more" if more else first
            why = f"step {flight.step}: {names} changed while it was copied"
            raise Later(why, Waits.TRAINING)
        return flight

    # ---- commit ----------------------------------------------------------------------------

    def _durable(self, flight: Flight, deadline: float) -> bool:
        """Wait for a sealed flight's commit on this rank.

        Raises:
            LightckError: it failed.
        """
        pipeline = self.recorder.pipeline
        while not flight.durable_s:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._locked(deadline):
                self.recorder.poll()
                if not flight.durable_s and flight not in pipeline.persisting:
                    raise LightckError(f"step {flight.step} could not be written")
            time.sleep(min(POLL_S, left))  # the training thread may want the lock
        return True

    def _finish_others(self, deadline: float) -> None:
        """What is sealed is kept: the newest is what a restart will find."""
        for flight in [*self.recorder.pipeline.persisting]:
            self._durable(flight, deadline)


def _versions(collected: Collected) -> list[tuple[str, int]]:
    names = [live.name for live in collected.lives]
    return list(zip(names, versions_of([live.tensor for live in collected.lives]), strict=True))
