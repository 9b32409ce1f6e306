"""Waits on the training thread until snapshots are committed or their fates are known."""

from __future__ import annotations

import logging
import time

from lightck.errors import (
    CoordinationError,
    DivergenceError,
    PersistError,
    WaitTimeoutError,
)
from lightck.events import event
from lightck.loop.checkpointer import Recorder
from lightck.loop.report import Reporter
from lightck.loop.requests import has_missed, open_missed

POLL_S = 0.002
LEAST_S = 2.0
"""Seconds that ranks wait for each other at their close, however little time the medium has
left."""
FATES_S = 600.0
"""Seconds: twice as long as a rank waits for the others before it claims a step dead (aborted)."""


def drain(recorder: Recorder, step: int | None, deadline: float | None) -> bool:
    """Poll until nothing is open, or one of `step` or newer is committed; False at the deadline.

    Without a deadline the medium is waited for as long as it takes, other ranks for `FATES_S` at
    most: their store may be gone for good.
    """
    recorder.poll()
    pipeline, fates_due = recorder.pipeline, time.monotonic() + FATES_S
    while recorder.pipeline.in_flight and not (step is not None and _reached(recorder, step)):
        now = time.monotonic()
        if pipeline.persisting:
            fates_due = now + FATES_S
        left = min(POLL_S, (deadline or fates_due) - now, fates_due - now)
        if left <= 0:
            return False
        recorder.poll(left)
        pipeline.await_fates(left)
        recorder.poll()
    return True


def drain_for_close(recorder: Recorder, deadline: float) -> None:
    """Wait for whatever is sealed, as it cannot be given up: after the deadline only warn."""
    recorder.poll()
    pipeline, told = recorder.pipeline, False
    while pipeline.persisting:
        if time.monotonic() >= deadline and not told:
            told, steps = True, [flight.step for flight in pipeline.persisting]
            event("closing_late", logging.WARNING, steps=steps, why="the medium has not synced yet")
        recorder.poll(POLL_S)


def settle_for_close(recorder: Recorder, deadline: float, *, last_step: bool) -> None:
    """Leave the other ranks: agree on the last step, or say that there is none; bounded."""
    pipeline, outcomes = recorder.pipeline, recorder.outcomes
    seconds = max(deadline - time.monotonic(), LEAST_S)
    if not last_step:
        pipeline.barrier.leave("detached", seconds)
        recorder.poll()
        for trouble in pipeline.barrier.troubles():  # that others leave, too, is none now
            if isinstance(trouble, DivergenceError):
                outcomes.report(trouble)
        return
    held = pipeline.newest.step if pipeline.newest is not None else None
    last = recorder.steps.step if held == recorder.steps.step else None
    why = "" if last is not None or not recorder.cadence.moved else outcomes.why_not_last
    try:
        if pipeline.barrier.close(last, why, seconds) is not None:
            pipeline.count_last()
    except CoordinationError as error:
        outcomes.report(error)
    finally:
        recorder.poll()
        outcomes.tell_troubles()


def wait(recorder: Recorder, reporter: Reporter, step: int | None, timeout: float | None) -> None:
    """Wait for a commit as `handle.wait` promises."""
    pipeline, counters = recorder.pipeline, recorder.pipeline.counters
    lost = counters.failed + counters.torn + counters.dead
    deadline = None if timeout is None else time.monotonic() + timeout
    recorder.finish_window()
    ready, missed = True, ""
    if step is not None and not any(flight.step >= step for flight in recorder.pipeline.in_flight):
        last = recorder.steps.step >= step and not _reached(recorder, step)
        if last and has_missed(recorder):
            # Its slot may be busy.
            ready = drain(recorder, step, deadline) and pipeline.await_abandoned(deadline)
            missed = open_missed(recorder) if ready else ""
    if not (ready and drain(recorder, step, deadline)):
        waiting = [flight.step for flight in recorder.pipeline.in_flight]
        raise WaitTimeoutError(f"not committed after {timeout} s: steps {waiting}")
    reporter.surface()
    if step is None or _reached(recorder, step):
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


def _reached(recorder: Recorder, step: int) -> bool:
    last = recorder.pipeline.counters.last_committed_step
    return last is not None and last >= step
