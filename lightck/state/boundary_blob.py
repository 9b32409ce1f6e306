"""Boundary state as bytes, for manifest and journal: JSON, and tensors' bytes beside it.

    length of the text (8 bytes, little-endian) | text, UTF-8 | bytes of all parts, in their order

The text is a JSON list of parts, the last of which is the tree:

    {"tree": ..., "tensors": [[dtype, shape, strides, offset, bytes], ...], "bytes": n}

Offsets count from where the part's own n bytes begin. What JSON has not is an object of a tag and
what it is (`_TAGS`): {"__lightck__": "tuple", "is": [1, 2]}. A tensor, bytes, or another part is a
number there. Each is meant once: nothing unfolds to more than the blob has.

Parts are what the journal writes at every instant and what seldom changes: while a part's tree is
the same object, it is encoded once.

Nothing here runs code that the bytes name, and everything is checked before it is made.
"""

from __future__ import annotations

import collections
import json
import math
import re
import reprlib
import struct
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightck.errors import CorruptSnapshotError, StateError
from lightck.state.boundary_codec import DEEPEST, TAG, identical
from lightck.state.tensor_support import DTYPES

_WORD = 8
_MANY = 256
"""The number of values from which on a container is a part of its own."""
_MANY_FLOATS = 16
"""The number of floats from which on a list of them is written as bytes: as text, each takes half a
microsecond."""
_MOST_DIMENSIONS = 64  # torch's
_MOST = 1 << 62
_MOST_LEVELS = DEEPEST + 16
"""Levels at most: those of a value, and those around it."""
_MOST_NESTING = 3 * _MOST_LEVELS
"""Brackets that are open at once at most: a dict whose keys are not strings takes three."""
_MOST_DIGITS = 4300
"""Digits of a number at most, as Python's own limit is: reading more takes quadratic time."""
_LONG_BITS = 2000
"""The bits from which on an integer may be longer than somebody's limit of digits."""
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (_MOST_DIGITS + 1))
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EVERY_DTYPE = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
"""Every dtype by its name, also those whose tensors have no plain bytes."""
_SCALARS = frozenset((type(None), bool, int, float, str))
"""Types that JSON has, but for some of their values (`PartWriter.careful`)."""
_STRINGS, _FLOATS = frozenset((str,)), frozenset((float,))
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)

# ---- writing -------------------------------------------------------------------------------------

