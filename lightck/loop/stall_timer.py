"""Time that the training thread spends in lightck, by cause."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightck.tracing.trace import Trace

_LAST = 9  # snapshots whose cost counts


@dataclass(eq=False)
class StallTimer:
    """Sums seconds per cause; where causes are nested, the outermost one counts."""

    trace: Trace | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _running: bool = False
    _seen: tuple[int, float, int] = (0, 0.0, 0)
    """Step, seconds and snapshots when `cost` last looked."""
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Count the time of the body under a cause."""
        if self._running:
            yield
            return
        self._running = True
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self._running = False
            end = time.perf_counter_ns()
            self.seconds[cause] = self.seconds.get(cause, 0.0) + (end - begin) / 1e9
            if self.trace is not None:
                self.trace.stall(cause, begin, end)

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
