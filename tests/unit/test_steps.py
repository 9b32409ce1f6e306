from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.errors import ConfigError
from lightck.loop.steps import Steps


def job(optimizers: int, **settings: object) -> Steps:
    steps = Steps(**settings)  # type: ignore[arg-type]
    for _ in range(optimizers):
        steps.add()
    return steps


def update(steps: Steps, who: int, inside: Callable[[], object] = lambda: None) -> bool:
    """One optimizer's step, as its hooks tell of it."""
    steps.begin(who)
    inside()
    return steps.end(who)


def failing(steps: Steps, who: int) -> None:
    """A step that raises: no hook tells of its end."""
    steps.begin(who)
    raise FloatingPointError


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_step_is_complete_when_every_optimizer_has_stepped_in_any_order(
    optimizers: int, rounds: int, dice: object
) -> None:
    steps = job(optimizers)
    for step in range(1, rounds + 1):
        order = list(range(optimizers))
        dice.shuffle(order)  # type: ignore[attr-defined]
        for position, who in enumerate(order):
            assert steps.between_updates == (position > 0)
            done = dice.choice([update, lambda s, w: s.skipped(w)])(steps, who)  # type: ignore[attr-defined]
            assert done == (position == optimizers - 1)
        assert steps.step == step
        assert not steps.between_updates and not steps.updating


def test_an_optimizer_that_steps_twice_is_ambiguous_and_the_ways_out_are_named() -> None:
    steps = job(2)
    update(steps, 0)
    with pytest.raises(ConfigError, match=r"optimizer 0 steps again at step 1 before optimizer 1"):
        steps.begin(0)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_with_a_boundary_its_steps_count_whatever_the_others_do(order: list[int]) -> None:
    steps = job(3, boundary=1)
    for who in order:
        assert update(steps, who) == (who == 1)
    assert steps.step == order.count(1)


@given(st.lists(st.integers(-1, 2), max_size=30))
def test_with_marks_only_the_marks_count(order: list[int]) -> None:
    steps = job(3, marked=True)
    for who in order:
        assert update(steps, who) == (who == Steps.MARK)
    assert steps.step == order.count(Steps.MARK)


def test_optimizers_inside_a_mark_do_not_end_a_step() -> None:
    steps = job(2, marked=True)

    def inside() -> None:
        assert not update(steps, 0)
        assert not update(steps, 1)
        assert steps.updating

    assert update(steps, Steps.MARK, inside)
    assert (steps.step, steps.nested) == (1, set())
    assert not steps.updating


def test_an_optimizer_inside_another_one_counts_once_with_the_outer_one() -> None:
    steps = job(2)
    for step in range(1, 4):

        def inside() -> None:
            assert not steps.begin(1)
            assert not steps.end(1)

        assert update(steps, 0, inside)
        assert steps.step == step


@given(st.lists(st.booleans(), max_size=12))
def test_an_update_that_raised_is_no_update_and_the_next_one_is_not_inside_it(
    fails: list[bool],
) -> None:
    steps = job(1)
    done = 0
    for fail in fails:
        if fail:
            with pytest.raises(FloatingPointError):
                failing(steps, 0)
        else:
            assert update(steps, 0)
            done += 1
    assert steps.step == done


def test_an_outer_update_that_raised_does_not_swallow_the_next_steps() -> None:
    steps = job(2)

    def outer() -> None:
        steps.begin(0)
        failing(steps, 1)

    with pytest.raises(FloatingPointError):
        outer()
    assert not update(steps, 1)
    assert update(steps, 0)
    assert steps.step == 1


def test_a_mark_that_raised_does_not_swallow_the_next_one() -> None:
    steps = job(1, marked=True)
    with pytest.raises(FloatingPointError):
        failing(steps, Steps.MARK)
    assert update(steps, Steps.MARK)
    assert steps.step == 1
    assert not steps.updating


def test_nothing_is_complete_before_the_job_is_known() -> None:
    steps = Steps(step=7, settled=False)
    steps.add()
    assert not update(steps, 0)
    assert steps.step == 7
    steps.add()
    steps.settled = True
    assert update(steps, 1)
    assert steps.step == 8


def test_a_new_optimizer_joins_where_the_others_are() -> None:
    steps = job(1, step=5)
    update(steps, 0)
    assert steps.step == 6
    steps.add()
    assert not update(steps, 0)
    assert update(steps, 1)
    assert steps.step == 7


def test_one_that_joins_late_belongs_to_the_step_that_has_just_ended() -> None:
    steps = job(1)
    update(steps, 0)
    steps.add(late=True)
    assert not update(steps, 1)
    assert steps.step == 1
    assert not update(steps, 0)
    assert update(steps, 1)
    assert steps.step == 2


def test_an_update_that_raised_is_known_to_have_been_given_up() -> None:
    steps, here = job(1), threading.get_ident()

    def raises() -> None:
        steps.begin(0)
        assert not steps.gave_up(here), "it still runs"
        raise FloatingPointError

    assert not steps.gave_up(here)
    with pytest.raises(FloatingPointError):
        raises()
    assert steps.updating and steps.gave_up(here)
    update(steps, 0)
    assert not steps.gave_up(here)
