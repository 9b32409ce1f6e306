from __future__ import annotations

import ast
import collections
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptSnapshotError, StateError
from lightck.state import boundary_blob, boundary_codec

keys = st.one_of(
    *(st.text(max_size=8), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    st.tuples(st.integers(), st.text(max_size=2)),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=()), max_size=20),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.Size([2, 3])]),
    st.integers(-100, 100).map(np.int64),
    st.floats(width=32, allow_nan=False).map(np.float32),
    st.booleans().map(np.bool_),
    st.sets(st.integers(), max_size=4),
    st.frozensets(st.text(max_size=3), max_size=4),
    st.binary(max_size=5).map(bytearray),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda d: collections.defaultdict(list, d)),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=4).map(collections.Counter),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 7)),
    ),
    max_leaves=20,
)


def there_and_back(tree: Any) -> Any:
    return boundary_codec.rebuild(
        boundary_blob.opened(boundary_blob.closed(boundary_codec.plain(tree, "x")), context="")
    )


def assert_same(a: Any, b: Any) -> None:
    """Equal in value and in every type."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b))
        for x, y in zip(a.values(), b.values(), strict=True):
            assert_same(x, y)
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b) if not isinstance(a, set | frozenset) else a == b
    for attribute in ("maxlen", "default_factory", "dtype"):
        assert getattr(a, attribute, None) == getattr(b, attribute, None)


@given(trees)
@settings(max_examples=300)
def test_plain_trees_come_back_equal_in_value_and_type(tree: Any) -> None:
    assert_same(there_and_back(tree), tree)


@given(st.integers(0, 5), st.sampled_from(["<f4", ">i8", "?", "<c16", "<U3", "<M8[s]"]))
def test_arrays_come_back_with_dtype_and_shape(size: int, dtype: str) -> None:
    before = np.zeros((size, 2), np.dtype(dtype))
    after = there_and_back({"a": before})["a"]
    assert after.dtype == before.dtype and after.shape == before.shape
    assert np.array_equal(after, before)
    assert after.flags.writeable


def test_generator_states_come_back() -> None:
    for state in (
        random.getstate(),
        np.random.get_state(),
        np.random.get_state(legacy=False),
        np.random.default_rng(3).bit_generator.state,
        np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    ):
        assert repr(there_and_back(state)) == repr(state)
    state = torch.get_rng_state()
    assert torch.equal(there_and_back(state), state)


def test_a_plain_tree_shares_nothing_with_the_state() -> None:
    state = {"list": [1], "deque": collections.deque([1])}
    state |= {"tensor": torch.zeros(2), "array": np.zeros(2)}
    tree = boundary_codec.plain(state, "")
    state["list"].append(2)
    state["tensor"].fill_(1)
    state["array"].fill(1)
    state["deque"].append(2)
    back = boundary_codec.rebuild(tree)
    assert back["list"] == [1] and list(back["deque"]) == [1]
    assert not back["tensor"].any() and not back["array"].any()


def _rich() -> dict[str, Any]:
    return {
        "at": 3,
        "list": [1.5, [2, ("a", [None])]],
        "array": np.arange(10_000.0),
        "tensor": torch.arange(10_000),
        "small": [np.int64(3), torch.ones(2)],
        "ordered": collections.OrderedDict(a=1, b={"c": 2.5}),
    }


def test_of_what_has_not_changed_the_very_objects_are_given_again() -> None:
    state = _rich()
    last = boundary_codec.plain(state, "")
    assert boundary_codec.plain({k: v for k, v in state.items() if k != "small"}, "", last=last)
    for name in ("list", "ordered"):
        other = {**state, "at": 4}
        found = boundary_codec.plain(other, "", last=last)
        assert found is not last and found["at"] == 4 and last["at"] == 3
        assert found[name] is last[name]
    found = boundary_codec.plain({"b": 1, "a": 1}, "", last={"a": 1, "b": 1})
    assert [*found] == ["b", "a"]
    state = {name: state[name] for name in ("at", "list", "ordered")}
    last = boundary_codec.plain(state, "")
    assert boundary_codec.plain(state, "", last=last) is last


def test_what_comes_back_is_the_same_whatever_was_before(rng: np.random.Generator) -> None:
    kinds: list[Any] = [0, 0.0, -0.0, False, None, "0", b"", b"0", float("nan"), 1, True, 1.0]

    def drawn(depth: int) -> Any:
        kind = int(rng.integers(6 if depth else 1))
        if kind in (1, 2):
            return (list, tuple)[kind - 1](drawn(depth - 1) for _ in range(rng.integers(3)))
        if kind in (3, 4):
            keys = [["a", 1, "b"][i] for i in rng.permutation(3)[: rng.integers(4)]]
            return (dict, collections.OrderedDict)[kind - 3]((k, drawn(depth - 1)) for k in keys)
        if kind == 5:
            return np.zeros(int(rng.integers(2)), ["i8", "f8"][int(rng.integers(2))])
        return kinds[int(rng.integers(len(kinds)))]

    last = None
    for _ in range(3000):
        state = drawn(3)
        alone, last = boundary_codec.plain(state, ""), boundary_codec.plain(state, "", last=last)
        assert pickle.dumps(_unshared(last)) == pickle.dumps(_unshared(alone))


def _unshared(tree: Any) -> Any:
    """Told apart by types and bits, not by which objects are the same."""
    if isinstance(tree, dict):
        return [type(tree).__name__, *([_unshared(k), _unshared(v)] for k, v in tree.items())]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *map(_unshared, tree)]
    return f"{type(tree).__name__} {tree!r}"


def test_tensors_are_placed_by_path_and_found_again() -> None:
    placed = {}

    def place(path: str, tensor: torch.Tensor) -> Any:
        placed[path] = tensor
        return boundary_codec.reference(path)

    tree = {"a": [torch.ones(1)], "b/c": {"%": torch.zeros(1)}}
    flat = boundary_codec.plain(tree, "extras/x", place)
    assert set(placed) == {"extras/x/a/0", "extras/x/b%2Fc/%25"}
    back = boundary_codec.rebuild(flat, placed.__getitem__)
    assert back["a"][0] is tree["a"][0]
    assert back["b/c"]["%"] is tree["b/c"]["%"]


class Custom(dict[str, int]):
    """A type of the user's own."""


