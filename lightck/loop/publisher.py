"""Collects a handle's statistics, and publishes them after every step for `lightck top`.

What lightck costs the training thread is measured here, too.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightck.errors import RegionIOError
from lightck.events import event
from lightck.journal.step_journal import StepJournal
from lightck.loop.due import DueCheck
from lightck.loop.extra_movement import Movement
from lightck.loop.outcomes import Outcomes
from lightck.loop.steps import Steps
from lightck.pipeline.pipeline import Counters, Pipeline
from lightck.region.stats_page import CLOSED, FAILED, GONE, LEFT, NO_STEP, Page
from lightck.tracing.trace import Trace
from lightck.types import Stats

# ---- time that the training thread spends in lightck, by cause -----------------------------------

_LAST = 5  # snapshots whose cost counts: three show that the machine has changed
_NESTED = nullcontext()


@dataclass(eq=False, slots=True)
class _Stall:
    """Context of `StallTimer.of`; a class, because it is entered several times in every step."""

    timer: StallTimer
    cause: str
    _begin: int = 0

    def __enter__(self) -> None:
        """Begin to count."""
        self._begin = self.timer.begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add what has passed."""
        self.timer.end(self.cause, self._begin)


@dataclass(eq=False)
class StallTimer:
    """Sums seconds per cause; where causes are nested, the outermost one counts."""

    trace: Trace | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _running: bool = False
    _seen: tuple[int, float, int] = (0, 0.0, 0)
    """Step, seconds and snapshots when `cost` last looked."""
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def of(self, cause: str) -> AbstractContextManager[None]:
        """Return a context that counts the time of its body under a cause."""
        return _NESTED if self._running else _Stall(self, cause)

    def begin(self) -> int:
        """Begin to count; return the instant, in ns."""
        self._running = True
        return time.perf_counter_ns()

    def end(self, cause: str, begin_ns: int) -> None:
        """End counting, and add the time since `begin_ns` under a cause."""
        end_ns = time.perf_counter_ns()
        self._running = False
        self.seconds[cause] = self.seconds.get(cause, 0.0) + (end_ns - begin_ns) / 1e9
        if self.trace is not None:
            self.trace.stall(cause, begin_ns, end_ns)

    def total(self) -> float:
        """Return the seconds over all causes."""
        return sum(self.seconds.values())

    def cost(self, step: int, captured: int) -> float | None:
        """Return the seconds that a snapshot adds to its iteration, lately; None before the first.

        Asked at every step with the snapshots captured so far; of a step the first call counts.
        What iterations without a snapshot cost is left out: were they rare it would be most of the
        sum, and no policy can save it. So is, by a median, what only the first ones cost (room,
        page faults).
        """
        asked, before, known = self._seen
        if step != asked:
            total = self.total()
            if captured > known:
                self._costs.append((total - before) / (captured - known))
            self._seen = step, total, captured
        return statistics.median_low(self._costs) if self._costs else None


# ---- the statistics ------------------------------------------------------------------------------

_COUNTED = ("captured", "committed", "slipped", "torn", "failed")


