"""A group of Ray Train's workers is killed anywhere; Ray starts it again, and it is bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support.integrations.chain import Chain

FRAMEWORK = "ray"
MODULES = ("torch._dynamo",)
# An epoch is 6 batches on each of two workers; batches are counted from 0.
PLACES = ("forward 0", "forward 3", "validation 0.1")


# Ray starts a group in 20 s, eight new interpreters; on a machine with other work in two minutes.
@pytest.mark.timeout(2500)
def test_a_train_function_goes_on_bit_for_bit_and_saves_at_a_preemption_s_announcement(
    chain: Callable[..., Chain],
) -> None:
    made = chain("ray_train.py", environment={"KILLS": json.dumps(PLACES)}, timeout_s=1200)
    made.reference()
    assert made.life(on=True) == [0], made.log
    made.ranks = 2  # the harness has started one process, and Ray the workers
    made.compare(len(PLACES))
    for rank in (0, 1):
        assert "notice" in made.notes("saved", rank), made.log
        assert not made.notes("signals_unheard", rank)


def test_the_names_that_are_used_are_there_and_other_callers_are_refused(
    chain: Callable[..., Chain],
) -> None:
    made = chain("ray_refusals.py")
    assert made.life(on=True) == [0], made.log
