"""A loop is taken to hang by a pure decision, asked with a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from lightck.failure.hang import SLACK_S, CollectivePosition, HangWatch, Suspicion
from lightck.types import Failure

PERIOD_S = 0.25
BARRIER = CollectivePosition("barrier, called from train.py:1", (1, 2))


@dataclass(frozen=True)
class Seen:
    """A `LoopProgress`."""

    step: int = 0
    updating: bool = False
    inside: bool = False
    ticks: int = 0
    step_s: float | None = None
    thread: int = 0


@dataclass
class Loop:
    """A training loop that is looked at, and the clock of whoever looks."""

    failure: Failure = field(default_factory=Failure)
    seen: Seen = field(default_factory=Seen)
    now_s: float = 1000.0
    place: CollectivePosition | None = None

    def __post_init__(self) -> None:
        self.watch = HangWatch(self.failure, PERIOD_S)

    def step(self, step_s: float | None) -> None:
        """One step, looked at when it has ended."""
        self.seen = replace(
            self.seen, step=self.seen.step + 1, ticks=self.seen.ticks + 5, step_s=step_s
        )
        assert self.look(step_s or PERIOD_S) is None

    def look(self, after_s: float) -> Suspicion | None:
        self.now_s += after_s
        return self.watch.observe(self.now_s, self.seen, self.place)

    def wait(self, seconds: float) -> float | None:
        """Let time pass without progress; after how long a hang was found, or None."""
        began = self.now_s
        while self.now_s - began < seconds:
            if self.look(self.watch.next_look_s()) is not None:
                return self.now_s - began
        return None


def running(step_s: float = 0.5, **settings: float) -> Loop:
    loop = Loop(Failure(**settings))
    for _ in range(5):
        loop.step(step_s)
    return loop


@pytest.mark.parametrize("step_s", [0.01, 0.2, 0.5, 3.0])
def test_a_stop_in_a_collective_is_a_hang_after_three_steps_and_within_a_second_more(
    step_s: float,
) -> None:
    loop = running(step_s)
    loop.place = BARRIER
    found_s = loop.wait(100)
    assert found_s is not None
    assert 3 * step_s + SLACK_S <= found_s <= 3 * step_s + 0.99
    assert loop.watch.suspected is not None
    assert loop.watch.suspected.position is BARRIER


def test_elsewhere_only_the_generous_deadline_counts() -> None:
    loop = running(0.1, hang_s=60)
    assert loop.wait(59) is None
    found_s = loop.wait(3)
    assert found_s is not None and 59 + found_s >= 60


def test_a_generous_deadline_shorter_than_the_steps_is_lengthened() -> None:
    loop = running(40.0, hang_s=60)
    assert loop.wait(119) is None
    assert loop.wait(3) is not None


def test_in_the_first_steps_only_the_generous_deadline_counts_in_collectives_too() -> None:
    """They compile, and nothing tells how long a step takes: that does, whatever it is doing."""
    loop = Loop(Failure(hang_s=500))
    assert loop.look(1.0) is None
    for place in (BARRIER, None):
        loop.place = place
        assert loop.wait(499) is None
        assert loop.wait(3) is not None
        loop.step(None)
    loop.place = BARRIER
    loop.step(1.0)  # now it is known what a step takes
    assert loop.wait(100) is not None


def test_one_slow_step_does_not_change_what_is_usual() -> None:
    loop = running(0.1)
    loop.step(60.0)
    loop.step(0.1)
    assert loop.watch.step_s == 0.1


def test_steps_that_become_slower_are_taken_over() -> None:
    loop = running(0.1)
    for _ in range(5):
        loop.step(2.0)
    assert loop.watch.step_s == 2.0


def test_progress_inside_a_step_is_progress() -> None:
    loop = running(0.1)
    loop.place = BARRIER
    for _ in range(100):
        loop.seen = replace(loop.seen, ticks=loop.seen.ticks + 1)
        assert loop.wait(0.6) is None


def test_going_from_one_collective_to_the_next_is_progress() -> None:
    loop = running(0.1)
    for mark in range(100):
        loop.place = CollectivePosition("all_reduce", (mark,))
        assert loop.wait(0.5) is None
    for _ in range(100):  # an evaluation that computes between its reductions
        loop.place = None
        assert loop.wait(0.3) is None
        loop.place = BARRIER
        assert loop.wait(0.5) is None


def test_a_process_that_was_stopped_has_not_hung() -> None:
    loop = running(0.1)
    loop.place = BARRIER
    assert loop.wait(0.5) is None
    assert loop.look(3600.0) is None  # SIGSTOP, an hour, SIGCONT
    assert loop.look(0.1) is None
    assert loop.wait(5) is not None, "that it hangs afterwards is noticed all the same"


def test_a_process_stopped_again_and_again_has_not_hung_elsewhere() -> None:
    loop = running(0.1, hang_s=60)
    for _ in range(100):
        assert loop.look(59.0) is None


def test_a_look_that_comes_late_counts_as_if_it_had_come_a_little_late() -> None:
    loop = running(0.1)
    loop.place = BARRIER
    assert loop.look(PERIOD_S) is None
    assert loop.look(1.5) is None, "of this time nobody knows what happened in it"
    assert loop.watch.suspected is None


def test_a_hang_is_told_once_and_ends_with_the_next_progress() -> None:
    loop = running(0.1)
    loop.place = BARRIER
    assert loop.wait(5) is not None
    assert loop.wait(1000) is None
    assert loop.watch.suspected is not None
    loop.seen = replace(loop.seen, ticks=loop.seen.ticks + 1)
    assert loop.look(PERIOD_S) is None
    assert loop.watch.suspected is None
    assert loop.wait(5) is not None, "the next one is told again"


def test_a_hang_inside_one_collective_ends_where_that_does() -> None:
    """An error comes out of it, with which the process ends by itself."""
    loop = running(0.1)
    loop.place = BARRIER
    assert loop.wait(5) is not None
    loop.place = None
    assert loop.look(PERIOD_S) is None
    assert loop.watch.suspected is None
    assert loop.wait(100) is None


def test_a_hang_elsewhere_goes_on_from_one_collective_to_the_next() -> None:
    """A loop that asks again and again, say: nothing ever moves."""
    loop = running(0.1, hang_s=60)
    marks = iter(range(10**6))
    found = []
    for _ in range(1000):
        loop.place = CollectivePosition("poll", (next(marks),))
        found.append(loop.look(PERIOD_S))
    assert sum(each is not None for each in found) == 1
    assert loop.watch.suspected is not None


def test_a_loop_has_not_moved_after_three_steps_wherever_it_is() -> None:
    loop = running(0.5, hang_s=60)
    loop.wait(1.7)
    assert not loop.watch.has_not_moved(loop.seen)
    loop.wait(0.5)
    assert loop.watch.has_not_moved(loop.seen)
    assert not loop.watch.is_stuck(loop.seen), "nor is it a hang yet"
    moved = replace(loop.seen, ticks=loop.seen.ticks + 1)
    assert not loop.watch.has_not_moved(moved), "though nobody has looked since"
    loop.wait(60)
    assert loop.watch.is_stuck(loop.seen) and not loop.watch.is_stuck(moved)


def test_a_loop_that_waits_for_others_is_not_stuck() -> None:
    loop = running(0.5)
    loop.place = BARRIER
    assert loop.wait(5) is not None
    assert loop.watch.has_not_moved(loop.seen) and not loop.watch.is_stuck(loop.seen)


def test_looks_are_rare_until_something_is_waited_for() -> None:
    loop = running(0.1)
    assert loop.watch.next_look_s() == PERIOD_S
    loop.wait(3)
    assert loop.watch.next_look_s() == PERIOD_S
    loop.place = BARRIER
    loop.look(PERIOD_S)
    loop.look(PERIOD_S)
    assert loop.watch.next_look_s() < PERIOD_S
    loop.wait(5)
    assert loop.watch.next_look_s() == PERIOD_S, "found: nothing is urgent any more"
