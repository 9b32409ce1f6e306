"""Tensor parallel, replicated groups, mixed precision and the rest: captured and restored alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer

import lightck
from support.distributed.ranks import Me, started
from support.distributed.sharded import differing, full, held, mesh_of, parts


def tensor_parallel(me: Me) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh_of(me.world), plan)


def both(me: Me) -> nn.Module:
    torch.manual_seed(3)
    mesh = mesh_of(2, me.world // 2)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def replicated_groups(me: Me) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
    return fully_shard(model, mesh=mesh_of(2, me.world // 2))


def mixed(me: Me) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=mesh_of(me.world), mp_policy=policy)


def ignoring(me: Me) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
    whole = set(model[2].parameters())
    return fully_shard(model, mesh=mesh_of(me.world), ignored_params=whole)


def offloaded(me: Me) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
    policy = CPUOffloadPolicy(pin_memory=False)
    return fully_shard(model, mesh=mesh_of(me.world), offload_policy=policy)


WAYS = {
    "tensor parallel": (2, tensor_parallel),
    "tensor parallel and FSDP2": (4, both),
    "FSDP2 in replicated groups": (4, replicated_groups),
    "mixed precision": (2, mixed),
    "some parameters left whole": (2, ignoring),
    "offloaded to the CPU": (2, offloaded),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_bit_for_bit_however_it_is_sharded(way: str, region_dir: Path) -> None:
    world, make = WAYS[way]

    def run(me: Me, model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            numbers = torch.Generator().manual_seed(step)
            loss = model(torch.randn(3, 6, generator=numbers)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(held(loss).item())
        return losses

    def compare(me: Me) -> None:
        model = make(me)
        optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
        expected = run(me, model, optimizer, range(1, 5)), parts(model, optimizer)
        path, model = region_dir, make(me)
        optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
        with lightck.attach(model, optimizer, path, threads=1, proof=True) as handle:
            losses = run(me, model, optimizer, range(1, 3))
        assert handle.stats().torn == 0
        if me.rank == 0:
            state = lightck.load(path, whole=True)["model"]
        written = {name: full(t) for name, t in model.state_dict().items()}
        assert me.rank or differing(state, written) == []
        model = make(me)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
        info = lightck.restore(model, optimizer, path)
        assert info is not None and info.step == 2
        losses += run(me, model, optimizer, range(3, 5))
        assert losses == expected[0]
        assert differing(parts(model, optimizer), expected[1]) == []

    with started(world, compare) as job:
        job.results()
