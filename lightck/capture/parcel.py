"""Boundary state as bytes for the journal: written at every step, so in microseconds.

`boundary.encode` takes as long for a tree as a step may cost in all. Here the tree is a bare pickle
beside its tensors' bytes; it becomes an archive for the restricted loader when it is read, which is
after a failure only.

    length of the pickle (8 bytes, little-endian) | pickle | bytes of the tensors, one by one
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.capture import boundary
from lightck.capture.boundary import TAG
from lightck.errors import CorruptSnapshotError

_LENGTH = struct.Struct("<Q")
_PROTOCOL = 2  # the newest that the restricted loader takes
_FORM = {TAG: str, "dtype": str, "shape": list, "strides": list, "at": int, "length": int}


@dataclass(eq=False)
class Parcel:
    """A tree whose tensors lie beside it."""

    parts: list[memoryview | bytes] = field(default_factory=list)
    size: int = 0
    """Of the parts."""

    def put(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Add a dense CPU tensor's bytes; returns what stands for it in the tree."""
        said = form(tensor, self.size)
        self.add(raw(tensor))
        return said

    def add(self, data: memoryview | bytes) -> None:
        """Add bytes; what stands for them is for the caller to say, see `form`."""
        self.parts.append(data)
        self.size += len(data)

    def packed(self, tree: Any) -> Any:
        """A plain tree with what stands for its tensors."""
        if isinstance(tree, torch.Tensor):
            return self.put(tree)
        if isinstance(tree, dict):
            return type(tree)((key, self.packed(value)) for key, value in tree.items())
        if type(tree) in (list, tuple):
            return type(tree)(map(self.packed, tree))
        return tree

    def sealed(self, tree: Any) -> bytes:
        """All of it; `tree` holds no tensors any more."""
        pickled = pickle.dumps(tree, _PROTOCOL)
        return b"".join((_LENGTH.pack(len(pickled)), pickled, *self.parts))


def form(tensor: torch.Tensor, at: int) -> dict[str, Any]:
    """What stands for a tensor whose bytes begin at `at`."""
    return {
        TAG: "bytes of a tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "at": at,
        "length": tensor.nbytes,
    }


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, in the order of its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def opened(data: bytes, *, context: str) -> Any:
    """The tree again, with tensors that own their bytes; runs no code.

    Raises:
        CorruptSnapshotError: it is not what `sealed` makes.
    """
    if len(data) < _LENGTH.size:
        raise CorruptSnapshotError(f"{context}: {len(data)} bytes are no boundary state")
    length = _LENGTH.unpack_from(data)[0]
    begin = _LENGTH.size
    if length > len(data) - begin:
        raise CorruptSnapshotError(f"{context}: a tree of {length} bytes in {len(data)}")
    tree = boundary.decode(_archive(data[begin : begin + length]), context=context)
    try:
        return _unpacked(tree, _Held(data[begin + length :]))
    except (ValueError, RuntimeError, OverflowError) as error:
        raise CorruptSnapshotError(f"{context}: {error}") from error


def _archive(pickled: bytes) -> bytes:
    """As `torch.save` makes it, around a pickle without tensors."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
    return sink.getvalue()


@dataclass(eq=False)
class _Held:
    """The bytes of a parcel's tensors, each of which takes its own."""

    data: bytes
    left: int = field(init=False)
    """Bytes that may yet be taken: forms that mean the same ones could ask for any amount."""

    def __post_init__(self) -> None:
        """Nothing is taken."""
        self.left = len(self.data)

    def take(self, at: int, length: int) -> bytearray:
        if not 0 <= at <= at + length <= len(self.data):
            raise ValueError(f"bytes {at} to {at + length} of {len(self.data)} are not there")
        self.left -= length
        if self.left < 0:
            raise ValueError(f"its tensors claim more than the {len(self.data)} bytes there are")
        return bytearray(self.data[at : at + length])


def _unpacked(tree: Any, data: _Held) -> Any:
    if isinstance(tree, dict):
        if tree.get(TAG) == "bytes of a tensor":
            return _tensor(tree, data)
        return type(tree)((key, _unpacked(value, data)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_unpacked(value, data) for value in tree)
    return tree


def _tensor(said: dict[str, Any], data: _Held) -> torch.Tensor:
    if said.keys() != _FORM.keys() or any(type(said[k]) is not kind for k, kind in _FORM.items()):
        raise ValueError(f"a tensor of unknown form: {said}")
    dtype, at, length = getattr(torch, said["dtype"], None), said["at"], said["length"]
    shape, strides = said["shape"], said["strides"]
    numbers = [*shape, *strides]
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"a tensor of unknown form: {said}")
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    size = math.prod(shape) * dtype.itemsize
    if not size == length == span * dtype.itemsize:
        raise ValueError(f"{length} bytes hold no {said}")
    held = data.take(at, length)
    if not length:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.frombuffer(held, dtype=dtype).as_strided(shape, strides)
