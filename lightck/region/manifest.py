"""Encode a snapshot's checksums and boundary state, the manifest, as one Arrow IPC row.

A manifest is written with every snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightck.errors import CorruptSnapshotError
from lightck.region.arrow import read

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
