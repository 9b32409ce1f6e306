"""What taking each extra costs every step: told when it is more than a step should bear."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from lightck.capture import parcel
from lightck.events import event

FIRST_STEPS = 4
"""Not measured: caches, workers and allocators get going."""
MEASURED_STEPS = 16
MOST_S = 1e-3
MOST_SHARE = 0.01
"""Of a step. An extra that takes more than both is told, once, by its median."""


@dataclass(eq=False)
class Burden:
    """Sums, and tells. Used under the recorder's lock."""

    _now: dict[str, float] = field(default_factory=dict)
    """Seconds by extra since the last step ended."""
    _steps: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Seconds of each step that is measured, and of extras in it."""
    _began: int = 0
    _ended_s: float = 0.0
    _done: bool = False

    def add(self, name: str, began_s: float) -> None:
        """An extra has been taken since then."""
        if not self._done:
            self._now[name] = self._now.get(name, 0.0) + time.perf_counter() - began_s

    def step_ended(self, taken: dict[str, Any]) -> None:
        """One more; `taken` is what was said of extras last, by name."""
        if self._done:
            return
        now, self._began = time.perf_counter(), self._began + 1
        if self._began > FIRST_STEPS:
            self._steps.append((now - self._ended_s, self._now))
        self._ended_s, self._now = now, {}
        if len(self._steps) == MEASURED_STEPS:
            self._done = True
            self._tell(taken)

    def _tell(self, taken: dict[str, Any]) -> None:
        step_s = statistics.median(seconds for seconds, _ in self._steps)
        for name, tree in taken.items():
            cost_s = statistics.median(spent.get(name, 0.0) for _, spent in self._steps)
            if cost_s > max(MOST_S, MOST_SHARE * step_s):
                event(
                    "dear_extra",
                    logging.WARNING,
                    name=name,
                    ms_per_step=round(cost_s * 1e3, 3),
                    step_ms=round(step_s * 1e3, 3),
                    bytes=parcel.weight(tree),
                    do="it is asked for its state at every step: keep what that is made of instead"
                    " (a seed and a position, not an order; the last values, not all)",
                )
