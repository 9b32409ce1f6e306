"""Exceptions that nobody handles: whoever wants to hears of them before the interpreter ends.

At a prompt it does not end: a mistyped line is no failure of the training. Nor is an exit that says
that all is well.
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
"""What is being told: a hook that was put over ours may lead back here."""


def tell(told: Told) -> None:
    """Call `told` with an exception that reaches the top of the main thread; then the hook before.

    The hook that is there when the first one asks is called, whatever happens here.
    """
    global _earlier
    if not _told:
        _earlier, sys.excepthook = sys.excepthook, _hook
    _told.append(told)


def forget(told: Told) -> None:
    """Tell it no more; idempotent. A hook that was installed since stays, and calls through."""
    if told in _told:
        _told.remove(told)
    if not _told and sys.excepthook is _hook:
        sys.excepthook = _earlier


def ends_well(error: BaseException) -> bool:
    """`sys.exit()`, or `sys.exit(0)`."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code is None or (isinstance(code, int) and code == 0)


def _is_prompt() -> bool:
    """Somebody types, or will after the script: Python's own prompt, `python -i`, IPython."""
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
