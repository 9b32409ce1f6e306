"""Polling for a notice that the machine will end, on a thread that may get stuck in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from lightck.errors import LightckError

PERIOD_S = 1.0


class Notice:
    """A preemption notice: a file that appears, or a function that turns true.

    Either may block (a dead network file system, a metadata server): this thread waits for it, and
    no other thread waits for this one.
    """

    def __init__(
        self,
        source: Path | Callable[[], bool],
        tell: Callable[[], object],
        report: Callable[[LightckError], object],
        period_s: float = PERIOD_S,
    ) -> None:
        """Start to poll.

        `tell` is called at each change from false to true, on the polling thread.
        """
        self.given = False
        self._source, self._tell, self._report, self._period_s = source, tell, report, period_s
        self._failed = False
        self._stop = threading.Event()
        threading.Thread(target=self._ask, name="lightck-notice", daemon=True).start()

    def stop(self) -> None:
        """Stop polling. Does not wait for a poll that is under way."""
        self._stop.set()

    def _ask(self) -> None:
        while not self._stop.is_set():
            true = self._answer()
            if true and not self.given and not self._stop.is_set():
                self.given = True
                self._tell()
            elif not true:
                self.given = False
            self._stop.wait(self._period_s)

    def _answer(self) -> bool:
        """Poll once. An error counts as false, and is reported once until a poll succeeds."""
        try:
            true = self._source() if callable(self._source) else self._source.exists()
        except Exception as error:  # noqa: BLE001 - it is the user's function
            if not self._failed:
                self._failed = True
                self._report(LightckError(f"asking for a notice failed: {error!r}"))
            return False
        self._failed = False
        return bool(true)
