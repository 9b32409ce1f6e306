"""The listener of recovery in place commits the iterations of its training, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightck.inplace.training import HandleTraining, InPlaceListener


class _Communicator:
    def __init__(self) -> None:
        self.commits: list[int] = []

    def commit(self, step: int) -> None:
        self.commits.append(step)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_an_optimizer_of_another_training_commits_nothing() -> None:
    ours, other, told = _optimizer(), _optimizer(), []
    checkpointer = SimpleNamespace(
        inventory=SimpleNamespace(optimizers=[ours]),
        watched=SimpleNamespace(refresh=lambda: None, owns=lambda optimizer: False),
        steps=SimpleNamespace(step=4, between_updates=False, updating=False),
    )
    rescue: Any = SimpleNamespace(checkpointer=checkpointer)
    passed_on: Any = SimpleNamespace(
        update_begins=lambda optimizer, frame, unseen: told.append(optimizer)
    )
    communicator: Any = _Communicator()
    listener = InPlaceListener(passed_on, communicator, HandleTraining(rescue))
    listener.update_begins(other)
    assert communicator.commits == []
    listener.update_begins(ours)
    assert communicator.commits == [5]
    assert told == [other, ours]
