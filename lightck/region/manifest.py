"""Encode a snapshot's checksums and boundary state, the manifest, as one Arrow IPC row.

A manifest is written with every snapshot. `read_stream` reads it and the layout table back, from
bytes that may be damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightck.errors import CorruptSnapshotError

SCHEMA = pa.schema(
    [
        pa.field("step", pa.uint64(), nullable=False),
        pa.field("sequence", pa.uint64(), nullable=False),
        pa.field("crcs", pa.list_(pa.uint32()), nullable=False),
        pa.field("at_step", pa.large_binary(), nullable=False),
        pa.field("at_forward", pa.large_binary(), nullable=False),
    ]
)
_HEAD: bytes = SCHEMA.serialize().to_pybytes()
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow IPC stream, as a stream writer writes it."""


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
    """Serialize to an Arrow IPC stream."""
    return b"".join((_HEAD, _serialize(manifest), _END))


def _serialize(manifest: Manifest) -> bytes:
    """Return the row as Arrow serializes it."""
    crcs = pa.ListArray.from_arrays(
        pa.array([0, len(manifest.crcs)], pa.int32()), pa.array(manifest.crcs, pa.uint32())
    )
    row = [
        pa.array([manifest.step], pa.uint64()),
        pa.array([manifest.sequence], pa.uint64()),
        crcs,
        pa.array([manifest.at_step], pa.large_binary()),
        pa.array([manifest.at_forward], pa.large_binary()),
    ]
    serialized: bytes = pa.RecordBatch.from_arrays(row, schema=SCHEMA).serialize().to_pybytes()
    return serialized


def decode(data: bytes, *, count: int, sequence: int, context: str) -> Manifest:
    """Parse and check against the record's sequence and the layout's number of entries.

    Raises:
        CorruptSnapshotError: it does not parse, or belongs to another snapshot or layout.
    """
    rows = read_stream(data, SCHEMA, context=f"{context}: manifest")
    if rows.num_rows != 1:
        raise CorruptSnapshotError(f"{context}: manifest has {rows.num_rows} rows")
    try:
        row = {name: rows.column(name)[0] for name in SCHEMA.names}
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


def read_stream(data: bytes, schema: pa.Schema, *, context: str) -> pa.Table:
    """Parse and validate an Arrow IPC stream.

    Args:
        data: the stream.
        schema: the schema that it was written with.
        context: what the stream is and where it lies, for messages.

    Raises:
        CorruptSnapshotError: it does not parse, has other fields, or nulls where none may be.
    """
    try:
        _refuse_compressed(data)
        with pa.ipc.open_stream(data) as reader:
            if reader.schema != schema:
                raise ValueError(f"it has fields {reader.schema.names[:20]}")
            rows = reader.read_all()
        rows.validate(full=True)
    except (pa.ArrowException, OSError, TypeError, ValueError, struct.error) as error:
        raise CorruptSnapshotError(f"{context} does not parse: {error}") from error
    for field in schema:
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
    for message in pa.ipc.MessageReader.open_stream(data):
        if message.type != "record batch":
            continue
        meta = message.metadata.to_pybytes()
        header = _child(meta, struct.unpack_from("<I", meta)[0], 2)
        if header is None or _child(meta, header, 3) is not None:
            raise ValueError("a batch is compressed")


def _child(meta: bytes, table: int, slot: int) -> int | None:
    """Return the position of the table that a slot of a flatbuffer table refers to, or None."""
    vtable = table - struct.unpack_from("<i", meta, table)[0]
    if 4 + 2 * slot >= struct.unpack_from("<H", meta, vtable)[0]:
        return None
    field = struct.unpack_from("<H", meta, vtable + 4 + 2 * slot)[0]
    if field == 0:
        return None
    at: int = table + field + struct.unpack_from("<I", meta, table + field)[0]
    return at
