"""Serve what the loop, or its end, asks for: a snapshot now, early, or the last one."""

from __future__ import annotations

import logging
import sys
import threading
import time

from lightck.errors import (
    CoordinationError,
    DivergenceError,
    PersistError,
    RegionBusyError,
    TornSnapshotError,
    WaitTimeoutError,
)
from lightck.events import event
from lightck.journal.step_journal import BoundaryCapture
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.outcomes import ErrorReporter
from lightck.pipeline.inflight import SlipReason
from lightck.region.native_region import RECORD_EARLY

FATE_S = 10.0
"""Seconds that a requested snapshot waits at most for other ranks to settle an older one."""


def open_now(checkpointer: Checkpointer) -> None:
    """Declare forward start reached and copy the state of the last complete step at once.

    The generators are taken as they are: what is drawn next comes after the snapshot.
    Waits for a slot if every one is persisting, and for other ranks' commits `FATE_S` at most: the
    caller asked for it.
    """
    with checkpointer.stalls.of("request"), checkpointer.lock:
        if checkpointer.pipeline.window is not None:
            with checkpointer.outcomes.reported():
                checkpointer.pipeline.fence(None)
        if not checkpointer.pipeline.barrier.request(checkpointer.steps.step):
            _join(checkpointer, checkpointer.steps.step)
            return
        _await_slot(checkpointer)
        checkpointer.instants.generators_stand()
        checkpointer.open(seen=False, synchronous=True)


def _await_slot(checkpointer: Checkpointer) -> None:
    if checkpointer.pipeline.busy:
        checkpointer.poll(None)
        checkpointer.pipeline.await_abandoned()
        checkpointer.pipeline.await_fates(FATE_S)
        checkpointer.poll()


def _join(checkpointer: Checkpointer, step: int) -> None:
    """Let those who wait for a snapshot of the step wait for the one that there is.

    Several ranks take one snapshot of a step at most.
    """
    pipeline, outcomes = checkpointer.pipeline, checkpointer.outcomes
    for flight in [*pipeline.persisting, *pipeline.awaiting]:
        if flight.step == step:
            flight.futures += outcomes.wanted
            outcomes.wanted = []
    if pipeline.counters.last_committed_step == step:
        for future in outcomes.wanted:
            future.set_result(step)
        outcomes.wanted = []
    outcomes.fail_wanted(CoordinationError(f"step {step} has lost its snapshot already"))


def has_missed(checkpointer: Checkpointer) -> bool:
    """Tell whether the last complete step is due, but has no open snapshot: one may be taken now.

    Its next forward is still to come, or no slot was free there; the latter counts for a single
    rank only, since over several ranks such a step is aborted.
    """
    slipped = checkpointer.outcomes.slipped_step == checkpointer.steps.step
    return checkpointer.due or (slipped and checkpointer.pipeline.barrier.alone)


def open_missed(checkpointer: Checkpointer) -> str:
    """Take the due snapshot of the last step now, marked early if its next forward is to come.

    Returns why it cannot be taken; empty if it is taken.
    """
    outcomes, cadence = checkpointer.outcomes, checkpointer.cadence
    why = _not_whole(checkpointer)
    if why:
        return why
    kept, flags = None, RECORD_EARLY
    if checkpointer.inside:
        try:
            kept, flags = _begun_step(checkpointer)
        except TornSnapshotError as error:
            return str(error)
    outcomes.slipped_step, cadence.overdue = -1, False
    with checkpointer.stalls.of("request"):
        checkpointer.open(kept, flags=flags, seen=False, synchronous=True)
    return f"{outcomes.slip}" if outcomes.slipped_step == checkpointer.steps.step else ""


