"""Serve what the loop, or its end, asks of a recorder: a snapshot now, early, or the last one."""

from __future__ import annotations

import sys
import threading

from lightck.errors import CoordinationError, RegionBusyError, TornSnapshotError
from lightck.events import event
from lightck.journal.kept import Instant
from lightck.loop.checkpointer import Recorder
from lightck.pipeline.inflight import Slip
from lightck.region.native_region import RECORD_EARLY

FATE_S = 10.0
"""Seconds that a requested snapshot waits at most for other ranks to settle an older one."""


def open_now(recorder: Recorder) -> None:
    """Declare forward start reached and copy the state of the last complete step at once.

    The generators are taken as they are: what is drawn next comes after the snapshot.
    Waits for a slot if every one is persisting, and for other ranks' commits `FATE_S` at most: the
    caller asked for it.
    """
    with recorder.stalls.of("request"), recorder.lock:
        if recorder.pipeline.window is not None:
            with recorder.outcomes.reported():
                recorder.pipeline.fence(None)
        if not recorder.pipeline.barrier.request(recorder.steps.step):
            _join(recorder, recorder.steps.step)
            return
        _await_slot(recorder)
        recorder.instants.generators_stand()
        recorder.open(seen=False, synchronous=True)


def _await_slot(recorder: Recorder) -> None:
    if recorder.pipeline.busy:
        recorder.poll(None)
        recorder.pipeline.await_abandoned()
        recorder.pipeline.await_fates(FATE_S)
        recorder.poll()


def _join(recorder: Recorder, step: int) -> None:
    """Let those who wait for a snapshot of the step wait for the one that there is.

    Several ranks take one snapshot of a step at most.
    """
    pipeline, outcomes = recorder.pipeline, recorder.outcomes
    for flight in [*pipeline.persisting, *pipeline.awaiting]:
        if flight.step == step:
            flight.futures += outcomes.wanted
            outcomes.wanted = []
    if pipeline.counters.last_committed_step == step:
        for future in outcomes.wanted:
            future.set_result(step)
        outcomes.wanted = []
    outcomes.fail_wanted(CoordinationError(f"step {step} has lost its snapshot already"))


def has_missed(recorder: Recorder) -> bool:
    """Tell whether the last complete step is due, but has no open snapshot: one may be taken now.

    Its next forward is still to come, or no slot was free there; the latter counts for a single
    rank only, since over several ranks such a step is aborted.
    """
    slipped = recorder.outcomes.slipped_step == recorder.steps.step
    return recorder.due or (slipped and recorder.pipeline.barrier.alone)


def open_missed(recorder: Recorder) -> str:
    """Take the due snapshot of the last step now, marked early if its next forward is to come.

    Returns why it cannot be taken; empty if it is taken.
    """
    outcomes, cadence = recorder.outcomes, recorder.cadence
    why = _not_whole(recorder)
    if why:
        return why
    kept, flags = None, RECORD_EARLY
    if recorder.inside:
        try:
            kept, flags = _begun_step(recorder)
        except TornSnapshotError as error:
            return str(error)
    outcomes.slipped_step, cadence.overdue = -1, False
    with recorder.stalls.of("request"):
        recorder.open(kept, flags=flags, seen=False, synchronous=True)
    return f"{outcomes.slip}" if outcomes.slipped_step == recorder.steps.step else ""


def finish_last_step(recorder: Recorder) -> None:
    """Make sure the last complete step has an exact snapshot, due or not, if it can have one."""
    recorder.finish_window()
    recorder.pipeline.barrier.begin_close()
    recorder.pipeline.region.spare = 0  # the last step of all: no newer one can fail
    counters, step = recorder.pipeline.counters, recorder.steps.step
    if not recorder.cadence.moved or counters.last_exact_step == step:
        return
    captured, slipped = counters.last_captured_step == step, counters.slipped
    why = _not_whole(recorder)
    if not why and not recorder.inside:
        open_now(recorder)
    elif not why:
        try:
            kept, flags = _begun_step(recorder)
            if not (captured and flags & RECORD_EARLY):  # else the early one is there
                _await_slot(recorder)
                recorder.open(kept, flags=flags, seen=False, synchronous=True)
        except TornSnapshotError as error:
            why = str(error)
    if why and not captured:
        recorder.outcomes.why_not_last = why
        event("skipped", step=step, why=why)
    if counters.slipped > slipped:
        slip = recorder.outcomes.slip
        ask = " (is a reader holding one?)" if slip is Slip.SLOTS else ""
        has = "only an early" if captured else "no"
        text = f"step {step}, the last one, has {has} snapshot: {slip}{ask}"
        recorder.outcomes.report(RegionBusyError(text))


def left_off(recorder: Recorder, error: BaseException) -> None:
    """Write or void the pre-fence journal entry when an exception leaves the iteration.

    Other ranks may make the update that this one does not make.
    """
    kept, here = recorder.journaled, threading.get_ident() == recorder.thread
    if not (here and recorder.inside) or recorder.mixed or kept is None:
        return
    if kept.habit.at_fence(error):
        recorder.fenced()
    else:
        with recorder.lock:
            kept.take_back(recorder.steps.step + 1)


def gradients_complete(recorder: Recorder, last: bool) -> None:
    """Write the pre-fence journal entry: all gradients of the iteration have come, by habit.

    Not `last`: one more has come after all, and the entry is voided. A rank that is killed from
    here on has its part in the allreduce, and its peers make the update. On autograd's thread,
    under the lock.
    """
    kept = recorder.journaled
    if kept is None or not (recorder.enabled and recorder.settled) or recorder.mixed:
        return
    step = recorder.steps.step + 1
    with recorder.stalls.of("fence"):
        if last:
            kept.leave(step)
        else:
            kept.take_back(step)


def left_standing(recorder: Recorder) -> None:
    """Write or void the pre-fence journal entry when the training thread is stuck, maybe for good.

    Under the lock; any thread. If the training goes on after all, its fence writes what has
    changed. See `left_off`.
    """
    kept, frame = recorder.journaled, sys._current_frames().get(recorder.thread)
    if not (recorder.enabled and recorder.settled and recorder.inside) or recorder.mixed:
        return
    if kept is None or frame is None:
        return
    if kept.habit.at_fence(frame):
        kept.leave(recorder.steps.step + 1)
    else:
        kept.take_back(recorder.steps.step + 1)


def _not_whole(recorder: Recorder) -> str:
    """Say why the last complete step cannot be copied any more; empty if it can."""
    if recorder.mixed:
        return "an update is half done"
    if recorder.instants.step != recorder.steps.step:
        # An interrupt came before they were, or the state was replaced inside an iteration.
        return "its position and generators were not taken"
    return ""


def _begun_step(recorder: Recorder) -> tuple[Instant | None, int]:
    """Return what is kept of the last step, whose next forward has begun, and record flags.

    None: the live state serves, for no forward has changed anything of it yet.

    Raises:
        TornSnapshotError: a forward has changed it, and nothing is kept.
    """
    kept = recorder.journaled
    if kept is None:
        now = [buffer._version for buffer in recorder.inventory.buffers(anew=True)]
        if (recorder.buffers or []) != now:
            raise TornSnapshotError("a forward has changed the buffers")
        return None, RECORD_EARLY
    try:
        instant = kept.late()
    except TornSnapshotError:
        if not kept.untouched():
            raise
        return None, RECORD_EARLY
    return instant, instant.flags
