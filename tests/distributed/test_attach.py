"""attach(ddp_model): one region per rank, one timeline, and steps that count when all hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightck.region.location import locate
from lightck.region.region import open_and_recover
from support.distributed import ranks
from support.distributed.training import Training


def records(path: Path, rank: int) -> dict[int, Any]:
    """The records in a rank's region, by step."""
    region, recovery = open_and_recover(locate(path, rank, create=False))
    try:
        return {c.record.step: c.record for c in recovery.candidates}
    finally:
        region.close()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_step_is_committed_on_every_rank(world: int, region_dir: Path) -> None:
    def train(me: ranks.Me) -> tuple[int | None, int]:
        training = Training(me.rank)
        with training.attach(region_dir) as handle:
            training.steps(6)
        return handle.last_committed_step, handle.stats().committed

    with ranks.started(world, train) as job:
        results = job.results()
    assert [last for last, _ in results] == [6] * world
    found = [records(region_dir, rank) for rank in range(world)]
    assert all(6 in each for each in found)
    assert len({each[6].timeline for each in found}) == 1
    assert [(each[6].rank, each[6].world) for each in found] == [(r, world) for r in range(world)]


def test_regions_of_a_larger_world_stay_as_they_are(region_dir: Path) -> None:
    def train(me: ranks.Me) -> None:
        training = Training(me.rank)
        with training.attach(region_dir, overwrite=True):
            training.steps(2)

    with ranks.started(3, train) as job:
        job.results()
    third = (region_dir / "region-00002.lck").read_bytes()
    with ranks.started(2, train) as job:
        job.results()
    for rank in range(2):
        region, recovery = open_and_recover(locate(region_dir, rank, create=False))
        region.close()
        assert region.info.world == 3, "the region was made for three"
        assert {c.record.world for c in recovery.candidates} == {2}, "and is written by two"
    assert (region_dir / "region-00002.lck").read_bytes() == third