def finish_last_step(checkpointer: Checkpointer) -> None:
    """Make sure the last complete step has an exact snapshot, due or not, if it can have one."""
    checkpointer.finish_window()
    checkpointer.pipeline.barrier.begin_close()
    checkpointer.pipeline.region.use_spare_slots()
    counters, step = checkpointer.pipeline.counters, checkpointer.steps.step
    if not checkpointer.cadence.moved or counters.last_exact_step == step:
        return
    captured, slipped = counters.last_captured_step == step, counters.slipped
    why = _not_whole(checkpointer)
    if not why and not checkpointer.inside:
        open_now(checkpointer)
    elif not why:
        try:
            kept, flags = _begun_step(checkpointer)
            if not (captured and flags & RECORD_EARLY):  # else the early one is there
                _await_slot(checkpointer)
                checkpointer.open(kept, flags=flags, seen=False, synchronous=True)
        except TornSnapshotError as error:
            why = str(error)
    if why and not captured:
        checkpointer.outcomes.why_not_last = why
        event("skipped", step=step, why=why)
    if counters.slipped > slipped:
        slip = checkpointer.outcomes.slip
        ask = " (is a reader holding one?)" if slip is SlipReason.SLOTS else ""
        has = "only an early" if captured else "no"
        text = f"step {step}, the last one, has {has} snapshot: {slip}{ask}"
        checkpointer.outcomes.report(RegionBusyError(text))


def left_off(checkpointer: Checkpointer, error: BaseException) -> None:
    """Write or void the pre-fence journal entry when an exception leaves the iteration.

    Other ranks may make the update that this one does not make.
    """
    kept, here = checkpointer.journaled, threading.get_ident() == checkpointer.thread
    if not (here and checkpointer.inside) or checkpointer.mixed or kept is None:
        return
    if kept.habit.at_fence(error):
        checkpointer.fenced()
    else:
        with checkpointer.lock:
            kept.take_back(checkpointer.steps.step + 1)


def gradients_complete(checkpointer: Checkpointer, last: bool) -> None:
    """Write the pre-fence journal entry: all gradients of the iteration have come, as predicted.

    Not `last`: one more has come after all, and the entry is voided. A rank that is killed from
    here on has its part in the allreduce, and its peers make the update. On autograd's thread,
    under the lock.
    """
    kept = checkpointer.journaled
    if kept is None or not (checkpointer.enabled and checkpointer.settled) or checkpointer.mixed:
        return
    step = checkpointer.steps.step + 1
    with checkpointer.stalls.of("fence"):
        if last:
            kept.leave(step)
        else:
            kept.take_back(step)


def left_standing(checkpointer: Checkpointer) -> None:
    """Write or void the pre-fence journal entry when the training thread is stuck, maybe for good.

    Under the lock; any thread. If the training goes on after all, its fence writes what has
    changed. See `left_off`.
    """
    kept, frame = checkpointer.journaled, sys._current_frames().get(checkpointer.thread)
    if (
        not (checkpointer.enabled and checkpointer.settled and checkpointer.inside)
        or checkpointer.mixed
    ):
        return
    if kept is None or frame is None:
        return
    if kept.habit.at_fence(frame):
        kept.leave(checkpointer.steps.step + 1)
    else:
        kept.take_back(checkpointer.steps.step + 1)


def _not_whole(checkpointer: Checkpointer) -> str:
    """Say why the last complete step cannot be copied any more; empty if it can."""
    if checkpointer.mixed:
        return "an update is half done"
    if checkpointer.instants.step != checkpointer.steps.step:
        # An interrupt came before they were, or the state was replaced inside an iteration.
        return "its position and generators were not taken"
    return ""


def _begun_step(checkpointer: Checkpointer) -> tuple[BoundaryCapture | None, int]:
    """Return what is kept of the last step, whose next forward has begun, and record flags.

    None: the live state serves, for no forward has changed anything of it yet.

    Raises:
        TornSnapshotError: a forward has changed it, and nothing is kept.
    """
    kept = checkpointer.journaled
    if kept is None:
        now = [buffer._version for buffer in checkpointer.inventory.buffers(anew=True)]
        if (checkpointer.buffers or []) != now:
            raise TornSnapshotError("a forward has changed the buffers")
        return None, RECORD_EARLY
    try:
        instant = kept.late()
    except TornSnapshotError:
        if not kept.untouched():
            raise
        return None, RECORD_EARLY
    return instant, instant.flags


# ---- waits, on the training thread, for commits and fates ----------------------------------------

POLL_S = 0.002
LEAST_S = 2.0
"""Seconds that ranks wait for each other at their close, however little time the medium has
left."""
FATES_S = 600.0
"""Seconds: twice as long as a rank waits for the others before it claims a step dead (aborted)."""


