"""Encode a snapshot's checksums and boundary state, the manifest, as one Arrow IPC row.

A manifest is written with every snapshot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightck.errors import CorruptSnapshotError
from lightck.region.table import read

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
_NUMBERS = struct.Struct("<QQii")
"""The binary form of step, sequence, and first and last offset of the list of checksums."""
_OFFSETS = struct.Struct("<qq")
_ZEROS = bytes(8)


@dataclass(frozen=True)
class Manifest:
    """The metadata of one snapshot that changes each time.

    The boundary blobs, of step end and of forward start, are opaque here: `capture.parcel` encodes
    them. A snapshot that was finished before forward start lacks what only forward start has.
    """

    step: int
    sequence: int
    crcs: npt.NDArray[np.uint32]
    """CRC32C per entry of the layout, in its order; 0 for entries without bytes."""
    at_step: bytes
    at_forward: bytes


def encode(manifest: Manifest) -> bytes:
    """Serialize to an Arrow IPC stream.

    The bytes that Arrow puts before the values depend only on the values' lengths: they are
    computed once for each set of lengths.
    """
    head = _head(len(manifest.crcs), len(manifest.at_step), len(manifest.at_forward))
    if head is None:
        return b"".join((_HEAD, _serialize(manifest), _END))
    return b"".join((_HEAD, head, *_body(manifest), _END))


def _body(manifest: Manifest) -> list[bytes]:
    """Return the buffers of the row, each padded to eight bytes.

    No column has a validity bitmap.
    """
    crcs = manifest.crcs.tobytes()
    one, other = manifest.at_step, manifest.at_forward
    return [
        _NUMBERS.pack(manifest.step, manifest.sequence, 0, len(manifest.crcs)),
        crcs,
        _ZEROS[: -len(crcs) % 8],
        _OFFSETS.pack(0, len(one)),
        one,
        _ZEROS[: -len(one) % 8],
        _OFFSETS.pack(0, len(other)),
        other,
        _ZEROS[: -len(other) % 8],
    ]


@lru_cache(maxsize=16)
def _head(count: int, at_step_bytes: int, at_forward_bytes: int) -> bytes | None:
    """Return the bytes that precede values of these lengths.

    Returns None if this version of Arrow lays the values out in another way.
    """
    crcs = np.zeros(count, np.uint32)
    blank = Manifest(0, 0, crcs, bytes(at_step_bytes), bytes(at_forward_bytes))
    row = _serialize(blank)
    body = b"".join(_body(blank))
    return row[: len(row) - len(body)] if row.endswith(body) else None


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
    rows = read(data, SCHEMA, context=f"{context}: manifest")
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
