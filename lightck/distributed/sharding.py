"""The division of replicated state among the ranks that hold it: no byte is written twice.

It is a pure function of the state's description, so that ranks with the same state agree without a
message. The tensors, sorted by name, are laid end to end and cut into ranges of equal size. A cut
falls on a page of the tensor it cuts; the largest element has 16 bytes, so it is between elements,
too. A tensor without plain bytes cannot be cut and goes to one rank whole. Tensors that no
optimizer changes are divided by themselves: they are written once and then skipped, and no rank
shall have more of the rest for it.

Ranks whose descriptions differ cut differently. The digest of the map tells: shares are put
together only with those of the same map (`reader/assembly.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightck.distributed.topology import Topology
from lightck.reader import assembly
from lightck.region.layout import Entry
from lightck.state import tensor_layout
from lightck.state.boundary_codec import join
from lightck.state.inventory import (
    RankShare,
    StateTensor,
    held_parameters,
    names_of,
    torch_class,
)

# ---- the tensors that DistributedDataParallel keeps alike on every rank --------------------------
# A wrong yes loses state: ranks would write parts of different contents. So every tensor that is
# not known to be a replica counts as rank-local. Whether replicas really are equal is checked
# elsewhere, by comparing digests of them (`divergence.py`).

_AVERAGES_LATER = "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer"
_REDUCES_NOTHING = {"noop_hook", "post_localSGD_hook"}
"""Torch's comm hooks that leave each rank, or each node, its own gradients."""

_replicas: WeakSet[nn.Module] = WeakSet()
"""Modules without DDP whose parameters a framework keeps alike."""


def keeps_alike(module: nn.Module) -> None:
    """Note that a framework reduces every gradient of a module over all ranks, as DDP does."""
    _replicas.add(module)


def is_own(entry: Entry) -> bool:
    """Tell if an entry is rank-local: a buffer, an extra, or what an optimizer keeps beside."""
    beside = "/@group/" in entry.name or "/@attribute/" in entry.name
    return entry.role not in ("parameter", "optimizer") or beside


@dataclass(eq=False)
class ReplicatedTensors:
    """Finds the replicated tensors in an inventory.

    Parameters: those below a DistributedDataParallel over all ranks, frozen ones among them; not
    those that it was told to ignore, nor those that local SGD or LBFGS (which uses the rank's own
    loss) changes. Optimizer state: that of such parameters, in torch's own optimizers. Those step
    each parameter alike on every rank; others may well divide the work among the ranks, as
    ZeroRedundancyOptimizer and Muon's distributed forms do, and hold state of some parameters on
    each.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    world: int
    _wrappers: list[DistributedDataParallel] = field(default_factory=list)
    """The DDP modules found at the last call."""

    def hooks(self) -> list[Any]:
        """Return the present comm hooks: a model may get one at any time (`Division.depends`)."""
        return [hook for wrapper in self._wrappers for hook, _ in wrapper._comm_hooks]

    def __call__(self, lives: Sequence[StateTensor]) -> set[str]:
        """Return the names of the tensors that are the same on every rank, aliases excluded."""
        parameters = self._parameters()
        names = names_of(self.model)
        states = {
            f"optim/{i}/{join('', names[id(p)])}"
            for i, optimizer in enumerate(self.optimizers)
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
        modules = self.model.modules()
        self._wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        found: dict[int, torch.Tensor] = {}
        for wrapper in filter(self._reduces, self._wrappers):
            ignored = wrapper.parameters_to_ignore
            named = wrapper.module.named_parameters()
            found |= {id(p): p for name, p in named if name not in ignored}
        for module in self.model.modules():
            if module in _replicas:
                found |= {id(p): p for p in module.parameters()}
        for optimizer in self.optimizers:
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
        if not torch_class(optimizer).__module__.startswith("torch.optim."):
            return False
        return not any(  # it steps some parameters of one that divides them among ranks
            any(value is optimizer for value in vars(other).values())
            for other in self.optimizers
            if other is not optimizer
        )


def _of_parameter(name: str) -> str:
    """Return the path of the parameter that a state's name belongs to."""
    return "/".join(name.split("/", 3)[:3])


def _kinds(value: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}


# ---- the division --------------------------------------------------------------------------------

PAGE_BYTES = 4096
"""The unit of cuts, in bytes: no page of a live tensor is read by two ranks' copies."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor that all ranks hold."""

    name: str
    length: int
    may_cut: bool
    held: bool
    """True if an optimizer changes it."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes that one rank writes of one tensor."""

    name: str
    peer: int
    """The index of the rank among those that share."""
    begin: int
    end: int


def divide(tensors: Sequence[SharedTensor], ranks: int) -> list[ByteRange]:
    """Divide tensors among ranks; every byte, and every empty tensor, goes to exactly one.

    Without tensors that cannot be cut, no rank has more than two pages above its part of the sum.
    The order of the tensors does not matter.
    """
    ranges: list[ByteRange] = []
    for held in (True, False):
        alike = sorted((i for i in tensors if i.held is held), key=lambda each: each.name)
        whole = [each for each in alike if not each.may_cut]
        loads = [0] * ranks
        for each in sorted(whole, key=lambda each: -each.length):
            peer = loads.index(min(loads))
            loads[peer] += each.length
            ranges.append(ByteRange(each.name, peer, 0, each.length))
        ranges += _cut([each for each in alike if each.may_cut], loads)
    return ranges


