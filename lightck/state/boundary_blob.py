"""Boundary state as bytes, for the manifest and for the journal; written in microseconds.

`torch.save` takes as long for a tree as a step may cost in all. Here the tree is a bare pickle
beside its tensors' bytes; it becomes an archive for the restricted loader when it is read.

    number of pickles, length of each (8 bytes, little-endian) | pickles | bytes of the tensors

The last pickle is the tree. The others are parts of it that have been the same for some time, and
were pickled only once (`Kept`). Among the tensors lie the bytes of large arrays and, as blobs of
this same form, large containers, which are made once, too: pickling is for what is small.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.errors import CorruptSnapshotError, StateError
from lightck.state import boundary_codec
from lightck.state.boundary_codec import FLAT, TAG
from lightck.state.tensor_support import DTYPES

_WORD = 8
_PART = "part"
_BYTES = "bytes beside"
_PARCEL = "parcel"
_LARGE_BYTES = 1 << 10
_MANY = 256
"""The number of values from which on a container is a blob of its own."""
_PROTOCOL = 2  # the newest that the restricted loader takes
_MOST_PARTS = 1000
_MOST_DIMENSIONS = 64  # torch's
_MOST = 1 << 62
_ARCHIVE = b"PK\3\4"
"""The first bytes of a `torch.save` archive, which lightck wrote into manifests at first."""
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)
_BESIDE = {TAG: str, "at": int, "length": int}
_FORM = {TAG: str, "dtype": str, "shape": list, "strides": list, "at": int, "length": int}


@dataclass(eq=False)
class Kept:
    """Keeps the pickles of parts, by path: each serves while its tree is the same object.

    Nobody changes a tree that is in here: what differs is another one.
    """

    parcels: dict[int, tuple[Any, bytes]] = field(default_factory=dict)
    """Containers that are blobs of their own, with their bytes, by identity."""
    _known: dict[str, tuple[Any, bytes | None]] = field(default_factory=dict)

    def pickled(self, where: str, tree: Any) -> bytes | None:
        """Return a tree's pickle; None if it is new at this path, for the next may differ, too."""
        known = self._known.get(where)
        if known is None or known[0] is not tree:
            self._known[where] = tree, None
            return None
        if known[1] is None:
            known = self._known[where] = tree, pickle.dumps(tree, _PROTOCOL)
        return known[1]


