"""Boundary state as the journal has it: what was put in comes back, and damage is an error."""

from __future__ import annotations

import io
import mmap
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightck.errors import CorruptSnapshotError
from lightck.state import boundary_blob, boundary_codec
from lightck.state.boundary_blob import BlobWriter, Kept

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
    held = BlobWriter()
    return held.sealed([held.pickled({"tensors": TENSORS, "plain": PLAIN})])


def test_a_tree_comes_back_with_its_tensors() -> None:
    found = boundary_blob.opened(sealed(), context="test")
    assert found["plain"] == PLAIN
    for name, tensor in TENSORS.items():
        back = found["tensors"][name]
        assert back.dtype == tensor.dtype and back.stride() == tensor.stride()
        assert boundary_blob.raw(back) == boundary_blob.raw(tensor)


def test_a_part_that_stays_the_same_is_pickled_once_and_comes_back() -> None:
    kept, part = Kept(), {"names": ["a", "b"], "n": 3}
    blobs = []
    for i in range(4):
        held = BlobWriter(kept)
        tree = {"i": i, "one": held.part("x", part), "two": held.part("y", part)}
        held.pickled(tree)
        blobs.append(held.sealed(held.pickles))
        assert boundary_blob.opened(blobs[-1], context="test") == {"i": i, "one": part, "two": part}
    assert len(blobs[1]) == len(blobs[3]) and blobs[1].count(b"names") == 1
    held = BlobWriter(kept)
    held.pickled({"i": 5, "one": held.part("x", {**part, "n": 4}), "two": held.part("y", part)})
    found = boundary_blob.opened(held.sealed(held.pickles), context="test")
    assert found == {"i": 5, "one": {**part, "n": 4}, "two": part}


@pytest.mark.parametrize("number", [-1, 1, 2, 1 << 40, "0", None, True])
def test_a_part_that_is_not_there_is_an_error(number: Any) -> None:
    held = BlobWriter()
    held.pickled({"n": 1})
    held.pickled({"part": {**boundary_blob.part(0), "number": number}})
    with pytest.raises(CorruptSnapshotError):
        boundary_blob.opened(held.sealed(held.pickles), context="test")


def refused(blob: bytes) -> str:
    with pytest.raises(CorruptSnapshotError, match="test: ") as caught:
        boundary_blob.opened(blob, context="test")
    return str(caught.value)


def test_a_part_that_is_meant_over_and_over_is_an_error() -> None:
    """All that is done with the tree would take as long as if it were there as often."""
    held = BlobWriter()
    held.pickled([0] * 200)
    held.pickled({"parts": [boundary_blob.part(0) for _ in range(200)]})
    assert "unfolds" in refused(held.sealed(held.pickles))


@pytest.mark.parametrize("levels", [100, 149])
def test_a_tree_that_is_too_deep_in_all_its_parts_together_is_an_error(levels: int) -> None:
    held, tree = BlobWriter(), cast(Any, None)
    for number in range(2):
        tree = boundary_blob.part(0) if number else []
        for _ in range(levels):
            tree = [tree]
        held.bare(tree)
    assert "unfolds" in refused(held.sealed(held.pickles))


@pytest.mark.parametrize(
    "said",
    [
        {"strides": [2**70]},
        {"shape": [0, 2**64], "strides": [1, 1], "length": 0},
        {"shape": [1] * 65, "strides": [1] * 65},
        {"shape": [1 << 2030] * 100_000, "strides": [1] * 100_000},
        {"dtype": "qint8"},
        {"dtype": "quint4x2"},
        {"dtype": "_inductor"},
        {"dtype": "float"},
    ],
    ids=lambda said: "".join(f"{key} {str(value)[:24]} " for key, value in said.items()),
)
def test_a_tensor_of_a_form_that_none_has_is_an_error(said: dict[str, Any]) -> None:
    held = BlobWriter()
    form = held.put(torch.zeros(1, dtype=torch.uint8))
    refused(held.sealed([held.bare({"t": {**form, **said}})]))


def test_parcels_of_next_to_nothing_are_an_error() -> None:
    """Each would take a loader of its own."""
    held, least = BlobWriter(), boundary_blob.closed(None)
    said = [{boundary_codec.TAG: "parcel", "at": 0, "length": len(least)}]
    held.add(least)
    assert "a parcel of" in refused(held.sealed([held.bare(said)]))


def test_a_part_of_a_part_is_an_error() -> None:
    held = BlobWriter()
    held.pickled({"n": 1})
    held.pickled({"part": boundary_blob.part(0)})
    held.pickled({"part": boundary_blob.part(1)})
    with pytest.raises(CorruptSnapshotError):
        boundary_blob.opened(held.sealed(held.pickles), context="test")


def test_tensors_that_mean_the_same_bytes_are_an_error_before_they_take_memory() -> None:
    held = BlobWriter()
    said = held.put(torch.zeros(1 << 20, dtype=torch.uint8))
    tree = [[{**said} for _ in range(32)] for _ in range(32)]
    with pytest.raises(CorruptSnapshotError, match="claim more than the 1048576 bytes there are"):
        _within(
            64 << 20,
            lambda: boundary_blob.opened(held.sealed([held.pickled(tree)]), context="test"),
        )


def test_what_is_large_is_put_in_once_while_it_is_the_same_object() -> None:
    kept = Kept()
    blobs, counts = [], []
    for i in range(3):
        held = BlobWriter(kept)
        blobs.append(held.sealed([held.pickled({**PLAIN, "i": i})]))
        before, kept.parcels = kept.parcels, held.parcels or {}
        counts.append(sum(known is before.get(at) for at, known in kept.parcels.items()))
        assert boundary_blob.opened(blobs[-1], context="test") == {**PLAIN, "i": i}
    assert counts == [0, 2, 2] and len(blobs[0]) == len(blobs[2])


