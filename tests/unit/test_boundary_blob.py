"""Boundary state as bytes: what was put in comes back bit for bit, and damage is an error."""

from __future__ import annotations

import collections
import json
import mmap
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError, StateError
from lightck.state import boundary_blob
from lightck.state.boundary_blob import BlobWriter
from lightck.state.boundary_codec import DEEPEST, TAG
from lightck.state.tensor_support import DTYPES

TENSORS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3j]),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
}
PLAIN: dict[str, Any] = {
    "list": [1, 2.5, None, True, "text"],
    "tuple": (1, (2,)),
    3: torch.float32,
    "bytes": b"beside" * 500,
    "long": [(i, [float(i)], b"large" * 300 if i == 7 else "small") for i in range(300)],
    "words": {f"k{i}": -i for i in range(300)},
}


def sealed() -> bytes:
    return boundary_blob.closed({"tensors": TENSORS, "plain": PLAIN})


def forged(*parts: Any, data: bytes = b"") -> bytes:
    """A blob of these parts; of a tree if it is no part."""
    text = json.dumps(
        [
            part if isinstance(part, dict) and "tree" in part
            else {"tree": part, "tensors": [], "bytes": 0}
            for part in parts
        ]
    ).encode()  # fmt: skip
    return struct.pack("<Q", len(text)) + text + data


def of_text(text: bytes) -> bytes:
    whole = b'[{"tree":' + text + b',"tensors":[],"bytes":0}]'
    return struct.pack("<Q", len(whole)) + whole


def means(tag: str, what: Any) -> dict[str, Any]:
    return {TAG: tag, "is": what}


def refused(blob: bytes) -> str:
    with pytest.raises(CorruptSnapshotError, match="test: ") as caught:
        boundary_blob.opened(blob, context="test")
    return str(caught.value)


def there_and_back(tree: Any) -> Any:
    return boundary_blob.opened(boundary_blob.closed(tree), context="test")


def test_a_tree_comes_back_with_its_tensors() -> None:
    found = boundary_blob.opened(sealed(), context="test")
    assert found["plain"] == PLAIN
    for name, tensor in TENSORS.items():
        back = found["tensors"][name]
        assert back.dtype == tensor.dtype and back.stride() == tensor.stride()
        assert boundary_blob.raw(back) == boundary_blob.raw(tensor)


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32)")
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3)])
@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_come_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    before = torch.empty(shape, dtype=DTYPES[name])
    dice = random.Random(5)
    flat = torch.empty(before.nbytes, dtype=torch.uint8)
    flat.copy_(torch.tensor([dice.randrange(2) for _ in range(before.nbytes)], dtype=torch.uint8))
    before.untyped_storage().copy_(flat.untyped_storage())
    after = there_and_back([before])[0]
    assert (after.dtype, after.shape, after.stride()) == (before.dtype, shape, before.stride())
    assert boundary_blob.raw(after) == boundary_blob.raw(before) == flat.numpy().data


def test_a_dtype_that_no_dense_tensor_has_comes_back_as_a_value() -> None:
    every = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    assert there_and_back(every) == every and torch.quint4x2 in every


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_tensor_without_plain_bytes_is_a_state_error() -> None:
    with pytest.raises(StateError, match="has no bytes"):
        boundary_blob.closed([torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)])
    with pytest.raises(StateError, match="has no bytes"):
        boundary_blob.closed([torch.eye(3).to_sparse()])


@pytest.mark.parametrize("value", [object(), {1, 2}, range(3)])
def test_a_value_that_is_in_no_plain_tree_is_a_state_error(value: Any) -> None:
    with pytest.raises(StateError, match="boundary state holds a builtins"):
        boundary_blob.closed({"a": [value]})


def of_bits(bits: int) -> float:
    found: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    return found


ODD: list[Any] = [
    *(float("inf"), -float("inf"), -0.0, 5e-324, of_bits(0x7FF8000000000000)),
    *(of_bits(0xFFF800000000BEEF), of_bits(0x7FF4000000000001), complex(-0.0, float("nan"))),
    *(1 << 64, -(1 << 2000), 10**4299, -(10**5000), 7**40_000),
    *("\ud800", "\ud83d\ude00", "\U0001f600", "\udc80x", "\x00\u2028", "[" * 5000, '\\"' * 50),
    *(b"", b"\x00\xff", "", (), [], {}, collections.OrderedDict(), torch.Size([])),
]


def bits(value: Any) -> Any:
    """Return what tells a value from all others."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return bits(value.real), bits(value.imag)
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), list(map(bits, value))
    return type(value), value


@pytest.fixture(params=[4300, 640, 0])
def digits(request: pytest.FixtureRequest) -> Iterator[None]:
    """The user's own limit of digits, by which Python reads and writes integers."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(request.param)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("i", range(len(ODD)))
