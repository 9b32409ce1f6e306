"""torch's AdamW, Adam and SGD with an update that can write the snapshot in the same pass.

The results are those of torch's classes with `fused=True`, bit for bit (a NaN may differ in sign
and payload). What the native update cannot do that way is left to torch's own step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightck.errors import LightckError
from lightck.optim.openmp import gomp_parallel
from lightck.optim.self_test import order_of
from lightck.optim.update_stream import OpenStream
from lightck.optim.update_table import ADAM_KEYS, SGD_KEYS, StateKeys, UpdateTable
from lightck.region import native_update


class NativeOptimizer(Optimizer):
    """Steps natively where torch's fused kernel would give the same bits, else as torch does."""

    __slots__ = ("_open_stream", "_table", "why_not")  # none of them is state of the optimizer

    torch_class: ClassVar[type[Optimizer]]
    """The class of torch's whose results these are: snapshots of one restore into the other."""
    native_kind: ClassVar[int]
    state_keys: ClassVar[StateKeys]
    _open_stream: OpenStream | None
    _table: UpdateTable
    why_not: str

    def __init__(self, params: ParamsT, *args: Any, **options: Any) -> None:
        """Take torch's arguments; `fused` is the default."""
        if options.get("fused") is None:
            options["fused"] = not (options.get("foreach") or options.get("differentiable"))
        super().__init__(params, *args, **options)

    def stream_into(self, open_stream: OpenStream | None) -> None:
        """Let the next step, and no other, write a snapshot: it asks here for the place."""
        self._open_stream = open_stream

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the closure's loss, if any.

        On return the parameters are updated, and what they are is stored in the slot, if
        `stream_into` was called and a slot was free: `why_not` is then empty, else it says why
        torch's own step was taken. It is not committed.

        Raises:
            RegionError: the native update was refused: a defect of lightck's. Nothing was changed,
                and the update was not made.
        """
        open_stream: OpenStream | None = getattr(self, "_open_stream", None)
        self._open_stream = None
        self.why_not = self._step_natively(open_stream) if closure is None else "a closure"
        if not self.why_not:
            return None
        with torch.set_grad_enabled(closure is not None):
            step: Any = self.torch_class.step
            return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)

    def _step_natively(self, open_stream: OpenStream | None) -> str:
        """Update, and return nothing; or return why torch has to, with nothing changed."""
        table: UpdateTable | None = getattr(self, "_table", None)
        if table is None:
            table = self._table = UpdateTable(self.native_kind, self.state_keys)
        why = table.prepare(self)
        if why:
            return why
        kinds = frozenset(table.rules["kind"].tolist())
        order = order_of(kinds, table.types, torch.get_num_threads() > 1)
        if order is None:
            return "torch's kernel on this machine gives other bits"
        table.rules["flags"] |= order
        run = partial(
            native_update.update, threads=torch.get_num_threads(), parallel=gomp_parallel()
        )
        stream = open_stream(table.rows, table.pointers) if open_stream is not None else None
        if stream is None:
            table.tasks["copies"] = native_update.NOT_STREAMED
            run(table.rules, table.tasks)
            return ""
        table.tasks["copies"] = stream.copies
        complete = False
        try:
            run(table.rules, table.tasks, stream.snapshot, stream.batch)
            complete = True
        except LightckError:  # of the snapshot's: nothing was changed, and the update is due
            table.tasks["copies"] = native_update.NOT_STREAMED
            run(table.rules, table.tasks)
        finally:
            stream.ended(complete)
        return ""


class AdamW(NativeOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)`, bit for bit, whose step can write the snapshot itself.

    Takes torch's arguments. One condition is new: what is written to a parameter or its state
    between a step and the next forward is seen, but for writes through an array (`tensor.numpy()`,
    DLPack) that was made before the step, by another thread, by native code that moves no version
    counter, or with torch's modes switched off. Those are found by a comparison of samples only.
    """

    torch_class = torch.optim.AdamW
    native_kind = native_update.ADAMW
    state_keys = ADAM_KEYS


class Adam(NativeOptimizer, torch.optim.Adam):
    """`torch.optim.Adam(fused=True)`, bit for bit; for the rest see `AdamW`."""

    torch_class = torch.optim.Adam
    native_kind = native_update.ADAM
    state_keys = ADAM_KEYS


class SGD(NativeOptimizer, torch.optim.SGD):
    """`torch.optim.SGD(fused=True)`, bit for bit; for the rest see `AdamW`."""

    torch_class = torch.optim.SGD
    native_kind = native_update.SGD
    state_keys = SGD_KEYS
