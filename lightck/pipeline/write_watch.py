"""Sees what the training thread writes to tensors between an update and the next forward.

The bytes that an update has streamed are the snapshot's; what is written to their tensors before
forward start belongs to it, too: I2 (the two instants). Version counters tell only a part of that:
`p.data.clamp_()` moves none. While a watch runs, every operation that torch dispatches on this
thread passes through it, and a tensor that is made an array of (`numpy()`, DLPack) counts as
written, for what writes to an array is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_ARRAYS = ("numpy", "__dlpack__")
"""Methods whose result shares the tensor's memory; `__array__` calls the first."""
_watching: set[WriteWatch] = set()
"""Watches that run now, on any thread."""


@cache
def _written_arguments(operation: Any) -> tuple[list[int], list[str], bool]:
    """Return which arguments an operation may write: positions, names, and whether any may be."""
    if operation.namespace not in ("aten", "prims"):
        return [], [], True  # a schema of somebody's own need not say what it writes
    written = [
        (i, argument.name)
        for i, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [i for i, _ in written], [name for _, name in written], False


class WriteWatch(TorchDispatchMode):
    """Notes the memory that the thread which began the watch writes to, until it ends.

    Where a mode of somebody else's stands on torch's stack above it, it stays below, without an
    effect, until it is on top: no other mode is ever moved.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranges: set[tuple[int, int]] = set()
        self._thread = 0
        """The thread on whose stack this mode stands; 0: on none."""
        self._gap = False

    def begin(self) -> bool:
        """Watch this thread from now on; False if a mode of somebody else's is there already.

        The operations of that mode, and what it makes of others, could not be told apart.
        """
        self.settle()
        if self._thread or torch._C._len_torch_dispatch_stack():
            return False
        _note_arrays()
        self._ranges.clear()
        self._gap, self._thread = False, threading.get_ident()
        _watching.add(self)
        self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def end(self) -> None:
        """Watch no more. Any thread; `settle` on the watched one takes it off torch's stack."""
        _watching.discard(self)
        self.settle()

    def interrupt(self) -> None:
        """End the watch before forward start: what is written from here on is not seen."""
        self._gap = self._gap or self in _watching
        self.end()

    @property
    def gapless(self) -> bool:
        """Tell whether everything was seen up to `end`."""
        return not self._gap

    def settle(self) -> None:
        """Take an ended watch off this thread's stack, if it is the one and nothing is above."""
        if self in _watching or self._thread != threading.get_ident():
            return
        top = torch._C._len_torch_dispatch_stack() - 1
        if top >= 0 and torch._C._get_dispatch_stack_at(top) is self:
            self._thread = 0
            self.__exit__(None, None, None)

    def wrote_to(
        self, pointers: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Mark each of these ranges of memory, in bytes, of which a part may have been written."""
        marked = np.zeros(len(pointers), np.bool_)
        ends = pointers + lengths
        for begin, end in self._ranges:
            marked |= (pointers < np.uint64(end)) & (ends > np.uint64(begin))
        return marked

    def note(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor's storage as written."""
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            self._ranges.add((begin, begin + storage.nbytes()))

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what the operation writes, and let it run."""
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if self in _watching:
            places, names, unknown = _written_arguments(operation)
            if unknown:
                self._note_all((args, kwargs))
            elif places:
                self._note_all([args[i] for i in places if i < len(args)])
                self._note_all([kwargs[name] for name in names if name in kwargs])
        return result

    def _note_all(self, tree: Any) -> None:
        for leaf in tree_iter(tree):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)


@cache
def _note_arrays() -> None:
    """Let the methods that make arrays tell every watch, from now on and for this process."""
    for name in _ARRAYS:
        setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name)))


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for watch in tuple(_watching):
            watch.note(tensor)
        return method(tensor, *args, **kwargs)

    return noted
