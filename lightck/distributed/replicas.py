"""The tensors that are the same on every rank, because DistributedDataParallel keeps them alike.

A wrong yes loses state: ranks would write parts of different contents. So every tensor that is not
known to be a replica counts as rank-local. Whether replicas really are equal is checked elsewhere,
by comparing digests of them (`divergence.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightck.region.layout import Entry
from lightck.state.boundary import join
from lightck.state.inventory import Inventory, Live, held_parameters

_AVERAGES_LATER = "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer"
_REDUCES_NOTHING = {"noop_hook", "post_localSGD_hook"}
"""Torch's comm hooks that leave each rank, or each node, its own gradients."""


def is_own(entry: Entry) -> bool:
    """Tell if an entry is rank-local: a buffer, an extra, or what an optimizer keeps beside."""
    beside = "/@group/" in entry.name or "/@attribute/" in entry.name
    return entry.role not in ("parameter", "optimizer") or beside


@dataclass(eq=False)
class Replicas:
    """Finds the replicated tensors in an inventory.

    Parameters: those below a DistributedDataParallel over all ranks, frozen ones among them; not
    those that it was told to ignore, nor those that local SGD or LBFGS (which uses the rank's own
    loss) changes. Optimizer state: that of such parameters, in torch's own optimizers. Those step
    each parameter alike on every rank; others may well divide the work among the ranks, as
    ZeroRedundancyOptimizer and Muon's distributed forms do, and hold state of some parameters on
    each.
    """

    inventory: Inventory
    world: int
    _wrappers: list[DistributedDataParallel] = field(default_factory=list)
    """The DDP modules found at the last call."""

    def hooks(self) -> list[Any]:
        """Return the present comm hooks: a model may get one at any time (`Inventory.depends`)."""
        return [hook for wrapper in self._wrappers for hook, _ in wrapper._comm_hooks]

    def __call__(self, lives: Sequence[Live]) -> set[str]:
        """Return the names of the tensors that are the same on every rank, aliases excluded."""
        parameters = self._parameters()
        names = self.inventory.names()
        states = {
            f"optim/{i}/{join('', names[id(p)])}"
            for i, optimizer in enumerate(self.inventory.optimizers)
            if self._steps_alike(optimizer)
            for p in held_parameters(optimizer)
            if id(p) in parameters
        }
        return {
            live.name
            for live in lives
            if live.alias_of is None
            and (
                (live.role == "parameter" and id(live.tensor) in parameters)
                or (live.role == "optimizer" and _of_parameter(live.name) in states)
            )
        }

    def _parameters(self) -> set[int]:
        modules = self.inventory.model.modules()
        self._wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        found: dict[int, torch.Tensor] = {}
        for wrapper in filter(self._reduces, self._wrappers):
            ignored = wrapper.parameters_to_ignore
            named = wrapper.module.named_parameters()
            found |= {id(p): p for name, p in named if name not in ignored}
        for optimizer in self.inventory.optimizers:
            if isinstance(optimizer, LBFGS) or _AVERAGES_LATER in _kinds(optimizer):
                for p in held_parameters(optimizer):
                    found.pop(id(p), None)
        return set(found)

    def _reduces(self, wrapper: DistributedDataParallel) -> bool:
        """Tell whether its gradients are the same on all ranks of the job."""
        hooks = {getattr(hook, "__name__", "") for hook, _ in wrapper._comm_hooks}
        group = dist.get_world_size(wrapper.process_group)
        return group == self.world and hooks.isdisjoint(_REDUCES_NOTHING)

    def _steps_alike(self, optimizer: Optimizer) -> bool:
        if not type(optimizer).__module__.startswith("torch.optim."):
            return False
        return not any(  # it steps some parameters of one that divides them among ranks
            any(value is optimizer for value in vars(other).values())
            for other in self.inventory.optimizers
            if other is not optimizer
        )


def _of_parameter(name: str) -> str:
    """Return the path of the parameter that a state's name belongs to."""
    return "/".join(name.split("/", 3)[:3])


def _kinds(value: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
