"""Load boundary state (all that is not a tensor in the region) from bytes, without running code.

Trees of plain values are written (`parcel.py`) for torch's `weights_only` loader, the only
unpickler that lightck uses. Types that it refuses but that training loops hold (NumPy values,
deques, counters) become tagged dicts. What could not be restored is a `StateError` at attach that
names its path.
"""

from __future__ import annotations

import collections
import io
import pickletools
import re
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightck.errors import CorruptSnapshotError
from lightck.state.boundary_codec import PLAIN
from lightck.state.boundary_codec import TAG as TAG
from lightck.state.boundary_codec import join as join
from lightck.state.boundary_codec import plain as plain
from lightck.state.boundary_codec import reference as reference

DEEPEST = 150
"""Levels of nesting at most: what recursion bears, with room for the caller's stack."""
_NAMED = re.compile(rb"(?=c([\w.]{1,80})\n([\w.]{1,80})\n)")
"""Pattern of what may be a pickle's reference to a function or class, overlapping ones, too."""
_STORAGE = "torch.storage.UntypedStorage"
_CALLED = {
    *("collections.OrderedDict", "_codecs.encode", "__builtin__.complex", "builtins.complex"),
    *("torch.device", "torch.Size", "torch._utils._rebuild_tensor_v2"),
    "torch._utils._rebuild_tensor_v3",
}
"""Callables in the pickle of a tree that `plain` made; none takes more memory than it is given."""

_DTYPE = re.compile(r"[<>|=][a-zA-Z][0-9]*(\[[0-9]*[a-zA-Z]+\])?")


