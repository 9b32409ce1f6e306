"""Read Arrow IPC streams of one schema, from bytes that may be damaged."""

from __future__ import annotations

import struct

import pyarrow as pa

from lightck.errors import CorruptSnapshotError


def read(data: bytes, schema: pa.Schema, *, context: str) -> pa.Table:
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
