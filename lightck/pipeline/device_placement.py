"""Choose how each device's tensors reach the region: as asked for, as possible, as measured.

Where a device can store into the region itself and need not, one measurement decides: copies of the
same bytes to the region and to pinned DRAM, made when the first snapshot has a slot.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from lightck.device.base import Device
from lightck.events import event
from lightck.pipeline.device_transfer import TransferMode
from lightck.region.region import Region

PIECE_BYTES = 1 << 30
"""The bytes that are registered with the driver at once; no copy may lie in two such pieces."""
TOO_SLOW = 2.0
"""A device that is this many times slower to store into the region than into pinned DRAM goes
through the ring."""
SAMPLE_BYTES = 32 << 20
"""The bytes that are copied both ways, three times, to know how long that takes."""
_NO_PINS = {
    "fsdax": "its pages must not be pinned for long",
    "file": "it is an ordinary file",
}


@dataclass(eq=False)
class DevicePlacement:
    """Chooses each device's transfer mode, and owns what the choice needs.

    Used by the training thread.
    """

    region: Region
    wanted: str = "auto"
    """The setting `placement`."""
    limited: bool = False
    """True if writes to the region are limited: devices do not store there themselves."""
    chosen: tuple[str, str] = ("", "")
    """The transfer mode of a device's tensors, and why; both change at once."""
    _told: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The mode and reason that were told last, by device."""
    _denied: dict[str, int] = field(default_factory=dict)
    """The bytes that each device did not have to spare. Asking takes as long as a small copy."""
    _registered: dict[str, tuple[Device, list[int]]] = field(default_factory=dict)
    """By kind of device: one device of it, and the addresses of registered pieces, in a row."""
    _ends: dict[str, int] = field(default_factory=dict)
    """The end of the last registered piece, by kind of device."""
    _refused: dict[str, str] = field(default_factory=dict)
    """The reason why a driver did not register the region, by kind of device."""
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    """The spare memory of each device."""
    _mapped: torch.Tensor | None = None
    _rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Bytes per second of a device's stores into the region and into pinned DRAM, once measured."""

    @property
    def copy_bytes(self) -> int:
        """The bytes of all devices' spare memory."""
        return sum(copy.numel() for copy in list(self._copies.values()))

    def choose(
        self, device: Device, size: int, *, ask: bool
    ) -> tuple[TransferMode, torch.Tensor | None]:
        """Return the transfer mode of a device's bytes, and room for their copy, if any.

        May register the region, which blocks, when it is asked for the first time. The room is in
        the device's spare memory.

        Args:
            device: that holds the bytes.
            size: number of the bytes.
            ask: the device may be asked for memory: its peak is known, and it is not to hang.
        """
        copy, why_not = None, ""
        if self.wanted in ("auto", "device"):
            copy = self._spare(device, size, ask)
            why_not = "" if copy is not None else f"{device.name} has no {size} bytes to spare"
            why_not += "" if copy is not None or ask else ", as far as is known by now"
        mode, why = TransferMode.HOST, f"placement is {self.wanted!r}"
        if copy is not None:
            mode, why = TransferMode.DEVICE, f"{device.name} has {size} bytes to spare"
            why_not = self._too_slow(device)
        elif self.wanted in ("auto", "direct"):
            avoided = self._refuses(device) or self._too_slow(device)
            mode = TransferMode.HOST if avoided else TransferMode.DIRECT
            why = avoided or "the region is registered with the driver"
        self._tell(device, mode, "; ".join(filter(None, (why_not, why))))
        return mode, copy

    def in_place(self, device: Device, mode: TransferMode) -> bool:
        """Tell whether the device stores into the region itself."""
        if mode is TransferMode.DEVICE:
            return not (self._refuses(device) or self._too_slow(device))
        return mode is TransferMode.DIRECT

    def needs_measuring(self, device: Device) -> bool:
        """Tell whether `measure` is to decide whether the device stores into the region itself."""
        wanted = self.wanted in ("auto", "device") and device.name not in self._rates
        return wanted and not self._refuses(device)

    def measure(
        self,
        device: Device,
        sources: Sequence[torch.Tensor],
        extents: Sequence[torch.Tensor],
        place: torch.Tensor | None,
    ) -> None:
        """Measure how fast a device stores bytes into the region and into pinned DRAM, once.

        Blocks for some milliseconds. Copies wait for nothing that computes, so that their bytes may
        be of any moment.

        Args:
            device: that holds the sources.
            sources: bytes of live tensors.
            extents: their places in a slot that is open: they are written again with what counts.
            place: pinned DRAM for the most bytes of one copy; None: nothing is measured.
        """
        if place is None:
            return
        chunks, targets, size = [], [], 0
        pairs = zip(sources, extents, strict=True)
        parts = (zip(*(each.split(place.numel()) for each in pair), strict=True) for pair in pairs)
        for chunk, target in chain.from_iterable(parts):
            if size >= SAMPLE_BYTES:
                break
            if not self._crosses(device, target):
                chunks.append(chunk)
                targets.append(target)
                size += chunk.numel()
        pinned = [place[: chunk.numel()] for chunk in chunks]
        region_rate, pinned_rate = (size / _seconds(device, to, chunks) for to in (targets, pinned))
        self._rates[device.name] = region_rate, pinned_rate
        ring = self._too_slow(device) != ""
        event("device_rates", device=device.name, region=region_rate, pinned=pinned_rate, ring=ring)

    def _crosses(self, device: Device, target: torch.Tensor) -> bool:
        """Tell whether these bytes of the region lie in two registered pieces."""
        pieces, begin = self.pieces(device), target.data_ptr()
        return bisect_right(pieces, begin) != bisect_right(pieces, begin + target.numel() - 1)

    def _too_slow(self, device: Device) -> str:
        """Return why the device does not store into the region itself, though it could; else ""."""
        region, pinned = self._rates.get(device.name, (0.0, 0.0))
        if TOO_SLOW * region >= pinned:
            return ""
        return (
            f"it stores {1e-9 * region:.2f} GB/s into the region, {1e-9 * pinned:.2f} GB/s into"
            " pinned DRAM: it goes through the ring"
        )

    def pieces(self, device: Device) -> list[int]:
        """Return the addresses that no copy of this device may cross."""
        kind = type(device).__name__
        return self._registered[kind][1] if kind in self._registered else []

    def extents(self, offsets: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return the region's memory at these places, for a device to store to."""
        if self._mapped is None or self._mapped.numel() != self.region.info.size:
            base, size = self.region.info.device, self.region.info.size
            memory = (ctypes.c_char * size).from_address(base)
            self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        rows = zip(offsets, lengths, strict=True)
        return [self._mapped[offset : offset + length] for offset, length in rows]

    def close(self) -> None:
        """Let go of spare memory and registrations: nothing is copied any more.

        It comes before the region is closed, while the memory is still mapped.
        """
        self._copies.clear()
        self._mapped = None
        for device, pieces in self._registered.values():
            for address in pieces:
                device.unregister(address)
        self._registered.clear()

    def _tell(self, device: Device, mode: TransferMode, why: str) -> None:
        self.chosen = mode, why
        if self._told.get(device.name) != (mode, why):
            self._told[device.name] = (mode, why)
            event("device_placement", device=device.name, mode=str(mode), why=why)

    def _spare(self, device: Device, size: int, ask: bool) -> torch.Tensor | None:
        held = self._copies.get(device.name)
        if ask and held is not None and device.is_low_on_memory():
            del self._copies[device.name]  # once no snapshot uses it, training may have it
            held, self._denied[device.name] = None, 0
        if held is not None and held.numel() >= size:
            return held[:size]
        if not ask or size >= self._denied.get(device.name, size + 1):
            return None
        self._copies.pop(device.name, None)
        held = None  # before more is asked for
        held = device.allocate_spare(size)
        if held is None:
            self._denied[device.name] = size
        else:
            self._copies[device.name] = held
        return held

    def _refuses(self, device: Device) -> str:
        """Return why the device cannot store into the region itself; "" if it can.

        Registers what is not registered yet.
        """
        kind = type(device).__name__
        if kind in self._refused:
            return self._refused[kind]
        medium = self.region.info.medium
        why = _NO_PINS.get(medium, "")
        if self.region.staged:
            why = why or "copies to this medium are staged"
        if self.limited:
            why = why or "a write limit bounds what is written to it"
        if not why:
            why = self._register(kind, device)
        if why:
            self._refused[kind] = f"the region ({medium}) is not registered: {why}"
            return self._refused[kind]
        return ""

    def _register(self, kind: str, device: Device) -> str:
        _, pieces = self._registered.setdefault(kind, (device, []))
        base, size = self.region.info.device, self.region.info.size
        grown, begin, end = bool(pieces), self._ends.get(kind, base), base + size
        while begin < end:  # at first all of it, later what it has grown by
            length = min(PIECE_BYTES, end - begin)
            why = device.register(begin, length)
            if why:
                for address in () if grown else pieces:  # else copies may be under way there
                    device.unregister(address)
                if not grown:
                    del self._registered[kind]
                return why
            pieces.append(begin)
            begin += length
            self._ends[kind] = begin
        return ""


def _seconds(
    device: Device, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> float:
    """Return how long a device's copy takes, the best of three."""
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        device.copy(targets, sources).synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
