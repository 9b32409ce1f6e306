"""Encode a snapshot's checksums and boundary state, the manifest, as one Arrow IPC row.

A manifest is written with every snapshot. `read_stream` reads it and the layout table back, from
bytes that may be damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError

if TYPE_CHECKING:
    import pyarrow as pa

_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow IPC stream, as a stream writer writes it."""
_ALIGNED_BYTES = 8
"""The alignment of each buffer of a row."""
_PREFIX_BYTES = 8
"""The length of the mark and the size before a message."""
_LONG, _ROW, _BLOB = struct.Struct("<q"), struct.Struct("<QQii"), struct.Struct("<qq")
_EMPTY_ROW_BYTES = 8 + 8 + 8 + 16 + 16


@cache
def schema() -> pa.Schema:
    """Return the columns of a manifest."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("step", pa.uint64(), nullable=False),
            pa.field("sequence", pa.uint64(), nullable=False),
            pa.field("crcs", pa.list_(pa.uint32()), nullable=False),
            pa.field("at_step", pa.large_binary(), nullable=False),
            pa.field("at_forward", pa.large_binary(), nullable=False),
        ]
    )


@dataclass(frozen=True)
class Manifest:
    """The metadata of one snapshot that changes each time.

    The boundary blobs, of step end and of forward start, are opaque here: `boundary_blob` encodes
    them. A snapshot that was finished before forward start lacks what only forward start has.
    """

    step: int
    sequence: int
    crcs: npt.NDArray[np.uint32]
    """CRC32C per entry of the layout, in its order; 0 for entries without bytes."""
    at_step: bytes
    at_forward: bytes


def encode(manifest: Manifest) -> bytes:
    """Serialize to an Arrow IPC stream, the same bytes as Arrow's own stream writer.

    All that differs from row to row of Arrow's message is where the row's buffers lie: the message
    that Arrow has made once is patched, for Arrow takes a quarter of a millisecond.
    """
    count, at_step, at_forward = len(manifest.crcs), manifest.at_step, manifest.at_forward
    lengths = (8, 8, 8, 4 * count, 16, len(at_step), 16, len(at_forward))
    begins = [0, *accumulate(map(_padded, lengths))]
    places: list[int] = []
    for i, (begin, length) in enumerate(zip(begins, lengths, strict=False)):
        if i not in (5, 7):  # the bytes behind their offsets: one bitmap for both buffers
            places += (begin, 0)  # the bitmap of nulls, of which there are none
        places += (begin, length)
    template = _template()
    message = bytearray(template.message)
    _LONG.pack_into(message, template.body_length_at, begins[-1])
    _LONG.pack_into(message, template.count_at, count)
    template.buffers.pack_into(message, template.buffers_at, *places)
    row = _ROW.pack(manifest.step, manifest.sequence, 0, count)
    crcs = _filled(manifest.crcs.astype("<u4", copy=False).tobytes())
    blobs = [
        part for blob in (at_step, at_forward) for part in (_BLOB.pack(0, len(blob)), _filled(blob))
    ]
    return b"".join((template.head, message, row, crcs, *blobs, _END))


def _padded(length: int) -> int:
    return -(-length // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNED_BYTES)


@dataclass(frozen=True)
class _Template:
    """Arrow's message about a row, and the positions of what differs from row to row."""

    head: bytes
    """Arrow's message about the columns, which comes before it."""
    message: bytes
    body_length_at: int
    count_at: int
    """Position of the number of checksums."""
    buffers_at: int
    """Position of the offset and length of each buffer."""
    buffers: struct.Struct


@cache
def _template() -> _Template:
    """Return Arrow's message about an empty row; Message.fbs says what is where."""
    import pyarrow as pa

    row = [
        pa.array([0], pa.uint64()),
        pa.array([0], pa.uint64()),
        pa.array([[]], pa.list_(pa.uint32())),
        pa.array([b""], pa.large_binary()),
        pa.array([b""], pa.large_binary()),
    ]
    whole: bytes = pa.RecordBatch.from_arrays(row, schema=schema()).serialize().to_pybytes()
    message = whole[: len(whole) - _EMPTY_ROW_BYTES]
    meta = message[_PREFIX_BYTES:]
    root = struct.unpack_from("<I", meta)[0]
    header, length_at = _child(meta, root, 2), _field(meta, root, 3)
    assert header is not None and length_at is not None
    nodes, buffers = _child(meta, header, 1), _child(meta, header, 2)
    assert nodes is not None and buffers is not None
    count = struct.unpack_from("<I", meta, buffers)[0]
    return _Template(
        schema().serialize().to_pybytes(),
        message,
        _PREFIX_BYTES + length_at,
        _PREFIX_BYTES + nodes + 4 + 16 * schema().names.index("crcs") + 16,  # the list's child
        _PREFIX_BYTES + buffers + 4,
        struct.Struct(f"<{2 * count}q"),
    )


