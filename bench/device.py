"""Measure time and plain copies on a device: with events and pinned memory on a GPU, or on a CPU.

A GPU works asynchronously to the training thread: what it does between two points of the program is
timed by events on its stream, and waited for only outside of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.work import part

_LINE = 64  # bytes


def synchronize(device: str) -> None:
    """Return when everything that was asked of the device is done."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def settle(device: str) -> None:
    """Set what people use for training on a GPU.

    That is TF32 where allowed, and convolutions chosen by trial.
    """
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.zeros(1, device=device)  # start the driver now, outside of all measurements


@dataclass
class Mark:
    """A point of the program; on a GPU, one in the current stream's work."""

    device: str
    _event: Any = field(init=False, default=None)
    _at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.device != "cpu":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._at = time.perf_counter()

    def wait(self) -> None:
        """Return when the stream has reached this point; other streams may go on."""
        if self._event is not None:
            self._event.synchronize()

    def until(self, later: Mark) -> float:
        """Return the seconds from here to `later`; call when the device has reached both."""
        if self._event is None:
            return later._at - self._at
        return float(self._event.elapsed_time(later._event)) / 1000  # it returns milliseconds


class PlainCopy:
    """A copy of the whole state at once between device and pinned memory: the limit of the bus."""

    def __init__(self, device: str, tensors: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._live = [part(t, 0, t.nbytes) for t in tensors]
        self.bytes = sum(t.nbytes for t in tensors)
        ends = [-(-t.nbytes // _LINE) * _LINE for t in tensors]
        held = torch.empty(max(sum(ends), 1), dtype=torch.uint8, pin_memory=device != "cpu")
        self._held: list[torch.Tensor] = []
        at = 0
        for t, size in zip(self._live, ends, strict=True):
            self._held.append(held[at : at + t.nbytes])
            at += size
        self.to_host()  # also touches every page

    def to_host(self) -> float:
        """Copy the live tensors to host memory; return the seconds. Nothing else may run."""
        return self._timed(self._held, self._live)

    def to_device(self) -> float:
        """Copy what `to_host` has copied back into the live tensors; return the seconds."""
        return self._timed(self._live, self._held)

    def _timed(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
        synchronize(self._device)
        begin = Mark(self._device)
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        end = Mark(self._device)
        synchronize(self._device)
        return begin.until(end)