def drain(checkpointer: Checkpointer, step: int | None, deadline: float | None) -> bool:
    """Poll until nothing is open, or one of `step` or newer is committed; False at the deadline.

    Without a deadline the medium is waited for as long as it takes, other ranks for `FATES_S` at
    most: their store may be gone for good.
    """
    checkpointer.poll()
    pipeline, fates_due = checkpointer.pipeline, time.monotonic() + FATES_S
    while checkpointer.pipeline.in_flight and not (
        step is not None and _reached(checkpointer, step)
    ):
        now = time.monotonic()
        if pipeline.persisting:
            fates_due = now + FATES_S
        left = min(POLL_S, (deadline or fates_due) - now, fates_due - now)
        if left <= 0:
            return False
        checkpointer.poll(left)
        pipeline.await_fates(left)
        checkpointer.poll()
    return True


def drain_for_close(checkpointer: Checkpointer, deadline: float) -> None:
    """Wait for whatever is sealed, as it cannot be given up: after the deadline only warn."""
    checkpointer.poll()
    pipeline, told = checkpointer.pipeline, False
    while pipeline.persisting:
        if time.monotonic() >= deadline and not told:
            told, steps = True, [flight.step for flight in pipeline.persisting]
            event("closing_late", logging.WARNING, steps=steps, why="the medium has not synced yet")
        checkpointer.poll(POLL_S)


def settle_for_close(checkpointer: Checkpointer, deadline: float, *, last_step: bool) -> None:
    """Leave the other ranks: agree on the last step, or say that there is none; bounded."""
    pipeline, outcomes = checkpointer.pipeline, checkpointer.outcomes
    seconds = max(deadline - time.monotonic(), LEAST_S)
    if not last_step:
        pipeline.barrier.leave("detached", seconds)
        checkpointer.poll()
        for trouble in pipeline.barrier.troubles():  # that others leave, too, is none now
            if isinstance(trouble, DivergenceError):
                outcomes.report(trouble)
        return
    held = pipeline.newest.step if pipeline.newest is not None else None
    last = checkpointer.steps.step if held == checkpointer.steps.step else None
    why = "" if last is not None or not checkpointer.cadence.moved else outcomes.why_not_last
    try:
        if pipeline.barrier.close(last, why, seconds) is not None:
            pipeline.count_last()
    except CoordinationError as error:
        outcomes.report(error)
    finally:
        checkpointer.poll()
        outcomes.tell_troubles()


def wait(
    checkpointer: Checkpointer, reporter: ErrorReporter, step: int | None, timeout: float | None
) -> None:
    """Wait for a commit as `handle.wait` promises."""
    pipeline, counters = checkpointer.pipeline, checkpointer.pipeline.counters
    lost = counters.failed + counters.torn + counters.dead
    deadline = None if timeout is None else time.monotonic() + timeout
    checkpointer.finish_window()
    ready, missed = True, ""
    if step is not None and not any(
        flight.step >= step for flight in checkpointer.pipeline.in_flight
    ):
        last = checkpointer.steps.step >= step and not _reached(checkpointer, step)
        if last and has_missed(checkpointer):
            # Its slot may be busy.
            ready = drain(checkpointer, step, deadline) and pipeline.await_abandoned(deadline)
            missed = open_missed(checkpointer) if ready else ""
    if not (ready and drain(checkpointer, step, deadline)):
        waiting = [flight.step for flight in checkpointer.pipeline.in_flight]
        raise WaitTimeoutError(f"not committed after {timeout} s: steps {waiting}")
    reporter.surface()
    if step is None or _reached(checkpointer, step):
        return
    newest = counters.last_committed_step
    if counters.failed + counters.torn + counters.dead > lost:
        why = reporter.latest or f"step {step}: {pipeline.barrier.why_dead(step)}"
        raise PersistError(
            f"no snapshot of step {step} or newer was committed, the last one is {newest}: {why}"
        ) from reporter.latest
    why = f" ({missed})" if missed else ""
    raise WaitTimeoutError(
        f"no snapshot of step {step} or newer is open{why}; the last committed one is {newest}"
    )


def _reached(checkpointer: Checkpointer, step: int) -> bool:
    last = checkpointer.pipeline.counters.last_committed_step
    return last is not None and last >= step
