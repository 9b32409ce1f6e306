from __future__ import annotations

import numpy as np
import pytest

from lightck.errors import CorruptSnapshotError
from lightck.region import layout
from lightck.region.layout import Entry, Layout
from lightck.region.native_region import Record, Segment

SEGMENTS = (Segment(1 << 21, 1 << 21, 8192), Segment(1 << 22, 1 << 21, 4096))
SLOT = 1
FIRST, SECOND = (1 << 21) + 8192, (1 << 22) + 4096


def checked(*places: tuple[int, int], payload: int | None = None) -> None:
    """Extents (offset, length) beside a table and a manifest at the slot's start."""
    lengths = [length for _, length in places]
    entries = tuple(Entry(f"t{i}", "extra", "uint8", (n,), (1,), n) for i, n in enumerate(lengths))
    record = Record(
        sequence=1, step=1, timeline=1, parent=0, layout_offset=FIRST, layout_length=300,
        manifest_offset=FIRST + 320, manifest_length=100, wall_time_ns=0, flags=0, slot=SLOT,
        payload_bytes=sum(lengths) if payload is None else payload, rank=0, world=1,
    )  # fmt: skip
    offsets = np.array([at for at, _ in places], np.uint64)
    layout.check(Layout(entries, offsets), record, SEGMENTS, context="slot 1")


def test_extents_inside_the_parts_of_the_slot_are_good() -> None:
    checked((FIRST + 448, 64), (FIRST + 512, 8192 - 512), (SECOND, 4096), (0, 0))


@pytest.mark.parametrize(
    "place",
    [
        (FIRST - 64, 64),
        (FIRST + 8192 - 64, 65),
        (FIRST + 8192, 64),
        (SECOND - 64, 64),
        (SECOND, 4097),
        (SECOND + 1, 64),
        (0, 64),
        ((1 << 64) - 64, 64),
        ((1 << 64) - 64, 128),
        (SECOND, 1 << 63),
        (FIRST + 64, (1 << 64) - 1),
    ],
)
def test_an_extent_outside_of_its_slot_is_corrupt(place: tuple[int, int]) -> None:
    with pytest.raises(CorruptSnapshotError, match="t0"):
        checked(place, (FIRST + 1024, 64))


@pytest.mark.parametrize(
    "places",
    [
        ((FIRST + 1024, 65), (FIRST + 1088, 64)),
        ((FIRST + 1024, 64), (FIRST + 1024, 64)),
        ((FIRST + 256, 64),),
        ((FIRST + 384, 64),),
    ],
)
def test_extents_upon_each_other_or_upon_a_table_are_corrupt(
    places: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(CorruptSnapshotError, match="upon each other"):
        checked(*places)


def test_a_record_that_counts_other_bytes_is_corrupt() -> None:
    with pytest.raises(CorruptSnapshotError, match="64 bytes, the record says 65"):
        checked((SECOND, 64), payload=65)
