"""The hook for exceptions that nobody handles, among hooks of others."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from lightck.failure import triggers


def test_a_hook_put_over_ours_that_outlives_a_handle_is_no_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[BaseException] = []
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, trace: shown.append(error))
    triggers.register(told.append)
    ours = sys.excepthook

    def theirs(kind: Any, error: Any, trace: Any) -> None:
        ours(kind, error, trace)

    sys.excepthook = theirs
    triggers.unregister(told.append)  # another handle's; theirs stays, and calls through
    told_later: list[BaseException] = []
    triggers._callbacks.clear()
    triggers.register(told_later.append)
    error = KeyError("the user's")
    try:
        sys.excepthook(KeyError, error, None)
    finally:
        triggers._callbacks.clear()
    assert told_later == [error] and shown == [error]


@pytest.mark.parametrize("at", ["ps1", "__IPYTHON__", ""])
def test_a_mistyped_line_at_a_prompt_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    told: list[BaseException] = []
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    triggers.register(told.append)
    if at:
        monkeypatch.setattr(sys if at == "ps1" else builtins, at, ">>> ", raising=False)
    error = NameError("a typo")
    try:
        sys.excepthook(NameError, error, None)
    finally:
        triggers.unregister(told.append)
        triggers._callbacks.clear()
    assert shown == [error] and told == ([] if at else [error])


@pytest.mark.parametrize(
    ("error", "well"),
    [
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(2), False),
        (SystemExit("0"), False),
        (KeyboardInterrupt(), False),
        (ValueError(0), False),
    ],
)
def test_an_exit_ends_well_by_its_code(error: BaseException, well: bool) -> None:
    assert triggers.is_success(error) is well
