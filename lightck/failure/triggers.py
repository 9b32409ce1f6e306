"""Triggers besides signals: a notice that the machine will end, and unhandled exceptions.

The save that a trigger starts is made by `watchdog.py`; CONTRIBUTING.md says how to add another.
"""

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
        register: Callable[[], object],
        report: Callable[[LightckError], object],
        period_s: float = PERIOD_S,
    ) -> None:
        """Start to poll.

        `register` is called at each change from false to true, on the polling thread.
        """
        self.is_present = False
        self._source, self._on_notice, self._report, self._period_s = (
            source,
            register,
            report,
            period_s,
        )
        self._failed = False
        self._stop = threading.Event()
        threading.Thread(target=self._poll, name="lightck-notice", daemon=True).start()

    def stop(self) -> None:
        """Stop polling. Does not wait for a poll that is under way."""
        self._stop.set()

    def _poll(self) -> None:
        while not self._stop.is_set():
            true = self._is_noticed()
            if true and not self.is_present and not self._stop.is_set():
                self.is_present = True
                self._on_notice()
            elif not true:
                self.is_present = False
            self._stop.wait(self._period_s)

    def _is_noticed(self) -> bool:
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

ExceptionCallback = Callable[[BaseException], object]
_callbacks: list[ExceptionCallback] = []
_earlier_hook: Callable[..., Any] = sys.__excepthook__
_reporting: list[BaseException] = []
"""The exception being reported: a hook installed over ours may call ours again."""


def register(callback: ExceptionCallback) -> None:
    """Call `callback` with every unhandled exception of the main thread, then the earlier hook.

    The hook that was installed at the first registration is called, even if a callback fails.
    """
    global _earlier_hook
    if not _callbacks:
        _earlier_hook, sys.excepthook = sys.excepthook, _hook
    _callbacks.append(callback)


def unregister(callback: ExceptionCallback) -> None:
    """Stop reporting to `callback`; idempotent. A hook installed since stays, and calls through."""
    if callback in _callbacks:
        _callbacks.remove(callback)
    if not _callbacks and sys.excepthook is _hook:
        sys.excepthook = _earlier_hook


def is_success(error: BaseException) -> bool:
    """Tell whether the exception is `sys.exit()` or `sys.exit(0)`."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code is None or (isinstance(code, int) and code == 0)


def _is_prompt() -> bool:
    """Tell whether there is or will be a prompt: Python's own, `python -i`, or IPython."""
    flags = sys.flags.interactive or sys.flags.inspect
    return bool(flags) or hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _reporting:
        sys.__excepthook__(kind, error, trace)
        return
    if _is_prompt():
        _earlier_hook(kind, error, trace)
        return
    _reporting.append(error)
    try:
        for callback in [*_callbacks]:
            callback(error)
    finally:
        try:
            _earlier_hook(kind, error, trace)
        finally:
            _reporting.clear()