def rebuild(tree: Any, tensors: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Rebuild the values from which `plain` made a tree; `tensors` resolves references by name."""
    if isinstance(tree, dict):
        if TAG in tree:
            return _untag(tree, tensors)
        return type(tree)((k, rebuild(v, tensors)) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(rebuild(value, tensors) for value in tree)
    return tree


def _untag(tree: dict[str, Any], tensors: Callable[[str], torch.Tensor] | None) -> Any:
    kind = tree[TAG]
    if kind == "tensor":
        return tree if tensors is None else tensors(_field(tree, "name", str))
    if kind == "bytes":
        return b""
    if kind in ("ndarray", "scalar", "bytearray"):
        held = _field(tree, "bytes", bytes, type(None)) or b""
        return bytearray(held) if kind == "bytearray" else _array(tree, held)
    try:
        return _container(kind, tree, rebuild(_field(tree, "items", list), tensors))
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptSnapshotError(f"boundary state holds no {kind}: {error}") from error


def _container(kind: Any, tree: dict[str, Any], items: list[Any]) -> Any:
    if kind == "deque":
        return collections.deque(items, _field(tree, "maxlen", int, type(None)))
    if kind in ("set", "frozenset"):
        return set(items) if kind == "set" else frozenset(items)
    if kind == "counter":
        return collections.Counter(dict(items))
    if kind == "defaultdict":
        factories: dict[str | None, Any] = {t.__name__: t for t in (int, float, list, dict, set)}
        factory = factories.get(_field(tree, "factory", str, type(None)))
        return collections.defaultdict(factory, items)
    raise CorruptSnapshotError(f"boundary state holds an unknown kind of value: {kind!r}")


def _array(tree: dict[str, Any], held: bytes) -> Any:
    name = _field(tree, "dtype", str)
    if not _DTYPE.fullmatch(name):
        raise CorruptSnapshotError(f"boundary state holds an array of dtype {name!r}")
    try:
        array = np.frombuffer(held, np.dtype(name)).reshape(_field(tree, "shape", list)).copy()
        return array if tree[TAG] == "ndarray" else array[()]
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptSnapshotError(f"boundary state holds no {name} array: {error}") from error


def _field(tree: dict[str, Any], name: str, *kinds: type) -> Any:
    value = tree.get(name)
    if type(value) not in kinds:
        found = type(value).__name__
        raise CorruptSnapshotError(f"boundary state: {name} of a {tree[TAG]!r} is a {found}")
    return value


def decode(data: bytes, *, context: str) -> Any:
    """Load an archive as `torch.save` makes it of a plain tree, running no code.

    Raises:
        CorruptSnapshotError: the restricted loader refuses it.
    """
    try:
        _check_archive(data)
        tree = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        check_tree(tree, len(data))
        return tree
    # Damaged bytes make the loader fail in every way: IndexError, struct.error, AttributeError, ...
    except Exception as error:  # noqa: BLE001
        raise CorruptSnapshotError(f"{context}: boundary state does not load: {error}") from error


def _check_archive(data: bytes) -> None:
    """Refuse an archive that unfolds to more bytes than it has, and what is no archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("a member of the archive is compressed")
        if sum(member.file_size for member in members) > len(data):
            raise ValueError(f"its members claim more than the {len(data)} bytes of the archive")
        for member in members:
            if member.filename.endswith(".pkl"):
                _check_calls(archive.read(member))


def _check_calls(pickled: bytes) -> None:
    """Refuse a pickle that calls anything that `plain` does not need.

    The loader would take `bytearray(n)`, for one, which makes n bytes.
    """
    names = {b".".join(named).decode() for named in _NAMED.findall(pickled)}
    if all(map(_is_known, names)):
        return
    stored: set[Any] = set()
    expects_key = False
    for opcode, argument, _ in pickletools.genops(pickled):
        put = opcode.name in ("BINPUT", "LONG_BINPUT", "PUT")
        if expects_key and not put and opcode.name != "BINUNICODE":
            raise ValueError(f"it uses {_STORAGE} for something else than a tensor's bytes")
        if expects_key and put:
            stored.add(argument)
        elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
            expects_key = argument in stored
        elif opcode.name == "GLOBAL":
            name = str(argument).replace(" ", ".", 1)
            expects_key = name == _STORAGE
            if not (expects_key or _is_known(name)):
                raise ValueError(f"it uses {name}, which no boundary state needs")
        elif opcode.name in ("POP", "POP_MARK", "DUP", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ"):
            raise ValueError(f"it uses {opcode.name}, which no boundary state needs")
        elif not put:
            expects_key = False


def _is_known(name: str) -> bool:
    module, _, what = name.rpartition(".")
    of_torch = module == "torch" and (
        what.endswith("Storage") or isinstance(getattr(torch, what, None), torch.dtype)
    )
    return of_torch or name in _CALLED


def check_tree(tree: Any, limit: int) -> None:
    """Check that what was loaded is what `plain` makes: a tree with at least a byte per node.

    A pickle may refer to one list a million times, and so stand for more than any memory holds.

    Raises:
        ValueError: there are more than `limit` nodes, or it is too deep or of other types.
    """
    waiting = [(tree, 0)]
    seen = 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        if seen > limit or depth > DEEPEST:
            raise ValueError(f"it unfolds beyond {limit} nodes or {DEEPEST} levels")
        if isinstance(node, torch.Tensor):
            held = node.untyped_storage().nbytes()
            plain_one = type(node) is torch.Tensor and node.device.type == "cpu"
            if not plain_one or node.layout is not torch.strided or node.nbytes > held:
                raise ValueError(
                    f"it holds a {type(node).__name__} of {node.nbytes} bytes in {held}"
                )
        elif type(node) in (dict, collections.OrderedDict):
            for pair in node.items():
                waiting += ((part, depth + 1) for part in pair)
        elif type(node) in (list, tuple):
            waiting += ((part, depth + 1) for part in node)
        elif type(node) not in PLAIN:
            raise ValueError(f"it holds a {type(node).__name__}")


def types_of(tree: Any) -> Any:
    """Return the types in a plain tree; where they change, it must be proved again to load."""
    if isinstance(tree, dict):
        return (type(tree), tuple((k, types_of(v)) for k, v in tree.items()))
    if type(tree) in (list, tuple):
        kinds = set(map(type, tree))
        if not kinds.isdisjoint((dict, collections.OrderedDict, list, tuple)):
            return (type(tree), tuple({types_of(value) for value in tree}))
        return (type(tree), tuple(kinds))
    return type(tree)
