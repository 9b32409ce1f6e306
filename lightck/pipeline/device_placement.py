"""Chooses how each device's tensors reach the region: as asked for, as possible, as measured.

Where a device can store into the region itself and may not have to, both ways are measured: what
counts is how long live memory, or its copy in spare memory, waits to be let go of. See
`trial.py`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightck.device.base import Device
from lightck.events import event
from lightck.pipeline.device_transfer import TransferMode
from lightck.pipeline.trial import ABTrial, TrialResult
from lightck.region.region import Region

PIECE_BYTES = 1 << 30
"""The bytes that are registered with the driver at once; no copy may lie in two such pieces."""
TOO_SLOW = 2.0
"""Stores into the region that take this many times as long as copies to pinned DRAM are worth a
trial."""
SAMPLE_BYTES = 32 << 20
"""The bytes that are copied to pinned DRAM, three times, to know how long that takes."""
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
    _said: dict[str, tuple[str, str]] = field(default_factory=dict)
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
    _plain: dict[str, float] = field(default_factory=dict)
    """The seconds a byte of a copy to pinned DRAM, by device. A device without is not judged."""
    _contests: dict[str, ABTrial] = field(default_factory=dict)
    """The trial, by device, of the ring against stores into the region, in seconds a byte."""

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
        way, why = TransferMode.HOST, f"placement is {self.wanted!r}"
        if copy is not None:
            way, why = TransferMode.DEVICE, f"{device.name} has {size} bytes to spare"
            why_not = self._beaten(device)
        elif self.wanted in ("auto", "direct"):
            avoided = self._refuses(device) or self._beaten(device)
            way = TransferMode.HOST if avoided else TransferMode.DIRECT
            why = avoided or "the region is registered with the driver"
        self._say(device, way, "; ".join(filter(None, (why_not, why))))
        return way, copy

    def in_place(self, device: Device, way: TransferMode) -> bool:
        """Tell whether the device stores into the region itself."""
        if way is TransferMode.DEVICE:
            return not (self._refuses(device) or self._beaten(device))
        return way is TransferMode.DIRECT

    def judged(self, device: Device) -> bool:
        """Tell whether the ring may be tried instead of stores into the region."""
        return self.wanted in ("auto", "device") and not self._refuses(device)

    def measure(self, device: Device, sources: Sequence[torch.Tensor], load_bytes: int) -> None:
        """Measure how fast the device copies these bytes to pinned DRAM. Blocks some ms."""
        if device.name in self._plain:
            return
        place, loads, size = device.pinned(load_bytes), [], 0
        for load in (part for each in sources for part in each.split(load_bytes)):
            loads.append(load)
            size += load.numel()
            if size >= SAMPLE_BYTES:
                break
        if size < load_bytes:
            return  # so few would measure the calls' own time
        places, best = [place[: load.numel()] for load in loads], float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            device.copy(places, loads).wait()
            best = min(best, time.perf_counter() - begin)
        self._plain[device.name] = best / size
        self._contests[device.name] = ABTrial()

    def paid(self, device: Device, cost: float, *, in_place: bool) -> None:
        """Learn what a snapshot's transfers from a device have cost.

        Args:
            device: the device.
            cost: seconds a byte, from the first load that arrived to the last one.
            in_place: True if it stored into the region itself, False if through the ring.
        """
        contest = self._contests.get(device.name)
        if contest is None or in_place is contest.other:  # from before the trial's last turn
            return
        turn = contest.saw(cost, lambda: TOO_SLOW * self._plain[device.name])
        if turn is TrialResult.DOUBT:
            contest.begin()
        elif turn is not None:
            event(
                "device_ring",
                device=device.name,
                stays=turn is TrialResult.WON,
                rates=self._rates(device),
            )

    def _beaten(self, device: Device) -> str:
        """Return why the device does not store into the region itself, though it could; else ""."""
        contest = self._contests.get(device.name)
        if contest is None or not contest.other:
            return ""
        return f"its own stores into the region are slow: {self._rates(device)}"

    def _rates(self, device: Device) -> str:
        contest = self._contests[device.name]
        costs = contest.first_cost, contest.other_cost, self._plain[device.name]
        own, ring, plain = (f"{1e-9 / cost:.2f} GB/s" if cost else "not known" for cost in costs)
        return f"{own}; through the ring {ring}; plain copies to pinned DRAM {plain}"

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

    def _say(self, device: Device, way: TransferMode, why: str) -> None:
        self.chosen = way, why
        if self._said.get(device.name) != (way, why):
            self._said[device.name] = (way, why)
            event("device_placement", device=device.name, mode=str(way), why=why)

    def _spare(self, device: Device, size: int, ask: bool) -> torch.Tensor | None:
        held = self._copies.get(device.name)
        if ask and held is not None and device.is_short():
            del self._copies[device.name]  # once no snapshot uses it, training may have it
            held, self._denied[device.name] = None, 0
        if held is not None and held.numel() >= size:
            return held[:size]
        if not ask or size >= self._denied.get(device.name, size + 1):
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
