"""A replacement's program begins where the others are, or all ranks are restarted: none guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lightck.errors import CoordinationError
from lightck.inplace.communicator import Communicator
from lightck.inplace.group import Group
from lightck.inplace.inputs import Inputs
from lightck.inplace.operations import Operation, described
from lightck.inplace.plan import Description
from support.inplace.simulated import Switch

BASE, STEP = 20, 5
TOP = "train.py:9 < train.py:30"
END = "train.py:9 < train.py:50"


def form(site: str, values: int = 1) -> Description:
    return Description("allreduce SUM", (("float32", (values,)),), site=site)


@pytest.fixture
def joined() -> Iterator[Callable[..., Communicator]]:
    """Makes a replacement that has joined, and been given the results between step and forward."""
    every: list[Communicator] = []

    def join(*prelude: Description) -> Communicator:
        communicator = Communicator(1, 2)
        numbers = range(BASE - len(prelude), BASE)
        forms = dict(zip(numbers, prelude, strict=True))
        communicator.join(BASE, forms, STEP)
        for number, each in forms.items():
            communicator.give(number, each, [torch.full((each.tensors[0][1]), float(number))])
        every.append(communicator)
        return communicator

    yield join
    for each in every:
        each.end("the test is over")


def make(communicator: Communicator, site: str, values: int = 1) -> tuple[Operation, torch.Tensor]:
    tensor = torch.zeros(values)
    made = Description("allreduce SUM", described([tensor]), site=site)
    return communicator.run(made, [tensor], lambda b: b.allreduce([tensor])), tensor


def given(made: tuple[Operation, torch.Tensor]) -> int:
    """Return the number of the result that a collective was given."""
    operation, tensor = made
    assert operation.future.done()
    return int(tensor[0])


def test_two_places_that_use_one_helper_are_told_apart_by_their_callers(
    joined: Callable[..., Communicator],
) -> None:
    communicator = joined(form(END), form(TOP))
    assert given(make(communicator, TOP)) == 19
    communicator.forward_started(STEP)
    assert not communicator.refused


def test_a_loop_that_makes_none_begins_at_its_forward(joined: Callable[..., Communicator]) -> None:
    communicator = joined(form(END), form(TOP))
    communicator.forward_started(STEP)
    assert not communicator.refused
    operation, _ = make(communicator, TOP)
    assert (operation.number, operation.future.done()) == (BASE, False)


def test_callers_that_differ_by_rank_leave_the_helper_s_line(
    joined: Callable[..., Communicator],
) -> None:
    communicator = joined(form("log.py:3"), form("train.py:9 < train.py:31"))
    assert given(make(communicator, TOP)) == 19


REFUSED = {
    "several at one place": ((form(TOP), form(TOP)), TOP, "18, 19: which of these"),
    "several of one helper": ((form(END), form(END)), TOP, "18, 19: which of these"),
    "none of its place": ((form("log.py:3"),), TOP, "which the other ranks did not make"),
    "none of its form": ((form(TOP, 3),), TOP, "which the other ranks did not make"),
    "none at all": ((), TOP, "which the other ranks did not make"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_collective_that_may_be_another_of_the_others_or_none_restarts_all_ranks(
    joined: Callable[..., Communicator], name: str
) -> None:
    prelude, site, why = REFUSED[name]
    communicator = joined(*prelude)
    operation, tensor = make(communicator, site)
    communicator.resume(Switch(1, 0).open(0))  # not even over a link that works
    for number in range(BASE + 2):
        communicator.give(number, form(site), [torch.ones(1)])
    communicator.forward_started(STEP)
    assert not operation.future.done()
    assert float(tensor) == 0
    assert why in communicator.refused
    communicator.end(communicator.refused)
    with pytest.raises(CoordinationError, match="before its first forward"):
        communicator.wait(operation)


@pytest.mark.parametrize("site", [TOP, "train.py:9 < train.py:31"])
def test_one_like_it_that_nobody_can_give_restarts_all_ranks(
    joined: Callable[..., Communicator], site: str
) -> None:
    communicator = joined()
    communicator.join(BASE, {BASE - 1: form(site)}, STEP, [form(site)])
    operation, _ = make(communicator, TOP)
    assert not operation.future.done()
    assert "whose result nobody can give" in communicator.refused


def test_callers_tell_what_can_be_given_from_what_cannot(
    joined: Callable[..., Communicator],
) -> None:
    communicator = joined(form(TOP))
    communicator.join(BASE, {BASE - 1: form(TOP)}, STEP, [form(END)])
    make(communicator, TOP)
    assert not communicator.refused


def test_one_collective_more_before_the_forward_restarts_all_ranks(
    joined: Callable[..., Communicator],
) -> None:
    communicator = joined(form(TOP))
    assert given(make(communicator, TOP)) == 19
    operation, _ = make(communicator, TOP)
    assert not operation.future.done()
    assert "before its first forward" in communicator.refused


def test_one_collective_less_before_the_forward_restarts_all_ranks(
    joined: Callable[..., Communicator],
) -> None:
    communicator = joined(form(TOP), form("train.py:31"))
    assert given(make(communicator, TOP)) == 18
    communicator.forward_started(STEP)
    assert "before collective 19, the other ranks before 20" in communicator.refused


def test_a_result_of_another_form_is_not_given_and_restarts_all_ranks(
    joined: Callable[..., Communicator],
) -> None:
    communicator = joined(form(TOP), form(END, 3))
    assert given(make(communicator, TOP)) == 18
    operation, _ = make(communicator, TOP)
    assert not operation.future.done()
    assert "does not begin where they are" in communicator.refused


def test_a_survivor_s_collectives_before_its_forwards_are_nobody_s_business() -> None:
    communicator = Communicator(0, 1)
    communicator.resume(Switch(1, 0).open(0))
    for step in range(3):
        communicator.wait(make(communicator, TOP)[0])
        communicator.forward_started(step)
    assert not communicator.refused
    communicator.end("the test is over")


def test_a_site_names_the_callers_of_a_helper() -> None:
    communicator = Communicator(0, 1)
    group = Group(communicator, Inputs(1))

    def helper() -> None:
        group.allreduce([torch.zeros(1)])

    def deep(more: int) -> None:
        if more:
            deep(more - 1)
        else:
            helper()

    helper()
    helper()
    deep(7)
    for _ in range(2):
        helper()
    one, other, far, again, same = [each.form for each in communicator.window]
    assert len({each.line for each in (one, other, far, again)}) == 1
    assert one.line.startswith("test_in_place_entry.py:")
    assert len({one.site, other.site, far.site, again.site}) == 4
    assert again.site == same.site
    communicator.end("the test is over")
