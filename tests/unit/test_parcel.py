"""Boundary state as the journal has it: what was put in comes back, and damage is an error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightck.capture import parcel
from lightck.capture.parcel import Parcel
from lightck.errors import CorruptSnapshotError

TENSORS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3j]),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
}
PLAIN: dict[str, Any] = {"list": [1, 2.5, None, True, "text"], "tuple": (1, (2,)), 3: torch.float32}


def sealed() -> bytes:
    held = Parcel()
    return held.sealed({"tensors": held.packed(TENSORS), "plain": held.packed(PLAIN)})


def test_a_tree_comes_back_with_its_tensors() -> None:
    found = parcel.opened(sealed(), context="test")
    assert found["plain"] == PLAIN
    for name, tensor in TENSORS.items():
        back = found["tensors"][name]
        assert back.dtype == tensor.dtype and back.stride() == tensor.stride()
        assert parcel.raw(back) == parcel.raw(tensor)


@pytest.mark.parametrize("length", [0, 4, 8, 20, -1])
def test_what_is_cut_is_an_error(length: int) -> None:
    with pytest.raises(CorruptSnapshotError):
        parcel.opened(sealed()[:length], context="test")


def test_what_is_damaged_is_an_error_or_of_the_same_form() -> None:
    whole, dice = sealed(), random.Random(5)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        try:
            parcel.opened(bytes(damaged), context="test")
        except CorruptSnapshotError:
            continue


@pytest.mark.parametrize(
    "change",
    [
        {"at": 1 << 40},
        {"at": -1},
        {"length": 8},
        {"shape": [-1]},
        {"shape": [1 << 40, 1 << 40]},
        {"strides": [9]},
        {"dtype": "nn"},
        {"dtype": 3},
        {"more": 1},
    ],
)
def test_a_tensor_that_is_not_there_is_an_error(change: dict[str, Any]) -> None:
    held = Parcel()
    said = {**held.put(torch.ones(3)), **change}
    with pytest.raises(CorruptSnapshotError):
        parcel.opened(held.sealed({"tensor": said}), context="test")
