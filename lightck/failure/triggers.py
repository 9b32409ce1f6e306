"""Exceptions that nobody handles, reported before the interpreter ends.

At a prompt it does not end: a mistyped line is no failure of the training. Nor is an exit with a
status of success.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

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
