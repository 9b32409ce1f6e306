"""Collect the statistics of `handle.stats()` from all counters."""

from __future__ import annotations

from lightck.loop.checkpointer import Recorder
from lightck.types import Stats


def stats_of(recorder: Recorder) -> Stats:
    """Return the statistics as of the last poll.

    Any thread: it neither waits for the training nor delays it.
    """
    counters, pool = recorder.outcomes.counted, recorder.pipeline.pool_stats()
    compared, uncompared = recorder.pipeline.barrier.compared()
    seconds, kept = pool["copy_ns"] / 1e9, recorder.journaled
    offload = recorder.pipeline.offload
    mode, why = offload.ways.chosen
    return Stats(
        captured=counters.captured,
        committed=counters.committed,
        slipped=counters.slipped,
        torn=counters.torn,
        failed=counters.failed,
        dead=counters.dead,
        compared=compared,
        uncompared=uncompared,
        skipped_unchanged_bytes=pool["bytes_skipped"],
        bytes_copied=pool["bytes_copied"],
        bytes_helped=pool["bytes_helped"],
        stall_s=dict(recorder.stalls.seconds),
        copy_rate=pool["bytes_copied"] / seconds if seconds else 0.0,
        commit_s=counters.commit_s / counters.durable if counters.durable else 0.0,
        whole_s=counters.whole_s / counters.committed if counters.committed else 0.0,
        staging_bytes=pool["staging_bytes"],
        device_mode=str(mode),
        device_why=why,
        bytes_from_device=offload.transfers.moved_bytes,
        ring_bytes=offload.transfers.ring_bytes,
        device_copy_bytes=offload.ways.copy_bytes,
        moved_in_draws=recorder.movement.count,
        not_kept=str((kept and kept.unwritten) or ""),
    )
