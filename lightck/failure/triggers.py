"""Triggers besides signals: a notice that the machine will end, and unhandled exceptions."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from lightck.errors import LightckError

# ---- a notice that the machine will end, polled on a thread that may get stuck in it -------------

PERIOD_S = 1.0


class PreemptionNotice:
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


# ---- exceptions that nobody handles, reported before the interpreter ends ------------------------
# At a prompt it does not end: a mistyped line is no failure of the training. Nor is an exit with a
# status of success.

Told = Callable[[BaseException], object]
_told: list[Told] = []
_earlier: Callable[..., Any] = sys.__excepthook__
_inside: list[BaseException] = []
"""The exception being reported: a hook installed over ours may call ours again."""


def tell(told: Told) -> None:
    """Call `told` with every unhandled exception of the main thread, then the earlier hook.

    The hook that was installed at the first registration is called, even if a callback fails.
    """
    global _earlier
    if not _told:
        _earlier, sys.excepthook = sys.excepthook, _hook
    _told.append(told)


def forget(told: Told) -> None:
    """Stop reporting to `told`; idempotent. A hook installed since stays, and calls through."""
    if told in _told:
        _told.remove(told)
    if not _told and sys.excepthook is _hook:
        sys.excepthook = _earlier


def ends_well(error: BaseException) -> bool:
    """Tell whether the exception is `sys.exit()` or `sys.exit(0)`."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code is None or (isinstance(code, int) and code == 0)


def _is_prompt() -> bool:
    """Tell whether there is or will be a prompt: Python's own, `python -i`, or IPython."""
    flags = sys.flags.interactive or sys.flags.inspect
    return bool(flags) or hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _inside:
        sys.__excepthook__(kind, error, trace)
        return
    if _is_prompt():
        _earlier(kind, error, trace)
        return
    _inside.append(error)
    try:
        for told in [*_told]:
            told(error)
    finally:
        try:
            _earlier(kind, error, trace)
        finally:
            _inside.clear()
