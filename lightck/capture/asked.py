"""What the loop, or its end, asks of a recorder: a snapshot now, early, or of the last step."""

from __future__ import annotations

import sys
import threading

from lightck.capture.flight import Slip
from lightck.capture.recorder import Recorder
from lightck.errors import CoordinationError, RegionBusyError, TornSnapshotError
from lightck.events import event
from lightck.region.native import RECORD_EARLY

FATE_S = 10.0
"""How long a snapshot that is asked for waits until other ranks have settled an older one."""


def open_now(recorder: Recorder) -> None:
    """Declare (b) reached and copy the state of the last complete step at once.

    The generators are taken as they stand: what is drawn next comes after the snapshot.
    Waits for a slot if every one is persisting, for other ranks' commits not longer than
    `FATE_S`: the caller asked for it.
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
    """Several ranks take one snapshot of a step at most: wait for the one that there is."""
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


def open_early(recorder: Recorder) -> None:
    """Copy the due snapshot now: (b) is still to come, so it is marked early (I2)."""
    if recorder.due and recorder.can_open_now():
        with recorder.stalls.of("request"):
            recorder.open(flags=RECORD_EARLY, seen=False, synchronous=True)


def finish_last_step(recorder: Recorder) -> None:
    """Make sure the last complete step has a snapshot, due or not, if it can have one."""
    recorder.finish_window()
    recorder.pipeline.barrier.begin_close()
    recorder.pipeline.region.spare = 0  # the last step of all: nothing newer can fail
    counters = recorder.pipeline.counters
    captured = counters.last_captured_step == recorder.steps.step
    if not recorder.cadence.moved or (captured and not _is_early_share(recorder)):
        return
    if recorder.mixed:
        _no_last(recorder, "an update is half done")
        return
    if recorder.instants.step != recorder.steps.step:  # an interrupt, between one and the other
        _no_last(recorder, "its position and generators were not taken")
        return
    slipped = counters.slipped
    if not recorder.inside:
        open_now(recorder)
    else:
        _finish_begun_step(recorder)
    if counters.slipped > slipped:
        slip = recorder.outcomes.slip
        ask = " (is a reader holding one?)" if slip is Slip.SLOTS else ""
        text = f"step {recorder.steps.step}, the last one, has no snapshot: {slip}{ask}"
        recorder.outcomes.report(RegionBusyError(text))


def left_off(recorder: Recorder, error: BaseException) -> None:
    """An exception leaves the iteration: others may make the update that this rank does not."""
    kept, here = recorder.journaled, threading.get_ident() == recorder.thread
    if not (here and recorder.inside) or recorder.mixed or kept is None:
        return
    if kept.habit.at_fence(error):
        recorder.fenced()
    else:
        with recorder.lock:
            kept.take_back(recorder.steps.step + 1)


def gradients_complete(recorder: Recorder, last: bool) -> None:
    """All gradients of the iteration have come, by habit; not `last`: one more, after all.

    A rank that is killed from here on has its part in the allreduce: its peers make the update. On
    autograd's thread, under the lock.
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
    """The training thread stands still, perhaps for good: as `left_off`.

    Under the lock; any thread. Should it go on after all, its fence writes what has changed.
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


def _finish_begun_step(recorder: Recorder) -> None:
    """The next forward has begun: what it changes is kept, or has not changed."""
    if recorder.journaled is None:
        now = [buffer._version for buffer in recorder.inventory.buffers(anew=True)]
        if (recorder.buffers or []) != now:
            _no_last(recorder, "a forward has changed the buffers")
            return
        _await_slot(recorder)
        recorder.open(flags=RECORD_EARLY, seen=False, synchronous=True)
        return
    kept = None
    try:
        kept = recorder.journaled.late()
    except TornSnapshotError as error:
        if not recorder.journaled.untouched():
            _no_last(recorder, str(error))
            return
    _await_slot(recorder)
    flags = RECORD_EARLY if kept is None else kept.flags
    recorder.open(kept, flags=flags, seen=False, synchronous=True)


def _is_early_share(recorder: Recorder) -> bool:
    """What was captured of the last step goes with no exact share, as other ranks will have."""
    if recorder.inside:
        return False
    pipeline, step = recorder.pipeline, recorder.steps.step
    flights = [*pipeline.in_flight, *filter(None, [pipeline.newest])]
    return any(flight.step == step and flight.is_early_share for flight in flights)


def _no_last(recorder: Recorder, why: str) -> None:
    recorder.outcomes.why_not_last = why
    event("skipped", step=recorder.steps.step, why=why)
