"""The predictor tells, as far as it can, whether an iteration that raises has reached its fence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightck.journal.boundary_state import BoundaryState
from lightck.journal.pre_fence import EXAMINE_EVERY, PreFencePredictor
from lightck.state.extras import parse
from lightck.state.inventory import Inventory

GRADIENTS = 4


def nothing() -> None:
    """Do nothing between the gradients and the update."""


class Loop:
    """Iterations as the predictor sees them."""

    def __init__(self, begin: int = 0) -> None:
        self.model = nn.BatchNorm1d(3)
        self.counted = {"seen": 0}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        inventory = Inventory(self.model, [optimizer], parse({"counted": self.counted}))
        self.predictor, self.step = (
            PreFencePredictor(BoundaryState(inventory), threading.RLock(), GRADIENTS),
            begin,
        )
        self.heard: list[tuple[int, bool]] = []

    def run(
        self, steps: int, between: Callable[[], Any] = nothing, gradients: int = GRADIENTS
    ) -> None:
        for _ in range(steps):
            self.gradients(gradients)
            between()
            self.step += 1
            self.predictor.fence(self.step)

    def gradients(self, number: int = GRADIENTS) -> None:
        for _ in range(number):
            last = self.predictor.gradient()
            if last is not None:
                self.heard.append((self.step, last))

    def forward(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 3))

    def draw(self) -> None:
        torch.rand(())

    def count(self) -> None:
        self.counted["seen"] += 1


@pytest.mark.parametrize("begin", [0, 1000])
@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_behind_all_gradients_it_has_come_to_its_fence(steps: int, begin: int) -> None:
    """An iteration of a job that has gone on from a snapshot has come to its fence, too."""
    loop = Loop(begin)
    loop.run(steps)
    assert not loop.predictor.is_state_of_fence(ValueError())
    loop.gradients(GRADIENTS - 1)
    assert not loop.predictor.is_state_of_fence(ValueError())
    loop.gradients(1)
    assert loop.predictor.is_state_of_fence(ValueError())


@pytest.mark.parametrize("what", ["forward", "draw", "count"])
def test_not_where_something_of_its_own_still_changes_by_habit(what: str) -> None:
    loop = Loop()
    loop.run(4, getattr(loop, what))
    loop.gradients()
    assert not loop.predictor.is_state_of_fence(ValueError())


def test_a_thread_that_stands_behind_them_has_come_to_it_but_for_a_forward() -> None:
    """Nothing is forgotten: should it go on, its fence finds what it would have found."""

    class Standing(nn.Module):
        def forward(self) -> bool:
            return loop.predictor.is_state_of_fence(sys._getframe())

    loop = Loop()
    loop.run(4)
    assert not loop.predictor.is_state_of_fence(sys._getframe())
    loop.gradients()
    for _ in range(3):
        assert loop.predictor.is_state_of_fence(sys._getframe())
        assert not Standing()()
    loop.predictor.fence(loop.step + 1)
    assert loop.predictor.is_steady


def test_a_new_habit_is_noticed(steps: int = EXAMINE_EVERY + 1) -> None:
    loop = Loop()
    loop.run(4)
    loop.run(steps, loop.draw)
    loop.gradients()
    assert not loop.predictor.is_state_of_fence(ValueError())
    loop.run(2 * EXAMINE_EVERY)
    loop.gradients()
    assert loop.predictor.is_state_of_fence(ValueError())


def test_nor_where_iterations_differ_in_their_gradients() -> None:
    loop = Loop()
    loop.run(4)
    loop.run(1, gradients=GRADIENTS - 1)
    loop.gradients(GRADIENTS - 1)
    assert not loop.predictor.is_state_of_fence(ValueError())


def test_the_last_gradient_is_told_once_that_is_known_and_the_one_that_comes_after_all() -> None:
    loop = Loop()
    heard = loop.heard
    loop.run(5)
    assert heard == [(step, True) for step in (1, 2, 3, 4)], "the first iteration has shown it"
    heard.clear()
    loop.run(1, gradients=GRADIENTS + 3)
    assert heard == [(5, True), (5, False)]
    heard.clear()
    loop.run(2)
    assert not heard, "what comes next is not known"


@pytest.mark.parametrize("count", [2 * GRADIENTS, 2 * GRADIENTS - 1, GRADIENTS - 1])
def test_a_first_iteration_shows_it_that_ends_with_a_whole_backward(count: int) -> None:
    loop = Loop()
    loop.run(1, gradients=count)
    loop.gradients(count)
    assert loop.predictor.is_state_of_fence(ValueError()) is (count % GRADIENTS == 0)
    loop.gradients(1)
    assert not loop.predictor.is_state_of_fence(ValueError())


def test_an_iteration_whose_update_is_left_out_is_no_other_habit() -> None:
    loop = Loop()
    loop.run(5)
    heard = loop.heard
    heard.clear()
    for _ in range(2):
        loop.gradients()
        loop.predictor.skip_fence()
    loop.run(1)
    assert heard == [(5, True)] * 3
    loop.gradients()
    assert loop.predictor.is_state_of_fence(ValueError())


@pytest.mark.parametrize("what", ["forward", "draw", "count"])
def test_no_gradient_is_the_last_thing_where_something_comes_behind_it(what: str) -> None:
    loop = Loop()
    loop.run(5, getattr(loop, what))
    assert not loop.heard


class Failing(nn.Module):
    """Its forward, or its items, cannot be had."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        raise ValueError

    def forward(self, x: Any) -> Any:
        raise ValueError


@pytest.mark.parametrize("where", ["a forward", "a draw"])
@pytest.mark.parametrize("told", ["itself", "as another's reason"])
def test_nor_in_the_middle_of_what_changes_something(where: str, told: str) -> None:
    loop = Loop()
    loop.run(4)
    loop.gradients()
    failing: Any = Failing()
    with pytest.raises((ValueError, LookupError)) as raised:
        try:
            failing(0) if where == "a forward" else next(iter(DataLoader(failing)))
        except ValueError:
            if told == "itself":
                raise
            raise LookupError from None
    assert not loop.predictor.is_state_of_fence(raised.value)