@dataclass(eq=False)
class BlobWriter:
    """Writes a tree and, beside it, the bytes of its tensors."""

    kept: Kept = field(default_factory=Kept)
    parts: list[memoryview | bytes] = field(default_factory=list)
    size: int = 0
    """The number of bytes in `parts`."""
    pickles: list[bytes] = field(default_factory=list)
    parcels: dict[int, tuple[Any, bytes]] | None = field(default_factory=dict)
    """The entries of `Kept.parcels` that this blob contains; None: it is an inner blob itself, and
    contains none."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """The number of each part's pickle, by the identity of its tree."""

    def put(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Add a dense CPU tensor's bytes; return what stands for it in the tree."""
        said = form(tensor, self.size)
        self.add(raw(tensor))
        return said

    def add(self, data: memoryview | bytes) -> None:
        """Add bytes; the caller puts something into the tree that refers to them, see `form`."""
        self.parts.append(data)
        self.size += len(data)

    def packed(self, tree: Any) -> Any:
        """Return a plain tree with references in place of its tensors and of all that is large."""
        kind = type(tree)
        if isinstance(tree, torch.Tensor):
            return self.put(tree)
        if kind is bytes and len(tree) >= _LARGE_BYTES:
            return self._beside(_BYTES, tree)
        if kind not in _CONTAINERS:
            return tree
        if len(tree) >= _MANY and self.parcels is not None:
            return self._apart(tree)
        values = tree.values() if isinstance(tree, dict) else tree
        if FLAT.issuperset(map(type, values)):
            return tree
        packed = (each if type(each) in FLAT else self.packed(each) for each in values)
        return kind(zip(tree, packed, strict=True)) if isinstance(tree, dict) else kind(packed)

    def _apart(self, tree: Any) -> dict[str, Any]:
        known = self.kept.parcels.get(id(tree))
        if known is None or known[0] is not tree:
            inner = BlobWriter(parcels=None)
            known = tree, inner.sealed([inner.pickled(tree)])
        assert self.parcels is not None
        self.parcels[id(tree)] = known
        return self._beside(_PARCEL, known[1])

    def _beside(self, kind: str, data: bytes) -> dict[str, Any]:
        at = self.size
        self.add(data)
        return {TAG: kind, "at": at, "length": len(data)}

    def part(self, where: str, tree: Any) -> Any:
        """Return a reference to a tree without tensors; the tree itself if it is new at this path.

        The caller keeps the tree alive at least as long as this object.
        """
        pickled = self.kept.pickled(where, tree)
        if pickled is None:
            return tree
        if id(tree) not in self._numbers:
            self._numbers[id(tree)] = len(self.pickles)
            self.pickles.append(pickled)
        return part(self._numbers[id(tree)])

    def pickled(self, tree: Any) -> bytes:
        """Add a tree as one more pickle, with its tensors beside it, and return the pickle."""
        return self.bare(self.packed(tree))

    def bare(self, tree: Any) -> bytes:
        """Add a tree without anything beside it as one more pickle, and return the pickle."""
        self.pickles.append(pickle.dumps(tree, _PROTOCOL))
        return self.pickles[-1]

    def sealed(self, pickles: Sequence[bytes]) -> bytes:
        """Return the blob as bytes; the last of the pickles is the tree, the others its parts."""
        head = struct.pack(f"<{1 + len(pickles)}Q", len(pickles), *map(len, pickles))
        return b"".join((head, *pickles, *self.parts))


def closed(tree: Any) -> bytes:
    """Encode a tree that `boundary_codec.plain` made.

    Raises:
        StateError: a tensor in it has no plain bytes.
    """
    held = BlobWriter()
    try:
        held.pickled(tree)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise StateError(f"the state holds what has no bytes: {error}") from error
    return held.sealed(held.pickles)


def prove(tree: Any, path: str) -> None:
    """Show that a plain tree can be restored, before anything relies on it.

    Raises:
        StateError: the restricted loader refuses it.
    """
    try:
        boundary_codec.rebuild(opened(closed(tree), context=path))
    except (CorruptSnapshotError, StateError) as error:
        raise StateError(f"{path} could not be restored: {error}", path=path) from error


def weight(tree: Any) -> int:
    """Return the number of bytes that a tree takes here."""
    held = BlobWriter()
    return len(held.pickled(tree)) + held.size


def part(number: int) -> dict[str, Any]:
    """Return the reference that stands for another pickle of the blob in the tree."""
    return {TAG: _PART, "number": number}


def form(tensor: torch.Tensor, at: int) -> dict[str, Any]:
    """Return the reference that stands for a tensor whose bytes begin at `at`."""
    return {
        TAG: "bytes of a tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "at": at,
        "length": tensor.nbytes,
    }


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, in the order of its memory."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor.numpy().data  # random generators' states, at every instant
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def opened(data: bytes, *, context: str) -> Any:
    """Decode a tree, with tensors that own their bytes; runs no code.

    Raises:
        CorruptSnapshotError: it is not what `sealed` makes.
    """
    if data.startswith(_ARCHIVE):
        return boundary_codec.decode(data, context=context)
    try:
        tree = _tree(data, context, inner=False)
        boundary_codec.check_tree(tree, len(data))  # one part may be used many times
        return tree
    # As in `decode`: torch's errors are of every kind.
    except CorruptSnapshotError:
        raise
    except Exception as error:
        raise CorruptSnapshotError(f"{context}: {error}") from error


def _tree(data: bytes, context: str, *, inner: bool) -> Any:
    pickles, data = _opened(data, 1 if inner else _MOST_PARTS)
    trees = [boundary_codec.decode(_archive(pickled), context=context) for pickled in pickles]
    held = _Held(data, context, inner)
    parts = [_unpacked(tree, held, ()) for tree in trees[:-1]]
    return _unpacked(trees[-1], held, parts)


def _opened(data: bytes, most: int) -> tuple[list[bytes], bytes]:
    """Return the pickles, and the bytes after them."""
    count = int.from_bytes(data[:_WORD], "little")
    at = _WORD * (1 + count)
    if not 0 < count <= most or at > len(data):
        raise ValueError(f"{len(data)} bytes are no boundary state")
    pickles = []
    for length in struct.unpack_from(f"<{count}Q", data, _WORD):
        if length > len(data) - at:
            raise ValueError(f"a tree of {length} bytes in {len(data)}")
        pickles.append(data[at : at + length])
        at += length
    return pickles, data[at:]


def _archive(pickled: bytes) -> bytes:
    """Return an archive as `torch.save` makes it, around a pickle without tensors."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
    return sink.getvalue()


@dataclass(eq=False)
class _Held:
    """The bytes beside a blob's tree, of which each reference may claim its own only."""

    data: bytes
    context: str
    inner: bool
    """True if the blob is inside another one, and so may have none itself."""
    left: int = field(init=False)
    """Bytes that may yet be claimed: overlapping references could otherwise ask for any amount."""

    def __post_init__(self) -> None:
        """Begin with all bytes unclaimed."""
        self.left = len(self.data)

    def take(self, at: int, length: int) -> bytearray:
        if not 0 <= at <= at + length <= len(self.data):
            raise ValueError(f"bytes {at} to {at + length} of {len(self.data)} are not there")
        self.left -= length
        if self.left < 0:
            raise ValueError(f"its tensors claim more than the {len(self.data)} bytes there are")
        return bytearray(self.data[at : at + length])


def _unpacked(tree: Any, data: _Held, parts: Sequence[Any]) -> Any:
    """Replace references by tensors and parts; a part is one object for all references to it."""
    if isinstance(tree, dict):
        kind = tree.get(TAG)
        if kind == "bytes of a tensor":
            return _tensor(tree, data)
        if kind in (_BYTES, _PARCEL):
            return _besides(kind, tree, data)
        if kind == _PART:
            number = tree["number"]
            if type(number) is not int or not 0 <= number < len(parts):
                raise ValueError(f"part {number!r} of {len(parts)}")
            return parts[number]
        return type(tree)((key, _unpacked(value, data, parts)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_unpacked(value, data, parts) for value in tree)
    return tree


def _besides(kind: str, said: dict[str, Any], data: _Held) -> Any:
    if said.keys() != _BESIDE.keys() or {type(said["at"]), type(said["length"])} != {int}:
        raise ValueError(f"{kind} of unknown form: {said}")
    held = bytes(data.take(said["at"], said["length"]))
    if kind == _BYTES:
        return held
    if data.inner:
        raise ValueError("a parcel in one that is in another")
    if len(held) < _MANY:  # a loader is started for each
        raise ValueError(f"a parcel of {len(held)} bytes for {_MANY} values")
    return _tree(held, data.context, inner=True)


def _tensor(said: dict[str, Any], data: _Held) -> torch.Tensor:
    if said.keys() != _FORM.keys() or any(type(said[k]) is not kind for k, kind in _FORM.items()):
        raise ValueError(f"a tensor of unknown form: {said}")
    dtype, at, length = DTYPES.get(said["dtype"]), said["at"], said["length"]
    shape, strides = said["shape"], said["strides"]
    numbers = [*shape, *strides]
    many = len(numbers) > 2 * _MOST_DIMENSIONS
    if dtype is None or many or not all(type(n) is int and 0 <= n < _MOST for n in numbers):
        raise ValueError(f"a tensor of unknown form: {said}")
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    size = math.prod(shape) * dtype.itemsize
    if not size == length == span * dtype.itemsize:
        raise ValueError(f"{length} bytes hold no {said}")
    held = data.take(at, length)
    if not length:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.frombuffer(held, dtype=dtype).as_strided(shape, strides)
