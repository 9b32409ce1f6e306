"""A small job of several ranks that is stopped and goes on, and what it would be uninterrupted."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

import lightck
from support.distributed import ranks
from support.distributed.training import Training

LAST = 8


def losses_of(training: Training, count: int) -> list[float]:
    """The losses of some further steps."""
    found = []
    for _ in range(count):
        training.optimizer.zero_grad()
        batch = torch.randn(4, 8, generator=training.data)
        loss = training.model(batch + torch.rand(())).square().mean()
        loss.backward()
        training.optimizer.step()
        found.append(loss.item())
    return found


def state_of(training: Training) -> dict[str, torch.Tensor]:
    """Every tensor that a restored run must have the same."""
    held = {f"model/{k}": v.clone() for k, v in training.module.state_dict().items()}
    for i, parameter in enumerate(training.module.parameters()):
        for key, value in training.optimizer.state[parameter].items():
            held[f"optim/{i}/{key}"] = torch.as_tensor(value).clone()
    return {**held, "data": training.data.get_state(), "rng": torch.get_rng_state()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def begin(me: ranks.Me) -> Training:
    training = Training(me.rank)
    torch.manual_seed(300 + me.rank)
    return training


def restore(training: Training, path: Path, **options: Any) -> lightck.types.RestoreInfo | None:
    given = {"extras": {"data": training.data}, **options}
    return lightck.restore(training.model, training.optimizer, path, **given)


def attach(training: Training, path: Path, **settings: Any) -> lightck.Handle:
    return training.attach(path, extras={"data": training.data}, **settings)


@cache
def golden(world: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return what each rank has after `LAST` steps that nothing interrupted."""

    def train(me: ranks.Me) -> tuple[list[float], dict[str, torch.Tensor]]:
        training = begin(me)
        return losses_of(training, LAST), state_of(training)

    with ranks.started(world, train) as job:
        return job.results()
