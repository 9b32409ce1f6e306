"""Notes, for a trace only, when forwards and updates run and which layer's gradient is ready.

It stands between the hooks and the checkpointer, with hooks of its own; without a trace there is
none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck.data.lookahead import Lookahead
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Watched, is_weight, untraced
from lightck.state.modules import trains
from lightck.tracing.trace import Trace, now_ns


@dataclass(eq=False)
class TraceListener:
    """Passes everything that the hooks tell on to the checkpointer, and notes when it was."""

    checkpointer: Checkpointer
    trace: Trace
    watched: Watched
    _updates: list[int] = field(default_factory=list)
    """The times, in ns, when the updates that are running began, outermost first."""
    _forward: RemovableHandle | None = None
    """The handle of the hook that waits for the next forward; None while a forward runs."""
    _ends: RemovableHandle | None = None
    _began_ns: int = 0
    """The time, in ns, when the forward that runs began."""

    # ---- the listener ----------------------------------------------------------------------

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Pass on that an update begins, and note it: the update itself begins after the fence."""
        self.checkpointer.update_begins(optimizer, frame, unseen=unseen)
        if self._ours(optimizer):
            self._updates.append(now_ns())

    def update_ends(self, optimizer: Optimizer) -> None:
        """Note that an update has ended, and pass it on; the step may have ended, too."""
        if self._ours(optimizer):
            self._updated()
        self._passed_on(lambda: self.checkpointer.update_ends(optimizer))

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Pass on that the gradient scaler left an update out."""
        self._passed_on(lambda: self.checkpointer.update_skipped(optimizer))

    def forward(self, training: bool) -> None:
        """Pass on that a forward begins."""
        self.checkpointer.forward(training)

    def evaluation(self) -> None:
        """Pass on that an evaluation begins."""
        self.checkpointer.evaluation()

    def gradient(self, layer: str) -> None:
        """Note that a layer's gradient is ready, and pass it on."""
        self.trace.note("tick", layer, now_ns())
        self.checkpointer.gradient(layer)

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Pass on that a loader is iterated, or draws."""
        self.checkpointer.iterating(loader, drawing)

    def drawn(self) -> None:
        """Pass on that a batch has been drawn."""
        self.checkpointer.drawn()

    def drawing_ahead(self, iterator: Lookahead) -> None:
        """Pass on that a loader draws a batch ahead of its step."""
        self.checkpointer.drawing_ahead(iterator)

    def mark_begin(self) -> None:
        """Pass on `handle.before_update()`, and note when the update begins."""
        self.checkpointer.mark_begin()
        self._updates = [now_ns()]

    def mark_end(self) -> None:
        """Note that the update has ended, and pass on `handle.after_update()`."""
        self._updated()
        self._passed_on(self.checkpointer.mark_end)

    def _ours(self, optimizer: Optimizer) -> bool:
        return any(known is optimizer for known in self.checkpointer.inventory.optimizers)

    def _updated(self) -> None:
        if self._updates:
            self.trace.note("update", "update", self._updates.pop(), now_ns())

    def _passed_on(self, end: Any) -> None:
        before = self.checkpointer.steps.step
        end()
        if self.checkpointer.steps.step > before:
            self._updates.clear()  # one that raised never ended
            self.trace.step_ended(self.checkpointer.steps.step)

    # ---- hooks of its own ------------------------------------------------------------------

    def __post_init__(self) -> None:
        """Watch forwards.

        The hooks are made once: keeping dynamo out of a hook costs more than the hook.
        """
        self._hooks = untraced(self._module_begins), untraced(self._module_ends)
        self._await_forward()

    def _await_forward(self) -> None:
        self._forward = register_module_forward_pre_hook(self._hooks[0])

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        """Note when a forward begins.

        The outermost module is the first to be called; the modules inside it are left alone.
        """
        if not (torch.is_grad_enabled() and trains(module) and self.watched.holds(module)):
            return
        if is_weight(module) or self._forward is None or module._compiled_call_impl is not None:
            return  # on a compiled module, adding a hook would make dynamo recompile
        self._forward.remove()
        self._forward = None
        self._began_ns = now_ns()
        self._ends = module.register_forward_hook(self._hooks[1], always_call=True)

    def _module_ends(self, module: nn.Module, args: Any, result: Any) -> None:
        self.trace.note("forward", "forward", self._began_ns, now_ns())
        if self._ends is not None:
            self._ends.remove()
            self._ends = None
            self._await_forward()

    def remove(self) -> None:
        """Stop watching. Idempotent."""
        for handle in (self._forward, self._ends):
            if handle is not None:
                handle.remove()
        self._forward = self._ends = None
