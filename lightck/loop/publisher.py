"""Collects a handle's statistics, publishes them after every step, and keeps a trace if wanted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightck.config import Config
from lightck.errors import LightckError, RegionIOError
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Watched
from lightck.loop.log_summary import Summary
from lightck.loop.outcomes import ErrorReporter
from lightck.loop.trace_listener import TraceListener
from lightck.pipeline.inflight import InflightSnapshot
from lightck.region.native_region import RECORD_JIT
from lightck.region.stats_page import NO_STEP, Page, Process
from lightck.tracing import perfetto
from lightck.tracing.trace import Trace
from lightck.types import Stats

# ---- the statistics of `handle.stats()`, from all counters ---------------------------------------


def collect_stats(checkpointer: Checkpointer) -> Stats:
    """Return the statistics as of the last poll.

    Any thread: it neither waits for the training nor delays it.
    """
    counters, pool = checkpointer.outcomes.counted, checkpointer.pipeline.pool_stats()
    compared, uncompared = checkpointer.pipeline.barrier.compared()
    seconds, kept = pool["copy_ns"] / 1e9, checkpointer.journaled
    offload = checkpointer.pipeline.offload
    mode, why = offload.placement.chosen
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
        stall_s=dict(checkpointer.stalls.seconds),
        copy_rate=pool["bytes_copied"] / seconds if seconds else 0.0,
        commit_s=counters.commit_s / counters.durable if counters.durable else 0.0,
        whole_s=counters.whole_s / counters.committed if counters.committed else 0.0,
        placement=checkpointer.pipeline.placement.choice.mode,
        placement_why=checkpointer.pipeline.placement.choice.why,
        staging_bytes=pool["staging_bytes"],
        device_mode=str(mode),
        device_why=why,
        bytes_from_device=offload.engine.moved_bytes,
        ring_bytes=offload.engine.ring_bytes,
        device_copy_bytes=offload.placement.copy_bytes,
        moved_in_draws=checkpointer.movement.count,
        not_kept=str((kept and kept.unwritten) or ""),
    )


# ---- the statistics page, and the trace ----------------------------------------------------------


@dataclass(eq=False)
class StatusPublisher:
    """Publishes statistics and traces. Used by the training thread."""

    config: Config
    checkpointer: Checkpointer
    reporter: ErrorReporter
    watched: Watched
    trace: Trace | None = field(default=None, init=False)
    listener: Checkpointer | TraceListener = field(init=False)
    """The listener that the hooks and the loop's own marks call."""

    def __post_init__(self) -> None:
        """Open the statistics page, and insert the trace's listener if a trace is wanted."""
        checkpointer, pipeline = self.checkpointer, self.checkpointer.pipeline
        self.listener = checkpointer
        self._page = Page(pipeline.pool, pipeline.region.native)
        self._page.said.began_ns = time.time_ns()
        self._page.said.began_step = checkpointer.steps.step
        self._summary = Summary(checkpointer)
        checkpointer.on_step = self._step_ended
        if self.config.trace is not False:
            self.trace = Trace(self._about(), checkpointer.steps.step + 1, pipeline.pool)
            self.listener = TraceListener(checkpointer, self.trace, self.watched)
            checkpointer.stalls.tell = self.trace.stall
            pipeline.trace = self.trace

    def _about(self) -> dict[str, object]:
        region, config = self.checkpointer.pipeline.region, self.config
        return {
            "rank": region.info.rank,
            "world": region.world,
            "process": Process.this().number,
            "region": str(region.place.file),
            "medium": region.info.medium,
            "survives": region.survives,
            "threads": self.checkpointer.pipeline.pool.threads,
            "chunk_bytes": config.chunk_bytes,
            "schedule": config.schedule,
        }

    def install(self) -> None:
        """Publish for the first time, and install the trace's hooks."""
        self.publish()
        if isinstance(self.listener, TraceListener):
            self.listener.install()

    def remove(self) -> None:
        """Stop watching the loop."""
        if isinstance(self.listener, TraceListener):
            self.listener.remove()

    def _step_ended(self) -> None:
        self.publish()
        self._summary.step_ended()

    def publish(self, *, ended: bool = False) -> None:
        """Publish the statistics for `lightck top`; takes a few microseconds."""
        checkpointer, page = self.checkpointer, self._page
        counters, said = checkpointer.pipeline.counters, page.said
        record = checkpointer.pipeline.region.continued
        captured, committed = counters.last_captured_step, counters.last_committed_step
        said.ended = ended
        said.updated_ns = time.time_ns()
        said.step = checkpointer.steps.step
        said.captured_step = NO_STEP if captured is None else captured
        said.committed_step = NO_STEP if committed is None else committed
        said.step_ns = int((checkpointer.cadence.step_s or 0.0) * 1e9)
        said.captured, said.committed = counters.captured, counters.committed
        said.slipped, said.torn, said.failed = counters.slipped, counters.torn, counters.failed
        said.payload_bytes = record.payload_bytes if record is not None else 0
        said.errors = self.reporter.count
        page.stalls(checkpointer.stalls.seconds)
        page.error(self.reporter.latest)
        try:
            page.publish()
        except RegionIOError as error:
            self.checkpointer.outcomes.region_lost(error)

    def torn(self, flight: InflightSnapshot, names: Sequence[str]) -> None:
        """Count a torn snapshot that the pipeline has dropped.

        One made just in time is not counted, and only its maker is told: the loop went on
        meanwhile, which is no fault of the loop.
        """
        if flight.flags & RECORD_JIT:
            return
        if self.trace is not None:
            self.trace.lost_snapshot("torn", flight.step, names[0])
        self.checkpointer.outcomes.torn(flight, names)

    def ended(self) -> None:
        """Publish the last statistics and log the last summary, while the pool is still there."""
        self.publish(ended=True)
        self._summary.tell()

    def write(self, path: Path) -> Path:
        """Write the trace as it is now.

        Raises:
            LightckError: there is none, or it cannot be written there.
        """
        if self.trace is None:
            raise LightckError("there is no trace: attach with trace=True or trace=<file>")
        try:
            perfetto.write(self.trace.recorded(), path)
        except OSError as error:
            raise LightckError(f"cannot write the trace to {path}: {error.strerror}") from error
        return path

    def write_wanted(self) -> None:
        """Write the trace to the file that the config names; a failure is a background error."""
        if isinstance(self.config.trace, Path):
            try:
                self.write(self.config.trace)
            except LightckError as error:
                self.reporter(error)
