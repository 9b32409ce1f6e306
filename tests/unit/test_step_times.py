"""The cost of a snapshot beside its stall is seen in the steps beside which it is written."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

import pytest

from lightck.loop.step_times import StepTimes


@dataclass
class Training:
    """A training by a clock of its own."""

    times: StepTimes = field(default_factory=StepTimes)
    now_s: float = 100.0
    stalled_s: float = 0.0
    captured: int = 0

    def __post_init__(self) -> None:
        self.end()

    def end(self, in_flight: bool = False) -> None:
        """End a step now."""
        self.times.step_ended(self.now_s, self.stalled_s, self.captured, in_flight)

    def step(self, seconds: float, *, in_flight: bool = False, stall_s: float = 0.0) -> None:
        """Make a step of so many seconds, and of a stall in them."""
        self.now_s += seconds + stall_s
        self.stalled_s += stall_s
        self.end(in_flight)

    def snapshot(self, quiet_s: float, beside_s: float, steps: int, stall_s: float = 0.0) -> None:
        """Make a snapshot beside so many steps, and two quiet steps behind them."""
        self.captured += 1
        for i in range(steps):
            self.step(beside_s, in_flight=i < steps - 1, stall_s=0.0 if i else stall_s)
        for _ in range(2):
            self.step(quiet_s)


def test_a_snapshot_costs_its_stall_and_what_its_copy_slows_down() -> None:
    made = Training()
    for _ in range(10):
        made.step(0.1)
    for _ in range(10):
        made.snapshot(0.1, 0.11, 5, stall_s=0.05)
    assert made.times.quiet_s == pytest.approx(0.1)
    assert made.times.cost_s(0.05) == pytest.approx(0.1)
    assert made.times.cost_s(None) is None


@pytest.mark.parametrize(("quiet", "beside"), [(7, 31), (31, 7)])
def test_too_few_steps_of_one_kind_say_nothing(quiet: int, beside: int) -> None:
    made = Training()
    for _ in range(quiet):
        made.step(0.1)
    made.captured = 1
    for _ in range(beside):
        made.step(0.2, in_flight=True)
    assert made.times.cost_s(0.05) == 0.05


def test_a_copy_that_makes_steps_shorter_by_chance_does_not_count_as_a_gain() -> None:
    made = Training()
    for _ in range(20):
        made.snapshot(0.1, 0.09, 3)
    assert made.times.cost_s(0.05) == 0.05


def test_an_evaluation_among_the_steps_changes_nothing() -> None:
    plain, evaluated = Training(), Training()
    for i in range(20):
        for made in (plain, evaluated):
            made.snapshot(0.1, 0.11, 3, stall_s=0.01)
        if i % 5 == 4:
            evaluated.step(60.0)
    assert evaluated.times.cost_s(0.01) == pytest.approx(plain.times.cost_s(0.01))
    assert evaluated.times.step_s == pytest.approx(plain.times.step_s)


def test_a_machine_that_becomes_slower_is_no_cost_of_snapshots() -> None:
    made = Training()
    for _ in range(20):
        made.snapshot(0.1, 0.11, 3)
    before = made.times.cost_s(0.0)
    for _ in range(20):
        made.snapshot(0.2, 0.22, 3)
    assert before == pytest.approx(0.03)
    assert made.times.cost_s(0.0) == pytest.approx(2 * before)
    for _ in range(20):
        made.snapshot(0.1, 0.11, 3)
    assert made.times.cost_s(0.0) == pytest.approx(before)


def test_a_dearer_copy_is_seen_within_forty_steps() -> None:
    made = Training()
    for _ in range(20):
        made.snapshot(0.1, 0.11, 3)
    steps, before = 0, made.times.cost_s(0.0)
    assert before is not None
    while (made.times.cost_s(0.0) or 0.0) < 2 * before:
        made.snapshot(0.1, 0.13, 3)
        steps += 5
    assert steps <= 40


def test_with_a_snapshot_beside_every_step_no_quiet_step_is_known_to_be_recent() -> None:
    made = Training()
    for i in range(70):
        made.captured += 1
        made.step(0.1, in_flight=True)
        assert made.times.quiet_age == i + 1 if i < 7 else made.times.quiet_age >= 64
    for i in range(9):
        made.step(0.1)
        assert (made.times.quiet_age == 0) == (i >= 8)  # the first is still beside a snapshot
    for i in range(30):
        made.captured += 1
        made.step(0.1, in_flight=True)
        assert made.times.quiet_age == i + 1


def test_the_overhead_is_that_of_the_last_five_minutes() -> None:
    made = Training()
    assert made.times.overhead == 0.0
    for i in range(4000):
        made.step(1.0)
        made.times.spent(made.now_s, 0.5, int(i % 10 == 0))
    assert made.times.overhead == pytest.approx(0.05, rel=0.05)
    for _ in range(301):
        made.step(1.0)
        made.times.spent(made.now_s, 0.5, 0)
    assert made.times.overhead == 0.0


def test_medians_are_those_of_the_last_steps() -> None:
    draw, made, last = random.Random(29), Training(), []
    for _ in range(200):
        last.append(draw.uniform(0.1, 0.2))
        made.step(last[-1])
        last = last[-31:]
        assert made.times.step_s == pytest.approx(statistics.median_low(last))
        assert made.times.quiet_s == pytest.approx(statistics.median_low(last))


def test_a_step_takes_some_microseconds() -> None:
    best = float("inf")
    for _ in range(5):
        made = Training()
        began_s = time.perf_counter()
        for i in range(2000):
            made.step(0.1 + (i * 7919 % 100) / 1e4, in_flight=i % 3 == 0)
            made.times.cost_s(0.05)
        best = min(best, (time.perf_counter() - began_s) / 2000)
    print(f"{best * 1e6:.1f} us")
