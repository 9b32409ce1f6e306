"""Training-thread time spent in lightck, by cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Stalls:
    """Sums seconds per cause; of nested causes the outermost counts."""

    seconds: dict[str, float] = field(default_factory=dict)
    tell: Callable[[str, int, int], None] | None = None
    """Called with cause, begin and end in ns, when there is a trace."""
    _running: bool = False

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Count the time of the body."""
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
            if self.tell is not None:
                self.tell(cause, begin, end)

    def total(self) -> float:
        """Seconds over all causes."""
        return sum(self.seconds.values())
