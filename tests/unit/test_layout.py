from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError
from lightck.region import layout
from lightck.region.layout import Entry, Layout, Shard

names = st.text(st.characters(codec="utf-8"), max_size=40)
numbers = st.integers(0, 1 << 40)
tables = st.lists(
    st.builds(
        Entry,
        name=names,
        role=st.sampled_from(["parameter", "buffer", "optimizer", "extra"]),
        dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"]),
        shape=st.tuples(numbers, numbers),
        strides=st.tuples(numbers, numbers),
        length=st.integers(0, 1 << 60),
        layer=names,
        device=st.sampled_from(["cpu", "cuda"]),
        begin=st.none() | st.integers(0, 1 << 60),
        shard=st.none() | st.just(Shard((1 << 50, 1 << 50), (3, 4), "mesh(2), shard 0")),
    ),
    unique_by=lambda entry: entry.name,
    max_size=12,
)


def sample() -> Layout:
    entries = (
        Entry("model/a", "parameter", "float32", (3, 4), (4, 1), 48, "a"),
        Entry("model/b", "parameter", "float32", (3, 4), (4, 1), 0, "b", "cuda", "model/a"),
        Entry("model/0", "buffer", "int64", (), (), 8, ""),
    )
    return Layout(entries, np.array([4096, 0, 8192], np.uint64))


@given(tables, st.integers(0, (1 << 64) - 1))
def test_a_table_comes_back_as_it_was(entries: list[Entry], offset: int) -> None:
    offsets = np.full(len(entries), offset, np.uint64)
    before = Layout(tuple(entries), offsets)
    after = layout.decode(before.table, context="here")
    assert after.entries == before.entries
    assert np.array_equal(after.offsets, before.offsets)
    assert after.digest == before.digest
    assert after.payload_bytes == sum(entry.length for entry in entries)


@given(tables, st.integers(0, (1 << 64) - 1))
def test_the_length_of_a_table_does_not_depend_on_the_offsets(
    entries: list[Entry], offset: int
) -> None:
    zeros = np.zeros(len(entries), np.uint64)
    assert len(layout.encode(entries, zeros)) == len(layout.encode(entries, zeros + offset))


def test_a_digest_names_one_table() -> None:
    first = sample()
    moved = Layout(first.entries, first.offsets + np.uint64(64))
    assert first.digest != moved.digest
    assert len(first.digest) == 16


@given(st.data())
@settings(max_examples=400)
def test_a_damaged_table_is_corrupt_or_a_table_and_nothing_else(data: st.DataObject) -> None:
    table = bytearray(sample().table)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(table) - 1))
        table[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del table[data.draw(st.integers(0, len(table))) :]
    try:
        found = layout.decode(bytes(table), context="slot 3")
    except CorruptSnapshotError as error:
        assert "slot 3" in str(error)
    else:
        assert len(found.offsets) == len(found.entries)
        assert len(found.index) == len(found.entries)


@given(st.binary(max_size=600))
def test_any_bytes_that_are_no_table_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError, match="slot 3"):
        layout.decode(data, context="slot 3")


def rewritten(**columns: Any) -> bytes:
    """The sample's table with other columns, valid as Arrow."""
    rows = pa.ipc.open_stream(sample().table).read_all()
    for name, values in columns.items():
        at = layout.schema().get_field_index(name)
        field = layout.schema().field(at)
        array = values if isinstance(values, pa.Array) else pa.array(values, field.type)
        rows = rows.set_column(at, pa.field(name, array.type, field.nullable), array)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"name": ["model/a", "model/a", "model/0"]}, "twice"),
        ({"alias_of": [None, "model/nowhere", None]}, "model/nowhere"),
        ({"alias_of": [None, "model/b", None]}, "model/b"),
        ({"alias_of": ["model/0", "model/a", None]}, "alias"),
        ({"offset": pa.array([1.0, 2.0, 3.0])}, "fields"),
        ({"name": ["model/a", None, "model/0"]}, "nulls in its column"),
        ({"shape": [[3, 4], None, []]}, "nulls in its column"),
        ({"length": [48, None, 8]}, "nulls in its column"),
        ({"offset": [48, None, 8]}, "nulls in its column"),
        ({"shape": [[3, 4], [3, 4], [-1]]}, "model/0"),
        ({"strides": [[4], [4, 1], []]}, "model/a"),
        ({"global_shape": [[6, 4], None, None]}, "does not parse: a shard with"),
        ({"begin": [None, 4, None]}, "model/b is an alias, and of a part"),
    ],
)
def test_a_table_that_parses_but_makes_no_sense_is_corrupt(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptSnapshotError, match=message):
        layout.decode(rewritten(**columns), context="slot 3")


def test_the_sample_rewritten_as_it_is_is_good() -> None:
    assert layout.decode(rewritten(role=["parameter"] * 3), context="").entries[0].role


def changed(**fields: Any) -> bytes:
    """The sample's table with its second entry changed."""
    before = sample()
    entries = list(before.entries)
    entries[1] = dataclasses.replace(entries[1], **fields)
    return layout.encode(entries, before.offsets)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (4, 3)},
        {"strides": (1, 4)},
        {"dtype": "int32"},
        {"alias_of": None, "shape": (1 << 40,) * 2000, "strides": (1,) * 2000},
        {"shard": Shard((6, 4), (4, 0), "beyond the end")},
        {"shard": Shard((6,), (0,), "of other dimensions")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_entry_that_no_tensor_has_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptSnapshotError, match="model/b"):
        layout.decode(changed(**fields), context="slot 3")


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_table_is_refused_before_it_unfolds(compression: str) -> None:
    name = "x" * 50_000_000
    entries = [Entry(name, "parameter", "uint8", (1,), (1,), 1)]
    plain = layout.encode(entries, np.zeros(1, np.uint64))
    with pa.ipc.open_stream(plain) as reader:
        rows = reader.read_all()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, layout.schema(), options=options) as writer:
        writer.write_table(rows)
    bomb = sink.getvalue().to_pybytes()
    assert len(bomb) < len(plain) // 100
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptSnapshotError, match="compressed"):
        layout.decode(bomb, context="slot 3")
    assert pa.default_memory_pool().max_memory() == before
