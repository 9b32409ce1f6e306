"""Hints of what is about to be looked at: complete where they can be, and never more than hints."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch
from torch import nn

from lightck.capture import ahead, arrange
from lightck.capture.ahead import RUN, Ahead
from lightck.region.native import LINE_BYTES, Lines


def noted(tensors: list[torch.Tensor], also: tuple[int, ...] = ()) -> Ahead:
    hints = Ahead(tensors, also)
    for _ in range(2):
        hints.ask(0)
    return hints


def counter_of(tensor: torch.Tensor) -> int:
    word = ahead.counter_at()
    assert word is not None, "this build of torch keeps version counters where nobody finds them"
    return ctypes.c_uint64.from_address(tensor._cdata + 8 * word).value


def test_the_counter_is_where_the_hint_says() -> None:
    for tensor in (torch.zeros(3), nn.Parameter(torch.zeros(2, 2)), torch.zeros(4)[1:]):
        found = []
        for _ in range(3):
            with torch.no_grad():
                tensor.add_(1)
            words = (ctypes.c_uint32 * 6).from_address(counter_of(tensor))
            found.append(tensor._version in list(words))
        assert all(found), tensor


def test_everything_that_describes_a_tensor_is_asked_for_with_its_run() -> None:
    tensors = [torch.zeros(i % 5 + 1) for i in range(2 * RUN + 3)]
    hints = noted(tensors, also=(1 << 30,))
    assert len(hints.runs) == 3
    for i, tensor in enumerate(tensors):
        lines = set(map(int, hints.runs[i // RUN].addresses))
        storage = tensor.untyped_storage()._cdata
        for address in (id(tensor), tensor._cdata, storage, counter_of(tensor)):
            assert address // LINE_BYTES * LINE_BYTES in lines, i
    assert 1 << 30 in set(map(int, hints.runs[0].addresses))


def test_what_is_looked_at_once_is_not_noted() -> None:
    """An optimizer's state, for one, may be new to lightck at every step."""
    hints = Ahead([torch.zeros(1)])
    hints.ask(0)
    assert not hints.runs
    hints.ask(0)
    assert len(hints.runs) == 1


def test_a_hint_may_be_wrong() -> None:
    Lines(np.array([0, 1, 1 << 40, (1 << 58) - 1], np.uint64)).ask()
    Lines(np.array([], np.uint64)).ask()
    noted([]).ask(0)
    tensors = [torch.zeros(1 << 20)]
    hints, alive = noted(tensors, also=(tensors[0].data_ptr(),)), weakref.ref(tensors[0])
    tensors.clear()
    assert alive() is None
    hints.ask(0)
    hints.ask(1)


def test_what_is_read_does_not_depend_on_hints() -> None:
    tensors = [torch.zeros(2) for _ in range(RUN + 1)]
    tensors[7].add_(1)
    for hints in (None, noted([]), noted(tensors), noted(tensors[:3])):
        pointers, versions = arrange.read(tensors, hints)
        assert pointers.tolist() == [tensor.data_ptr() for tensor in tensors]
        assert versions.tolist() == [int(i == 7) for i in range(RUN + 1)]
