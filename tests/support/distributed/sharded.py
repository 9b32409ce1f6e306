"""Jobs over sharded state: a model with every awkward shard, its training, and what is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # seconds, spent here once instead of in every rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightck
from support.distributed.ranks import Me

WORDS, WIDTH, ODD = 11, 6, 7
"""Rows that no number of ranks from 2 to 4 divides, and one (6) that two and three do."""
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw for-loop": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    """Tied weights, buffers that differ by rank, random numbers in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, ODD)
        self.norm = nn.BatchNorm1d(ODD)
        self.last = nn.Linear(ODD, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)  # one row: empty on every rank but the first
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        x = x + self.last(self.norm(self.first(x)).relu())
        result: torch.Tensor = self.head(x * self.gate(x).sigmoid())
        return result


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("dp", "tp") if len(sizes) > 1 else ("dp",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def net(mesh: DeviceMesh, **options: Any) -> Net:
    """The same weights on every call, sharded in three groups."""
    torch.manual_seed(1)
    model = Net()
    for part in (model.first, model.last):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch(me: Me, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank has data of its own; the same whenever it is asked."""
    numbers = torch.Generator().manual_seed(1000 * step + me.rank)
    words = torch.randint(0, WORDS, (2, 8), generator=numbers)
    return words[0], words[1]


def loss_of(model: nn.Module, me: Me, step: int) -> torch.Tensor:
    tokens, wanted = batch(me, step)
    return nn.functional.cross_entropy(model(tokens), wanted)


def train(
    me: Me, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> Iterator[float]:
    """One loss per step, given when the step is complete."""
    for step in steps:
        loss = loss_of(model, me, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of what this rank holds of every parameter, buffer and optimizer tensor."""
    named = dict(model.named_parameters())
    found = {f"parameter {name}": p for name, p in named.items()}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{key} of {name}"] = value
    return {name: held(tensor).clone() for name, tensor in found.items()}


def held(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor, and any other tensor as it is; every rank calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not in both, bit for bit."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]


def settle(handle: lightck.Handle) -> None:
    """Let what is captured be committed: the next snapshot finds a slot."""
    while handle.last_committed_step != handle.last_captured_step:
        time.sleep(0.001)