class Odd(torch.Tensor):
    """Would come back as a plain one."""


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, lambda: 1]}, "extras/x/a/1"),
        ({"a": {"b": object()}}, "extras/x/a/b"),
        ({"a": Custom()}, "extras/x/a"),
        ({"a": np.array([object()])}, "extras/x/a"),
        ({"a": np.zeros(1, "i4,i4")}, "extras/x/a"),
        ({"a": {object(): 1}}, "extras/x/a"),
        ({"a": collections.defaultdict(lambda: 1)}, "extras/x/a"),
        ({"a": collections.deque([{1: iter([])}])}, "extras/x/a/0/1"),
        ({"a": {boundary_codec.TAG: "set"}}, "extras/x/a"),
        ({"a": torch.eye(3).to_sparse()}, "extras/x/a"),
        ({"a": [torch.empty(3, device="meta")]}, "extras/x/a/0"),
        ({"a": torch.zeros(2).as_subclass(Odd)}, "extras/x/a"),
    ],
)
def test_what_could_not_be_restored_is_named_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(StateError) as caught:
        boundary_codec.plain(value, "extras/x")
    assert caught.value.path == path
    assert path in str(caught.value)


class Bomb:
    """Runs a command when it is unpickled by an unrestricted loader."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("framed", [False, True])
def test_no_code_in_boundary_state_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Bomb(), tmp_path / "archive")
    data = (tmp_path / "archive").read_bytes() if framed else pickle.dumps(Bomb())
    with pytest.raises(CorruptSnapshotError, match="slot 3"):
        boundary_blob.opened(data, context="slot 3")
    assert not (tmp_path / "exploded").exists()


_UNPICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "zipfile", "joblib"}
_ALLOWED = {
    ("failure/fault_injector.py", "pickle"),  # prints a state that it has taken itself
    ("failure/fault_injector.py", "pickle.dumps"),
    ("cli/demo/command.py", "torch.load"),  # compares what its two trainings saved, no region
    ("cli/export.py", "torch.load"),  # checks the file that it has just made for the user
}


def unpickling(source: str) -> set[str]:
    """Find what a module has that may run code that bytes name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in _UNPICKLES}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name.split(".")[0] in _UNPICKLES}
            found |= names & {"torch.load", "numpy.load", "torch.serialization"}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if node.value.id in _UNPICKLES or name in ("torch.load", "np.load", "numpy.load"):
                found.add(name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"eval", "exec", "__import__"}
    return found


def test_no_module_has_a_way_to_unpickle_anything() -> None:
    """Reading a region runs no code that its bytes name, whatever they are."""
    root = Path(boundary_blob.__file__).parents[1]
    found = {
        (path.relative_to(root).as_posix(), name)
        for path in root.rglob("*.py")
        for name in unpickling(path.read_text())
    }
    assert found == _ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import zipfile", "torch.load(x)",
        "from torch import load", "np.load(x, allow_pickle=True)", "eval(x)", "import dill.source",
    ],
)  # fmt: skip
def test_a_way_to_unpickle_is_found(source: str) -> None:
    assert unpickling(source)


