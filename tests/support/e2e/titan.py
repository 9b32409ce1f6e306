"""torchtitan's Trainer in small: what it counts moves at the top of an iteration, its loader is
an endless generator with a state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lightck
from support.e2e.jobs import CLASSES, small_model
from support.e2e.trainer import Job, Run


class Loader:
    """torchtitan's BaseDataLoader: stateful and iterable, with epochs of five batches."""

    def __init__(self) -> None:
        self.i = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            source = torch.Generator().manual_seed(self.i)
            self.i += 1
            x = torch.randn(12, 6, generator=source) + 0.1 * torch.rand(6)
            yield x, torch.randint(0, CLASSES, (12,), generator=source)

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


class Titan(Job):
    """The order of calls of `Trainer.train`: count, fetch, forward, backward, clip, update."""

    steps = 14

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01)]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda t: 0.9**t)
        self.loader = Loader()
        self.step_count, self.samples_seen = 0, 0
        self.extras = {
            "train_state": lightck.at_step(self), "dataloader": lightck.at_step(self.loader),
            "lr_scheduler": self.scheduler,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step_count, "samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count, self.samples_seen = state["step"], state["samples_seen"]

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        run.begin()
        batches = iter(self.loader)
        while self.step_count < run.last:
            self.step_count += 1
            run.now = self.step_count
            x, y = next(batches)
            self.samples_seen += len(x)
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            run.done(self.step_count, loss.detach())
        run.finish()
