"""A snapshot's cost to the training thread is told from what every step costs."""

from __future__ import annotations

from lightck.loop.publisher import StallTimer


def test_steps_without_a_snapshot_do_not_count() -> None:
    stalls = StallTimer()
    assert stalls.cost(0, 0) is None
    for step in range(1, 1001):
        stalls.seconds["step"] = stalls.seconds.get("step", 0.0) + 0.125
        assert stalls.cost(step, 0) is None
    stalls.seconds["fence"] = 0.5
    assert stalls.cost(1001, 1) == 0.5
    stalls.seconds["step"] += 7.0
    assert stalls.cost(1002, 1) == 0.5


def test_an_expensive_first_snapshot_is_forgotten() -> None:
    stalls, total = StallTimer(), 0.0
    for step, cost in enumerate([64.0, 0.5, 0.25, 0.5], 1):
        total += cost
        stalls.seconds["fence"] = total
        found = stalls.cost(step, step)
    assert found == 0.5


def test_asking_twice_in_a_step_counts_once() -> None:
    stalls = StallTimer(seconds={"fence": 1.0})
    assert stalls.cost(1, 1) == 1.0
    stalls.seconds["fence"] = 1.5
    assert stalls.cost(1, 1) == 1.0
    stalls.seconds["fence"] = 2.0
    assert stalls.cost(2, 2) == 1.0
    assert list(stalls._costs) == [1.0, 1.0]
