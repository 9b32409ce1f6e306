"""A generator's memory: while its bytes are the same, so is its state; asking takes far longer.

Which bytes of an object tell its states apart is found out on one made for that, not assumed. Where
it cannot be (another interpreter, another NumPy) there is nothing to see, and the state is asked
for every time. Reads memory of living objects only, and writes none.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

_WORDS = 624
_STATE_BYTES = 4 * (_WORDS + 1)
"""Of a Mersenne Twister: the words, and which one comes next."""
_KEPT_BYTES = range(12, 17)
"""Of a normal number that is kept for the next call, and whether there is one."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """A generator, and what is looked at; views are made once: calling C from Python is slow."""

    ask: Any
    """What gives its state; the generator is behind it."""
    generator: Any
    views: tuple[memoryview, ...]
    """Of memory that lives as long as both; empty: nothing can be seen."""


_python = _numpy = _Seen(None, None, ())
_kinds: dict[int, Any] = {}  # of arrays, by length


def python() -> tuple[Any, ...] | None:
    """What tells two states of the `random` module apart; None: nothing does."""
    global _python
    seen = _python
    if seen.ask is not random.getstate:
        seen = _python = _see_python()
    if not seen.views:
        return None
    return seen.ask, seen.generator.gauss_next, seen.views[0].tobytes()


def numpy() -> tuple[Any, ...] | None:
    """Likewise of NumPy's global generator, while that is a Mersenne Twister."""
    global _numpy
    seen, source = _numpy, np.random.get_bit_generator()  # type: ignore[attr-defined]
    if seen.generator is not source or seen.ask is not np.random.get_state:
        seen = _numpy = _see_numpy(source)
    if not seen.views:
        return None
    with source.lock:  # no draw of another thread is seen half done
        return source, seen.views[0].tobytes(), seen.views[1].tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Of a contiguous CPU tensor of bytes; half of what a way through NumPy takes when cold."""
    kind = _kinds.get(tensor.numel())
    if kind is None:
        kind = _kinds[tensor.numel()] = ctypes.c_char * tensor.numel()
    found: bytes = kind.from_address(tensor.data_ptr()).raw
    return found


def _see_python() -> _Seen:
    ask, where = random.getstate, _of_python()
    generator: Any = getattr(ask, "__self__", None)
    if where is None or type(generator) is not random.Random:
        return _Seen(ask, generator, ())
    return _Seen(ask, generator, (_view(id(generator) + where[0], where[1]),))


def _see_numpy(source: Any) -> _Seen:
    """Where NumPy's generator keeps its words it says; what is there is compared with its answer.

    The number that is kept for the next call is in the object around it.
    """
    ask, where = np.random.get_state, _of_numpy()
    around: Any = getattr(ask, "__self__", None)
    twister = type(source) is np.random.MT19937
    if where is None or not twister or type(around) is not np.random.RandomState:
        return _Seen(ask, source, ())
    words = _view(source.ctypes.state_address, _STATE_BYTES)
    said = source.state["state"]
    next_one = said["pos"].to_bytes(4, sys.byteorder)
    if words.tobytes() != said["key"].astype(np.uint32).tobytes() + next_one:
        return _Seen(ask, source, ())
    return _Seen(ask, source, (_view(id(around) + where[0], where[1]), words))


def _view(address: int, length: int) -> memoryview:
    """Bytes of an object that lives as long as this is used."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


@cache
def _of_python() -> tuple[int, int] | None:
    probe = random.Random()
    low, high = (0,) * _WORDS, (2**32 - 1,) * _WORDS
    found = _differing(
        probe,
        lambda: probe.setstate((3, (*low, 0), None)),
        lambda: probe.setstate((3, (*high, _WORDS), None)),
    )
    return found if found is not None and found[1] == _STATE_BYTES else None


@cache
def _of_numpy() -> tuple[int, int] | None:
    probe: Any = np.random.RandomState(0)
    name, words, at, *_ = probe.get_state(legacy=True)
    kept = float.fromhex("0x1.123456789abcdp+3")  # no byte of it is 0
    found = _differing(
        probe,
        lambda: probe.set_state((name, words, at, 0, 0.0)),
        lambda: probe.set_state((name, words, at, 1, kept)),
    )
    return found if found is not None and found[1] in _KEPT_BYTES else None


def _differing(
    probe: Any, one: Callable[[], None], other: Callable[[], None]
) -> tuple[int, int] | None:
    """First byte and number of bytes of an object, outer ones included, that differ."""
    if sys.implementation.name != "cpython":
        return None  # where an id is no address
    whole = _view(id(probe), type(probe).__basicsize__)
    one()
    before = whole.tobytes()
    other()
    moved = [i for i, pair in enumerate(zip(before, whole, strict=True)) if pair[0] != pair[1]]
    return (moved[0], moved[-1] + 1 - moved[0]) if moved else None
