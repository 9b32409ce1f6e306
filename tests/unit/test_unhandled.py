"""The hook for exceptions that nobody handles, among hooks of others."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightck.failure import unhandled


def test_a_hook_put_over_ours_that_outlives_a_handle_is_no_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[BaseException] = []
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, trace: shown.append(error))
    unhandled.tell(told.append)
    ours = sys.excepthook

    def theirs(kind: Any, error: Any, trace: Any) -> None:
        ours(kind, error, trace)

    sys.excepthook = theirs
    unhandled.forget(told.append)  # another handle's; theirs stays, and calls through
    told_later: list[BaseException] = []
    unhandled._told.clear()
    unhandled.tell(told_later.append)
    error = KeyError("the user's")
    try:
        sys.excepthook(KeyError, error, None)
    finally:
        unhandled._told.clear()
    assert told_later == [error] and shown == [error]
