"""Pause the training thread, at the best place, while a save that ends the process runs.

A single rank is paused at its fence: of what it would go on to compute, nothing is saved any more.
Several are paused at the start of a forward, where each has made the update that another may have
made already: all ranks are at the same step then.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

_LOOK_S = 0.05
"""Seconds of one wait: handlers on the main thread run in between, whatever locks do here."""


@dataclass(eq=False)
class Hold:
    """Pause of the training thread, begun and ended by the thread that has the state saved."""

    at_fence: bool = False
    until_s: float = 0.0
    """Time (`time.monotonic`) at which the pause ends in any case."""
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Begin without a pause."""
        self._over.set()

    def begin(self, until_s: float, *, at_fence: bool) -> None:
        """Pause the training thread at its next fence, or forward if not `at_fence`. Any thread."""
        self.at_fence, self.until_s = at_fence, until_s
        self._over.clear()

    def end(self) -> None:
        """End the pause. Any thread."""
        self._over.set()

    def here(self, *, fence: bool) -> None:
        """Wait while paused here. For the training thread, which holds no lock of lightck's."""
        while fence == self.at_fence and not self._over.is_set():
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                return
            self._over.wait(min(left_s, _LOOK_S))