_encoder = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A part of a blob, encoded."""

    text: bytes
    data: tuple[memoryview | bytes, ...]
    """Bytes of its tensors."""


@dataclass(eq=False)
class PartWriter:
    """Writes one tree as JSON, and its tensors' bytes beside it."""

    apart: Callable[[Any], Any] | None = None
    """Adds a large container to the blob as a part of its own, and returns what stands for it."""
    careful: bool = False
    """True: look at every value for those that JSON has not (NaN, infinity, integers of thousands
    of digits, lone surrogates). Rarely needed, and slow."""
    rows: list[list[Any]] = field(default_factory=list)
    data: list[memoryview | bytes] = field(default_factory=list)
    size: int = 0
    """The number of bytes in `data`."""

    def put(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Add a dense CPU tensor's bytes; return what stands for it in the tree."""
        said = self.describe(tensor, self.size)
        self.add(raw(tensor))
        return said

    def describe(self, tensor: torch.Tensor, at: int) -> dict[str, Any]:
        """Add a row for a tensor whose bytes begin at `at`; return what stands for it."""
        shape, strides = list(tensor.shape), list(tensor.stride())
        return self._row("raw", [_NAMES[tensor.dtype], shape, strides, at, tensor.nbytes])

    def _row(self, kind: str, row: list[Any]) -> dict[str, Any]:
        self.rows.append(row)
        return {TAG: kind, "is": len(self.rows) - 1}

    def _beside(self, kind: str, dtype: str, values: bytes | array[float]) -> dict[str, Any]:
        data = memoryview(values).cast("B")
        said = self._row(kind, [dtype, [len(values)], [1], self.size, len(data)])
        self.add(data)
        return said

    def add(self, data: memoryview | bytes) -> None:
        """Add bytes, of which the caller describes what is in them."""
        self.data.append(data)
        self.size += len(data)

    def finish(self, tree: Any) -> Part:
        """Encode the tree.

        Raises:
            ValueError: it has a value that JSON has not, and this writer is not `careful`.
            StateError: it has a value of a type that is in no plain tree.
        """
        said = {"tree": self._packed(tree), "tensors": self.rows, "bytes": self.size}
        return Part(_encoder.encode(said).encode(), tuple(self.data))

    def _packed(self, tree: Any) -> Any:
        """Return a plain tree in what JSON has: tags in place of the rest."""
        kind = type(tree)
        if kind in _SCALARS:
            return self._scalar(tree) if self.careful else tree
        if kind not in _CONTAINERS:
            return self._tagged(tree, kind)
        if self.apart is not None and len(tree) >= _MANY:
            return self.apart(tree)
        if kind is list:
            if len(tree) >= _MANY_FLOATS and _FLOATS.issuperset(map(type, tree)):
                return self._beside("floats", "float64", array("d", tree))
            return self._each(tree)
        if kind is tuple:
            return {TAG: "tuple", "is": self._each(tree)}
        if kind is dict and self._has_names(tree):
            if not self.careful and _SCALARS.issuperset(map(type, tree.values())):
                return tree
            return dict(zip(tree, self._each(tree.values()), strict=True))
        items = [self._each(pair) for pair in tree.items()]
        return {TAG: "dict" if kind is dict else "ordered", "is": items}

    def _each(self, values: Collection[Any]) -> list[Any]:
        """Return each of the values as `_packed` does, at no call for those that JSON has."""
        if self.careful:
            return list(map(self._packed, values))
        return [each if type(each) in _SCALARS else self._packed(each) for each in values]

    def _has_names(self, tree: dict[Any, Any]) -> bool:
        """Tell whether all keys are strings that JSON has."""
        if not _STRINGS.issuperset(map(type, tree)):
            return False
        return not self.careful or all(self._scalar(key) is key for key in tree)

    def _tagged(self, tree: Any, kind: type) -> dict[str, Any]:
        if isinstance(tree, torch.Tensor):
            return self.put(tree)
        if kind is bytes:
            return self._beside("bytes", "uint8", tree)
        if kind is torch.Size:
            return {TAG: "size", "is": [*tree]}
        if kind is complex:
            return {TAG: "complex", "is": self._each((tree.real, tree.imag))}
        if kind in (torch.dtype, torch.device):
            return {TAG: kind.__name__, "is": str(tree)}
        raise StateError(f"boundary state holds a {kind.__module__}.{kind.__qualname__}")

    def _scalar(self, value: Any) -> Any:
        if type(value) is float and not math.isfinite(value):
            return {TAG: "float", "is": struct.pack(">d", value).hex()}
        if type(value) is int and value.bit_length() > _LONG_BITS:
            return {TAG: "int", "is": f"{value:x}"}
        if type(value) is str and not value.isascii():
            held = value.encode("utf-8", "surrogatepass")
            return value if _is_utf8(held) else {TAG: "str", "is": held.hex()}
        return value


def _is_utf8(held: bytes) -> bool:
    try:
        held.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(eq=False)
class BlobWriter:
    """Writes a blob, part by part. Nobody changes a tree that was put in here."""

    last: Mapping[int, tuple[Any, Part]] | None = None
    """The parts of the blob before that were put in with `apart`, see `made`; None: large
    containers are no parts."""
    made: dict[int, tuple[Any, Part]] = field(default_factory=dict)
    """Parts of this blob that serve the next one while their trees are the same objects, by the
    identity of these."""
    parts: list[Part] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of bytes that the parts so far have."""
        return sum(len(part.text) + sum(map(len, part.data)) for part in self.parts)

    def add(self, part: Part) -> dict[str, Any]:
        """Add a part; return what stands for it in the trees of later ones."""
        self.parts.append(part)
        return {TAG: "part", "is": len(self.parts) - 1}

    def put(self, tree: Any) -> dict[str, Any]:
        """Encode a tree and add it, after the large containers that it has."""
        begun, apart = len(self.parts), None if self.last is None else self.apart
        if 0 < sys.get_int_max_str_digits() <= _MOST_DIGITS:
            try:
                return self.add(PartWriter(apart).finish(tree))
            except ValueError:
                del self.parts[begun:]
        return self.add(PartWriter(apart, careful=True).finish(tree))

    def apart(self, tree: Any) -> dict[str, Any]:
        """Add a tree that seldom changes; while it is the same object, it is not encoded again."""
        known = self.made.get(id(tree)) or (self.last or {}).get(id(tree))
        if known is None or known[0] is not tree:
            inner = BlobWriter()
            inner.put(tree)
            known = tree, inner.parts[0]
        self.made[id(tree)] = known
        return self.add(known[1])

    def sealed(self) -> bytes:
        """Return the blob as bytes; the part that was put in last is its tree."""
        text = b",".join(part.text for part in self.parts)
        data = (each for part in self.parts for each in part.data)
        return b"".join((struct.pack("<Q", len(text) + 2), b"[", text, b"]", *data))


def closed(tree: Any) -> bytes:
    """Encode a plain tree.

    Raises:
        StateError: something in it has no plain bytes.
    """
    writer = BlobWriter()
    with _stated():
        writer.put(tree)
    return writer.sealed()


@contextmanager
def _stated() -> Iterator[None]:
    """Raise a `StateError` for an error of json's or torch's in the body."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"the state holds what has no bytes: {error!r}") from error


@dataclass(frozen=True, eq=False)
class _Skeleton:
    """The parts of a blob that stay while only generators, and parts before them, change."""

    told: list[Any]
    """The objects that the parts were made of; while all are the same, the parts are."""
    drawn: list[Any]
    """The content of the last part about the generators, see `_drawn`."""
    parts: list[Part]
    """The parts behind those that change."""
    made: dict[int, tuple[Any, Part]]
    """The rows of `BlobWriter.made` for parts that stay."""


Put = Callable[[BlobWriter, list[dict[str, Any]], list[dict[str, Any]]], None]
"""Puts the rest of a blob into a writer, given what stands for its first parts and generators."""


@dataclass(eq=False)
class BlobEncoder:
    """Encodes blobs of one kind, one after the other: what is the same object is encoded once."""

    _last: dict[int, tuple[Any, Part]] = field(default_factory=dict)
    _skeleton: _Skeleton | None = None

    def closed(self, tree: dict[str, Any]) -> bytes:
        """Encode a plain tree as `closed` does: of step, generators under `rng`, and the rest.

        Raises:
            StateError: something in it has no plain bytes.
        """
        generated = [tree["rng"]] if "rng" in tree else []
        changing = [PartWriter().finish(tree["step"])] if "step" in tree else []

        def put(
            writer: BlobWriter, step: list[dict[str, Any]], states: list[dict[str, Any]]
        ) -> None:
            with _stated():
                rest = {k: writer.put(v) for k, v in tree.items() if k not in ("step", "rng")}
                for key, said in (("step", step), ("rng", states)):
                    if said:
                        rest[key] = said[0]
                writer.put(rest)

        return self.encode(changing, generated, constituents(tree), put)

    def encode(
        self, first: list[Part], generated: list[dict[str, Any]], told: list[Any], put: Put
    ) -> bytes:
        """Encode a blob of parts that always change, of generators, and of a rest that seldom does.

        Args:
            first: the parts that change.
            generated: states of random generators.
            told: every object that the rest is made of. While they are the same, so is the rest.
            put: puts the rest; generators' tensors are the only ones of its last part.

        Raises:
            Exception: what `put` raises.
        """
        writer = BlobWriter(self._last)
        places = [writer.add(part) for part in first]
        states = [generators(writer, state) for state in generated]
        drawn, raws = _drawn(states)
        known = self._skeleton
        if known is None or known.drawn != drawn or not identical(known.told, told):
            begun, changing = len(writer.parts), [*writer.made]
            put(writer, places, states)
            assert [*map(len, writer.parts[-1].data)] == [*map(len, raws)], "others' bytes"
            stay = {key: row for key, row in writer.made.items() if key not in changing}
            known = self._skeleton = _Skeleton(told, drawn, writer.parts[begun:], stay)
        else:
            writer.parts += known.parts[:-1]
            writer.add(Part(known.parts[-1].text, tuple(raws)))
            writer.made |= known.made
        self._last = writer.made
        return writer.sealed()


def constituents(tree: dict[str, Any]) -> list[Any]:
    """Return the objects that a tree of boundary state is made of, but step and generators."""
    told: list[Any] = []
    for key, value in tree.items():
        if key in ("step", "rng"):
            continue
        told += (key, type(value))
        if type(value) is dict:
            told += value
            told += value.values()
        elif type(value) is list:
            told += value
        else:
            told.append(value)
    return told


def generators(writer: BlobWriter, states: dict[str, Any]) -> dict[str, Any]:
    """Split states that are the same objects until somebody draws from those with tensors."""
    return {
        name: writer.apart(state) if type(state) is dict else state
        for name, state in states.items()
    }


def _drawn(states: list[dict[str, Any]]) -> tuple[list[Any], list[memoryview]]:
    """Return what a blob's last part says of generators, and those bytes of them that it has."""
    said: list[Any] = []
    raws: list[memoryview] = []
    for state in states:
        for name, value in state.items():
            said.append((name, value if type(value) is dict else type(value)))
            some = () if type(value) is dict else value if type(value) is list else (value,)
            raws += map(raw, some)
    return [*said, *map(len, raws)], raws


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, in the order of its memory."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor.numpy().data  # random generators' states, at every instant
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


# ---- reading -------------------------------------------------------------------------------------

_DAMAGE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
"""The errors of json, torch and Python where bytes mean nothing."""


def opened(data: bytes, *, context: str) -> Any:
    """Decode a tree, with tensors that own their bytes; runs no code.

    Raises:
        CorruptSnapshotError: it is not what `BlobWriter` writes.
    """
    try:
        return _Reader(data).tree()
    except _DAMAGE as error:
        raise CorruptSnapshotError(f"{context}: boundary state does not load: {error}") from error


_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def _parsed(text: bytes) -> Any:
    """Parse JSON that is not deeper, and has no longer numbers, than can be parsed in its time.

    Raises:
        ValueError: it is, or is no JSON.
    """
    whole = text.decode()
    # Every second piece between quotes is what stands outside of strings.
    bare = b"".join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    nesting = int(np.cumsum(_STEPS[np.frombuffer(bare, np.uint8)], dtype=np.int32).max(initial=0))
    if nesting > _MOST_NESTING:
        raise ValueError(f"it is nested {nesting} levels deep, at most {_MOST_NESTING} expected")
    if _LONG_NUMBER.search(bare):
        raise ValueError(f"it has a number of more than {_MOST_DIGITS} digits")
    return json.loads(whole, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has {name}, which is no JSON")


@dataclass(frozen=True, eq=False, slots=True)
class _Row:
    """Describes a tensor's bytes."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    data: memoryview

    def tensor(self) -> torch.Tensor:
        if not len(self.data):
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        flat = torch.frombuffer(bytearray(self.data), dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides)


def _row(said: Any, data: memoryview) -> _Row:
    """Check one row of a part whose bytes are `data`."""
    if type(said) is not list or [*map(type, said)] != [str, list, list, int, int]:
        raise ValueError(f"a tensor of unknown form: {reprlib.repr(said)}")
    name, shape, strides, at, length = said
    dtype, numbers = DTYPES.get(name), [*shape, *strides]
    many = len(numbers) > 2 * _MOST_DIMENSIONS
    if dtype is None or many or not all(type(n) is int and 0 <= n < _MOST for n in numbers):
        raise ValueError(f"a tensor of unknown form: {reprlib.repr(said)}")
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    size = math.prod(shape) * dtype.itemsize
    if not size == length == span * dtype.itemsize:
        raise ValueError(f"{length} bytes hold no {reprlib.repr(said)}")
    if not 0 <= at <= at + length <= len(data):
        raise ValueError(f"bytes {at} to {at + length} of {len(data)} are not there")
    return _Row(dtype, shape, strides, data[at : at + length])


def _rows(said: list[Any], data: memoryview) -> list[_Row | None]:
    """Check a part's rows."""
    rows = [_row(each, data) for each in said]
    end = 0
    for at, length in sorted((each[3], each[4]) for each in said if each[4]):
        if at < end:
            raise ValueError(f"its tensors share the bytes from {at} to {end}")
        end = at + length
    return [*rows]


_PART = {"tree", "tensors", "bytes"}


class _Reader:
    """Makes a blob's tree, after everything that a blob says of itself was checked."""

    def __init__(self, blob: bytes) -> None:
        length = int.from_bytes(blob[:_WORD], "little")
        if len(blob) < _WORD + length:
            raise ValueError(f"{len(blob)} bytes, {_WORD} and {length} of text expected")
        parts = _parsed(blob[_WORD : _WORD + length])
        if type(parts) is not list or not parts:
            raise ValueError("it is no list of parts")
        data, at = memoryview(blob)[_WORD + length :], 0
        self._parts: list[tuple[Any, list[_Row | None]] | None] = []
        for part in parts:
            if type(part) is not dict or part.keys() != _PART:
                raise ValueError(f"a part of unknown form: {reprlib.repr(part)}")
            said, size = part["tensors"], part["bytes"]
            if type(said) is not list or type(size) is not int or not 0 <= size <= len(data) - at:
                raise ValueError(f"a part with {size!r} of {len(data)} bytes")
            self._parts.append((part["tree"], _rows(said, data[at : at + size])))
            at += size
        if at != len(data):
            raise ValueError(f"its parts have {at} bytes, {len(data)} are there")

    def tree(self) -> Any:
        return self._part(len(self._parts) - 1, 0)

    def _part(self, number: Any, level: int) -> Any:
        tree, rows = _once(self._parts, number)
        return self._made(tree, rows, level)

    def _made(self, tree: Any, rows: list[_Row | None], level: int) -> Any:
        """Make the values that a tree's tags stand for, and those in it."""
        if level > _MOST_LEVELS:
            raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
        if type(tree) is list:
            values = []
            for each in tree:  # no comprehension: half as much recursion
                values.append(each if type(each) in _SCALARS else self._made(each, rows, level + 1))
            return values
        if type(tree) is not dict:
            return tree
        tag = tree.get(TAG)
        if tag in _TAGS:
            if tree.keys() != _TAGGED:
                raise ValueError(f"a {tag} of unknown form: {reprlib.repr([*tree])}")
            return self._untagged(tag, tree["is"], rows, level)
        made = {}
        for key, value in tree.items():
            scalar = type(value) in _SCALARS
            made[key] = value if scalar else self._made(value, rows, level + 1)
        return made

    def _untagged(self, tag: str, said: Any, rows: list[_Row | None], level: int) -> Any:
        if tag == "part":
            return self._part(said, level + 1)
        if tag == "raw":
            return _once(rows, said).tensor()
        if tag == "bytes":
            return bytes(_once(rows, said).data)
        if tag == "floats":
            return array("d", bytes(_once(rows, said).data)).tolist()
        if tag in _SCALAR_TAGS:
            if type(said) is not str:
                raise ValueError(f"a {tag} of a {type(said).__name__}")
            return _SCALAR_TAGS[tag](said)
        if tag in _SEQUENCE_TAGS:
            return _SEQUENCE_TAGS[tag](self._made(said, rows, level))
        made: dict[Any, Any] = {} if tag == "dict" else collections.OrderedDict()
        for key, value in said:
            made[self._made(key, rows, level + 1)] = self._made(value, rows, level + 1)
        return made


_SCALAR_TAGS: dict[str, Callable[[str], Any]] = {
    "float": lambda said: struct.unpack(">d", bytes.fromhex(said))[0],
    "int": lambda said: int(said, 16),
    "str": lambda said: bytes.fromhex(said).decode("utf-8", "surrogatepass"),
    "dtype": lambda said: _EVERY_DTYPE[said],
    "device": torch.device,
}
_SEQUENCE_TAGS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "complex": lambda parts: complex(parts[0], parts[1]),
}
_TAGGED = {TAG, "is"}
_TAGS = frozenset(
    (*_SCALAR_TAGS, *_SEQUENCE_TAGS, "dict", "ordered", "raw", "bytes", "floats", "part")
)


def _once(every: list[Any], number: Any) -> Any:
    """Return what has a number; it is nothing from then on."""
    if type(number) is not int or not 0 <= number < len(every) or every[number] is None:
        raise ValueError(f"number {number!r} of {len(every)} is not there, or is meant twice")
    found, every[number] = every[number], None
    return found
