"""Encode the layout table, which maps named tensors to extents, as an Arrow IPC stream.

It is written once per layout; `check` says whether its extents lie in their slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError
from lightck.region.manifest import read_stream
from lightck.region.native_region import LINE_BYTES, Record, Segment

if TYPE_CHECKING:
    import pyarrow as pa

_SHARD = ("global_shape", "global_offset", "placements")
MAX_DIMS = 1024
"""The most dimensions of a tensor; torch and NumPy stop far below in all but the simplest
operations."""


@cache
def schema() -> pa.Schema:
    """Return the columns of a layout table."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("name", pa.string(), nullable=False),
            pa.field("role", pa.string(), nullable=False),
            pa.field("dtype", pa.string(), nullable=False),
            pa.field("shape", pa.list_(pa.int64()), nullable=False),
            pa.field("strides", pa.list_(pa.int64()), nullable=False),
            pa.field("device", pa.string(), nullable=False),
            pa.field("layer", pa.string(), nullable=False),
            pa.field("alias_of", pa.string()),
            pa.field("offset", pa.uint64(), nullable=False),
            pa.field("length", pa.uint64(), nullable=False),
            # First byte of the tensor that the extent holds; null: all of the tensor is there.
            pa.field("begin", pa.uint64()),
            # Shards of a DTensor; null for a tensor that this rank holds whole.
            pa.field("global_shape", pa.list_(pa.int64())),
            pa.field("global_offset", pa.list_(pa.int64())),
            pa.field("placements", pa.string()),
        ]
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a local tensor within its DTensor."""

    shape: tuple[int, ...]
    """Shape of the whole DTensor."""
    offset: tuple[int, ...]
    """Index of the local tensor's first element in the whole, per dimension."""
    placements: str
    """Mesh and placements as text; equal meshes and placements have equal texts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The description of one tensor, without its offset.

    Strides count elements and describe the bytes of the tensor: those of the live tensor when it is
    dense, row-major otherwise. An alias shares the extent of the entry it names. A rank that shares
    a replicated tensor with others may hold a part of its bytes: `length` of them, from `begin`.
    """

    name: str
    role: str
    """The role: parameter, buffer, optimizer or extra."""
    dtype: str
    """The dtype by torch's name without the prefix, e.g. "bfloat16"."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    length: int
    """Bytes of the extent; 0 for an empty tensor and for an alias."""
    layer: str = ""
    """The module that owns the tensor: tensors of one layer are released and audited together."""
    device: str = "cpu"
    """The kind of device that the live tensor was on, e.g. "cpu"."""
    alias_of: str | None = None
    begin: int | None = None
    """The first byte of the tensor that the extent holds; None: the extent holds the whole
    tensor."""
    shard: Shard | None = None


@dataclass(frozen=True)
class Layout:
    """Entries with their extents in one slot; immutable.

    `offsets` count from the start of the region. Two slots hold the same entries at different
    offsets, so each has a table of its own.
    """

    entries: tuple[Entry, ...]
    offsets: npt.NDArray[np.uint64] = field(repr=False)

    @cached_property
    def index(self) -> dict[str, int]:
        """Map each name to its position in `entries`."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    @cached_property
    def lengths(self) -> npt.NDArray[np.uint64]:
        """Return the bytes of each extent."""
        return np.array([entry.length for entry in self.entries], np.uint64)

    @property
    def payload_bytes(self) -> int:
        """Return the sum of the extents in bytes."""
        return int(self.lengths.sum())

    @cached_property
    def table(self) -> bytes:
        """Return the Arrow IPC stream that goes into the slot."""
        return encode(self.entries, self.offsets)

    @cached_property
    def digest(self) -> bytes:
        """Return 16 bytes that identify the table."""
        return hashlib.blake2b(self.table, digest_size=16).digest()


