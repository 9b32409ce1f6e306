"""Trainings whose iterations run inside of `optimizer.step(closure)` lose a minibatch at most.

As in `test_failures.py` and `test_kills.py`, with forward and backward inside of the closure.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_failures import EXACT
from torch.nn import functional as F

from support.e2e.failing import FailingClosed
from support.e2e.jobs import Plain, batch
from support.e2e.resume import Bed, same_end, same_steps
from support.e2e.trainer import Run


class Closed(Plain):
    """The usual loop, in the order that Lightning has it."""

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()

        def closure() -> Any:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            return loss

        return self.optimizer.step(closure).detach()


class Hooked(Closed):
    """The hook that kills in the update stands before the step."""

    expected_warnings = ("lightck saw no forward",)


@pytest.mark.parametrize("phase", ["drawn", "forward", "backward", "micro-batches"])
def test_an_exception_goes_on_bit_for_bit_from_the_last_complete_step(bed: Bed, phase: str) -> None:
    plain = bed.run(FailingClosed, "plain").check_ended()
    first = bed.run(FailingClosed, "attach", params={"at": [4, phase]}).check_ended()
    assert first.value("broke") == phase
    second = bed.run(FailingClosed, "resume").check_ended()
    same_steps(first, plain)
    same_end(second, plain)
    assert (second.value("restored"), second.value("early")) == (3, phase not in EXACT)


def test_an_exception_inside_of_the_update_goes_on_from_the_newest_committed_step(
    bed: Bed,
) -> None:
    plain = bed.run(FailingClosed, "plain").check_ended()
    params = {"at": [6, "update"], "policy": 2}
    bed.run(FailingClosed, "attach", params=params).check_ended()
    second = bed.run(FailingClosed, "resume", params={"policy": 2}).check_ended()
    same_end(second, plain)
    assert (second.value("restored"), second.value("early")) == (4, False)


def test_what_is_killed_anywhere_goes_on_bit_for_bit_from_what_was_committed(bed: Bed) -> None:
    bed.check(Closed, kills=("forward", "backward", "after"))


def test_what_a_strangers_hook_kills_before_its_closure_goes_on_bit_for_bit_too(bed: Bed) -> None:
    """The hook mixes the state from `step` on; what is copied is of the step before."""
    bed.check(Hooked, kills=("update",))
