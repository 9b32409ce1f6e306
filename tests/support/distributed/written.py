"""Regions of several ranks, written by the engine's own parts in one process; no job, no store.

`Crew` writes steps of a model that all ranks hold alike, with buffers, counters and generators of
each rank's own, and remembers what every step held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightck.distributed.sharding import SharePartitioner
from lightck.distributed.topology import Topology
from lightck.journal.boundary_state import BoundaryState
from lightck.pipeline.copy_plan import CopyPlan
from lightck.region import location
from lightck.region.native_pool import NativePool
from lightck.region.native_region import Record, RegionSpec
from lightck.region.region import Region
from lightck.region.slot_writer import SlotWriter
from lightck.state.extras import parse
from lightck.state.inventory import Inventory, StateTensor

RUN = b"run of the tests"
T1, T2, T3 = 1001, 1002, 1003


class Net(nn.Module):
    """Parameters that cuts fall into, a tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 60)
        self.second = nn.Linear(60, 64)
        self.tied = nn.Linear(64, 60, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.second(self.first(x)))
        return out


@dataclass
class Rank:
    """One rank's live objects."""

    rank: int
    net: Net = field(default_factory=Net)
    optimizer: Any = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.extras = {
            "position": {"batches": -1},
            "noise": torch.Generator().manual_seed(900 + self.rank),
        }

    def train(self, step: int) -> None:
        """The same update on every rank, and other buffers."""
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        self.net(torch.randn(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.net.seen.fill_(1000 * self.rank + step)
        self.extras["position"]["batches"] = 100 * step + self.rank
        self.extras["noise"].manual_seed(7000 + 100 * self.rank + step)
        torch.manual_seed(50_000 + 100 * self.rank + step)

    def state(self) -> dict[str, Any]:
        """Everything, as clones: what a restored rank must equal."""
        parameters = list(self.net.parameters())
        held = {f"model/{k}": v.clone() for k, v in self.net.state_dict().items()}
        for i, parameter in enumerate(parameters):
            for key, value in self.optimizer.state[parameter].items():
                held[f"optim/{i}/{key}"] = torch.as_tensor(value).clone()
        held["position"] = torch.tensor(self.extras["position"]["batches"])
        held["noise"] = self.extras["noise"].get_state()
        held["rng"] = torch.get_rng_state()
        return held


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what is not equal, bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


class NoSlotError(Exception):
    """Every slot is protected, or of a fate that nobody knows."""


class Crew:
    """The ranks of one world, training and writing below a folder; a context manager."""

    def __init__(
        self,
        folder: Path,
        world: int,
        *,
        timeline: int = T1,
        continued: Sequence[Record | None] | None = None,
        step: int = 0,
        shares: bool = True,
        run: bytes = RUN,
        nodes: int = 1,
    ) -> None:
        self.folder, self.world, self.run = folder, world, run
        self.ranks = [Rank(r) for r in range(world)]
        self.states: dict[tuple[int, int], dict[str, Any]] = {}
        """States are held by (rank, step)."""
        self.records: dict[tuple[int, int], Record] = {}
        self.pool = NativePool(threads=1, chunk_bytes=4096, idle=False)
        self.regions: list[Region] = []
        self.shares, self.nodes = shares, nodes
        torch.manual_seed(1)
        first = self.ranks[0].net.state_dict()
        for rank in self.ranks:
            rank.net.load_state_dict(first)
            for past in range(1, step + 1):
                rank.train(past)
            where = location.locate(folder, rank.rank, create=True)
            if where.exists:
                region = Region.open(where, writable=True, process_durable=True)
                region.recover()
            else:
                spec = RegionSpec(
                    run, 3, 1 << 20, rank=rank.rank, world=world, process_durable=True
                )
                region = Region.create(where, spec)
            region.begin_timeline(continued[rank.rank] if continued else None, timeline)
            self.regions.append(region)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        for region in self.regions:
            region.close()

    def train(self, step: int, *, absent: Sequence[int] = (), flags: int = 0) -> None:
        """A step on every rank, and its snapshot on all but some."""
        for rank in self.ranks:
            rank.train(step)
            self.states[rank.rank, step] = rank.state()
            if rank.rank not in absent:
                self.commit(rank.rank, step, flags)

    def file(self, rank: int) -> Path:
        """Return where a rank's region is."""
        return self.regions[rank].place.file

    def sharing(self, rank: int) -> SharePartitioner:
        """Chooses a rank's share."""
        size = self.world // self.nodes
        first = rank // size * size
        peers = tuple(range(first, first + size))
        return SharePartitioner(Topology(rank, self.world, peers=peers), replicated)

    def commit(self, number: int, step: int, flags: int = 0) -> None:
        """A rank's snapshot of what it holds."""
        rank, region = self.ranks[number], self.regions[number]
        sharing = self.sharing(number) if self.shares and self.world > 1 else None
        inventory = Inventory(rank.net, [rank.optimizer], parse(rank.extras), division=sharing)
        instants = BoundaryState(inventory)
        instants.step_ended(0)
        collected = instants.collect()
        blobs = instants.encode(collected, step, seen=False)
        plan = CopyPlan(region)
        allocation = plan.update(collected.lives, sum(map(len, blobs)))
        writer = SlotWriter.open(region, self.pool, allocation)
        if writer is None:
            raise NoSlotError
        held = []
        for part in plan.groups:
            chosen = plan.sources(part)
            held.append(chosen)
            nothing = np.zeros(len(part.positions), np.bool_)
            pointers = chosen.pointers + part.begins
            writer.finish_copies(writer.add(part.positions, pointers, nothing, nothing))
        writer.seal(step, *blobs, flags, collected.share_digest)
        assert writer.wait(None)
        self.records[rank.rank, step] = next(
            c.record
            for c in region.recover().candidates
            if c.record.step == step and c.record.timeline == region.timeline
        )


def replicated(lives: Sequence[StateTensor]) -> set[str]:
    """Names of what every rank holds alike."""
    return {live.name for live in lives if live.role in ("parameter", "optimizer")}