def encode(entries: Sequence[Entry], offsets: npt.NDArray[np.uint64]) -> bytes:
    """Serialize to an Arrow IPC stream, whose length does not depend on the offsets."""
    import pyarrow as pa

    shards = [e.shard for e in entries]
    columns: list[Any] = [
        [e.name for e in entries],
        [e.role for e in entries],
        [e.dtype for e in entries],
        [e.shape for e in entries],
        [e.strides for e in entries],
        [e.device for e in entries],
        [e.layer for e in entries],
        [e.alias_of for e in entries],
        offsets,
        np.array([e.length for e in entries], np.uint64),
        [e.begin for e in entries],
        [s and s.shape for s in shards],
        [s and s.offset for s in shards],
        [s and s.placements for s in shards],
    ]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema(), strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema()) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema()))
    result: bytes = sink.getvalue().to_pybytes()
    return result


def decode(table: bytes, *, context: str) -> Layout:
    """Parse and check a table; `check` checks where the extents lie.

    Raises:
        CorruptSnapshotError: the bytes are no layout table; `context` names region and slot.
    """
    import pyarrow as pa

    rows = read_stream(table, schema(), context=f"{context}: layout table")
    try:
        plain = ("name", "role", "dtype", "shape", "strides", "length", "layer", "device")
        columns = [rows.column(name).to_pylist() for name in (*plain, "alias_of", "begin")]
        whole = [rows.column(name).to_pylist() for name in _SHARD]
        entries = tuple(
            Entry(n, r, d, tuple(sh), tuple(st), le, la, de, al, begin, _shard(*shard))
            for n, r, d, sh, st, le, la, de, al, begin, *shard in zip(*columns, *whole, strict=True)
        )
        offsets = rows.column("offset").to_numpy().astype(np.uint64, copy=False)
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{context}: layout table does not parse: {error}") from error
    layout = Layout(entries, offsets)
    if len(layout.index) != len(entries):
        raise CorruptSnapshotError(f"{context}: layout table names a tensor twice")
    for entry in entries:
        problem = _problem(entry, layout)
        if problem:
            raise CorruptSnapshotError(f"{context}: {entry.name} {problem}")
    return layout


def _shard(
    shape: list[int] | None, offset: list[int] | None, placements: str | None
) -> Shard | None:
    if shape is None and offset is None and placements is None:
        return None
    if shape is None or offset is None or placements is None:
        raise ValueError(f"a shard with shape {shape}, offset {offset}, placements {placements}")
    return Shard(tuple(shape), tuple(offset), placements)


def _problem(entry: Entry, layout: Layout) -> str:
    shard = entry.shard
    if max(len(entry.shape), len(entry.strides)) > MAX_DIMS:
        return f"has {len(entry.shape)} dimensions and {len(entry.strides)} strides"
    if len(entry.shape) != len(entry.strides) or min((*entry.shape, *entry.strides, 0)) < 0:
        return f"has shape {list(entry.shape)} and strides {list(entry.strides)}"
    if shard is not None and (
        not len(shard.shape) == len(shard.offset) == len(entry.shape)
        or min((*shard.shape, *shard.offset, 0)) < 0
        or any(o + n > w for o, n, w in zip(shard.offset, entry.shape, shard.shape, strict=True))
    ):
        return f"of shape {list(entry.shape)} is no part of {list(shard.shape)} at {shard.offset}"
    if entry.alias_of is None:
        return ""
    if entry.begin is not None:
        return "is an alias, and of a part"
    target = layout.index.get(entry.alias_of)
    if target is None:
        return f"is an alias of {entry.alias_of}, which is not there"
    if layout.entries[target].alias_of is not None:
        return f"is an alias of {entry.alias_of}, which is an alias itself"
    kin = layout.entries[target]
    if (entry.dtype, entry.shape, entry.strides) != (kin.dtype, kin.shape, kin.strides):
        return f"is {entry.dtype}{list(entry.shape)}, unlike {entry.alias_of}, which it aliases"
    return f"is an alias with {entry.length} bytes of its own" if entry.length else ""


# ---- the extents of a snapshot: in their slot, none over another ---------------------------------

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
