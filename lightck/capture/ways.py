"""Which way tensors on a device go: what was asked for, what is possible, and why this one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightck.capture.device import Device
from lightck.capture.transfer import Way
from lightck.events import event
from lightck.region.region import Region

PIECE_BYTES = 1 << 30
"""Registered at once; no copy may lie in two pieces."""
_NO_PINS = {
    "fsdax": "its pages must not be pinned for long",
    "file": "it is an ordinary file",
}


@dataclass(eq=False)
class Ways:
    """Chooses, and owns what the choice needs. Used by the training thread."""

    region: Region
    wanted: str = "auto"
    """The setting `placement`."""
    mode: str = ""
    why: str = ""
    _said: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By device: what was said last."""
    _denied: dict[str, int] = field(default_factory=dict)
    """By device: bytes that it did not have to spare. Asking takes as long as a small copy."""
    _registered: dict[str, tuple[Device, list[int]]] = field(default_factory=dict)
    """By kind of device: one of it, and the addresses of pieces, one behind the other."""
    _ends: dict[str, int] = field(default_factory=dict)
    """By kind of device: where the last piece ends."""
    _refused: dict[str, str] = field(default_factory=dict)
    """By kind of device: why its driver did not register the region."""
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    """By device: its spare memory."""
    _mapped: torch.Tensor | None = None

    @property
    def copy_bytes(self) -> int:
        """Of devices' spare memory."""
        return sum(copy.numel() for copy in self._copies.values())

    def choose(self, device: Device, size: int) -> tuple[Way, torch.Tensor | None]:
        """How `size` bytes of one snapshot leave this device, and room for their copy there.

        May register the region, which blocks, when it is asked for the first time.
        """
        copy, why_not = None, ""
        if self.wanted in ("auto", "device"):
            copy = self._spare(device, size)
            why_not = "" if copy is not None else f"{device.name} has no {size} bytes to spare"
        way, why = Way.HOST, f"placement is {self.wanted!r}"
        if copy is not None:
            way, why = Way.DEVICE, f"{device.name} has {size} bytes to spare"
        elif self.wanted in ("auto", "direct"):
            refused = self._refuses(device)
            way = Way.HOST if refused else Way.DIRECT
            why = refused or "the region is registered with the driver"
        self._say(device, way, "; ".join(filter(None, (why_not, why))))
        return way, copy

    def in_place(self, device: Device, way: Way) -> bool:
        """Whether the device stores into the region itself."""
        return way is Way.DIRECT or (way is Way.DEVICE and not self._refuses(device))

    def pieces(self, device: Device) -> list[int]:
        """Addresses that no copy of the device's may lie on both sides of."""
        kind = type(device).__name__
        return self._registered[kind][1] if kind in self._registered else []

    def extents(self, offsets: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """The region's memory at these places, for a device to store to."""
        if self._mapped is None or self._mapped.numel() != self.region.info.size:
            base, size = self.region.info.device, self.region.info.size
            memory = (ctypes.c_char * size).from_address(base)
            self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        rows = zip(offsets, lengths, strict=True)
        return [self._mapped[offset : offset + length] for offset, length in rows]

    def close(self) -> None:
        """Nothing is copied any more. The region is mapped until it is closed."""
        self._copies.clear()
        self._mapped = None
        for device, pieces in self._registered.values():
            for address in pieces:
                device.unregister(address)
        self._registered.clear()

    def _say(self, device: Device, way: Way, why: str) -> None:
        self.mode, self.why = way, why
        if self._said.get(device.name) != (way, why):
            self._said[device.name] = (way, why)
            event("device_placement", device=device.name, mode=str(way), why=why)

    def _spare(self, device: Device, size: int) -> torch.Tensor | None:
        held = self._copies.get(device.name)
        if held is not None and held.numel() >= size:
            return held[:size]
        if size >= self._denied.get(device.name, size + 1):
            return None
        self._copies.pop(device.name, None)
        held = None  # before more is asked for
        held = device.spare(size)
        if held is None:
            self._denied[device.name] = size
        else:
            self._copies[device.name] = held
        return held

    def _refuses(self, device: Device) -> str:
        """Why the device cannot store into the region itself; registers what is not registered."""
        kind = type(device).__name__
        if kind in self._refused:
            return self._refused[kind]
        medium = self.region.info.medium
        why = _NO_PINS.get(medium, "")
        if self.region.staged:
            why = why or "copies to this medium are staged"
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
