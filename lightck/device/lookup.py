"""Find the device that holds a tensor's memory, and view that memory as plain bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lightck.device import cuda
from lightck.device.base import Device

finders: list[Callable[[torch.Tensor], Device | None]] = [cuda.of]
"""Functions that find a tensor's device, each for devices of one kind."""


def holder(tensor: torch.Tensor) -> Device | None:
    """Return the device that holds the tensor's memory.

    None: the caller can read the memory, or nobody can.
    """
    for find in finders:
        device = find(tensor)
        if device is not None:
            return device
    return None


def recording(tensors: Iterable[torch.Tensor]) -> Callable[[], bool] | None:
    """Return a function that tells whether a device that holds one of them records a graph.

    None: no device holds any.

    Args:
        tensors: tensors of which none is a DTensor.
    """
    found = {device.name: device for device in map(holder, tensors) if device is not None}
    devices = [*found.values()]
    return (lambda: any(device.recording() for device in devices)) if devices else None


def flat(tensor: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    """View bytes of a dense tensor as a tensor of their own, which keeps the memory alive."""
    first = tensor.storage_offset() * tensor.element_size() + begin
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), first, (length,), (1,))