def test_a_parcel_in_a_parcel_in_a_parcel_is_an_error() -> None:
    blob = boundary_blob.closed({"n": 1, "text": "as long as many values" * 20})
    for levels in range(3):
        if levels < 2:
            assert boundary_blob.opened(blob, context="test")
        else:
            with pytest.raises(CorruptSnapshotError, match="in one that is in another"):
                boundary_blob.opened(blob, context="test")
        held = BlobWriter()
        said = {**boundary_blob.part(0), boundary_codec.TAG: "parcel", "at": 0, "length": len(blob)}
        del said["number"]
        held.add(blob)
        blob = held.sealed([held.pickled({"inner": said})])


class Asks:
    """Pickled as the call of a function that the restricted loader takes."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (bytearray, (1 << 40,)),
        (bytearray, (b"few",)),
        (torch.Tensor, (1 << 40,)),
        (torch.UntypedStorage, (1 << 40,)),
        (set, ([1],)),
    ],
    ids=lambda call: f"{call[0].__name__} {call[1]}",
)
@pytest.mark.parametrize("beside", [None, torch.zeros(3).to(torch.float8_e4m3fn)], ids=["", "fp8"])
def test_a_pickle_that_asks_for_memory_is_an_error_before_it_gets_any(
    call: Any, beside: Any
) -> None:
    tree = {"first": [1, beside if beside is None else "text"], "asks": Asks(*call)}
    blobs = [boundary_blob.closed(tree)]
    sink = io.BytesIO()
    torch.save({**tree, "beside": beside, "again": beside}, sink)
    for opened in (
        lambda: boundary_blob.opened(blobs[0], context="test"),
        lambda: boundary_codec.decode(sink.getvalue(), context="test"),
    ):
        with pytest.raises(CorruptSnapshotError, match="which no boundary state needs|for someth"):
            _within(64 << 20, opened)


def test_text_that_looks_like_a_call_comes_back() -> None:
    tree = {"text": "cbuiltins\nbytearray\n", "also": "abcd\nef\n", "bytes": b"cos\nsystem\n"}
    assert boundary_blob.opened(boundary_blob.closed(tree), context="test") == tree


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2, torch.complex64, torch.bool])
def test_tensors_of_every_kind_come_back_from_a_manifest(dtype: torch.dtype) -> None:
    tree = {"a": torch.zeros(3).to(dtype), "b": [torch.zeros(2).to(dtype)] * 2, "dtype": dtype}
    found = boundary_blob.opened(boundary_blob.closed(tree), context="test")
    assert found["a"].dtype == dtype and found["b"][1].shape == (2,) and found["dtype"] is dtype


def test_a_tensor_larger_than_its_bytes_is_an_error() -> None:
    tensor = torch.zeros(4)
    sink = io.BytesIO()
    torch.save({"tensor": tensor}, sink)
    whole = sink.getvalue()
    at = whole.index(b"K\x04\x85")  # its shape
    forged = whole[:at] + b"M\xff\x85" + whole[at + 3 :]
    with pytest.raises(CorruptSnapshotError):
        boundary_codec.decode(forged, context="test")


def _within(most: int, work: Callable[[], object]) -> None:
    """Do it in address space that has so many bytes left."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + most, limits[1]))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("kind", ["parcel", "bytes beside"])
@pytest.mark.parametrize(
    "change", [{"at": 1 << 40}, {"at": -1}, {"length": 1 << 40}, {"length": "8"}, {"more": 1}]
)
def test_what_is_not_beside_a_tree_is_an_error(kind: str, change: dict[str, Any]) -> None:
    held, tree = BlobWriter(), {"n": "as long as many values" * 20}
    inner = boundary_blob.closed(tree)
    held.add(inner)
    said = {boundary_codec.TAG: kind, "at": 0, "length": len(inner)}
    whole = held.sealed([held.bare({"said": said})])
    assert boundary_blob.opened(whole, context="test")["said"] in (tree, inner)
    with pytest.raises(CorruptSnapshotError):
        boundary_blob.opened(held.sealed([held.bare({"said": {**said, **change}})]), context="test")


@pytest.mark.parametrize("length", [0, 4, 8, 20, -1])
def test_what_is_cut_is_an_error(length: int) -> None:
    with pytest.raises(CorruptSnapshotError):
        boundary_blob.opened(sealed()[:length], context="test")


def test_what_is_damaged_is_an_error_or_of_the_same_form() -> None:
    whole, dice = sealed(), random.Random(5)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        try:
            boundary_blob.opened(bytes(damaged), context="test")
        except CorruptSnapshotError:
            continue


@pytest.mark.parametrize(
    "change",
    [
        {"at": 1 << 40},
        {"at": -1},
        {"length": 8},
        {"shape": [-1]},
        {"shape": [1 << 40, 1 << 40]},
        {"strides": [9]},
        {"dtype": "nn"},
        {"dtype": 3},
        {"more": 1},
    ],
)
def test_a_tensor_that_is_not_there_is_an_error(change: dict[str, Any]) -> None:
    held = BlobWriter()
    said = {**held.put(torch.ones(3)), **change}
    with pytest.raises(CorruptSnapshotError):
        boundary_blob.opened(held.sealed([held.pickled({"tensor": said})]), context="test")
