from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError
from lightck.region import allocator, manifest
from lightck.region.manifest import Manifest

u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
manifests = st.builds(
    Manifest,
    step=u64,
    sequence=u64,
    crcs=st.lists(u32, max_size=50).map(lambda values: np.array(values, np.uint32)),
    at_step=st.binary(max_size=300),
    at_forward=st.binary(max_size=300),
)


def sample() -> Manifest:
    return Manifest(8, 9, np.array([1, 2, 3], np.uint32), b"at step", b"at forward")


@given(manifests)
def test_a_manifest_comes_back_as_it_was_and_fits_its_room(before: Manifest) -> None:
    data = manifest.encode(before)
    after = manifest.decode(data, count=len(before.crcs), sequence=before.sequence, context="")
    assert (after.step, after.sequence) == (before.step, before.sequence)
    assert (after.at_step, after.at_forward) == (before.at_step, before.at_forward)
    assert np.array_equal(after.crcs, before.crcs)
    boundary_bytes = len(before.at_step) + len(before.at_forward)
    assert len(data) <= 4 * len(before.crcs) + boundary_bytes + allocator.MANIFEST_SLACK_BYTES


@given(st.integers(0, 200_000), st.integers(0, 1 << 20))
@settings(max_examples=20)
def test_the_slack_is_enough_for_manifests_of_every_size(count: int, blob: int) -> None:
    data = manifest.encode(Manifest(1, 1, np.zeros(count, np.uint32), bytes(blob), bytes(blob)))
    assert len(data) <= 4 * count + 2 * blob + allocator.MANIFEST_SLACK_BYTES


@given(manifests)
def test_a_manifest_is_byte_for_byte_what_arrow_writes(made: Manifest) -> None:
    assert manifest.encode(made) == _arrow(made)


def _arrow(made: Manifest) -> bytes:
    values = {
        "step": [made.step],
        "sequence": [made.sequence],
        "crcs": [made.crcs.tolist()],
        "at_step": [made.at_step],
        "at_forward": [made.at_forward],
    }
    rows = pa.table(values, schema=manifest.schema())
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, manifest.schema()) as writer:
        writer.write_table(rows)
    return sink.getvalue()


@pytest.mark.parametrize(("count", "sequence"), [(3, 8), (2, 9), (4, 9)])
def test_a_manifest_of_another_snapshot_or_layout_is_corrupt(count: int, sequence: int) -> None:
    with pytest.raises(CorruptSnapshotError, match=r"slot 3: .*sequence 9 with 3 checksums"):
        manifest.decode(manifest.encode(sample()), count=count, sequence=sequence, context="slot 3")


@given(st.data())
@settings(max_examples=400)
def test_a_damaged_manifest_is_corrupt_or_a_manifest_and_nothing_else(data: st.DataObject) -> None:
    blob = bytearray(manifest.encode(sample()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob) - 1))
        blob[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob))) :]
    try:
        found = manifest.decode(bytes(blob), count=3, sequence=9, context="slot 3")
    except CorruptSnapshotError as error:
        assert "slot 3" in str(error)
    else:
        assert len(found.crcs) == 3
        assert isinstance(found.at_step, bytes) and isinstance(found.at_forward, bytes)


@given(st.binary(max_size=600))
def test_any_bytes_that_are_no_manifest_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError, match="slot 3"):
        manifest.decode(data, count=3, sequence=9, context="slot 3")


def written(schema: pa.Schema, **columns: Any) -> bytes:
    values: dict[str, Any] = {
        "step": [8],
        "sequence": [9],
        "crcs": [[1, 2, 3]],
        "at_step": [b"a"],
        "at_forward": [b"b"],
        **columns,
    }
    arrays = [pa.array(values[field.name], field.type) for field in schema]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return sink.getvalue()


@pytest.mark.parametrize(
    "columns",
    [
        {"crcs": [None]},
        {"step": [None]},
        {"sequence": [None]},
        {"at_step": [None]},
        {"at_forward": [None]},
        {"crcs": [[1, None, 3]]},
        {name: [] for name in manifest.schema().names},
        {
            name: 2 * [value]
            for name, value in zip(
                manifest.schema().names, [8, 9, [1, 2, 3], b"", b""], strict=True
            )
        },
    ],
)
def test_a_manifest_with_nulls_or_another_number_of_rows_is_corrupt(
    columns: dict[str, Any],
) -> None:
    with pytest.raises(CorruptSnapshotError, match="slot 3"):
        manifest.decode(
            written(manifest.schema(), **columns), count=3, sequence=9, context="slot 3"
        )


def test_other_fields_are_corrupt() -> None:
    other = manifest.schema().set(0, pa.field("step", pa.int32(), nullable=False))
    with pytest.raises(CorruptSnapshotError, match="slot 3"):
        manifest.decode(written(other), count=3, sequence=9, context="slot 3")
