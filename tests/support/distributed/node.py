"""The ranks of one node in one process: their regions and journals, and who of them lives.

A rank is dead once its region has no owner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightck.distributed.topology import Topology
from lightck.failure.takeover.inference import RankLocalState
from lightck.failure.takeover.takeover import Takeover, TakeoverContext, TakeoverResult
from lightck.journal.boundary_state import BoundaryState
from lightck.region import location
from lightck.region.native_region import FORWARD, RECORD_JIT, STEP_END, JournalEntry
from lightck.region.region import open_and_recover
from lightck.state.extras import parse
from lightck.state.inventory import Inventory, StateTensor
from support.distributed.written import Crew, replicated

LONG_S = 100.0
JIT = RECORD_JIT


class Live:
    """A `LiveState` that is what the test says; every instant of its step is there."""

    pre_update: Any = None

    def __init__(self, steps: dict[int, int | None], rank: int) -> None:
        self.steps, self.rank = steps, rank

    @property
    def step(self) -> int | None:
        return self.steps[self.rank]

    def require_instant(self, early: bool) -> None:
        """Have it."""

    def journal_entry(self, kind: int) -> JournalEntry | None:
        """Have none beside the region's."""
        return None


class Node:
    """The ranks of one node, their journals, and who of them lives."""

    def __init__(self, folder: Path, world: int, **options: Any) -> None:
        self.crew = Crew(folder, world, **options)
        self.world = world
        self.kept: dict[bytes, RankLocalState] = {}
        self.live_steps: dict[int, int | None] = dict.fromkeys(range(world), 0)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.__exit__()

    def train(self, step: int, *, absent: Sequence[int] = (), flags: int = 0) -> None:
        """A step, with its journal entries on every rank and its snapshot on all but some."""
        self.crew.train(step, absent=absent, flags=flags)
        for rank in range(self.world):
            self.live_steps[rank] = step
            self.journal(rank, step, STEP_END)
            self.journal(rank, step, FORWARD)

    def journal(self, rank: int, step: int, kind: int, lives: Sequence[StateTensor] = ()) -> None:
        """A rank's own state as it stands; its blob is a key into `kept`."""
        live, region = self.crew.ranks[rank], self.crew.regions[rank]
        sharing = self.crew.sharing(rank)
        boundary_state = BoundaryState(
            Inventory(live.net, [live.optimizer], parse(live.extras), division=sharing)
        )
        boundary_state.step_ended(0)
        collected = boundary_state.collect()
        own = tuple(
            StateTensor(v.name, v.role, v.layer, v.tensor.clone(), sync=True)
            for v in collected.lives
            if v.span is None and v.alias_of is None
        )
        blob = f"{rank} {step} {kind} {len(self.kept)}".encode()
        self.kept[blob] = RankLocalState(
            *boundary_state.encode(collected, step, seen=False), lives or own
        )
        region.native.write_journal(kind, step, region.timeline, blob)

    def die(self, *ranks: int) -> None:
        for rank in ranks:
            self.crew.regions[rank].close()

    def takeover(self, rank: int) -> Takeover:
        live = self.crew.ranks[rank]
        peers = tuple(range(self.world))
        context = TakeoverContext(
            self.crew.regions[rank],
            Inventory(live.net, [live.optimizer], parse(live.extras)),
            Topology(rank, self.world, peers=peers),
            replicated,
            threading.RLock(),
            Live(self.live_steps, rank),
            process_durable=True,
        )
        return Takeover(context, self.own)

    def own(self, entry: JournalEntry) -> RankLocalState:
        return self.kept[entry.blob]

    def take(self, rank: int, dead: int, early: bool | None = None) -> TakeoverResult:
        return self.takeover(rank).complete(dead, time.monotonic() + LONG_S, early)

    def steps(self, rank: int) -> list[tuple[int, int]]:
        """(step, flags) of what a dead rank's region holds."""
        region, recovery = open_and_recover(location.locate(self.crew.folder, rank, create=False))
        region.close()
        assert not recovery.problems, recovery.problems
        return sorted((c.record.step, c.record.flags) for c in recovery.candidates)