def decode(data: bytes, *, count: int, sequence: int, context: str) -> Manifest:
    """Parse and check against the record's sequence and the layout's number of entries.

    Raises:
        CorruptSnapshotError: it does not parse, or belongs to another snapshot or layout.
    """
    import pyarrow as pa

    rows = read_stream(data, schema(), context=f"{context}: manifest")
    if rows.num_rows != 1:
        raise CorruptSnapshotError(f"{context}: manifest has {rows.num_rows} rows")
    try:
        row = {name: rows.column(name)[0] for name in schema().names}
        crcs = np.array(row["crcs"].values.to_numpy(), np.uint32)
        found = Manifest(
            step=row["step"].as_py(),
            sequence=row["sequence"].as_py(),
            crcs=crcs,
            at_step=row["at_step"].as_py(),
            at_forward=row["at_forward"].as_py(),
        )
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{context}: manifest does not parse: {error}") from error
    if found.sequence != sequence or len(found.crcs) != count:
        raise CorruptSnapshotError(
            f"{context}: manifest of sequence {found.sequence} with {len(found.crcs)} checksums,"
            f" expected sequence {sequence} with {count}"
        )
    return found


# ---- Arrow IPC streams from bytes that may be damaged --------------------------------------------


def read_stream(data: bytes, columns: pa.Schema, *, context: str) -> pa.Table:
    """Parse and validate an Arrow IPC stream.

    Args:
        data: the stream.
        columns: the schema that it was written with.
        context: what the stream is and where it lies, for messages.

    Raises:
        CorruptSnapshotError: it does not parse, has other fields, or nulls where none may be.
    """
    import pyarrow as pa

    try:
        _refuse_compressed(data)
        with pa.ipc.open_stream(data) as reader:
            if reader.schema != columns:
                raise ValueError(f"it has fields {reader.schema.names[:20]}")
            rows = reader.read_all()
        rows.validate(full=True)
    except (pa.ArrowException, OSError, TypeError, ValueError, struct.error) as error:
        raise CorruptSnapshotError(f"{context} does not parse: {error}") from error
    for field in columns:
        if not field.nullable and rows.column(field.name).null_count:
            raise CorruptSnapshotError(f"{context} has nulls in its column {field.name}")
    return rows


def _refuse_compressed(data: bytes) -> None:
    """Refuse compressed batches; none is written, and 10 KB of zstd can claim gigabytes.

    Arrow's Message.fbs: slot 2 of a Message is its header; slot 3 of a RecordBatch says how its
    buffers are compressed. pyarrow has verified the message when it hands it out.

    Raises:
        ValueError: a batch is compressed.
    """
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(data):
        if message.type != "record batch":
            continue
        meta = message.metadata.to_pybytes()
        header = _child(meta, struct.unpack_from("<I", meta)[0], 2)
        if header is None or _child(meta, header, 3) is not None:
            raise ValueError("a batch is compressed")


def _child(meta: bytes, table: int, slot: int) -> int | None:
    """Return the position of what a slot of a flatbuffer table refers to, or None."""
    field = _field(meta, table, slot)
    return None if field is None else field + int(struct.unpack_from("<I", meta, field)[0])


def _field(meta: bytes, table: int, slot: int) -> int | None:
    """Return the position of the field in a slot of a flatbuffer table, or None."""
    vtable = table - struct.unpack_from("<i", meta, table)[0]
    if 4 + 2 * slot >= struct.unpack_from("<H", meta, vtable)[0]:
        return None
    field = struct.unpack_from("<H", meta, vtable + 4 + 2 * slot)[0]
    return None if field == 0 else table + int(field)
