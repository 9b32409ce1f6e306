"""A small DDP training for the ranks of a test, with data of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck


class Training:
    """Same weights on every rank, other data, BatchNorm statistics of its own."""

    def __init__(self, rank: int = 0, *, wrap: bool = True, optimizer: Any = torch.optim.AdamW):
        torch.manual_seed(7)
        self.module = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        )
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.model: nn.Module = self.module
        if wrap and not alone:
            self.model = DistributedDataParallel(self.module)
        self.optimizer = optimizer(self.module.parameters(), lr=1e-2)
        self.data = torch.Generator().manual_seed(100 + rank)

    def attach(self, path: Path | str, **settings: Any) -> lightck.Handle:
        settings = {"threads": 1, "proof": True, "on_error": "raise", **settings}
        return lightck.attach(self.model, self.optimizer, path, **settings)

    def batch(self) -> torch.Tensor:
        return torch.randn(4, 8, generator=self.data)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch()).square().mean().backward()
        self.optimizer.step()

    def steps(self, count: int, after: Callable[[], object] = lambda: None) -> None:
        for _ in range(count):
            self.step()
            after()
