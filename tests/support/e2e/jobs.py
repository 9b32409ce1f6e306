"""Models and jobs that several test files use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.e2e.trainer import Job, Run

CLASSES = 5


def small_model() -> nn.Module:
    """Everything that makes a resume hard: buffers that a forward changes, and dropout."""
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, CLASSES),
    )


def batch(size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """The next batch, drawn from the global generator: a position that restore must bring back."""
    return torch.randn(size, 6), torch.randint(0, CLASSES, (size,))


class Plain(Job):
    """One model, one optimizer, the usual loop."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [self.make_optimizer()]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.model(x), y)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()
