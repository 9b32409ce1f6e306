"""Holds the training thread where it stands still best, while a save that ends the process runs.

One rank is held at its fence: of what it would go on to compute, nothing is saved any more. Several
are held at the start of a forward, where each has made the update that another may have made
already: the ranks then stand at the same step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

_LOOK_S = 0.05
"""Handlers on the main thread run in between, whatever this platform's locks do."""


@dataclass(eq=False)
class Hold:
    """Begun and ended by the thread that has the state saved; the training thread waits."""

    at_fence: bool = False
    until_s: float = 0.0
    """Of `time.monotonic`: it ends then in any case."""
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Nothing is held."""
        self._over.set()

    def begin(self, until_s: float, *, at_fence: bool) -> None:
        """Hold the training thread when it comes there next. Any thread."""
        self.at_fence, self.until_s = at_fence, until_s
        self._over.clear()

    def end(self) -> None:
        """Let it go. Any thread."""
        self._over.set()

    def here(self, *, fence: bool) -> None:
        """Wait, if this is where to; the training thread, with no lock of lightck's."""
        while fence == self.at_fence and not self._over.is_set():
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                return
            self._over.wait(min(left_s, _LOOK_S))
