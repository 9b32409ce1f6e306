"""Check that the extents of a snapshot lie in their slot and do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError
from lightck.region.layout import Layout
from lightck.region.native_region import LINE_BYTES, Record, Segment

Numbers = npt.NDArray[np.uint64]


def check(layout: Layout, record: Record, segments: Sequence[Segment], *, context: str) -> None:
    """Check every extent, so that reading all of them reads no more than a slot.

    Raises:
        CorruptSnapshotError: the message names a tensor, or the sums that differ.
    """
    filled = np.flatnonzero(layout.lengths > 0)
    lengths = layout.lengths[filled]
    largest = sum(segment.slot_bytes for segment in segments)
    if int(lengths.max(initial=0)) > largest:
        worst = layout.entries[filled[int(lengths.argmax())]]
        raise CorruptSnapshotError(
            f"{context}: {worst.name} has {worst.length} bytes, a slot {largest}"
        )
    starts = layout.offsets[filled]
    bad = _outside(starts, lengths, record.slot, segments) | (starts % LINE_BYTES != 0)
    if bad.any():
        i = int(bad.argmax())
        raise CorruptSnapshotError(
            f"{context}: {layout.entries[filled[i]].name}: [{starts[i]}, +{lengths[i]}) is not in"
            f" slot {record.slot} on a line of {LINE_BYTES} bytes"
        )
    tables = [
        (record.layout_offset, record.layout_length),
        (record.manifest_offset, record.manifest_length),
    ]
    starts = np.concatenate([starts, np.array([at for at, _ in tables], np.uint64)])
    ends = starts + np.concatenate([lengths, np.array([n for _, n in tables], np.uint64)])
    order = np.argsort(starts, kind="stable")
    if (ends[order][:-1] > starts[order][1:]).any():
        raise CorruptSnapshotError(f"{context}: extents or tables lie upon each other")
    if layout.payload_bytes != record.payload_bytes:
        raise CorruptSnapshotError(
            f"{context}: extents of {layout.payload_bytes} bytes, the record says"
            f" {record.payload_bytes}"
        )


def _outside(
    starts: Numbers, lengths: Numbers, slot: int, segments: Sequence[Segment]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the extents that lie in no part of the slot.

    No length exceeds a slot, so nothing overflows.
    """
    outside = np.ones(len(starts), np.bool_)
    for segment in segments:
        begin = np.uint64(segment.offset + slot * segment.slot_bytes)
        part = np.uint64(segment.slot_bytes)
        at = starts - begin  # wraps to a huge number for an extent that lies before the part
        outside &= ~((at <= part) & (lengths <= part - np.minimum(at, part)))
    return outside
