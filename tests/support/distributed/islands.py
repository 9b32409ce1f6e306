"""Nodes with paths of their own: every rank gives the same path, and finds another folder there.

`/proc/self/cwd/run` is below the process's working directory, so that ranks of one node share a
folder which those of another cannot read. What is written there comes from a `Crew`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lightck
from lightck.region import location
from lightck.region.region import Region
from lightck.types import RestoreInfo
from support.distributed import ranks
from support.distributed.written import Crew, Rank, differences

PATH = "/proc/self/cwd/run"


class Islands:
    """The folders of several nodes below one."""

    def __init__(self, folder: Path, world: int, nodes: int) -> None:
        self.folder, self.world, self.nodes = folder, world, nodes
        for node in range(nodes):
            self.node(node).mkdir(parents=True)

    def node(self, node: int) -> Path:
        """A node's working directory."""
        return self.folder / f"node{node}"

    def node_of(self, rank: int, world: int | None = None) -> int:
        """Ranks are spread in order."""
        return rank * self.nodes // (world or self.world)

    def file(self, rank: int) -> Path:
        """Return where a rank's region is."""
        return self.node(self.node_of(rank)) / "run" / f"region-{rank:05d}.lck"

    def crew(self, **options: Any) -> Crew:
        """Writes into one folder; `settle` it afterwards."""
        return Crew(self.folder / "crew", self.world, nodes=self.nodes, **options)

    def settle(self, crew: Crew) -> None:
        """Move what was written to its nodes."""
        for rank in range(self.world):
            self.file(rank).parent.mkdir(mode=0o700, exist_ok=True)
            crew.file(rank).replace(self.file(rank))

    def enter(self, rank: int, world: int | None = None) -> str:
        """Enter a rank's node, in the rank's process; return the path that the rank gives."""
        os.chdir(self.node(self.node_of(rank, world)))
        return PATH

    def lose(self, node: int) -> None:
        """Lose all that a node had."""
        shutil.rmtree(self.node(node) / "run")

    def restored(
        self,
        world: int | None = None,
        *,
        before: Callable[[ranks.Me], object] = lambda me: None,
        during: Callable[[ranks.Job], object] = lambda job: None,
    ) -> list[Any]:
        """(info, state) of every rank of a job that restores, or what it raised.

        `before` is called in each rank's process, `during` here, while they restore.
        """
        world = world or self.world

        def code(me: ranks.Me) -> tuple[RestoreInfo | None, dict[str, Any]]:
            path = self.enter(me.rank, world)
            torch.manual_seed(77)
            live = Rank(me.rank)
            before(me)
            untouched = live.state()
            try:
                info = lightck.restore(live.net, live.optimizer, path, extras=live.extras)
            except lightck.LightckError:
                assert differences(live.state(), untouched) == [], "half filled"
                raise
            return info, live.state()

        with ranks.started(world, code) as job:
            during(job)
            return job.outcomes()

    def alter(self, rank: int, step: int, name: str | None) -> None:
        """Flip a bit of a tensor in a rank's region; None: of its share of parameters."""
        where = location.locate(self.file(rank).parent, rank, create=False)
        region = Region.open(where, writable=False)
        held = next(c for c in region.recover().candidates if c.record.step == step)
        if name is None:
            shares = [e for e in held.layout.entries if e.begin is not None]
            name = max(shares, key=lambda entry: entry.length).name
        at = int(held.layout.offsets[held.layout.index[name]])
        region.close()
        with self.file(rank).open("r+b") as file:
            file.seek(at + 5)
            byte = file.read(1)[0]
            file.seek(at + 5)
            file.write(bytes([byte ^ 4]))


def check(
    results: Sequence[Any], crew: Crew, step: int, *, lent: dict[int, int] | None = None
) -> list[RestoreInfo]:
    """Every rank holds that step, bit for bit; `lent`: rank -> whose own state it has."""
    infos = []
    for rank, result in enumerate(results):
        assert isinstance(result, tuple), result
        info, state = result
        assert info.step == step, (info.step, info.why, info.fell_back)
        owner = (lent or {}).get(rank, rank % crew.world)
        assert info.rank == owner
        found = differences(state, crew.states[owner, step])
        own = {"noise", "rng"} if rank in (lent or {}) else set()
        assert set(found) == own, (rank, found)
        infos.append(info)
    assert len({(i.step, i.timeline, i.why, i.fell_back, i.healed) for i in infos}) == 1
    return infos