def test_values_that_json_has_not_come_back_bit_for_bit(i: int) -> None:
    value = ODD[i]
    for tree in (value, [1, value], {"a": value}, ("a", {"b": [value]}), {"x": 1.5, "y": [value]}):
        assert bits(there_and_back(tree)) == bits(tree)
    if not isinstance(value, list | dict):
        for tree in ({value: 1}, {(value, "k"): [2]}, {"a": 1, value: b"x"}):
            assert bits(there_and_back(tree)) == bits(tree)


def test_what_one_user_s_limit_of_digits_allows_another_s_reads() -> None:
    before = sys.get_int_max_str_digits()
    try:
        sys.set_int_max_str_digits(0)
        blob = boundary_blob.closed([10**5000])
    finally:
        sys.set_int_max_str_digits(before)
    assert boundary_blob.opened(blob, context="test") == [10**5000]


# ---- parts ---------------------------------------------------------------------------------------


def test_what_is_put_apart_is_encoded_once_while_it_is_the_same_object() -> None:
    names, made, blobs = ["a", "b", torch.ones(3)], {}, []
    for i in range(3):
        writer = BlobWriter(made)
        writer.put({"i": i, "one": writer.apart(names), "two": writer.apart(names)})
        assert i == 0 or writer.made[id(names)] is made[id(names)]
        made = writer.made
        blobs.append(writer.sealed())
        found = boundary_blob.opened(blobs[-1], context="test")
        assert found["i"] == i and found["one"][:2] == found["two"][:2] == names[:2]
        assert torch.equal(found["two"][2], torch.ones(3))
    writer = BlobWriter(made)
    writer.put({"i": 3, "one": writer.apart(["c"])})
    assert [*writer.made] != [*made]
    assert boundary_blob.opened(writer.sealed(), context="test") == {"i": 3, "one": ["c"]}


def test_what_is_large_is_put_apart_by_itself() -> None:
    made: Any = {}
    counts = []
    for i in range(3):
        writer = BlobWriter(made)
        writer.put({**PLAIN, "i": i, "odd": float("inf")})
        counts.append(sum(known is made.get(at) for at, known in writer.made.items()))
        made = writer.made
        assert len(writer.parts) == 3
        found = boundary_blob.opened(writer.sealed(), context="test")
        assert found == {**PLAIN, "i": i, "odd": float("inf")}
    assert counts == [0, 2, 2]


@pytest.mark.parametrize("tag", ["part", "raw", "bytes", "floats"])
@pytest.mark.parametrize("number", [-1, 2, 1 << 40, "0", None, True, 0.0, [0]])
def test_what_is_not_there_is_an_error(tag: str, number: Any) -> None:
    assert "is not there" in refused(forged(1, {"a": means(tag, number)}))


@pytest.mark.parametrize("tag", ["raw", "bytes", "floats"])
def test_what_is_meant_twice_is_an_error(tag: str) -> None:
    """All that is done with the tree would take as long as if it were there as often."""
    row = ["uint8", [8], [1], 0, 8]
    part = {"tree": [means(tag, 0)] * 2, "tensors": [row], "bytes": 8}
    assert "meant twice" in refused(forged(part, data=b"abcdefgh"))
    assert "meant twice" in refused(forged([0] * 200, {"parts": [means("part", 0)] * 2}))


def test_parts_that_mean_each_other_are_an_error() -> None:
    assert "meant twice" in refused(forged(means("part", 1), means("part", 0)))
    assert "meant twice" in refused(forged(means("part", 0)))


@pytest.mark.parametrize("levels", [100, 149])
def test_a_tree_that_is_too_deep_in_all_its_parts_together_is_an_error(levels: int) -> None:
    trees: list[Any] = [[], means("part", 0)]
    for number in range(2):
        for _ in range(levels):
            trees[number] = [trees[number]]
    assert "levels deep" in refused(forged(*trees))


def test_a_chain_of_parts_is_an_error() -> None:
    assert "levels deep" in refused(forged(1, *(means("part", i) for i in range(10_000))))


# ---- what lightck never writes -------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"strides": [2**70]},
        {"shape": [0, 2**64], "strides": [1, 1], "length": 0},
        {"shape": [1] * 65, "strides": [1] * 65},
        {"shape": [1 << 2030] * 10_000, "strides": [1] * 10_000},
        {"dtype": "qint8"},
        {"dtype": "quint4x2"},
        {"dtype": "_inductor"},
        {"dtype": "float"},
    ],
    ids=lambda said: "".join(f"{key} {str(value)[:24]} " for key, value in said.items()),
)
def test_a_tensor_of_a_form_that_none_has_is_an_error(said: dict[str, Any]) -> None:
    fields = {"dtype": "uint8", "shape": [1], "strides": [1], "at": 0, "length": 1, **said}
    part = {"tree": means("raw", 0), "tensors": [[*fields.values()]], "bytes": 1}
    refused(forged(part, data=b"x"))


