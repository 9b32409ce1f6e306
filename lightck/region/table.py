"""Read Arrow IPC streams of one schema, from bytes that may be damaged."""

from __future__ import annotations

import pyarrow as pa

from lightck.errors import CorruptSnapshotError


def read(data: bytes, schema: pa.Schema, *, context: str) -> pa.Table:
    """Parse and validate.

    Args:
        data: the stream.
        schema: what it was written with.
        context: what it is and where it lies, for messages.

    Raises:
        CorruptSnapshotError: it does not parse, has other fields, or nulls where there are none.
    """
    try:
        with pa.ipc.open_stream(data) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{context} does not parse: {error}") from error
    if rows.schema != schema:
        raise CorruptSnapshotError(f"{context} has fields {rows.schema.names}")
    for field in schema:
        if not field.nullable and rows.column(field.name).null_count:
            raise CorruptSnapshotError(f"{context} has nulls in its column {field.name}")
    return rows
