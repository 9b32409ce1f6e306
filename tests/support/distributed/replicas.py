"""A small model under DDP on every rank, trained with lightck and without, in all of DDP's ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what torch would load on first use, in every rank by itself
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lightck
from support.distributed.ranks import Me

STEPS = 6


class Net(nn.Module):
    """Unequal layers, one of them in channels-last memory, and branches that may be left out."""

    def __init__(self, branches: int, kind: str = "") -> None:
        super().__init__()
        self.checkpointed = kind == "checkpointed"
        self.look = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(5 * 4 * 4, 67)
        self.branches = nn.ModuleList(nn.Linear(67, 67, bias=False) for _ in range(branches))
        self.narrow = nn.Linear(67, 3)
        if kind == "tied":
            self.branches[2].weight = self.branches[0].weight
        elif kind == "half":
            self.to(torch.bfloat16)
        elif kind == "mixed":
            self.branches.to(torch.float64)

    def forward(self, x: torch.Tensor, take: Sequence[int]) -> torch.Tensor:
        x = torch.relu(self.look(x.to(self.look.weight.dtype))).flatten(1)
        x = torch.relu(self.wide(x))
        for i in take:
            branch, y = self.branches[i], x.to(self.branches[i].weight.dtype)
            y = checkpoint(branch, y, use_reentrant=True) if self.checkpointed else branch(y)
            x = x + torch.tanh(y).to(x.dtype)
        out: torch.Tensor = self.narrow(x)
        return out


@dataclass(frozen=True)
class Case:
    """One way to train."""

    options: dict[str, Any] = field(default_factory=dict)
    """DDP is given these options."""
    hook: str = ""
    """The user's hook is `allreduce`, `fp16` or `power`; empty: there is none."""
    accumulation: int = 1
    to_none: bool = True
    """`zero_grad` lets go of the gradients."""
    kind: str = ""
    """`checkpointed` (branches are computed again in a backward inside the backward), `tied`,
    `half` (all of it), `mixed` (branches of another dtype)."""
    branches: str = "all"
    """`all`, `same` (the second is never used), `own` (each rank and step leaves another out)."""

    def __str__(self) -> str:
        options = [k if v is True else f"{k}={v}" for k, v in self.options.items()]
        more = [f"{self.accumulation} micro-batches"] * (self.accumulation > 1)
        more += ["gradients kept"] * (not self.to_none) + [self.branches] * (self.branches != "all")
        more += [self.kind] * bool(self.kind)
        return ", ".join([*filter(None, [self.hook]), *options, *more]) or "plain"

    def taken(self, rank: int, step: int, micro: int) -> list[int]:
        """Return the branches that a micro-batch takes."""
        if self.branches == "own":
            return [i for i in range(3) if i != (rank + step + micro) % 4]
        return [0, 2] if self.branches == "same" else [0, 1, 2]


def register(case: Case, module: DistributedDataParallel) -> None:
    """Register the user's hook."""
    group = dist.group.WORLD
    if case.hook == "allreduce":
        module.register_comm_hook(group, default_hooks.allreduce_hook)
    elif case.hook == "fp16":
        module.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif case.hook == "power":
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=3, min_compression_rate=1)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def made(case: Case) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Model and optimizer, in several buckets."""
    torch.manual_seed(7)
    module = DistributedDataParallel(Net(3, case.kind), **{"bucket_cap_mb": 0.006} | case.options)
    parameters = module.parameters()
    return module, torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def micro_batch(
    case: Case, module: DistributedDataParallel, rank: int, step: int, micro: int
) -> None:
    """Run forward and backward."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(4, 3, 6, 6, generator=generator)
    last = micro == case.accumulation - 1
    with nullcontext() if last else module.no_sync():
        out = module(x, case.taken(rank, step, micro))
        (out.pow(2).mean() / case.accumulation).backward()


def train(
    me: Me,
    case: Case,
    folder: Path | None = None,
    *,
    late_hook: bool = True,
    each_step: Callable[[Any], object] = lambda handle: None,
    **settings: Any,
) -> list[torch.Tensor]:
    """Gradients of every step and the parameters at last; with lightck if there is a folder."""
    module, optimizer = made(case)
    if not late_hook:
        register(case, module)
    handle = None
    if folder is not None:
        handle = lightck.attach(module, optimizer, folder / "run", on_error="raise", **settings)
    if late_hook:
        register(case, module)
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            micro_batch(case, module, me.rank, step, micro)
        seen += [torch.zeros(1) if p.grad is None else p.grad.clone() for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.to_none)
        if handle is not None:
            each_step(handle)
    if handle is not None:
        handle.close()
    return seen + [p.detach().clone() for p in module.parameters()]


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Say whether two trainings gave the same tensors, bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def compared(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Count the tensors that two trainings have given, and those of them that differ."""
    assert len(one) == len(other)
    return len(one), sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