@pytest.mark.parametrize(
    "row",
    [
        *(["float32", [3], [1], at, 12] for at in (1 << 40, -1, 1, "0", True, None)),
        *(["float32", [3], [1], 0, length] for length in (8, 13, -12, "12", None)),
        *(["float32", shape, [1], 0, 12] for shape in ([-1], [4], [1 << 40, 1 << 40], ["3"], 3)),
        *(["float32", [3], strides, 0, 12] for strides in ([9], [], [1, 1], [1.0], {})),
        *(["nn", [3], [1], 0, 12], [3, [3], [1], 0, 12], [["float32"], [3], [1], 0, 12]),
        *(["float32", [3], [1], 0], ["float32", [3], [1], 0, 12, 1], [], None, {}, "float32"),
    ],
    ids=str,
)
def test_a_row_that_no_tensor_has_is_an_error(row: Any) -> None:
    """Also where nothing refers to it."""
    for tree in (means("raw", 0), 1):
        refused(forged({"tree": tree, "tensors": [row], "bytes": 12}, data=bytes(12)))


@pytest.mark.parametrize(
    "part",
    [
        {"tree": 1, "tensors": [], "bytes": 11},
        {"tree": 1, "tensors": [], "bytes": 13},
        {"tree": 1, "tensors": [], "bytes": -1},
        {"tree": 1, "tensors": [], "bytes": "12"},
        {"tree": 1, "tensors": {}, "bytes": 12},
        {"tree": 1, "tensors": []},
        {"tree": 1, "tensors": [], "bytes": 12, "more": 1},
    ],
    ids=str,
)
def test_a_part_of_unknown_form_is_an_error(part: dict[str, Any]) -> None:
    refused(forged(part, data=bytes(12)))


@pytest.mark.parametrize("text", [b"[]", b"{}", b"1", b"null", b"[1]", b"", b"[", b'["x"]'])
def test_what_is_no_list_of_parts_is_an_error(text: bytes) -> None:
    refused(struct.pack("<Q", len(text)) + text)


def test_tensors_that_mean_the_same_bytes_are_an_error_before_they_take_memory() -> None:
    size = 1 << 20
    rows = [["uint8", [size], [1], 0, size] for _ in range(1024)]
    part = {"tree": [means("raw", i) for i in range(1024)], "tensors": rows, "bytes": size}
    blob = forged(part, data=bytes(size))
    with pytest.raises(CorruptSnapshotError, match="share the bytes"):
        _within(64 << 20, lambda: boundary_blob.opened(blob, context="test"))


@pytest.mark.parametrize(
    "rows",
    [[(0, 4), (3, 4)], [(2, 4), (0, 3)], [(0, 8), (2, 2)], [(0, 8), (0, 8)]],
    ids=str,
)
def test_tensors_that_overlap_are_an_error(rows: list[tuple[int, int]]) -> None:
    said = [["uint8", [length], [1], at, length] for at, length in rows]
    part = {"tree": [means("raw", i) for i in range(2)], "tensors": said, "bytes": 8}
    assert "share the bytes" in refused(forged(part, data=bytes(8)))


@pytest.mark.parametrize(
    ("tag", "what"),
    [
        *(("float", each) for each in ("7ff", "x" * 16, "", "00" * 9, 1.5, None)),
        *(("int", each) for each in ("", "0x", "g", 7, None, ["1"])),
        *(("str", each) for each in ("0", "ff", 7, None)),
        *(("dtype", each) for each in ("float32", "torch.nn", "torch.load", "", 3, ["torch.int8"])),
        *(("device", each) for each in ("gpu", "", "cpu:x", "cuda:" + "9" * 50, 0, None, {})),
        *(("tuple", each) for each in (7, None, {"a": 1}.get("b"))),
        *(("size", each) for each in (7, None, ["a"], [1.5], [None])),
        *(("complex", each) for each in ([], [1], ["1j", 2], [[], 1], 7, None)),
        *(("dict", each) for each in (7, None, [1], [[1]], [[1, 2, 3]], [[[], 1]], [[{}, 1]])),
        *(("ordered", each) for each in (7, [[[1], 1]])),
    ],
    ids=str,
)
def test_a_tag_that_means_nothing_is_an_error(tag: str, what: Any) -> None:
    refused(forged([means(tag, what)]))


