"""DeepSpeed's engine is killed anywhere and goes on bit for bit; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.integrations.chain import Chain

FRAMEWORK = "deepspeed"
MODULES = ("deepspeed", "torch._dynamo")

# An epoch is 11 batches on one rank, 6 on each of two; batches are counted from 0.
PLACES = ("forward 0", "forward 4", "forward 10", "validation 0.1")
CASES: list[dict[str, Any]] = [
    {"stage": 0, "workers": 2, "augment": True},
    {"stage": 1, "accumulate": 2, "augment": True, "schedule": "torch"},
    {"stage": 2},
    {"stage": 1, "half": True, "grad_accum_dtype": "fp32"},
    {"stage": 2, "half": True, "accumulate": 2},
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(f"{k}={v}" for k, v in p.items()))
def test_an_engine_goes_on_bit_for_bit(chain: Callable[..., Chain], params: dict[str, Any]) -> None:
    seeded = params.get("workers", 0) > 0
    chain("deepspeed_engine.py", params=params, seeded=seeded).check(*PLACES)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_engine_on_two_ranks_goes_on_bit_for_bit(
    chain: Callable[..., Chain], stage: int
) -> None:
    params = {"stage": stage, "accumulate": 1 + (stage == 1), "augment": True}
    # The last batch of an epoch, on each of two ranks, is the one with the number 5.
    places = ("forward 0", "forward 4", "forward 5", "validation 0.1")
    chain("deepspeed_engine.py", params=params, ranks=2).check(*places)


def test_every_name_of_the_engine_that_is_used_is_there_and_what_is_inexact_is_refused(
    chain: Callable[..., Chain],
) -> None:
    made = chain("deepspeed_refusals.py")
    assert made.life(on=True) == [0], made.log
