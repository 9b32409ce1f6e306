"""One log event a minute that sums up what each step says at DEBUG only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lightck.events import event
from lightck.loop.checkpointer import Checkpointer

EVERY_S = 60.0
_COUNTS = ("captured", "committed", "slipped", "torn", "failed", "dead")


@dataclass(eq=False)
class Summary:
    """Sums up the counts from one `tell` to the next. Used by the training thread."""

    checkpointer: Checkpointer
    _since: tuple[float, int, dict[str, int], float] = field(init=False)
    """Time, step, counts and stall at the last `tell`."""

    def __post_init__(self) -> None:
        """Begin to count."""
        self._since = self._now()

    def step_ended(self) -> None:
        """Log the summary if a minute has passed since the last one."""
        if time.monotonic() - self._since[0] >= EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Log what was counted since the last `tell`; nothing if no step has ended."""
        before, self._since = self._since, self._now()
        (began_s, began, counted, stalled), (now_s, step, counts, stall_s) = before, self._since
        steps = step - began
        if steps <= 0:
            return
        new: dict[str, Any] = {name: counts[name] - counted[name] for name in _COUNTS}
        event(
            "summary",
            step=step,
            committed_step=self.checkpointer.pipeline.counters.last_committed_step,
            steps=steps,
            seconds=round(now_s - began_s, 3),
            **new,
            stall_s_per_step=round((stall_s - stalled) / steps, 6),
        )

    def _now(self) -> tuple[float, int, dict[str, int], float]:
        counters = self.checkpointer.pipeline.counters
        counts = {name: getattr(counters, name) for name in _COUNTS}
        return (
            time.monotonic(),
            self.checkpointer.steps.step,
            counts,
            self.checkpointer.stalls.total(),
        )