@pytest.mark.parametrize("more", [{"more": 1}, {"is": 1, "more": 2}, {}, {"items": []}])
def test_a_tag_with_anything_else_beside_it_is_an_error(more: dict[str, Any]) -> None:
    assert "unknown form" in refused(forged({TAG: "tuple", **more}))


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"-Infinity", b"[1,]", b"'a'", b"\xff"])
def test_what_is_no_json_is_an_error(text: bytes) -> None:
    refused(of_text(text))


def in_time(work: Callable[[], object], most_s: float = 20.0) -> None:
    begun = time.process_time()
    work()
    assert time.process_time() - begun < most_s


@pytest.mark.parametrize("levels", [DEEPEST * 4, 20_000, 1_000_000])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":', b'["\\\\",[', b'["\\"]]",'])
@pytest.mark.parametrize("closed", [True, False])
def test_a_tree_deeper_than_any_stack_is_refused(levels: int, bracket: bytes, closed: bool) -> None:
    ends = b"]" if bracket[:1] == b"[" else b"}"
    text = bracket * levels + b"1" + ends * levels * closed
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000_000)  # as a user may: nothing relies on it
    try:
        in_time(lambda: refused(of_text(text)))
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    "text", [b"9" * 10_000_000, b"[1" + b"0" * 5000 + b"]", b"-" + b"1" * 9999]
)
def test_a_number_that_takes_long_to_read_is_refused(text: bytes) -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        in_time(lambda: refused(of_text(text)))
    finally:
        sys.set_int_max_str_digits(before)


def test_many_numbers_take_no_longer_than_their_digits() -> None:
    text = b"[" + (b"7" * 4300 + b",") * 2000 + b"0]"
    in_time(lambda: boundary_blob.opened(of_text(text), context="test"))


@pytest.mark.parametrize("piece", [b'"', b'\\"', b"\\", b'"",', b"[],", b"{},"])
def test_nothing_takes_more_than_a_moment_to_refuse(piece: bytes) -> None:
    in_time(lambda: refused(of_text(b'["' + piece * 1_000_000)))
    in_time(lambda: refused(of_text(b"[" + piece * 1_000_000)))


@pytest.mark.parametrize("length", [0, 4, 8, 20, -1])
def test_what_is_cut_is_an_error(length: int) -> None:
    refused(sealed()[:length])


def test_bytes_behind_the_last_are_an_error() -> None:
    refused(sealed() + b"x")


def test_what_is_damaged_is_an_error_or_of_the_same_form() -> None:
    whole, dice = sealed(), random.Random(5)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        try:
            boundary_blob.opened(bytes(damaged), context="test")
        except CorruptSnapshotError:
            continue


numbers = st.one_of(
    st.integers(-2, 20), st.integers(), st.none(), st.booleans(), st.text(max_size=2)
)
tags = st.sampled_from([
    *("tuple", "dict", "ordered", "size", "complex", "float", "int", "str", "dtype", "device"),
    *("raw", "bytes", "floats", "part", "tensor", "ndarray", "deque", ""),
])  # fmt: skip
hostile = st.recursive(
    st.one_of(numbers, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(tags, inner).map(lambda each: means(*each)),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=2).map(
            lambda pairs: means("dict", pairs)
        ),
    ),
    max_leaves=12,
)
rows = st.tuples(
    st.sampled_from(["uint8", "float32", "bool", "bfloat16", "complex64", "qint8", ""]),
    st.lists(st.integers(-1, 3), max_size=2),
    st.lists(st.integers(-1, 3), max_size=2),
    st.integers(-1, 16),
    st.integers(-1, 16),
).map(list)
parts = st.fixed_dictionaries(
    {
        "tree": hostile,
        "tensors": st.lists(rows, max_size=3),
        "bytes": st.sampled_from([0, 4, 8, 16]),
    }
)


@given(st.lists(parts, min_size=1, max_size=3), st.sampled_from([None, 0, 3]))
@settings(max_examples=200)
def test_any_parts_are_an_error_or_a_tree_that_can_be_written(
    said: list[dict[str, Any]], more: int | None
) -> None:
    size = sum(part["bytes"] for part in said) if more is None else more
    try:
        found = boundary_blob.opened(forged(*said, data=bytes(size)), context="test")
    except CorruptSnapshotError as error:
        assert "test: " in str(error)
    else:
        if TAG not in repr(found):
            assert repr(there_and_back(found)) == repr(found)


def _within(most: int, work: Callable[[], object]) -> None:
    """Do it in address space that has so many bytes left."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + most, limits[1]))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
