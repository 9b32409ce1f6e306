"""Lightning's `fit` is killed anywhere and goes on bit for bit, by the callback alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.integrations.chain import Chain

FRAMEWORK = "lightning"
MODULES = ("lightning.pytorch", "torchmetrics", "torchdata.stateful_dataloader", "torch._dynamo")

# An epoch is 11 batches on one rank, 6 on each of two; batches are counted from 0.
PLACES = ("forward 0", "forward 4", "forward 10", "validation 10.1", "forward 11", "forward 19")

CASES: list[dict[str, Any]] = [
    {},
    {"workers": 2, "augment": True},
    {"augment": True, "accumulate": 2, "every": 4, "schedule": "epoch"},
    {"loader": "stateful", "schedule": "plateau", "patience": 1},
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(f"{k}={v}" for k, v in p.items()))
def test_fit_goes_on_bit_for_bit(chain: Callable[..., Chain], params: dict[str, Any]) -> None:
    places = PLACES
    if "every" in params:
        places = ("forward 0", "validation 3.0", "forward 4", "forward 10", "forward 13")
    chain("lightning_fit.py", params=params).check(*places)
