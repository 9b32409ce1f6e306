"""Emulate an accelerator: its compute takes time and no CPU, its bus has a set rate.

It is for replaying another machine's setting. A forward and a backward sleep, layer by layer, so
that hooks fire in their order; an update changes every tensor in every 64 KiB and sleeps for the
rest of what the device's memory would need. The tensors are the host's and real, and so are
snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_STRIDE = 1 << 14  # elements: 64 KiB of floats
_PASSES = 3  # passes of an update over the state: read, read gradients, write
_FORWARD = 1 / 3  # the forward's share of forward and backward
_SLACK_S = 0.0002  # a sleep may be this much too long if the next one is shorter; more is lost time


@dataclass(frozen=True)
class Device:
    """The figures of an emulated accelerator.

    Attributes:
        bus: bytes per second that its copies to the host reach.
        memory: bytes per second of its own memory, which bounds an update.
    """

    bus: int
    memory: int


DEVICES = {
    "v100": Device(bus=12_000_000_000, memory=800_000_000_000),  # PCIe 3 x16
    "h100": Device(bus=50_000_000_000, memory=2_500_000_000_000),  # PCIe 5 x16
}


class Clock:
    """A clock that passes time without CPU.

    Time that hooks take between two calls is not deducted.
    """

    def __init__(self) -> None:
        self._owed = 0.0

    def spend(self, seconds: float) -> None:
        """Sleep for the seconds, less what the last sleep was too long by."""
        self._owed += seconds
        if self._owed > 0:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin
        self._owed = max(self._owed, -_SLACK_S)


class _Pass(torch.autograd.Function):
    """One layer's forward and backward: time, and gradients of which no byte is read."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.layer = layer
        layer.clock.spend(layer.seconds * _FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        layer: _Layer = ctx.layer
        layer.clock.spend(layer.seconds * (1 - _FORWARD))
        return None, gradients[0], *map(torch.empty_like, layer.parameters)


@dataclass
class _Layer:
    """The replacement of a module's forward."""

    module: nn.Module
    parameters: list[nn.Parameter]
    clock: Clock
    seconds: float  # of forward and backward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.module, _BatchNorm):
            for each in self.module.buffers(recurse=False):
                each.add_(1)
        out: torch.Tensor = _Pass.apply(self, x, *self.parameters)  # type: ignore[no-untyped-call]
        return out


class Update(torch.optim.Optimizer):
    """An optimizer with the state of AdamW or SGD with momentum that changes part of each page."""

    def __init__(self, parameters: Iterator[nn.Parameter], name: str, clock: Clock) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self._names = ("exp_avg", "exp_avg_sq") if name == "adamw" else ("momentum_buffer",)
        self._counts, self._clock = name == "adamw", clock
        self.seconds = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update; parameters without a gradient stay as they are."""
        begin = time.perf_counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter)
        self._clock.spend(max(0.0, self.seconds - (time.perf_counter() - begin)))

    def _change(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            # Ones, not zeros: zeros would share one page and be copied from the cache.
            state.update({name: torch.ones_like(parameter) for name in self._names})
            if self._counts:
                state["step"] = torch.zeros(())
        for tensor in (parameter, *state.values()):
            tensor.view(-1)[::_STRIDE].add_(0.001)


def place(model: nn.Module, device: str, step_s: float, optimizer: str) -> Update:
    """Let a model run on an emulated device from now on; return its optimizer.

    Layers take equal shares of what the update leaves of a step. A parameter belongs to the first
    layer that holds it, whose backward is the last to reach it.
    """
    clock = Clock()
    update = Update(model.parameters(), optimizer, clock)
    weights = sum(p.nbytes for p in model.parameters())
    whole = weights * (1 + len(update._names))
    update.seconds = min(step_s / 4, _PASSES * whole / DEVICES[device].memory)
    seen: set[int] = set()
    layers = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            layers.append(_Layer(module, own, clock, 0.0))
    for layer in layers:
        layer.seconds = (step_s - update.seconds) / len(layers)
        if layer.module is not model:
            layer.module.forward = layer

    def forward(batch: torch.Tensor) -> torch.Tensor:
        x = torch.zeros((), requires_grad=True)
        for layer in layers:
            x = layer(x) if layer.module is model else layer.module(x)
        return x

    model.forward = forward
    return update
