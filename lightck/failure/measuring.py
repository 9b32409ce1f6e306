"""The measured cost of a snapshot of a handle, as far as it is known."""

from __future__ import annotations

from lightck.failure.budget import Measured
from lightck.loop.checkpointer import Recorder
from lightck.pipeline.placement import dram_rate

_SLOW_RATE = 1e9
"""A rate that any memory exceeds: if a snapshot fits at this rate, it need not be measured."""


def measured(recorder: Recorder, write_limit: int, usable_s: float) -> Measured | None:
    """Return the cost of a snapshot, from those so far, or from a plain copy before the first one.

    None if not even the size is known. Runs on the watchdog's thread. The plain copy takes
    milliseconds, and is made only if a slow memory would not do.

    Args:
        recorder: of the handle.
        write_limit: bytes per second that the user allows; 0 is no limit.
        usable_s: the time that the snapshot has to fit into.
    """
    pipeline = recorder.pipeline
    size = sum(entry.length for entry in pipeline.arrangement.entries)
    if not size:
        return None
    pool, counters = pipeline.pool_stats(), pipeline.counters
    drained, limit = pool["bytes_drained"], float(write_limit)
    if not counters.durable or not pool["copy_ns"]:
        quick = size / _SLOW_RATE <= usable_s
        rate = _SLOW_RATE if quick else dram_rate()
        return Measured(size, rate, limit, step_s=recorder.cadence.step_s)
    medium = drained / (pool["drain_ns"] / 1e9) if drained and pool["drain_ns"] else limit
    return Measured(
        size,
        pool["bytes_copied"] / (pool["copy_ns"] / 1e9) * pipeline.pool.threads,
        medium,
        # After staged copies the commit is mostly the drain, whose rate is known already.
        0.0 if drained else counters.commit_s / counters.durable,
        recorder.cadence.step_s,
    )