@dataclass(eq=False)
class StatusPublisher:
    """Publishes the statistics after every step. Used by the training thread."""

    pipeline: Pipeline
    outcomes: Outcomes
    steps: Steps
    stall_timer: StallTimer
    due_check: DueCheck
    movement: Movement
    step_journal: StepJournal | None
    began_ns: int | None = None
    """When this life began, as the policies' state has it; None: now."""
    _ended: int = CLOSED
    _published: bool = False

    def __post_init__(self) -> None:
        """Open the statistics page."""
        self._page = Page(
            self.pipeline.pool, self.pipeline.region.native, self.steps.step, self.began_ns
        )
        self._summary = Summary(self.pipeline.counters, self.steps, self.stall_timer)

    def collect(self) -> Stats:
        """Return the statistics for `handle.stats()`, as of the last poll.

        Any thread: it neither waits for the training nor delays it.
        """
        counters, pool = self.outcomes.counted, self.pipeline.pool_stats()
        compared, uncompared = self.pipeline.barrier.compared()
        seconds, kept, offload = pool["copy_ns"] / 1e9, self.step_journal, self.pipeline.offload
        mode, why = offload.placement.chosen
        return Stats(
            captured=counters.captured,
            streamed=counters.streamed,
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
            stall_s=dict(self.stall_timer.seconds),
            copy_rate=pool["bytes_copied"] / seconds if seconds else 0.0,
            commit_s=counters.commit_s / counters.durable if counters.durable else 0.0,
            whole_s=counters.whole_s / counters.committed if counters.committed else 0.0,
            at_once_bytes=self.pipeline.copy_plan.at_once_bytes,
            copied_at_once=self.pipeline.copy_plan.is_at_once,
            placement=self.pipeline.placement.choice.mode,
            placement_why=self.pipeline.placement.choice.why,
            staging_bytes=pool["staging_bytes"],
            device_mode=str(mode),
            device_why=why,
            bytes_from_device=offload.engine.moved_bytes,
            ring_bytes=offload.engine.ring_bytes,
            device_copy_bytes=offload.placement.copy_bytes,
            moved_in_draws=self.movement.count,
            overhead=self.due_check.times.overhead,
            policy=self.due_check.why,
            risk=self.due_check.risk,
            not_kept=str((kept and kept.last_error) or ""),
        )

    def step_ended(self) -> None:
        """Publish the statistics, and log the summary if a minute has passed."""
        self.publish()
        self._summary.step_ended()

    def failed(self, error: BaseException) -> None:
        """Note that training ends by an error, or by the user's interrupt."""
        self._ended = LEFT if isinstance(error, KeyboardInterrupt) else FAILED

    def publish(self, *, ended: int = GONE) -> None:
        """Publish the statistics for `lightck top`; takes a few microseconds."""
        reporter, record = self.outcomes.reporter, self.pipeline.region.continued
        counters, self._published = self.pipeline.counters, True
        captured, committed = counters.last_captured_step, counters.last_committed_step
        try:
            self._page.publish(
                {
                    "ended": ended,
                    "updated_ns": time.time_ns(),
                    "step": self.steps.step,
                    "captured_step": NO_STEP if captured is None else captured,
                    "committed_step": NO_STEP if committed is None else committed,
                    "step_ns": int((self.due_check.step_s or 0.0) * 1e9),
                    "payload_bytes": record.payload_bytes if record is not None else 0,
                    "errors": reporter.count,
                    **{name: getattr(counters, name) for name in _COUNTED},
                },
                self.stall_timer.seconds,
                reporter.latest,
            )
        except RegionIOError as error:
            self.outcomes.region_failed(error)

    def ended(self) -> None:
        """Publish the last statistics and log the last summary, while the pool is still there."""
        if self._published:  # else attach has failed: the page is the last word of a life before
            self.publish(ended=self._ended)
        self._summary.tell()


# ---- one log event a minute, which sums up what each step says at DEBUG only --------------------

SUMMARY_S = 60.0
_SUMMED = ("captured", "committed", "slipped", "torn", "failed", "dead")


@dataclass(eq=False)
class Summary:
    """Sums up the counts from one `tell` to the next. Used by the training thread."""

    counters: Counters
    steps: Steps
    stall_timer: StallTimer
    _since: tuple[float, int, dict[str, int], float] = field(init=False)
    """Time, step, counts and stall at the last `tell`."""

    def __post_init__(self) -> None:
        """Begin to count."""
        self._since = self._now()

    def step_ended(self) -> None:
        """Log the summary if a minute has passed since the last one."""
        if time.monotonic() - self._since[0] >= SUMMARY_S:
            self.tell()

    def tell(self) -> None:
        """Log what was counted since the last `tell`; nothing if no step has ended."""
        before, self._since = self._since, self._now()
        (began_s, began, counted, stalled), (now_s, step, counts, stall_s) = before, self._since
        steps = step - began
        if steps <= 0:
            return
        new: dict[str, Any] = {name: counts[name] - counted[name] for name in _SUMMED}
        event(
            "summary",
            step=step,
            committed_step=self.counters.last_committed_step,
            steps=steps,
            seconds=round(now_s - began_s, 3),
            **new,
            stall_s_per_step=round((stall_s - stalled) / steps, 6),
        )

    def _now(self) -> tuple[float, int, dict[str, int], float]:
        counts = {name: getattr(self.counters, name) for name in _SUMMED}
        return time.monotonic(), self.steps.step, counts, self.stall_timer.total()
