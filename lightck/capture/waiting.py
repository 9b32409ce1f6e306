"""Waiting for commits, on the training thread."""

from __future__ import annotations

import logging
import time

from lightck.capture.recorder import Recorder
from lightck.capture.report import Reporter
from lightck.errors import PersistError, WaitTimeoutError
from lightck.events import event

POLL_S = 0.002


def drain(recorder: Recorder, step: int | None, deadline: float | None) -> bool:
    """Poll until nothing is open, or one of `step` or newer is committed; False at the deadline."""
    recorder.poll()
    while recorder.pipeline.persisting and not (step is not None and _reached(recorder, step)):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        recorder.poll(POLL_S if left is None else min(POLL_S, left))
    return True


def drain_for_close(recorder: Recorder, deadline: float) -> None:
    """Wait for whatever is sealed: it cannot be given up, so the deadline is for a word only."""
    if not drain(recorder, None, deadline):
        steps = [flight.step for flight in recorder.pipeline.persisting]
        event("closing_late", logging.WARNING, steps=steps, why="the medium has not synced yet")
        drain(recorder, None, None)


def wait(recorder: Recorder, reporter: Reporter, step: int | None, timeout: float | None) -> None:
    """What `handle.wait` does."""
    pipeline, counters = recorder.pipeline, recorder.pipeline.counters
    lost = counters.failed + counters.torn
    deadline = None if timeout is None else time.monotonic() + timeout
    recorder.finish_window()
    ready = True
    if step is not None and not any(flight.step >= step for flight in pipeline.persisting):
        if recorder.due and recorder.steps.step >= step and not _reached(recorder, step):
            ready = drain(recorder, step, deadline)  # its slot may be busy
            if ready:
                recorder.open_early()
    if not (ready and drain(recorder, step, deadline)):
        waiting = [flight.step for flight in pipeline.persisting]
        raise WaitTimeoutError(f"not committed after {timeout} s: steps {waiting}")
    reporter.surface()
    if step is None or _reached(recorder, step):
        return
    last = counters.last_committed_step
    if counters.failed + counters.torn > lost:
        raise PersistError(
            f"no snapshot of step {step} or newer was committed, the last one is {last}:"
            f" {reporter.latest}"
        ) from reporter.latest
    raise WaitTimeoutError(
        f"no snapshot of step {step} or newer is open; the last committed one is {last}"
    )


def _reached(recorder: Recorder, step: int) -> bool:
    last = recorder.pipeline.counters.last_committed_step
    return last is not None and last >= step
