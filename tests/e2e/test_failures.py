"""Work lost to an exception: a minibatch at most, in whatever phase it comes (golden trajectory).

No step is ever due here: what is resumed from was saved just in time.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.e2e.failing import PHASES, Failing
from support.e2e.resume import Bed, Outcome, same_end, same_steps

EXACT = ("forward", "backward", "micro-batches")


def broken_and_resumed(
    bed: Bed, step: int, phase: str, **params: Any
) -> tuple[Outcome, Outcome, Outcome]:
    """The uninterrupted run, the one that fails, and the one that goes on from it."""
    broken = {"at": [step, phase], **params}
    plain = bed.run(Failing, "plain").check_ended()
    first = bed.run(Failing, "attach", params=broken).check_ended()
    assert first.value("broke") == phase
    second = bed.run(Failing, "resume", params=params).check_ended()
    same_steps(first, plain)
    same_end(second, plain)
    return plain, first, second


@pytest.mark.parametrize("step", [2, 4, 6])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "update"])
def test_a_training_that_an_exception_ends_goes_on_bit_for_bit_from_its_last_complete_step(
    bed: Bed, phase: str, step: int
) -> None:
    _, _, second = broken_and_resumed(bed, step, phase)
    complete = phase in ("updated", "evaluation")
    assert second.value("restored") == (step if complete else step - 1)
    # The second micro-batch's data are drawn behind forward start, the first one's before it.
    assert second.value("early") == (phase not in EXACT)


def test_an_exception_inside_an_update_goes_on_from_the_newest_committed_step(bed: Bed) -> None:
    _, _, second = broken_and_resumed(bed, 6, "update", policy=2)
    assert second.value("restored") == 4


def test_copies_that_were_complete_before_the_update_are_committed(bed: Bed) -> None:
    _, _, second = broken_and_resumed(bed, 5, "update", policy=2)
    assert second.value("restored") == 4
    assert not second.value("early")


@pytest.mark.parametrize("phase", ["data", "backward", "evaluation"])
def test_copies_through_dram_are_saved_just_in_time_too(bed: Bed, phase: str) -> None:
    _, _, second = broken_and_resumed(bed, 4, phase, settings={"placement": "staged"})
    assert second.value("restored") == (4 if phase == "evaluation" else 3)


@pytest.mark.parametrize(("phase", "restored"), [("data", 2), ("forward", 3), ("evaluation", 3)])
def test_an_early_snapshot_yields_to_a_periodic_one_that_is_a_step_older(
    bed: Bed, phase: str, restored: int
) -> None:
    _, _, second = broken_and_resumed(bed, 4, phase, policy=1)
    assert (second.value("restored"), second.value("early")) == (restored, False)


def test_twice_in_a_row_is_no_worse_than_once(bed: Bed) -> None:
    plain = bed.run(Failing, "plain").check_ended()
    bed.run(Failing, "attach", params={"at": [3, "backward"]}).check_ended()
    again = bed.run(Failing, "resume", last=3).check_ended()
    assert again.value("restored") == 2
    same_steps(again, plain)
