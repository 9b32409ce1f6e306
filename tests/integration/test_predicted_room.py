"""Room that attach makes before there is optimizer state suffices when there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import lightck
from lightck.loop import state_prediction
from lightck.region import allocator
from lightck.state.extras import parse
from lightck.state.inventory import Inventory
from support.loops import Loop, attach


class Nested(nn.Module):
    """Modules with long paths: the layout table tells the layer of every tensor."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attention": nn.Linear(16, 16), "feed_forward": nn.Linear(16, 16)})
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["feed_forward"](block["attention"](x))
        return x


def nested_loop(depth: int) -> Loop:
    model = Nested(depth)
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)


def plan(loop: Loop) -> allocator.Plan:
    inventory = Inventory(loop.model, list(loop.optimizers), parse(None))
    entries, manifest_bytes = state_prediction.expected(inventory)
    found = allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, allocator.PAGE_BYTES)
    assert found is not None
    return found


@pytest.mark.parametrize("depth", [1, 7, 40])
def test_what_is_predicted_is_no_smaller_than_what_comes(depth: int) -> None:
    loop = nested_loop(depth)
    before = plan(loop)
    loop.run(1)
    after = plan(loop)
    assert after.table_bytes <= before.table_bytes and after.needed_bytes <= before.needed_bytes
    assert {e.name: (e.layer, e.length) for e in before.entries} == {
        e.name: (e.layer, e.length) for e in after.entries
    }


def test_a_region_does_not_grow_at_the_first_restart(run_dir: Path) -> None:
    loop = nested_loop(40)
    with attach(run_dir, loop) as handle:
        loop.run(1)
        handle.wait()
        size = os.stat(handle.region.place.file).st_size
    again = nested_loop(40)
    assert lightck.restore(again.model, list(again.optimizers), run_dir) is not None
    with attach(run_dir, again) as handle:
        assert os.stat(handle.region.place.file).st_size == size
