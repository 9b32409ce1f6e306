"""Sees what the training thread writes to tensors between an update and the next forward.

The bytes that an update has streamed are the snapshot's; what is written to their tensors before
forward start belongs to it, too: I2 (the two instants). Version counters tell only a part of that:
`p.data.clamp_()` moves none. While a watch runs, every operation that torch dispatches on this
thread passes through it. A tensor that is made an array of (`numpy()`, DLPack) counts as written,
for what writes to an array is not seen, and so does one whose method torch does not dispatch.

Of what the watch cannot look into (compiled code, operations of other libraries, subclasses of
tensors, higher-order operators) it only knows that it ran: a *gap*, after which all bytes have to
be compared. Compiled code never meets the mode, which would change how dynamo treats it for good.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._dynamo import eval_frame
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_ARRAYS = ("numpy", "__dlpack__")
"""Methods whose result shares the tensor's memory; `__array__` calls the first."""
_UNDISPATCHED = ("apply_", "map_", "map2_")
"""Methods that write to the tensor, and move no version counter, out of sight of every mode."""
_watching: set[WriteWatch] = set()
"""Watches that run now, on any thread."""
_replaced: dict[str, Any] = {}
"""The attributes of torch.Tensor itself that are replaced while watches run; None: it had none."""
_lock = threading.RLock()
"""Held while `_watching` and `_replaced` change."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KNOWN = ("aten", "prims", "profiler")
"""Libraries of operations whose schemas say what they write."""
_COMPILED, _ENTERED = "compile_wrapper", "_is_skip_guard_eval_unsafe_stance"
"""The names of torch's functions that call compiled code, and that those call first."""


@cache
def _written_arguments(operation: OpOverload) -> tuple[list[int], list[str]]:
    """Return which arguments an operation writes: positions, and names."""
    written = [
        (i, argument.name)
        for i, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [i for i, _ in written], [name for _, name in written]


class WriteWatch(TorchDispatchMode):
    """Notes the memory that the thread which began the watch writes to, until it ends.

    Where a mode of somebody else's stands on torch's stack above it, it stays below, without an
    effect, until it is on top: no other mode is ever moved.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Watch nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranges: set[tuple[int, int]] = set()
        self._thread = 0
        """The thread on whose stack this mode stands; 0: on none."""
        self._gap = False

    def begin(self) -> bool:
        """Watch this thread from now on; False if it cannot be.

        A mode of somebody else's is there already, whose operations could not be told apart; or
        compiled code calls this: when it goes on torch would miss the mode.
        """
        self.settle()
        if self._thread or torch._C._len_torch_dispatch_stack() or _inside_compiled():
            return False
        if not _tells_of_compiled():
            return False
        self._ranges.clear()
        self._gap, self._thread = False, threading.get_ident()
        with _lock:
            _watching.add(self)
            _replace_methods()
        self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def end(self) -> None:
        """Watch no more. Any thread; `settle` on the watched one takes it off torch's stack."""
        with _lock:
            _watching.discard(self)
            _replace_methods()
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
        if type(tensor) not in _PLAIN:
            self._gap = True
        elif tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            self._ranges.add((begin, begin + storage.nbytes()))

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what the operation may write, then let it run: it may fail half-way."""
        kwargs = kwargs or {}
        if self in _watching:
            # A schema of somebody else's need not say what it writes, and inside of it, as inside
            # of a subclass, the mode is off.
            ours = isinstance(operation, OpOverload) and operation.namespace in _KNOWN
            if not ours or any(each not in _PLAIN for each in types):
                self._gap = True
            else:
                places, names = _written_arguments(operation)
                written = [args[i] for i in places if i < len(args)]
                written += [kwargs[name] for name in names if name in kwargs]
                for leaf in tree_iter(written) if written else ():
                    if isinstance(leaf, torch.Tensor):
                        self.note(leaf)
        return operation(*args, **kwargs)


def _replace_methods() -> None:
    """Let the methods that no mode sees tell every watch, as long as one runs. Under the lock."""
    if _watching and not _replaced:
        for name in (*_ARRAYS, *_UNDISPATCHED):
            _replaced[name] = vars(torch.Tensor).get(name)
            setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name)))
    elif _replaced and not _watching:
        for name, before in _replaced.items():
            if before is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, before)
        _replaced.clear()


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for watch in tuple(_watching):
            watch.note(tensor)
        return method(tensor, *args, **kwargs)

    return noted


@cache
def _tells_of_compiled() -> bool:
    """Let every call of compiled code end the watches first; False: this torch has no such place.

    Done once for the process, at a function that torch calls there before it takes note of the
    thread's modes. With this one among them it would run the code as it stands, from then on.
    """
    original = getattr(eval_frame, _ENTERED, None)
    if original is None:
        return False

    @wraps(original)
    def entered() -> Any:
        for watch in tuple(_watching):
            watch.interrupt()
        return original()

    setattr(eval_frame, _ENTERED, entered)
    return True


def _inside_compiled() -> bool:
    """Tell whether compiled code has called this, from a part that is not compiled."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != _COMPILED:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
