"""Real journals tell what a rank killed inside its update would have had at the step's end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightck
from lightck.journal.entry import CannotInfer, decode_entry, step_end_of
from lightck.region.native_region import FENCE, FORWARD, STEP_END, JournalEntry
from support.loops import with_peers

NEVER = 10**6


class Counting(torch.optim.Optimizer):
    """Keeps what it computes where Prodigy and its like do: in its groups and in attributes."""

    def __init__(self, parameters: Iterable[torch.Tensor], own: int = 0, draws: bool = False):
        super().__init__(parameters, {"k": 0, "d": 1e-6, "lr": torch.tensor(0.1)})
        self.total, self.own, self._draws = 0.0, own, draws
        self.energy = torch.zeros(2)
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            norm = sum(float(p.grad.square().sum()) for p in group["params"])
            group["k"] += 1
            group["d"] = max(group["d"], norm / group["k"])
            group["lr"] += 0.01
            group[f"seen{group['k']}"] = norm
            self.total += norm
            self.energy += norm
            self.history.append(norm)
            if self._draws:
                torch.rand(())
            if self.own:
                self.own += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["d"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "counting": Counting,
}


def lived(
    path: Path, rank: int, make: Callable[[Any], torch.optim.Optimizer], steps: int
) -> dict[int, JournalEntry]:
    """The journal of a rank at the end of a step: gradients as everywhere, the rest its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    optimizer = make(net.parameters())
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    data = torch.Generator().manual_seed(rank)
    extras = {"data": data, "progress": {"rank": rank, "batches": 0}}
    with lightck.attach(
        net, optimizer, path, policy=NEVER, failure="jit", extras=extras, threads=1
    ) as handle:
        with_peers(handle)  # who has none has no entry at its fence
        for step in range(1, steps + 1):
            net(torch.randn(3, 4, generator=data)).sum().backward()
            extras["progress"]["batches"] += 1
            random.random(), np.random.rand()
            alike = torch.Generator().manual_seed(step)
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=alike)
            optimizer.step()
        found = {}
        for kind in (FENCE, STEP_END):
            entry = handle.region.native.read_journal(kind)
            assert entry is not None and (entry.step, entry.early) == (steps, True)
            found[kind] = entry
        before = handle.region.native.read_journal(FORWARD)
        assert before is not None and before.step == steps - 1
        handle.detach()
    return found


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_end_of_a_step_is_told_as_the_dead_rank_would_have_kept_it(
    run_dir: Path, name: str, steps: int
) -> None:
    dead, alive = (lived(run_dir.with_name(f"{r}"), r, OPTIMIZERS[name], steps) for r in (1, 2))
    told = step_end_of(dead[FENCE], [alive[FENCE], alive[STEP_END]])
    assert told.kind == STEP_END and told.early
    entries = told, dead[STEP_END], alive[STEP_END], dead[FENCE]
    found, wanted, others, fence = (decode_entry(each, context="test") for each in entries)
    for own, expected in zip(found.lives, wanted.lives, strict=True):
        assert (own.name, own.role, own.layer) == (expected.name, expected.role, expected.layer)
        assert torch.equal(own.tensor, expected.tensor)
    assert found.at_step == wanted.at_step and found.at_forward == wanted.at_forward
    assert found.at_step != others.at_step, "the ranks differ in something"
    # A first update makes state, and with it the order of its keys.
    made = steps == 1 and name in ("AdamW", "tensor lr")
    assert (found.at_forward != fence.at_forward) == (name == "counting" or made)


def test_what_is_a_rank_s_own_and_changed_in_the_update_is_refused_by_name(run_dir: Path) -> None:
    dead, alive = (
        lived(run_dir.with_name(f"own{r}"), r, lambda p, r=r: Counting(p, own=r), 2) for r in (1, 2)
    )
    with pytest.raises(CannotInfer, match="changes optimizers' options,"):
        step_end_of(dead[FENCE], [alive[FENCE], alive[STEP_END]])
    dead, alive = (
        lived(run_dir.with_name(f"drawn{r}"), r, lambda p: Counting(p, draws=True), 2)
        for r in (1, 2)
    )
    with pytest.raises(CannotInfer, match="changes random generators,"):
        step_end_of(dead[FENCE], [alive[FENCE], alive[STEP_END]])
