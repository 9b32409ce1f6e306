"""Notices: a file or a function says that the machine's end is near."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from lightck.errors import LightckError
from lightck.failure.triggers import PreemptionNotice

LONG_S = 100.0


def test_a_file_that_appears_is_told_once_until_it_has_gone(tmp_path: Path) -> None:
    told: queue.Queue[bool] = queue.Queue()
    asked: queue.Queue[bool] = queue.Queue()
    file = tmp_path / "notice"

    def there() -> bool:
        asked.put(True)
        return file.exists()

    notice = PreemptionNotice(there, lambda: told.put(True), report=_fails, period_s=0.001)
    try:
        for _ in range(2):
            file.touch()
            told.get(timeout=LONG_S)
            for _ in range(5):  # still there: asked again, not told again
                _next(asked)
            assert told.empty()
            file.unlink()
            for _ in range(3):
                _next(asked)
    finally:
        notice.stop()


def test_a_path_is_a_notice_when_it_exists(tmp_path: Path) -> None:
    told = threading.Event()
    notice = PreemptionNotice(tmp_path / "notice", told.set, report=_fails, period_s=0.001)
    (tmp_path / "notice").touch()
    assert told.wait(LONG_S)
    notice.stop()


def test_a_function_that_raises_is_reported_once_and_asked_again() -> None:
    told, errors = threading.Event(), []
    calls = iter([OSError("no route"), OSError("no route"), False, OSError("again"), True])

    def ask() -> bool:
        value = next(calls, True)
        if isinstance(value, OSError):
            raise value
        return value

    notice = PreemptionNotice(ask, told.set, report=errors.append, period_s=0.001)
    assert told.wait(LONG_S)
    notice.stop()
    assert [str(each) for each in errors] == [
        "asking for a notice failed: OSError('no route')",
        "asking for a notice failed: OSError('again')",
    ]


def test_one_that_blocks_holds_nobody_up() -> None:
    asked, go_on, told = threading.Event(), threading.Event(), threading.Event()

    def block() -> bool:
        asked.set()
        go_on.wait()
        return True

    notice = PreemptionNotice(block, told.set, report=_fails)
    assert asked.wait(LONG_S)
    notice.stop()  # returns
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "lightck-notice":
            thread.join(LONG_S)
    assert not told.is_set(), "stopped: an answer that comes later is nobody's"


def _fails(error: LightckError) -> None:
    raise AssertionError(error)


def _next(asked: queue.Queue[bool]) -> None:
    """One more answer than those that were given until now."""
    while not asked.empty():
        asked.get()
    asked.get(timeout=LONG_S)
