"""`attach(on_event=...)`: told of every event, aside from the training, whatever it does."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import lightck
from lightck import events
from support.loops import adam_loop, attach, steps_at


def test_it_is_told_of_every_event_in_order_on_a_thread_of_its_own(run_dir: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    threads = set()

    def hear(name: str, fields: dict[str, Any]) -> None:
        threads.add(threading.current_thread().name)
        told.append((name, fields))

    assert not logging.getLogger("lightck").isEnabledFor(logging.DEBUG)
    loop = adam_loop()
    handle = attach(run_dir, loop, on_event=hear)
    for _ in range(3):
        loop.run(1)
        handle.wait()
    handle.close()
    names = [name for name, _ in told]
    assert names[0] == "attached" and names[-1] == "summary"
    assert [fields["step"] for name, fields in told if name == "committed"][-1] == 3
    assert json.loads(json.dumps(told, allow_nan=False)) == [list(each) for each in told]
    assert threads == {"lightck-events"}
    events.event("after the close")
    assert names == [name for name, _ in told]


@pytest.mark.parametrize("on_error", ["warn", "raise", "function"])
def test_what_it_raises_is_reported_once_and_ends_nothing(
    run_dir: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[BaseException] = []
    warned: list[str] = []
    told = []

    def fail(name: str, fields: dict[str, Any]) -> None:
        told.append(name)
        raise KeyError(name) if len(told) % 2 else SystemExit(name)

    loop = adam_loop()
    given: Any = reports.append if on_error == "function" else on_error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda text, *_, **__: warned.append(str(text)))
        with attach(run_dir, loop, on_event=fail, on_error=given) as handle:
            loop.run(4)
            handle.wait()
    assert steps_at(run_dir)[-1] == 4 and len(told) >= 5
    if on_error == "function":
        (error,) = reports
        assert isinstance(error, lightck.LightckError) and isinstance(error.__cause__, KeyError)
        assert not warned
    else:
        (text,) = warned
        assert "on_event failed at the event 'attached'" in text and not reports
    (record,) = [r for r in caplog.records if "on_event" in r.getMessage()]
    assert record.levelno == logging.ERROR and record.exc_info is not None


def test_while_it_hangs_training_goes_on_and_a_close_ends_all_the_same(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PATIENCE_S", 0.1)
    monkeypatch.setattr(events, "MOST_UNTOLD", 5)
    go_on, inside = threading.Event(), threading.Event()
    told = []

    def hang(name: str, fields: dict[str, Any]) -> None:
        told.append(name)
        inside.set()
        go_on.wait()

    loop = adam_loop()
    handle = attach(run_dir, loop, on_event=hang)
    assert inside.wait(60)
    for _ in range(10):
        loop.run(1)
        handle.wait()
    handle.close()
    assert steps_at(run_dir)[-1] == 10
    assert told == ["attached"]
    go_on.set()
    warned = [r.getMessage() for r in caplog.records if "on_event" in r.getMessage()]
    assert len(warned) == 2, warned
    assert "slower than events come: 5 wait" in warned[0]
    assert "has not returned for 0.1 s" in warned[1]


def test_it_may_close_the_handle_and_ask_it(run_dir: Path) -> None:
    seen: list[Any] = []
    made = threading.Event()
    loop = adam_loop()

    def ask(name: str, fields: dict[str, Any]) -> None:
        if name == "summary":
            made.wait(60)
            seen.append(handle.stats().committed)
            handle.close()

    handle = attach(run_dir, loop, on_event=ask)
    made.set()
    loop.run(2)
    handle.close()
    assert seen == [handle.stats().committed]


def test_a_forked_child_tells_nobody(run_dir: Path) -> None:
    told = []
    loop = adam_loop()
    with attach(run_dir, loop, on_event=lambda name, fields: told.append(name)):
        child = os.fork()
        if child == 0:
            events.event("in the child")
            os._exit(len(events._subscribers))
        assert os.waitpid(child, 0)[1] == 0
    assert "in the child" not in told


def test_a_process_that_a_signal_ends_has_told_what_was_saved(run_dir: Path) -> None:
    told = run_dir.with_name("told")
    script = f"""
import os, signal, time, torch, lightck
def tell(name, fields):
    time.sleep(0.05)
    with open({str(told)!r}, "a") as file:
        print(name, fields.get("reason"), file=file)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = lightck.attach(model, optimizer, {str(run_dir)!r}, policy=1000, on_event=tell)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == -15
    assert told.read_text().splitlines()[-1] == "saved SIGTERM"


def test_what_is_no_function_is_refused(run_dir: Path) -> None:
    with pytest.raises(lightck.ConfigError, match="on_event must be a function, found 'print'"):
        attach(run_dir, adam_loop(), on_event="print")
    assert not events._subscribers
