"""Measure the caller's time of `Store.save` beside `torch.save`, for GPT-2's state on tmpfs."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck

_WIDTH, _LAYERS, _ROUNDS = 768, 12, 5


def _shapes() -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2 small's parameters."""
    w = _WIDTH
    layer = [(w,), (w,), (w, 3 * w), (3 * w,), (w, w), (w,), (w,), (w,), (w, 4 * w), (4 * w,)]
    layer += [(4 * w, w), (w,)]
    return [(50257, w), (1024, w), *layer * _LAYERS, (w,), (w,)]


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Return parameters and AdamW's state, 1.49 GB."""
    model = torch.nn.ParameterList(torch.randn(shape) for shape in _shapes())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("engine", ["lightck", "torch"])
def test_save(engine: str, state: dict[str, Any], folder: Path, benchmark: Any) -> None:
    """Save again and again; of lightck's commit, which follows, nothing is counted."""
    benchmark.group = "the caller's time of a save, 1.49 GB"
    if engine == "torch":
        benchmark.pedantic(_by_torch, (state, folder), rounds=_ROUNDS, warmup_rounds=1)
        return
    steps = count(1)
    with lightck.Store(folder / "store") as store:
        # The first makes the region, and each of two slots has its layout table after two.
        benchmark.pedantic(lambda: store.save(state, next(steps)), rounds=_ROUNDS, warmup_rounds=2)


def _by_torch(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / "state.pt")
