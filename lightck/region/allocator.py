"""Decide where each extent goes inside a slot; this is planned once per layout.

A snapshot then writes no metadata beyond its manifest and its record. A slot's space is a list of
parts, one per segment. Plans are made in *slot coordinates* (parts laid end to end, the same for
every slot) and translated to region offsets per slot. Order in the space: layout table, manifest,
then payload; metadata and payload never share a cache line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightck.region.layout import Entry, encode
from lightck.region.native_region import LINE_BYTES, Segment

PAGE_BYTES = 4096
LARGE_BYTES = 64 << 10
"""Extents of this many bytes or more start on a page, so that they could serve as a live tensor's
storage."""
HUGE_BYTES = 8 << 20
"""Extents of this many bytes or more start on a huge page where the mapping has them: at most 1/4
of the space is lost."""
MANIFEST_SLACK_BYTES = 8192
"""Bytes that a manifest takes beyond its values: Arrow framing (about 2 KiB measured) with a
margin."""


def align(value: int, unit: int) -> int:
    """Round up to a multiple of `unit`."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The planned place of every extent of a layout, in slot coordinates."""

    entries: tuple[Entry, ...]
    table_at: int
    table_bytes: int
    manifest_at: int
    manifest_bytes: int
    """Bytes that are kept for the manifest."""
    at: npt.NDArray[np.uint64]
    """Start of each entry's extent."""
    needed_bytes: int
    """End of the last extent: the bytes that a slot must offer."""
    layers: npt.NDArray[np.uint32]
    """A layer number per entry; entries of one layer have the same number."""


class Space:
    """The parts of a slot, as slot coordinates and as region offsets."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Lay the segments' parts end to end."""
        self.segments = tuple(segments)
        sizes = [segment.slot_bytes for segment in segments]
        self.ends = np.cumsum(sizes, dtype=np.uint64)
        self.starts = self.ends - np.array(sizes, np.uint64)

    @property
    def size(self) -> int:
        """Return the number of bytes in a slot."""
        return int(self.ends[-1])

    def place(self, at: int, length: int, alignment: int) -> int | None:
        """Return the first aligned coordinate >= `at` where `length` bytes lie inside one part.

        Returns None if there is no such coordinate.
        """
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            candidate = start + align(max(at, start) - start, alignment)
            if candidate + length <= end:
                return int(candidate)
        return None

    def offsets(self, at: npt.NDArray[np.uint64], slot: int) -> npt.NDArray[np.uint64]:
        """Return the region offsets of slot coordinates in `slot`."""
        part = np.searchsorted(self.ends, at, side="right").clip(max=len(self.segments) - 1)
        bases = np.array([s.offset + slot * s.slot_bytes for s in self.segments], np.uint64)
        result: npt.NDArray[np.uint64] = bases[part] + at - self.starts[part]
        return result


UNBOUNDED = Space([Segment(0, 1 << 62, 1 << 62)])
"""A slot without end: a plan made in it measures how much space is needed."""


def manifest_capacity(count: int, boundary_bytes: int) -> int:
    """Return the bytes to keep for the manifest of `count` entries and this much boundary state."""
    return align(4 * count + 2 * boundary_bytes + MANIFEST_SLACK_BYTES, PAGE_BYTES)


def plan(
    entries: Sequence[Entry], space: Space, manifest_bytes: int, page_bytes: int
) -> SlotPlan | None:
    """Place a layout in a slot, or None when it does not fit.

    Args:
        entries: aliases and empty tensors take no space.
        space: the slot's parts.
        manifest_bytes: see `manifest_capacity`.
        page_bytes: of the mapping; huge pages raise the alignment of the largest extents.
    """
    rows = tuple(entries)
    table_bytes = len(encode(rows, np.zeros(len(rows), np.uint64)))
    table_at = space.place(0, table_bytes, PAGE_BYTES)
    if table_at is None:
        return None
    manifest_at = space.place(table_at + table_bytes, manifest_bytes, PAGE_BYTES)
    if manifest_at is None:
        return None
    cursor = align(manifest_at + manifest_bytes, PAGE_BYTES)
    at = np.zeros(len(rows), np.uint64)
    # The coarsest alignment first, then the largest: so the space needed does not depend on the
    # entries' order.
    units = [_alignment(entry.length, page_bytes) for entry in rows]
    for i in sorted(range(len(rows)), key=lambda i: (-units[i], -rows[i].length)):
        if rows[i].length == 0:
            continue
        extent = align(rows[i].length, LINE_BYTES)
        found = space.place(cursor, extent, units[i])
        if found is None:
            return None
        at[i] = found
        cursor = found + extent
    ids: dict[str, int] = {}
    layers = np.array([ids.setdefault(entry.layer, len(ids)) for entry in rows], np.uint32)
    return SlotPlan(rows, table_at, table_bytes, manifest_at, manifest_bytes, at, cursor, layers)


def _alignment(length: int, page_bytes: int) -> int:
    if length >= HUGE_BYTES and page_bytes > PAGE_BYTES:
        return page_bytes
    return PAGE_BYTES if length >= LARGE_BYTES else LINE_BYTES
