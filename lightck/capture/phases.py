"""What only a trace wants to know of the loop: when forwards and updates run, which layer is done.

Stands between the hooks and the recorder, with hooks of its own; without a trace it is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck.capture.hooks import Watched, is_weight, layers, untraced
from lightck.capture.recorder import Recorder
from lightck.capture.trace import Trace, now_ns


@dataclass(eq=False)
class Phases:
    """A `Listener` that passes everything on to the recorder and notes when it was."""

    recorder: Recorder
    trace: Trace
    watched: Watched
    _updates: list[int] = field(default_factory=list)
    """When the updates that are running began, outermost first."""
    _handles: list[RemovableHandle] = field(default_factory=list)
    _forward: RemovableHandle | None = None
    """Waits for the next forward; None while one runs."""
    _ends: RemovableHandle | None = None

    # ---- the listener ----------------------------------------------------------------------

    def update_begins(self, optimizer: Optimizer) -> None:
        """The update itself begins behind the fence."""
        self.recorder.update_begins(optimizer)
        if self._ours(optimizer):
            self._updates.append(now_ns())

    def update_ends(self, optimizer: Optimizer) -> None:
        """The update has ended, and perhaps the step."""
        if self._ours(optimizer):
            self._updated()
        self._passed_on(lambda: self.recorder.update_ends(optimizer))

    def update_skipped(self, optimizer: Optimizer) -> None:
        """The gradient scaler left it out."""
        self._passed_on(lambda: self.recorder.update_skipped(optimizer))

    def forward(self, training: bool) -> None:
        """Passed on."""
        self.recorder.forward(training)

    def gradient(self) -> None:
        """Passed on."""
        self.recorder.gradient()

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Passed on."""
        self.recorder.iterating(loader, drawing)

    def mark_begin(self) -> None:
        """`handle.before_update()`."""
        self.recorder.mark_begin()
        self._updates = [now_ns()]

    def mark_end(self) -> None:
        """`handle.after_update()`."""
        self._updated()
        self._passed_on(self.recorder.mark_end)

    def _ours(self, optimizer: Optimizer) -> bool:
        return any(known is optimizer for known in self.recorder.inventory.optimizers)

    def _updated(self) -> None:
        if self._updates:
            self.trace.note("update", "update", self._updates.pop(), now_ns())

    def _passed_on(self, end: Any) -> None:
        before = self.recorder.steps.step
        end()
        if self.recorder.steps.step > before:
            self._updates.clear()  # one that raised never ended
            self.trace.step_ended(self.recorder.steps.step)

    # ---- hooks of its own ------------------------------------------------------------------

    def install(self) -> None:
        """Watch forwards, and the gradient of each layer."""
        trace = self.trace
        for name, parameter in layers(self.watched.model):

            @untraced
            def tick(_: torch.Tensor, name: str = name) -> None:
                trace.note("tick", name, now_ns())

            self._handles.append(parameter.register_post_accumulate_grad_hook(tick))
        self._await_forward()

    def _await_forward(self) -> None:
        @untraced
        def before(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and module.training and self.watched.holds(module):
                if not is_weight(module):
                    self._forward_begins(module)

        self._forward = register_module_forward_pre_hook(before)

    def _forward_begins(self, module: nn.Module) -> None:
        """The outermost module is the first to be called; its parts are left alone."""
        if self._forward is None or module._compiled_call_impl is not None:
            return  # a hook that comes and goes would make dynamo compile anew
        self._forward.remove()
        self._forward = None
        begin = now_ns()

        @untraced
        def after(module: nn.Module, args: Any, result: Any) -> None:
            self.trace.note("forward", "forward", begin, now_ns())
            if self._ends is not None:
                self._ends.remove()
                self._ends = None
                self._await_forward()

        self._ends = module.register_forward_hook(after, always_call=True)

    def remove(self) -> None:
        """Stop watching; idempotent."""
        for handle in (*self._handles, self._forward, self._ends):
            if handle is not None:
                handle.remove()
        self._handles.clear()
        self._forward = self._ends = None
