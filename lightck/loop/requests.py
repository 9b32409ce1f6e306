"""Serves what the handle asks for: a snapshot now, the last one, a wait, other state."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from lightck.errors import (
    ConfigError,
    CoordinationError,
    DivergenceError,
    LightckError,
    PersistError,
    RegionBusyError,
    TornSnapshotError,
    WaitTimeoutError,
)
from lightck.events import event
from lightck.history.history import HELD_S
from lightck.journal.step_journal import BoundaryCapture
from lightck.loop.checkpointer import Checkpointer
from lightck.pipeline.pipeline import SlipReason
from lightck.region.native_region import RECORD_EARLY

FATE_S = 10.0
"""Seconds that a requested snapshot waits at most for other ranks to settle an older one."""
POLL_S = 0.002
LEAST_S = 2.0
"""Seconds that ranks wait for each other at their close, however little time the medium has
left."""
FATES_S = 600.0
"""Seconds: twice as long as a rank waits for the others before it claims a step dead (aborted)."""


class Requests:
    """Serves the handle's calls. Used by the training thread."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        """Prepare to serve what concerns this loop."""
        self.checkpointer = checkpointer
        self.pipeline, self.outcomes = checkpointer.pipeline, checkpointer.outcomes
        self.steps, self.due_check = checkpointer.steps, checkpointer.due_check

    def open_now(self) -> None:
        """Declare forward start reached and copy the state of the last complete step at once.

        The generators are taken as they are: what is drawn next comes after the snapshot. Waits for
        a slot if every one is persisting, and for other ranks' commits `FATE_S` at most: the caller
        asked for it. Where readers hold every slot that is free, those who asked get an error.
        """
        with self.checkpointer.stall_timer.of("request"), self.pipeline.lock:
            with self.outcomes.reported():
                self.outcomes.fence()
            if not self.pipeline.barrier.request(self.steps.step):
                self.outcomes.join_wanted(self.steps.step)
                return
            self._await_slot()
            self.checkpointer.boundary_state.forward_starts_here()
            self.checkpointer.open(seen=False, synchronous=True)
            if self.outcomes.slipped_step == self.steps.step:
                self.outcomes.fail_pending_futures(
                    RegionBusyError(
                        f"step {self.steps.step} has no snapshot: {self.outcomes.slip}; what"
                        " lightck.load gave holds its slot: let go of it, or attach with more slots"
                    )
                )

    def report(self, metrics: Mapping[str, float]) -> None:
        """Give policy and history metrics of the last complete step; take a snapshot if wanted."""
        step, history = self.steps.step, self.outcomes.history
        best = self.due_check.reported(metrics)
        keeps = history is not None and history.report(step, metrics)
        if not (best or keeps):
            return
        with self.checkpointer.stall_timer.of("request"), self.pipeline.lock:
            self.outcomes.poll()
            window = self.pipeline.window
            on_its_way = [*self.pipeline.in_flight, *([window] if window is not None else [])]
            has_one = any(snapshot.step == step for snapshot in on_its_way)
            if has_one or self.pipeline.counters.last_committed_step == step:
                self.due_check.made_due()
                return
            if self.checkpointer.make_due():
                self.due_check.made_due()
                self._await_slot()
                return
        if history is None or not keeps:
            return  # the policy is asked again as the next step ends
        why = (
            "it has no snapshot, and its state cannot be taken any more: call report before the"
            " next forward begins"
        )
        history.missed(step, why)

    def _await_slot(self) -> None:
        if self.outcomes.history is not None:
            self.outcomes.history.slot_needed(HELD_S)
        if self.pipeline.busy:
            self.outcomes.poll(None)
            self.pipeline.await_abandoned()
            self.pipeline.await_fates(FATE_S)
            self.outcomes.poll()

    def _has_missed(self) -> bool:
        """Tell whether the last complete step is due, but has no open snapshot.

        One may be taken now: its next forward is still to come, or no slot was free there; the
        latter counts for a single rank only, since over several ranks such a step is aborted.
        """
        slipped = self.outcomes.slipped_step == self.steps.step
        return self.checkpointer.due or (slipped and self.pipeline.barrier.alone)

    def _open_missed(self) -> str:
        """Take the due snapshot of the last step now, marked early if its next forward is to come.

        Returns why it cannot be taken; empty if it is taken.
        """
        why = self._not_whole()
        if why:
            return why
        kept, flags = None, RECORD_EARLY
        if self.checkpointer.inside:
            try:
                kept, flags = self._begun_step()
            except TornSnapshotError as error:
                return str(error)
        self.outcomes.forget_slip()
        self.due_check.skipped(made_up=False)
        with self.checkpointer.stall_timer.of("request"):
            self.checkpointer.open(kept, flags=flags, seen=False, synchronous=True)
        return f"{self.outcomes.slip}" if self.outcomes.slipped_step == self.steps.step else ""

    def finish_last_step(self) -> None:
        """Give the last complete step an exact snapshot, due or not, if it can have one."""
        self.checkpointer.finish_window()
        self.pipeline.barrier.begin_close()
        self.pipeline.region.use_reserved_slots()  # the last step of all: no newer one can fail
        counters, step = self.pipeline.counters, self.steps.step
        if not self.due_check.moved or counters.last_exact_step == step:
            return
        captured, slipped = counters.last_captured_step == step, counters.slipped
        why = self._not_whole()
        if not why and not self.checkpointer.inside:
            self.open_now()
        elif not why:
            try:
                kept, flags = self._begun_step()
                if not (captured and flags & RECORD_EARLY):  # else the early one is there
                    self._await_slot()
                    self.checkpointer.open(kept, flags=flags, seen=False, synchronous=True)
            except TornSnapshotError as error:
                why = str(error)
        if why and not captured:
            self.outcomes.last_step_lost(why)
            event("skipped", step=step, why=why)
        if counters.slipped > slipped:
            slip = self.outcomes.slip
            ask = " (is a reader holding one?)" if slip is SlipReason.SLOTS else ""
            has = "only an early" if captured else "no"
            text = f"step {step}, the last one, has {has} snapshot: {slip}{ask}"
            self.outcomes.reporter(RegionBusyError(text))

    def _not_whole(self) -> str:
        """Say why the last complete step cannot be copied any more; empty if it can."""
        if self.checkpointer.mixed:
            return "an update is half done"
        if self.checkpointer.boundary_state.step != self.steps.step:
            # An interrupt came before they were, or the state was replaced inside an iteration.
            return "its position and generators were not taken"
        return ""

    def _begun_step(self) -> tuple[BoundaryCapture | None, int]:
        """Return what is kept of the last step, whose next forward has begun, and record flags.

        None: the live state serves, for no forward has changed anything of it yet.

        Raises:
            TornSnapshotError: a forward has changed it, and nothing is kept.
        """
        kept = self.checkpointer.step_journal
        if kept is None:
            now = [buffer._version for buffer in self.checkpointer.inventory.buffers(anew=True)]
            if (self.checkpointer.buffers or []) != now:
                raise TornSnapshotError("a forward has changed the buffers")
            return None, RECORD_EARLY
        try:
            instant = kept.as_of_boundary()
        except TornSnapshotError:
            if not kept.is_unchanged():
                raise
            return None, RECORD_EARLY
        return instant, instant.flags

    # ---- waits, on the training thread, for commits and outcomes over all ranks ---------------

    def _drain(self, step: int | None, deadline: float | None) -> bool:
        """Poll until nothing is open, or one of `step` or newer is committed.

        False at the deadline. Without one the medium is waited for as long as it takes, other ranks
        for `FATES_S` at most: their store may be gone for good.
        """
        self.outcomes.poll()
        pipeline, fates_due = self.pipeline, time.monotonic() + FATES_S
        while self.pipeline.in_flight and not (step is not None and self._reached(step)):
            now = time.monotonic()
            if pipeline.persisting:
                fates_due = now + FATES_S
            left = min(POLL_S, (deadline or fates_due) - now, fates_due - now)
            if left <= 0:
                return False
            self.outcomes.poll(left)
            pipeline.await_fates(left)
            self.outcomes.poll()
        return True

    def drain_for_close(self, deadline: float) -> None:
        """Wait for whatever is sealed, as it cannot be given up: after the deadline only warn."""
        self.outcomes.poll()
        pipeline, told = self.pipeline, False
        while pipeline.persisting:
            if time.monotonic() >= deadline and not told:
                told, steps = True, [snapshot.step for snapshot in pipeline.persisting]
                event(
                    "closing_late",
                    logging.WARNING,
                    steps=steps,
                    why="the medium has not synced yet",
                )
            self.outcomes.poll(POLL_S)

    def settle_for_close(self, deadline: float, *, last_step: bool) -> None:
        """Leave the other ranks: agree on the last step, or say that there is none; bounded."""
        pipeline, outcomes = self.pipeline, self.outcomes
        seconds = max(deadline - time.monotonic(), LEAST_S)
        if not last_step:
            pipeline.barrier.leave("detached", seconds)
            self.outcomes.poll()
            for trouble in pipeline.barrier.troubles():  # that others leave, too, is none now
                if isinstance(trouble, DivergenceError):
                    outcomes.reporter(trouble)
            return
        held = pipeline.newest.step if pipeline.newest is not None else None
        last = self.steps.step if held == self.steps.step else None
        why = "" if last is not None or not self.due_check.moved else outcomes.why_not_last
        try:
            if pipeline.barrier.close(last, why, seconds) is not None:
                if (counted := pipeline.count_last()) is not None:
                    outcomes.keep(counted)
        except CoordinationError as error:
            outcomes.reporter(error)
        finally:
            self.outcomes.poll()
            outcomes.tell_troubles()

    def give_up_for_close(self) -> None:
        """Leave without a word to the other ranks: another process goes on in this one's place."""
        self.pipeline.barrier.give_up()
        self.outcomes.poll()

    def wait(self, step: int | None, timeout: float | None) -> None:
        """Wait for a commit as `handle.wait` promises."""
        pipeline, counters = self.pipeline, self.pipeline.counters
        lost = counters.failed + counters.torn + counters.dead
        deadline = None if timeout is None else time.monotonic() + timeout
        self.checkpointer.finish_window()
        ready, missed = True, ""
        if step is not None and not any(each.step >= step for each in self.pipeline.in_flight):
            last = self.steps.step >= step and not self._reached(step)
            if last and self._has_missed():
                # Its slot may be busy.
                ready = self._drain(step, deadline) and pipeline.await_abandoned(deadline)
                missed = self._open_missed() if ready else ""
        if not (ready and self._drain(step, deadline)):
            waiting = [snapshot.step for snapshot in self.pipeline.in_flight]
            raise WaitTimeoutError(f"not committed after {timeout} s: steps {waiting}")
        self.outcomes.reporter.surface()
        if step is None or self._reached(step):
            return
        newest = counters.last_committed_step
        if counters.failed + counters.torn + counters.dead > lost:
            why = self.outcomes.reporter.latest or f"step {step}: {pipeline.barrier.why_dead(step)}"
            raise PersistError(
                f"no snapshot of step {step} or newer was committed, the last one is {newest}:"
                f" {why}"
            ) from self.outcomes.reporter.latest
        why = f" ({missed})" if missed else ""
        raise WaitTimeoutError(
            f"no snapshot of step {step} or newer is open{why}; the last committed one is {newest}"
        )

    def _reached(self, step: int) -> bool:
        last = self.pipeline.counters.last_committed_step
        return last is not None and last >= step

    # ---- a state that was replaced from outside: no half of two states is ever captured --------

    def replaced(self, step: int) -> None:
        """Go on from `step`: what is open is given up, what is sealed is committed.

        If a snapshot of `step` or newer has been opened since attach, a new timeline begins, so
        that snapshots of the two are never confused; this may block on the medium. The snapshot
        that was committed last is kept until a newer one is.

        Raises:
            ConfigError: `step` is no number of steps.
            LightckError: an update is half done; or several ranks would go back.
        """
        if type(step) is not int or step < 0:
            raise ConfigError(f"replaced({step!r}): expected the number of a step, 0 or more")
        with self.checkpointer.stall_timer.of("request"), self.pipeline.lock:
            if self.checkpointer.mixed:
                raise LightckError(
                    f"replaced({step}): the update after step {self.steps.step} is half done;"
                    " replace the state before the first optimizer steps, or when the last one has"
                )
            pipeline, counters, was = self.pipeline, self.pipeline.counters, self.steps.step
            newest = -1 if counters.last_captured_step is None else counters.last_captured_step
            if pipeline.window is not None:
                newest = max(newest, pipeline.window.step)
            pipeline.forget(f"the state was replaced by that of step {step}")
            if self.checkpointer.due:
                pipeline.barrier.lost(was, "the state was replaced")
            if not pipeline.barrier.alone and step <= max(newest, was - 1):
                self.checkpointer.forget()
                raise LightckError(
                    f"replaced({step}): several ranks are at step {max(newest, was)}, and can only"
                    " go ahead, for what they have of that step must never go together with what"
                    " they will have: detach, restore(step=...) and attach again"
                )
            if step <= newest:
                self._branch_timeline()
                if self.outcomes.history is not None:
                    self.outcomes.history.went_back(step)
            self.checkpointer.go_on_from(step)
        event("replaced", logging.INFO, step=step, was=was)

    def _branch_timeline(self) -> None:
        """Begin a timeline that continues the newest snapshot that is committed."""
        self._drain(None, None)
        self.pipeline.await_abandoned()
        self.pipeline.begin_timeline()
