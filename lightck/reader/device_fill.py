"""Copies from a region into a device's memory, through pinned DRAM, with checksums verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from lightck.device.base import Device, DeviceEvent
from lightck.device.lookup import flat, holder
from lightck.errors import CorruptSnapshotError
from lightck.reader.assembly import RegionPart
from lightck.region.native_pool import usual_threads
from lightck.region.native_region import crc32c_at

PIECE_BYTES = 4 << 20
_PLACES = 4
"""The number of places of PIECE_BYTES for each thread: while one is filled, the device reads
others."""


@dataclass(frozen=True)
class _DeviceExtent:
    """One extent and the tensor, or the part of one, that it fills."""

    part: RegionPart
    name: str
    offset: int
    crc: int
    target: torch.Tensor
    """The bytes to fill, on the device."""
    device: Device


@dataclass(eq=False)
class _PinnedPlaces:
    """Pinned DRAM of one thread; a place is written again when the device has read it."""

    free: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The places that nobody reads, by the device's name."""
    busy: deque[tuple[str, torch.Tensor, DeviceEvent]] = field(default_factory=deque)

    def next(self, device: Device) -> torch.Tensor:
        """Return a place that nobody reads, waiting for one if need be."""
        mine = [each for each in self.busy if each[0] == device.name]
        if not self.free.get(device.name) and len(mine) < _PLACES:
            return device.pinned(PIECE_BYTES)
        while not self.free.get(device.name):
            self.reclaim()
        return self.free[device.name].pop()

    def reclaim(self) -> None:
        """Wait until the device has read the oldest place, and free it."""
        name, place, event = self.busy.popleft()
        event.synchronize()
        self.free.setdefault(name, []).append(place)


def copy_to_devices(
    parts: Sequence[RegionPart], targets: Mapping[int, torch.Tensor], names: Sequence[str]
) -> None:
    """Fill tensors on devices with what a snapshot has of them; all of it is there on return.

    The copies come after what the calling thread's streams had to do before, and before what they
    are given later.

    Args:
        parts: of the snapshot, held.
        targets: by entry: dense, with the entry's strides.
        names: of the entries.

    Raises:
        CorruptSnapshotError: bytes are not those of the checksum; the tensors are then undefined.
        DeviceError: the device failed.
    """
    extents = []
    with torch.inference_mode(False):  # the threads that write to the views have it off
        for part in parts:
            for row, entry, begin in zip(part.rows, part.entries, part.begins, strict=True):
                target = targets.get(int(entry))
                device = None if target is None else holder(target)
                if target is not None and device is not None:
                    there = flat(target.detach(), int(begin), int(row["length"]))
                    said = (int(row["offset"]), int(row["crc"]), there, device)
                    extents.append(_DeviceExtent(part, names[int(entry)], *said))
    for device in {each.device.name: each.device for each in extents}.values():
        device.copy_stream_wait(device.record_event())
    extents.sort(key=lambda each: -each.target.numel())
    threads = usual_threads()
    with ThreadPoolExecutor(threads, "lightck-fill") as workers:
        shares = [extents[i::threads] for i in range(threads)]
        for done in [workers.submit(_copy_in, share) for share in shares]:
            done.result()


def _copy_in(extents: Sequence[_DeviceExtent]) -> None:
    places = _PinnedPlaces()
    try:
        for extent in extents:
            extent.device.enter_thread()
            crc, at = 0, extent.offset
            for target in extent.target.split(PIECE_BYTES):
                place, size = places.next(extent.device), target.numel()
                extent.part.region.native.peek(at, size, place.data_ptr())
                crc = crc32c_at(place.data_ptr(), size, crc)
                event = extent.device.copy([target], [place[:size]])
                places.busy.append((extent.device.name, place, event))
                at += size
            if crc != extent.crc:
                raise CorruptSnapshotError(
                    f"{extent.part.label}: {extent.name} is damaged: CRC 0x{crc:08x}, expected"
                    f" 0x{extent.crc:08x}"
                )
    finally:
        while places.busy:
            places.reclaim()
