"""Layer-wise updates: killed anywhere, resumed, bit-identical to a plain run without lightck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lightck
from support.e2e.jobs import Plain, batch
from support.e2e.resume import Bed
from support.e2e.trainer import Run


class Layers(Plain):
    """Layer-wise, with a scheduler; the uninterrupted run is plain."""

    settings = {"update": "layerwise", "slots": 3}

    def setup(self) -> None:
        super().setup()
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=20)
        self.extras = {"scheduler": self.scheduler}

    def make_optimizer(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.params["name"])
        return kind(self.model.parameters(), lr=0.01, **self.params["options"])

    def step(self, t: int, run: Run) -> Any:
        loss = super().step(t, run)
        self.scheduler.step()
        return loss


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {"foreach": False}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9})],
)
def test_layer_wise_updates_resume_bit_for_bit(
    bed: Bed, name: str, options: dict[str, Any]
) -> None:
    bed.check(Layers, params={"name": name, "options": options})


class MicroBatches(Layers):
    """Two backward passes per step."""

    settings = {"update": lightck.Layerwise(accumulation=2), "slots": 3}

    def step(self, t: int, run: Run) -> Any:
        self.optimizer.zero_grad()
        for _ in range(2):
            x, y = batch()
            loss = F.cross_entropy(self.model(x), y) / 2
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()


def test_layer_wise_updates_with_micro_batches_resume_bit_for_bit(bed: Bed) -> None:
    bed.check(MicroBatches, params={"name": "AdamW", "options": {}})
