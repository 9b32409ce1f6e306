"""The inputs and results of collectives are kept while a recovery may need it, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lightck.inplace.communicator import Communicator
from lightck.inplace.operations import described
from lightck.inplace.plan import Description
from support.inplace.simulated import Switch


def kept(communicator: Communicator, values: int, count: int) -> int:
    """Make collectives; return how many are kept of them."""
    before = len(list(communicator.window))
    for _ in range(count):
        tensor = torch.ones(values)
        form = Description("allreduce SUM", described([tensor]))
        made = communicator.run(form, [tensor], lambda b, t=tensor: b.allreduce([t]))
        communicator.wait(made)
    return len(list(communicator.window)) - before


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    """A rank that is alone."""
    communicator = Communicator(0, 1)
    communicator.resume(Switch(1, 0).open(0))
    yield communicator
    communicator.end("the test is over")


def test_of_a_set_up_small_results_are_kept_and_no_large_ones(communicator: Communicator) -> None:
    assert kept(communicator, 4, 3) == 3
    assert kept(communicator, 100_000, 3) == 0


def test_a_set_up_that_never_ends_keeps_a_bounded_number(communicator: Communicator) -> None:
    assert kept(communicator, 1, 600) <= 257


def test_while_ranks_recover_everything_is_kept(communicator: Communicator) -> None:
    communicator.keep(recovers=True)
    assert kept(communicator, 100_000, 3) == 3


def test_where_in_place_is_off_nothing_is_kept(communicator: Communicator) -> None:
    communicator.keep(recovers=False)
    assert kept(communicator, 100_000, 3) == kept(communicator, 1, 3) == 0


@pytest.mark.parametrize("broken", [False, True])
def test_a_commit_counts_before_the_training_that_waits_for_it_goes_on(
    communicator: Communicator, broken: bool
) -> None:
    seen: list[int] = []
    communicator.keep(recovers=True)

    def train() -> None:
        communicator.commit(7)
        seen.append(communicator.window.committed)

    if broken:
        communicator.interrupt()
    training = threading.Thread(target=train)
    training.start()
    if broken:
        while not (waiting := communicator.window.unfinished()):
            time.sleep(0.001)
        waiting[0].future.add_done_callback(lambda _: seen.append(communicator.window.committed))
        communicator.resume(Switch(1, 0).open(1))
    training.join()
    assert {*seen} == {7}