@given(st.data())
@settings(max_examples=300)
def test_damaged_boundary_state_is_corrupt_or_loads_and_nothing_else(data: st.DataObject) -> None:
    tree = {"a": [1, 2.5, "x"], "t": torch.arange(5), "many": list(range(300))}
    blob = bytearray(boundary_blob.closed(tree))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(blob) - 1))
        blob[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob))) :]
    try:
        boundary_blob.opened(bytes(blob), context="slot 3")
    except CorruptSnapshotError as error:
        assert "slot 3" in str(error)


@given(st.binary(max_size=300))
def test_any_bytes_that_are_no_boundary_state_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError, match="slot 3"):
        boundary_blob.opened(data, context="slot 3")


@pytest.mark.parametrize("tree", [{}, {"a": [1, 2.5, "x"], "t": torch.arange(5)}])
def test_an_archive_is_corrupt(tmp_path: Path, tree: dict[str, Any]) -> None:
    torch.save(tree, tmp_path / "archive")
    assert zipfile.is_zipfile(tmp_path / "archive")
    refused((tmp_path / "archive").read_bytes())


# ---- Right checksums around what lightck never writes --------------------------------------------


def refused(data: bytes) -> str:
    with pytest.raises(CorruptSnapshotError) as caught:
        boundary_blob.opened(data, context="slot 3")
    return str(caught.value)


def nested(levels: int, inside: Callable[[Any], Any]) -> Any:
    tree: Any = []
    for _ in range(levels):
        tree = inside(tree)
    return tree


INSIDE: dict[str, Callable[[Any], Any]] = {
    "list": lambda tree: [tree],
    "tuple": lambda tree: (tree,),
    "dict": lambda tree: {"a": tree},
    "a dict of numbers": lambda tree: {1: tree},
    "ordered": lambda tree: collections.OrderedDict(a=tree),
    "deque": lambda tree: collections.deque([tree]),
    "defaultdict": lambda tree: collections.defaultdict(list, a=tree),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_what_is_nested_too_deeply_to_come_back_is_told_where_it_is_taken(kind: str) -> None:
    inside = INSIDE[kind]
    levels = {"deque": boundary_codec.DEEPEST // 2, "defaultdict": boundary_codec.DEEPEST // 3}
    most = levels.get(kind, boundary_codec.DEEPEST)
    tree = nested(most, inside)
    assert repr(there_and_back(tree)) == repr(tree)
    with pytest.raises(StateError, match=r"^extras/x/.* is nested more than 150 levels") as caught:
        boundary_codec.plain(nested(most + 1, inside), "extras/x")
    assert caught.value.path.startswith("extras/x/")


@pytest.mark.parametrize(
    "tagged",
    [
        {"kind": "bytearray", "bytes": 1 << 45},
        {"kind": "ndarray", "bytes": None, "dtype": "<f8", "shape": [0]},
        {"kind": "ndarray", "bytes": 1 << 45, "dtype": "<f8", "shape": [2]},
        {"kind": "ndarray", "bytes": bytes(8), "dtype": "<f8", "shape": [2]},
        {"kind": "ndarray", "bytes": bytes(8), "dtype": "(" * 200 + "f8", "shape": [1]},
        {"kind": "ndarray", "bytes": bytes(8), "dtype": "|O", "shape": [1]},
        {"kind": "scalar", "bytes": bytes(8), "dtype": "<f8"},
        {"kind": "deque", "items": [1], "maxlen": -1},
        {"kind": "deque", "items": 7, "maxlen": 1},
        {"kind": "set", "items": [[]]},
        {"kind": "counter", "items": [1, 2]},
        {"kind": "defaultdict", "items": [], "factory": ["list"]},
        {"kind": "tensor"},
        {"kind": ["tensor"]},
        {"kind": "something new"},
    ],
    ids=lambda tagged: f"{tagged['kind']}",
)
def test_a_value_that_no_encoder_made_is_corrupt(tagged: dict[str, Any]) -> None:
    kind = tagged["kind"]
    with pytest.raises(CorruptSnapshotError):
        loaded = boundary_blob.opened(
            boundary_blob.closed({**tagged, boundary_codec.TAG: kind}), context=""
        )
        boundary_codec.rebuild(loaded, {}.__getitem__)
