"""An extra's cost at every step is told once, when it is more than a step should bear."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lightck.capture import burden
from lightck.capture.burden import FIRST_STEPS, MEASURED_STEPS, Burden

_SOME = FIRST_STEPS + MEASURED_STEPS // 2 - 1
"""Fewer than half of those that are measured, more than half of as many from the first on."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(burden.time, "perf_counter", lambda: now[0])
    return now


def run(clock: list[float], costs: dict[str, Any], step_s: float, steps: int = 64) -> None:
    """`costs`: seconds by extra and step."""
    held = Burden()
    for step in range(steps):
        for name, cost in costs.items():
            for _ in range(3):  # instants
                began = clock[0]
                clock[0] += cost(step) / 3
                held.add(name, began)
        clock[0] += step_s - sum(cost(step) for cost in costs.values())
        held.step_ended({name: {"list": [1.0] * 100} for name in costs})


def told(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [r.__dict__["lightck"] for r in caplog.records if "dear_extra" in r.message]


def test_a_dear_extra_is_told_once_with_its_bytes_and_its_time(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="lightck")
    run(clock, {"cheap": lambda step: 0.0004, "dear": lambda step: 0.006}, 0.5)
    (said,) = told(caplog)
    assert (said["name"], said["ms_per_step"], said["step_ms"]) == ("dear", 6.0, 500.0)
    assert 900 < said["bytes"] < 1000 and "a seed and a position" in said["do"]


@pytest.mark.parametrize(
    ("cost", "step_s"),
    [
        (lambda step: 0.0009, 0.002),  # a part of a millisecond, of whatever step
        (lambda step: 0.004, 0.5),  # less than a hundredth of a step
        (lambda step: 0.1 if step < _SOME else 0.0, 0.5),  # the first steps
        (lambda step: 0.1 if step % 3 == 0 else 0.0, 0.5),  # now and then, as on a busy machine
        (lambda step: 0.1 if step >= FIRST_STEPS + MEASURED_STEPS else 0.0, 0.5),
    ],
)
def test_what_a_step_can_bear_is_not_told(
    clock: list[float], caplog: pytest.LogCaptureFixture, cost: Any, step_s: float
) -> None:
    caplog.set_level(logging.WARNING, logger="lightck")
    run(clock, {"extra": cost}, step_s)
    assert not told(caplog)
