"""nanoGPT's train.py in small: the next batch is fetched by hand while this one is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lightck
from support.e2e.trainer import Job, Run

BLOCK, BATCH, VOCAB, WIDTH = 8, 4, 17, 16
DATA = np.random.default_rng(0).integers(0, VOCAB, 1_000, dtype=np.uint16)


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a batch at random places, drawn from the global generator."""
    at = torch.randint(len(DATA) - BLOCK, (BATCH,))
    rows = [torch.from_numpy(DATA[i : i + BLOCK + 1].astype(np.int64)) for i in at]
    both = torch.stack(rows)
    return both[:, :-1], both[:, 1:]


class GPT(nn.Module):
    """Tied weights and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(BLOCK))
        logits = self.head(self.drop(x + self.mix(x)))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


class NanoGPT(Job):
    """Accumulation, GradScaler, clipping, a schedule, and `estimate_loss` at the top."""

    steps = 14
    expected_warnings = ("torch.cpu.amp",)

    def setup(self) -> None:
        self.models = [GPT()]
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.state: dict[str, Any] = {"best_val_loss": 1e9}
        self.source = torch.Generator().manual_seed(9)
        self.batches = lightck.Prefetched(self.fetch)
        self.extras = {"state": self.state, "scaler": self.scaler, "noise": self.source}
        self.given = self.extras | {"data": self.batches}

    def restore(self, run: Run) -> lightck.RestoreInfo | None:
        return lightck.restore(self.model, self.optimizer, run.path, extras=self.given)

    def attach(self, run: Run) -> lightck.Handle:
        return lightck.attach(self.model, self.optimizer, run.path, extras=self.given)

    def fetch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws from a generator that is an extra, too."""
        x, y = get_batch("train")
        return torch.where(torch.rand(x.shape, generator=self.source) < 0.1, 0, x), y

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t, accumulation = run.begin(), self.params["accumulation"]
        x, y = next(self.batches)
        while t < run.last:
            run.now = t + 1
            self.optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * t / run.last))
            if t % 5 == 0:
                self.estimate_loss()
            for _ in range(accumulation):
                loss = self.model(x, y) / accumulation
                x, y = next(self.batches)
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            t += 1
            run.done(t, loss.detach())
        run.finish()

    def estimate_loss(self) -> None:
        self.model.eval()
        with torch.no_grad():
            found = sum(float(self.model(*get_batch("val"))) for _ in range(2))
        self.state["best_val_loss"] = min(self.state["best_val_loss"], found)
        self.model.train()
