"""Layout entries and private copies: what a copy starts from, live memory or its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch

from lightck.device.base import Device
from lightck.device.lookup import holder
from lightck.errors import CorruptSnapshotError
from lightck.region.layout import Entry
from lightck.state import tensor_support
from lightck.state.inventory import StateTensor
from lightck.state.tensor_support import DTYPES


def describe(live: StateTensor) -> Entry:
    """Return the layout entry of a live tensor.

    A dense tensor is stored byte for byte with its strides; any other (expanded, overlapping, with
    gaps, conjugated lazily) row-major. Of a DTensor it is this rank's part.
    """
    tensor = live.local
    strides = tuple(tensor.stride()) if is_dense(tensor) else row_major(tuple(tensor.shape))
    begin, end = live.span or (0, tensor.numel() * tensor.element_size())
    return Entry(
        name=live.name,
        role=live.role,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        strides=strides,
        length=0 if live.alias_of else end - begin,
        layer=live.layer,
        device=tensor.device.type,
        alias_of=live.alias_of,
        begin=begin if live.span else None,
        shard=tensor_support.shard_of(live.tensor),
    )


def check(entries: Iterable[Entry], *, context: str) -> None:
    """Show that entries which were read hold the bytes of dense tensors.

    Raises:
        CorruptSnapshotError: a dtype that torch does not have, or bytes that its shape does not.
    """
    for entry in entries:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise CorruptSnapshotError(f"{context}: {entry.name} has dtype {entry.dtype!r}")
        size = math.prod(entry.shape) * dtype.itemsize
        fits = size == entry.length if entry.begin is None else entry.begin + entry.length <= size
        if entry.alias_of is None and not (fits and _fill(entry.shape, entry.strides)):
            raise CorruptSnapshotError(
                f"{context}: {entry.name} has {entry.length} bytes for {entry.dtype}"
                f"{list(entry.shape)} with strides {list(entry.strides)}"
            )


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor fills its memory range, each element once, stored as it reads."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return _fill(tensor.shape, tensor.stride())


def _fill(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    pairs = zip(strides, shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def fill(live: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy `source` into a live tensor of its shape, which may be expanded or overlap itself.

    `copy_` refuses such a tensor; here every element's memory gets the element's value.
    """
    for dim, stride in enumerate(live.stride()):
        if stride == 0 and live.shape[dim] > 1:
            fill(live.narrow(dim, 0, 1), source.narrow(dim, 0, 1))
            return live
    if not _overlaps(live):
        return live.copy_(source)
    span = 1 + sum((n - 1) * s for n, s in zip(live.shape, live.stride(), strict=True))
    places = torch.arange(span, device=live.device).as_strided(live.shape, live.stride())
    live.as_strided((span,), (1,))[places.reshape(-1)] = source.to(live.device).reshape(-1)
    return live


def _overlaps(tensor: torch.Tensor) -> bool:
    reach = 0
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def must_own(live: StateTensor, device: Device | None = None) -> bool:
    """Tell whether the copy cannot start from live memory, and needs a private copy.

    The tensor changes inside the window, is not dense, or is in memory that neither the workers nor
    `device`, its holder, can read.
    """
    tensor = live.local
    return (
        live.sync
        or (device is None and tensor.device.type != "cpu")
        or tensor.is_inference()  # it has no version counter to watch
        or not is_dense(tensor)
    )


def lies_as_stored(tensor: torch.Tensor) -> bool:
    """Tell whether the workers can copy a tensor's bytes from where they are."""
    return tensor.device.type == "cpu" and is_dense(tensor)


MUCH_BYTES = 64 << 20
"""The bytes copied synchronously at the boundary from which on the user is told."""


def tell_synchronous(lives: Iterable[StateTensor]) -> None:
    """Warn `attach`'s caller when much must be copied while training waits."""
    waits = (live for live in lives if holder(live.local) is None and must_own(live))
    size = sum(describe(live).length for live in waits)
    if size >= MUCH_BYTES:
        warnings.warn(
            f"lightck copies {size >> 20} MiB at the start of a forward with a snapshot,"
            " and training waits: buffers, tensors that are not dense or in memory out of reach",
            stacklevel=4,
        )


def private(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a tensor where it is; a device does so in the order of what this thread computes."""
    device, held = holder(tensor), tensor.detach()
    if device is None or tensor_support.local(held) is not held or not is_dense(held):
        return held.clone()
    return device.private(held, held.shape, held.stride())


def owned(live: StateTensor, entry: Entry, device: Device | None = None) -> torch.Tensor:
    """Make a private copy of what the entry holds, as it is now.

    It is in CPU memory, made by this thread. Of a tensor that a device holds it is on that device,
    queued behind what this thread computes there.
    """
    held = live.local.detach()
    if live.span is not None and is_dense(held):
        begin, end = (at // held.element_size() for at in live.span)
        part = held.as_strided((held.numel(),), (1,))[begin:end]
        if device is not None:
            return device.private(part, part.shape, part.stride())
        return torch.empty(end - begin, dtype=part.dtype, device="cpu").copy_(part)
    if device is not None:
        return device.private(held, entry.shape, entry.strides)
    source = held.resolve_conj().resolve_neg()
    result = torch.empty_strided(entry.shape, entry.strides, dtype=source.dtype, device="cpu")
    return result.copy_(source)
