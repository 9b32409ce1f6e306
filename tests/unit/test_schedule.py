from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.pipeline.schedule import (
    LAST_TICK,
    Backward,
    Comm,
    Eager,
    schedule,
)
from lightck.types import ReleaseSchedule

totals = st.integers(0, 1 << 50)
events = st.lists(
    st.one_of(st.just("tick"), st.just("waits"), st.floats(0, 1.5)), min_size=0, max_size=60
)
windows = st.lists(st.tuples(totals, events), min_size=1, max_size=6)


def told(chosen: ReleaseSchedule, event: str | float) -> int:
    if isinstance(event, float):
        return chosen.communicates(event)
    return chosen.tick() if event == "tick" else chosen.training_waits()


@pytest.mark.parametrize("name", ["auto", "eager", "backward", "comm"])
@given(windows=windows, layers=st.integers(0, 100))
def test_releases_never_go_back_and_never_exceed_what_there_is(
    name: str, windows: list[tuple[int, list[str | float]]], layers: int
) -> None:
    chosen = schedule(name, layers, communicates=True)
    assert isinstance(chosen, ReleaseSchedule)
    for total, seen in windows:
        released = chosen.open(total)
        assert 0 <= released <= total
        for each in seen:
            more = told(chosen, each)
            assert released <= more <= total
            released = more
            assert each != "waits" or released == total
        chosen.close()


@given(total=totals, ticks=st.integers(0, 30))
def test_comm_holds_copies_back_while_the_training_computes_alone(total: int, ticks: int) -> None:
    chosen = Comm()
    chosen.open(total)
    chosen.communicates(1.0)  # communication is learned of
    chosen.close()
    assert chosen.open(total) == 0
    assert [chosen.tick() for _ in range(ticks)] == [0] * ticks
    assert chosen.communicates(0.25) == total // 4
    assert chosen.tick() == total // 4
    assert chosen.training_waits() == total
    chosen.close()


@given(total=totals, ticks=st.integers(0, 30))
def test_comm_without_communication_is_eager(total: int, ticks: int) -> None:
    chosen = Comm()
    for _ in range(3):
        assert chosen.open(total) == total
        assert [chosen.tick() for _ in range(ticks)] == [total] * ticks
        chosen.close()


def test_auto_is_comm_only_where_gradients_are_communicated() -> None:
    assert isinstance(schedule("auto", 3, communicates=True), Comm)
    assert isinstance(schedule("auto", 3, communicates=False), Eager)


@given(total=totals, layers=st.integers(0, 200), micro_batches=st.integers(1, 5))
def test_backward_is_complete_before_the_last_tick_of_a_window_like_the_last(
    total: int, layers: int, micro_batches: int
) -> None:
    chosen = Backward(layers)
    for window in range(3):
        ticks = max(1, layers * (1 if window == 0 else micro_batches))
        released = [chosen.open(total)] + [chosen.tick() for _ in range(ticks)]
        if window != 1:  # the second one has another length than the first
            enough = next(i for i in range(ticks + 1) if i >= LAST_TICK * ticks)
            assert released[enough] == total
        chosen.close()


@given(total=st.integers(1 << 20, 1 << 50), layers=st.integers(3, 200))
def test_backward_leaves_something_for_the_backward(total: int, layers: int) -> None:
    chosen = Backward(layers)
    assert chosen.open(total) < total // 2
    assert chosen.tick() < total


def test_a_window_without_a_tick_teaches_nothing() -> None:
    chosen = Backward(10)
    for _ in range(2):
        assert chosen.open(3000) == 1000
        chosen.close()
    assert chosen.open(3000) == 1000
    assert [chosen.tick() for _ in range(8)][-1] == 3000


def test_eager_releases_all_at_once() -> None:
    chosen = Eager()
    assert chosen.open(77) == chosen.tick() == 77
