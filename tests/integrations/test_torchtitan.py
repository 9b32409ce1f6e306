"""torchtitan's own `Trainer.train` is killed anywhere and goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.integrations.chain import Chain

FRAMEWORK = "torchtitan"
MODULES = (
    *("torch.distributed.fsdp", "torchdata.stateful_dataloader", "datasets"),
    *("triton", "torch._dynamo"),
)

PLACES = ("forward 1", "forward 4", "forward 5", "validation 5.1", "forward 6")
CASES: list[dict[str, Any]] = [{"augment": True}, {"accumulate": 2}, {"workers": 2}]


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(f"{k}={v}" for k, v in p.items()))
def test_the_trainer_goes_on_bit_for_bit(
    chain: Callable[..., Chain], params: dict[str, Any]
) -> None:
    chain("torchtitan_trainer.py", params=params).check(*PLACES)


def test_the_trainer_on_two_ranks_of_fsdp2_goes_on_bit_for_bit(
    chain: Callable[..., Chain],
) -> None:
    chain("torchtitan_trainer.py", params={"augment": True, "accumulate": 2}, ranks=2).check(
        *PLACES[:4]
    )


def test_the_base_class_and_its_settings_are_those_that_the_manager_was_made_for(
    chain: Callable[..., Chain],
) -> None:
    made = chain("torchtitan_seams.py")
    assert made.life(on=True) == [0], made.log
