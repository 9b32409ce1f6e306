"""Follows a state that was replaced from outside: no half of two states is ever captured."""

from __future__ import annotations

import logging

from lightck.errors import ConfigError, LightckError
from lightck.events import event
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.requests import drain


def replaced(checkpointer: Checkpointer, step: int) -> None:
    """Go on from `step`: what is open is given up, what is sealed is committed.

    If a snapshot of `step` or newer has been opened since attach, a new timeline begins, so that
    snapshots of the two are never confused; this may block on the medium. The snapshot that was
    committed last is kept until a newer one is.

    Raises:
        ConfigError: `step` is no number of steps.
        LightckError: an update is half done; or several ranks would go back.
    """
    if type(step) is not int or step < 0:
        raise ConfigError(f"replaced({step!r}): expected the number of a step, 0 or more")
    with checkpointer.stalls.of("request"), checkpointer.lock:
        if checkpointer.mixed:
            raise LightckError(
                f"replaced({step}): the update after step {checkpointer.steps.step} is half done;"
                " replace the state before the first optimizer steps, or when the last one has"
            )
        pipeline, counters, was = (
            checkpointer.pipeline,
            checkpointer.pipeline.counters,
            checkpointer.steps.step,
        )
        newest = -1 if counters.last_captured_step is None else counters.last_captured_step
        if pipeline.window is not None:
            newest = max(newest, pipeline.window.step)
        pipeline.forget(f"the state was replaced by that of step {step}")
        if checkpointer.due:
            pipeline.barrier.lost(was, "the state was replaced")
        if not pipeline.barrier.alone and step <= max(newest, was - 1):
            checkpointer.forget()
            raise LightckError(
                f"replaced({step}): several ranks are at step {max(newest, was)}, and can only go"
                " ahead, for what they have of that step must never go together with what they will"
                " have: detach, restore(step=...) and attach again"
            )
        if step <= newest:
            _branch(checkpointer)
        checkpointer.go_on_from(step)
    event("replaced", logging.INFO, step=step, was=was)


def _branch(checkpointer: Checkpointer) -> None:
    """Begin a timeline that continues the newest snapshot that is committed."""
    pipeline, region = checkpointer.pipeline, checkpointer.pipeline.region
    drain(checkpointer, None, None)
    pipeline.await_abandoned()
    region.begin_timeline(region.continued)
    pipeline.newest = None
    counters = pipeline.counters
    counters.last_captured_step = counters.last_exact_step = counters.last_committed_step = None
