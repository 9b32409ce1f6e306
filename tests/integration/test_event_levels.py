"""A run says plain values: single steps at DEBUG, a summary a minute at INFO."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lightck
from lightck.loop import publisher
from support.loops import adam_loop, attach


def _fields(records: list[logging.LogRecord], name: str) -> list[dict[str, Any]]:
    return [r.__dict__["lightck"] for r in records if r.__dict__.get("lightck_event") == name]


def _types(value: Any) -> Iterator[type]:
    yield type(value)
    if isinstance(value, dict):
        for key, each in value.items():
            yield type(key)
            yield from _types(each)
    if isinstance(value, list):
        for each in value:
            yield from _types(each)


@pytest.fixture
def told(run_dir: Path, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Records of a run of 20 steps that slips, saves, is restored and closed."""
    caplog.set_level(logging.DEBUG, "lightck")
    loop = adam_loop()
    handle = attach(run_dir, loop, policy=2, placement="staged", slots=2)
    for steps in (3, 2):
        loop.run(steps)
        handle.wait()
    held = [lightck.load(run_dir, step) for step in (2, 4)]
    loop.run(5)  # no slot is free
    del held
    gc.collect()
    handle.snapshot_now("to see it")
    loop.run(10)
    handle.close()
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir)
    assert info is not None and info.step == 20
    with attach(run_dir, loop):
        loop.run(1)
    return caplog.records


def test_every_field_of_every_event_is_plain_json(told: list[logging.LogRecord]) -> None:
    names = {record.__dict__["lightck_event"] for record in told}
    print(sorted(names))
    assert names >= {"attached", "committed", "slipped", "saved", "restored", "summary", "staging"}
    for record in told:
        fields = record.__dict__["lightck"]
        found = set(_types(fields))
        assert found <= {dict, list, str, int, float, bool, type(None)}, (fields, found)
        assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    (attached, *_) = _fields(told, "attached")
    assert attached["path"].endswith("/run")


def test_what_comes_at_every_step_is_said_at_debug_only(told: list[logging.LogRecord]) -> None:
    seen = [r.__dict__["lightck_event"] for r in told if r.levelno >= logging.INFO]
    assert not {"committed", "slipped", "schedule", "dead"} & set(seen)
    (restored,) = [r for r in told if r.__dict__["lightck_event"] == "restored"]
    assert restored.levelno == logging.INFO
    assert restored.getMessage().startswith("lightck: restored step 20, next is 21")


def test_a_close_sums_up_what_the_run_came_to(told: list[logging.LogRecord]) -> None:
    first, second = _fields(told, "summary")
    assert first["steps"] == first["step"] == first["committed_step"] == 20
    assert first["slipped"] == len(_fields(told, "slipped")) >= 1
    assert first["committed"] + second["committed"] == len(_fields(told, "committed"))
    assert first["stall_s_per_step"] > 0
    assert second["steps"] == 1 and second["step"] == 21


def test_a_long_run_says_how_it_goes_once_a_minute(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightck")
    now = [0.0]
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
    monkeypatch.setattr(publisher, "time", clock)
    loop = adam_loop()
    handle = attach(run_dir, loop, failure="off")
    for _ in range(30):
        loop.run(1)
        handle.wait()
        now[0] += 10.0
    told = _fields(caplog.records, "summary")
    # The clock moves after each step: a minute has passed when the seventh ends.
    assert [each["step"] for each in told] == [7, 13, 19, 25]
    assert [each["steps"] for each in told] == [7, 6, 6, 6]
    assert all(each["seconds"] == 60.0 for each in told)
    handle.close()
    assert [each["steps"] for each in _fields(caplog.records, "summary")][-1] == 5
