"""Jobs under DDP whose ranks share what they write: a part each, together the whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.errors import CoordinationError
from lightck.region.layout import Entry
from lightck.region.location import locate
from lightck.region.region import open_and_recover
from lightck.state.inventory import Inventory
from support import proof
from support.distributed import ranks
from support.distributed.ranks import Me
from support.distributed.shared import Readers, stored
from support.distributed.training import Training

PAGE = 4096
METADATA = 256 << 10
"""Above what attach keeps for the layout table, the manifest and the boundary state, and above what
the extents' alignment costs."""

Digests = dict[str, bytes]


def digests(contents: dict[str, bytes]) -> Digests:
    return {n: hashlib.blake2b(b, digest_size=16).digest() for n, b in contents.items()}


class Tied(nn.Module):
    """A layer under two names."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body, self.again = nn.Sequential(*layers), layers[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Wide:
    """4 MB of parameters and optimizer state, statistics of its own, a tied and a frozen layer."""

    def __init__(self, rank: int, *, wrap: bool = True) -> None:
        torch.manual_seed(3)
        first, last = nn.Linear(256, 512), nn.Linear(512, 256)
        frozen = nn.Linear(512, 512)
        frozen.requires_grad_(False)
        module = Tied(first, nn.BatchNorm1d(512), frozen, last)
        self.model: nn.Module = DistributedDataParallel(module) if wrap else module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(rank)

    def attach(self, path: Path, **settings: Any) -> lightck.Handle:
        chosen = {"threads": 1, "proof": True, "on_error": "raise", "slots": 3, **settings}
        return lightck.attach(self.model, self.optimizer, path, **chosen)

    def step(self) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(4, 256, generator=self.data)
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def note(self) -> Digests:
        """Digest what a snapshot of now holds of model and optimizer."""
        lives = Inventory(self.model, [self.optimizer]).everything()
        return digests({live.name: stored(live.tensor) for live in lives})


def layout(path: Path, rank: int) -> tuple[tuple[Entry, ...], int, int]:
    """Entries of the newest snapshot, its bytes, and the bytes of a slot."""
    region, recovery = open_and_recover(locate(path, rank, create=False))
    try:
        newest = recovery.candidates[0]
        slot_bytes = sum(segment.slot_bytes for segment in region.info.segments)
        assert len(region.info.segments) == 1, "attach has not made the room that was needed"
        return newest.layout.entries, newest.layout.payload_bytes, slot_bytes
    finally:
        region.close()


def steps(path: Path, rank: int) -> set[int]:
    """Return the steps that a rank's region holds."""
    region, recovery = open_and_recover(locate(path, rank, create=False))
    region.close()
    return {c.record.step for c in recovery.candidates}


NUMBERS: dict[str, object] = {}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_rank_writes_its_part_and_together_they_hold_all(world: int, region_dir: Path) -> None:
    def train(me: Me) -> tuple[int, int, Digests]:
        job = Wide(me.rank, wrap=world > 1)
        with job.attach(region_dir / "run") as handle:
            for _ in range(4):
                job.step()
        stats = handle.stats()
        assert (stats.torn, stats.failed, handle.last_committed_step) == (0, 0, 4)
        return stats.bytes_copied + stats.skipped_unchanged_bytes, stats.captured, job.note()

    with ranks.started(world, train) as job:
        results = job.results()
    with Readers(region_dir / "run", world) as readers:
        for rank, (_, _, expected) in enumerate(results):
            found = digests(readers.contents(rank, 4))
            assert {name: found[name] for name in expected} == expected
    found = [layout(region_dir / "run", rank) for rank in range(world)]
    own = sum(e.length for e in found[0][0] if e.begin is None) if world > 1 else 0
    replicated = sum(payload - own for _, payload, _ in found)
    for (copied, captured, _), (_, payload, slot_bytes) in zip(results, found, strict=True):
        assert abs(payload - own - replicated / world) <= 2 * PAGE
        assert copied == captured * payload
        assert payload <= slot_bytes <= payload + METADATA
    NUMBERS[f"{world} ranks"] = {
        "replicated_bytes": replicated,
        "own_bytes": own,
        "bytes_per_rank": [payload for _, payload, _ in found],
        "slot_bytes_per_rank": [slot_bytes for _, _, slot_bytes in found],
    }


