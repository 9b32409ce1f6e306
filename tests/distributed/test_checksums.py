"""A donor says each tensor's checksum from those of its parts, without reading a byte of it."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from lightck.distributed.restore.healing import whole_sums
from lightck.distributed.restore.selection import Key
from lightck.distributed.restore.survey import RegionSurvey
from lightck.distributed.sharding import is_own
from lightck.reader.assembly import AssembledSnapshot
from lightck.region import location
from lightck.region.native_region import crc32c, crc32c_combined
from support.distributed.written import Crew


def test_checksums_of_parts_give_that_of_the_whole() -> None:
    drawn = random.Random(5)
    for length in (0, 1, 7, 4096, 100_001):
        a, b = drawn.randbytes(drawn.randrange(1, 5000)), drawn.randbytes(length)
        assert crc32c_combined(crc32c(a), crc32c(b), length) == crc32c(a + b)


def test_a_replica_has_the_same_sums_however_many_ranks_wrote_it(tmp_path: Path) -> None:
    found = []
    for world in (1, 2, 3, 4):
        torch.manual_seed(3)
        with Crew(tmp_path / str(world), world) as crew:
            crew.train(1)
        where = location.locate(tmp_path / str(world), 0, create=False)
        with RegionSurvey.opened(where, 0, world) as held:
            state = held.assembled(Key(crew.records[0, 1].timeline, 1, world))
            assert isinstance(state, AssembledSnapshot) and state.replica == 0
            sums = whole_sums(state)
            alike = {e.name: int(sums[i]) for i, e in enumerate(state.entries) if not is_own(e)}
            assert len(alike) > 4
            found.append(alike)
    assert found == found[:1] * 4