def _cut(tensors: Sequence[SharedTensor], loads: Sequence[int]) -> list[ByteRange]:
    """Cut consecutive ranges, of such sizes that all ranks end with the same load if they can."""
    starts = [0, *accumulate(each.length for each in tensors)]
    bounds = [0, *accumulate(_quotas(loads, starts[-1]))]
    bounds[1:-1] = [_rounded(bound, starts) for bound in bounds[1:-1]]
    ranges = []
    for each, start in zip(tensors, starts, strict=False):
        # The last rank whose range begins here or before: the next one begins further on.
        peer = min(bisect_right(bounds, start), len(loads)) - 1
        at, end = start, start + each.length
        while True:
            until = min(end, bounds[peer + 1])
            if until > at or not each.length:
                ranges.append(ByteRange(each.name, peer, at - start, until - start))
            at, peer = until, peer + 1
            if at == end:
                break
    return ranges


def _rounded(bound: int, starts: Sequence[int]) -> int:
    """Return the nearest position where a tensor may be cut, or one begins."""
    i = bisect_right(starts, bound) - 1
    if i == len(starts) - 1:
        return starts[-1]
    low = starts[i] + (bound - starts[i]) // PAGE_BYTES * PAGE_BYTES
    high = min(low + PAGE_BYTES, starts[i + 1])
    return low if bound - low <= high - bound else high


def _quotas(loads: Sequence[int], free: int) -> list[int]:
    """Return how much each rank takes of `free` bytes: the least loaded are filled to one level."""
    order = sorted(range(len(loads)), key=lambda peer: loads[peer])
    count, total = len(loads), free + sum(loads)
    while loads[order[count - 1]] * count > total:
        count -= 1
        total -= loads[order[count]]
    quotas = [0] * len(loads)
    for i, peer in enumerate(order[:count]):
        quotas[peer] = (total + i) // count - loads[peer]
    return quotas


@dataclass(eq=False)
class SharePartitioner:
    """The choice of this rank's share of an inventory's tensors (`inventory.Division`)."""

    topology: Topology
    replicated: Callable[[Sequence[StateTensor]], set[str]]
    """Returns the names of the tensors that hold the same on every rank."""

    def depends(self) -> Sequence[Any]:
        """Return the present comm hooks, on which it depends what is replicated."""
        return self.replicated.hooks() if isinstance(self.replicated, ReplicatedTensors) else ()

    def __call__(self, lives: Sequence[StateTensor]) -> RankShare:
        """Drop the tensors that peers write; set the spans of those that this rank writes in part.

        Every tensor that is shared gets a span, also one that this rank writes whole. An alias is
        kept where a part of its target is.
        """
        peers, world = self.topology.peers, self.topology.world
        alike = self.replicated(lives) if world > 1 else set()
        statement = {"rank": self.topology.rank, "world": world, "peers": list(peers)}
        statement["alike"] = is_alike(lives, alike)
        if len(peers) == 1:
            return RankShare(tuple(lives), told=statement if world > 1 else None)
        entries = {
            live.name: tensor_layout.describe(live)
            for live in lives
            if live.name in alike and not live.alias_of
        }
        if not entries:
            return RankShare(tuple(lives), told=statement)
        tensors = [
            SharedTensor(
                v.name, entries[v.name].length, tensor_layout.is_dense(v.tensor), bool(v.holders)
            )
            for v in lives
            if v.name in entries
        ]
        ranges = divide(tensors, len(peers))
        mine = {c.name: (c.begin, c.end) for c in ranges if peers[c.peer] == self.topology.rank}
        # An alias has no bytes: it is in the map once, on whichever rank its target is.
        aliases = [(-1, tensor_layout.describe(v), None, 0) for v in lives if v.alias_of in entries]
        placed = [(peers[c.peer], entries[c.name], c.begin, c.end - c.begin) for c in ranges]
        # The form knows no ranks, but everything that determines the cuts.
        whole = [(-1 - i.held - 2 * i.may_cut, entries[i.name], None, i.length) for i in tensors]
        return RankShare(
            tuple(_kept(lives, entries.keys(), mine)),
            assembly.digest(world, [*placed, *aliases]),
            assembly.digest(world, [*whole, *aliases]),
            statement,
        )


def is_alike(lives: Sequence[StateTensor], alike: Set[str]) -> bool:
    """Tell whether all parameters, and optimizers' state of them, are among those that are alike.

    Buffers and extras are rank-local by rule.
    """
    return all(
        live.name in alike
        for live in lives
        if live.role in ("parameter", "optimizer") and live.alias_of is None
    )


def _kept(
    lives: Sequence[StateTensor], shared: Set[str], mine: Mapping[str, tuple[int, int]]
) -> Iterator[StateTensor]:
    for live in lives:
        target = live.alias_of or live.name
        if target not in shared:
            yield live
        elif target in mine:
            yield live if live.alias_of else replace(live, span=mine[target])
