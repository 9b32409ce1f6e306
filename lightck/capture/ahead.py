"""Memory that is about to be looked at, asked for all at once.

Behind an update everything is cold. A tensor's address and counter are in four objects, each found
through the one before: half a millisecond for some hundred tensors, one cache line after the other.
Where these objects are is noted once, and said to the CPU beforehand.

Hints, all of it: nothing is read through them, and one that is wrong by now costs a little time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightck.capture import dtensor
from lightck.region.native import LINE_BYTES, Lines

RUN = 512
"""Tensors that are looked at together: what is asked for stays in the cache until then."""
_OBJECT_BYTES, _TENSOR_BYTES, _STORAGE_BYTES, _COUNTER_BYTES = 48, 184, 64, 24
"""Of a tensor as Python has it, and of what is behind it in C++, as far as it is read here."""
_PROBED_WORDS = 16
"""Of a C++ tensor, which has some more."""


@dataclass(eq=False)
class Ahead:
    """Where a sequence of tensors is described, run by run.

    Noted when it is asked for the second time: a sequence that is new at every step would pay more
    for the noting than it gains.
    """

    tensors: Sequence[torch.Tensor]
    """All of them alive, as long as this is used."""
    also: Sequence[int] = ()
    """Addresses to ask for with the first run."""
    runs: Sequence[Lines] = field(default=(), init=False)
    _asked: int = field(default=0, init=False)

    def ask(self, run: int) -> None:
        """For what describes the tensors of a run, if it is known."""
        if run == 0:
            self._asked += 1
            if self._asked == 2:
                self._note()
        if run < len(self.runs):
            self.runs[run].ask()

    def _note(self) -> None:
        found = [_of(tensor) for tensor in self.tensors]
        runs = [list(chain.from_iterable(found[i : i + RUN])) for i in range(0, len(found), RUN)]
        if runs:
            runs[0] += self.also
        lines = (np.unique(np.array(each, np.uint64) // LINE_BYTES) for each in runs)
        self.runs = list(map(Lines, lines))


def _of(tensor: torch.Tensor) -> list[int]:
    held, at = dtensor.local(tensor), counter_at()
    found = _spread(held.untyped_storage()._cdata, _STORAGE_BYTES)
    for each in (tensor,) if held is tensor else (tensor, held):
        found += _spread(id(each), _OBJECT_BYTES) + _spread(each._cdata, _TENSOR_BYTES)
        if at is not None:
            found += _spread(_words(each)[at], _COUNTER_BYTES)
    return found


def _spread(begin: int, length: int) -> list[int]:
    return [*range(begin, begin + length, LINE_BYTES), begin + length - 1]


@cache
def counter_at() -> int | None:
    """Which word of a C++ tensor leads to its version counter; None: that cannot be told.

    A detached tensor shares it, and with it the storage; `data` shares the storage only.
    """
    tensor = torch.zeros(1)
    rows = zip(*map(_words, (tensor, tensor.detach(), tensor.data)), strict=True)
    found = [i for i, (own, same, other) in enumerate(rows) if own and own == same != other]
    return found[0] if len(found) == 1 else None


def _words(tensor: torch.Tensor) -> Any:
    """The memory of a living C++ tensor."""
    return (ctypes.c_uint64 * _PROBED_WORDS).from_address(tensor._cdata)