def test_a_job_without_optimizer_state_shares_from_its_first_snapshot_on(region_dir: Path) -> None:
    def train(me: Me) -> None:
        job = Training(me.rank, optimizer=torch.optim.SGD)
        with job.attach(region_dir / "run"):
            job.steps(1)

    with ranks.started(2, train) as job:
        job.results()
    first, second = (layout(region_dir / "run", rank)[0] for rank in range(2))
    shares = [{e.name for e in held if e.begin is not None} for held in (first, second)]
    names = {f"model/{layer}.{kind}" for layer in (0, 1, 3) for kind in ("weight", "bias")}
    assert shares[0] | shares[1] == names
    assert shares[0] != names != shares[1]


def test_record_what_was_seen(request: pytest.FixtureRequest) -> None:
    assert NUMBERS
    proof.record_whole(request, "shares", NUMBERS)


def test_a_rank_killed_before_its_commit_leaves_the_step_before_whole(region_dir: Path) -> None:
    def train(me: Me) -> None:
        job = Wide(me.rank)
        handle = job.attach(region_dir / "run", policy=3)
        for _ in range(3):
            job.step()
        me.send(job.note())
        for _ in range(2):
            job.step()
        handle.wait(3)
        me.pause()
        if me.rank == 0:
            handle.snapshot()  # of step 5; the other rank never comes to it
            while 5 not in steps(region_dir / "run", 0):
                handle.stats()
        me.send("done")
        me.pause()

    with ranks.started(2, train) as job:
        noted = [job.receive(rank) for rank in range(2)]
        job.let_go()
        assert [job.receive(rank) for rank in range(2)] == ["done"] * 2
        job.kill(1)
        job.kill(0)
    with Readers(region_dir / "run", 2) as readers:
        for rank in range(2):
            found = digests(readers.contents(rank, 3))
            assert {name: found[name] for name in noted[rank]} == noted[rank]
        assert readers.found(1, 5) == []
        assert readers.assembled(0, 5).missing


def test_state_of_one_rank_only_makes_steps_dead_and_costs_no_older_one(region_dir: Path) -> None:
    def train(me: Me) -> tuple[int | None, int, list[str], Digests]:
        job, told = Wide(me.rank), list[str]()
        handle = job.attach(region_dir / "run", on_error=lambda error: told.append(str(error)))
        job.step()
        job.step()
        noted = job.note()
        job.step()  # step 2 is captured in it, step 3 would be in the next
        handle.wait(2)
        if me.rank == 1:
            some = next(iter(job.optimizer.state.values()))
            some["only here"] = torch.zeros(8)
        for _ in range(7):
            job.step()
        handle.detach()
        return handle.last_committed_step, handle.stats().dead, told, noted

    with ranks.started(2, train) as job:
        results = job.results()
    for last, dead, told, _ in results:
        assert last == 2
        assert dead >= 1
        assert any("replicated state differs between the ranks" in text for text in told)
    with Readers(region_dir / "run", 2) as readers:
        for rank, (_, _, _, noted) in enumerate(results):
            found = digests(readers.contents(rank, 2))
            assert {name: found[name] for name in noted} == noted


def test_a_last_step_with_other_state_on_one_rank_does_not_count_at_close(region_dir: Path) -> None:
    def train(me: Me) -> tuple[str, int | None]:
        job = Wide(me.rank)
        handle = job.attach(region_dir / "run", policy=100)
        job.step()
        if me.rank == 1:
            next(iter(job.optimizer.state.values()))["only here"] = torch.zeros(8)
        with pytest.raises(CoordinationError) as caught:
            handle.close()
        return str(caught.value), handle.last_committed_step

    with ranks.started(2, train) as job:
        for text, last in job.results():
            assert "replicated state differs between the ranks" in text
            assert last is None
