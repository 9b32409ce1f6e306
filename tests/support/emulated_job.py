"""A training on emulated devices whose every tensor is known for every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightck
from support.emulated import EmulatedDevice, attached

FORWARD_S, UPDATE_S = 0.004, 0.002


def value(name: str, step: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor's value after so many steps; every element tells the step.

    A buffer's value is that after so many forwards.
    """
    first = 1000 * (sum(name.encode()) % 97) + step
    return (torch.arange(torch.Size(shape).numel()) % 611 * 0.25 + first).reshape(tuple(shape))


def write(
    device: EmulatedDevice, tensor: torch.Tensor, content: torch.Tensor, seconds: float
) -> None:
    """Queue it to the calling thread's stream, as a kernel: the CPU notes a change now."""
    device.overwrite(tensor, content, seconds)
    torch.autograd.graph.increment_version(tensor)


class Layer(nn.Module):
    """A weight, and a buffer that its forward changes."""

    def __init__(
        self, device: EmulatedDevice, name: str, shape: Sequence[int], buffers: bool
    ) -> None:
        super().__init__()
        self.device, self.name, self.forwards = device, name, 0
        self.weight = nn.Parameter(device.empty(shape))
        write(device, self.weight, value(f"{name}.weight", 0, shape), 0.0)
        self.register_buffer("seen", device.empty((37,)) if buffers else None)
        if buffers:
            write(device, self.seen, value(f"{name}.seen", 0, (37,)), 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.device.in_graph:  # queued to the graph: nothing runs
            return x
        self.forwards += 1
        if self.seen is not None:
            content = value(f"{self.name}.seen", self.forwards, (37,))
            write(self.device, self.seen, content, FORWARD_S)
        return x


class Update(torch.optim.Optimizer):
    """Writes what `value` says, on the device's stream; the state is made at its first step."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers, self.count = list(layers), 0
        super().__init__([layer.weight for layer in self.layers], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.layers[0].device.in_graph:
            return
        self.count += 1
        for layer in self.layers:
            state, weight = self.state[layer.weight], layer.weight
            if not state:
                state["momentum"] = layer.device.empty(weight.shape)
                state["step"] = torch.zeros(())
            state["step"] += 1
            for key, tensor in (("weight", weight), ("momentum", state["momentum"])):
                content = value(f"{layer.name}.{key}", self.count, weight.shape)
                write(layer.device, tensor, content, UPDATE_S)

    def replay(self) -> None:
        """Update as `step` does, unseen by Python's hooks and counters: a recorded graph."""
        self.count += 1
        for layer in self.layers:
            state = self.state[layer.weight]
            state["step"] += 1
            for key, tensor in (("weight", layer.weight), ("momentum", state["momentum"])):
                content = value(f"{layer.name}.{key}", self.count, tensor.shape)
                layer.device.overwrite(tensor, content, UPDATE_S)


class Job:
    """Layers, spread over the devices, and their optimizers."""

    def __init__(
        self,
        *devices: EmulatedDevice,
        layers: int = 5,
        optimizers: int = 1,
        buffers: bool = True,
    ) -> None:
        shapes = [(70 + 13 * i, 31) for i in range(layers)]
        self.devices = devices
        self.layers = [
            Layer(devices[i % len(devices)], f"{i}", shape, buffers)
            for i, shape in enumerate(shapes)
        ]
        self.model = nn.Sequential(*self.layers)
        self.optimizers = [Update(self.layers[k::optimizers]) for k in range(optimizers)]

    def attach(self, path: Path, **settings: Any) -> lightck.handle.Handle:
        settings = {"slots": 16, "chunk_bytes": 4096, **settings}
        handle = lightck.attach(self.model, self.optimizers, path, **settings)
        attached.append(handle)
        return handle

    def step(self) -> None:
        """One iteration; the CPU waits for nothing."""
        self.model(torch.zeros(1))
        for optimizer in self.optimizers:
            optimizer.step()

    def expected(self, step: int) -> dict[str, torch.Tensor]:
        """The state of a step at the start of the next forward, by name."""
        found = {}
        for layer in self.layers:
            for key in ("weight", "seen")[: 1 + (layer.seen is not None)]:
                shape = getattr(layer, key).shape
                found[f"{layer.name}.{key}"] = value(f"{layer.name}.{key}", step, shape)
        for k, optimizer in enumerate(self.optimizers):
            for i, layer in enumerate(optimizer.layers):
                shape = layer.weight.shape
                found[f"{k}/{i}/momentum"] = value(f"{layer.name}.momentum", step, shape)
                found[f"{k}/{i}/step"] = torch.tensor(float(step))
        return found


def wrong(job: Job, path: Path, step: int) -> list[str]:
    """Names of what a snapshot has that is not of its step."""
    stored = lightck.load(path, step)
    held = dict(stored["model"])
    for k, state in enumerate(stored["optimizers"]):
        for i, tensors in state["state"].items():
            held |= {f"{k}/{i}/{key}": tensor for key, tensor in tensors.items()}
    wanted = job.expected(step)
    assert held.keys() == wanted.keys(), (sorted(held), sorted(wanted))
    return [name for name, tensor in wanted.items() if not torch.equal(tensor, held[name])]
