"""Choose where copies go first: straight to the region, or to DRAM and later to the region.

`direct` needs a medium that takes a snapshot inside one window. Where it cannot, the fence waits
for the medium; `staged` copies leave the sources at the speed of memory instead, and due snapshots
are skipped until the medium has caught up. `auto` decides once, at attach: by the kind of the
medium and, where that does not tell, by one measurement of stores into an empty slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightck.config import Config
from lightck.errors import LightckError, NoSnapshotError, RegionBusyError
from lightck.events import event
from lightck.region import allocator
from lightck.region._ffi import free_dram_bytes
from lightck.region.medium import is_memory
from lightck.region.native_pool import COPY_DTYPE, NativePool, NativeSnapshot
from lightck.region.region import Region

TOO_SLOW = 2.0
"""A medium is too slow when it takes this many times as long as one thread's copy within DRAM."""
SAMPLE_BYTES = 4 << 20
"""The bytes of one measured copy into an empty slot; the best of `SAMPLES` counts."""
SAMPLES = 3
SPARE = 0.75
"""The fraction of the free DRAM that staging may take."""
LATE_S = 0.02
"""A fence that waits less than this is not told: on a small state the calls' own time counts."""
LATE_FENCES = 3
"""The number of late fences in a row after which the medium is reported as too slow."""

Mode = Literal["direct", "staged"]


@dataclass(frozen=True)
class PlacementChoice:
    """The placement of copies from DRAM, and what it was chosen for."""

    mode: Mode
    why: str
    dram_rate: float = 0.0
    """Bytes per second of one thread's copy within DRAM; 0: not measured."""
    paged: bool = False
    """True if the native part stages everything, in DRAM of its own."""
    may_be_late: bool = False
    """True if `auto` chose `direct` on a medium that may be slower than it seemed."""


DIRECT = PlacementChoice("direct", "placement is 'direct'")


def choose_placement(region: Region, config: Config) -> PlacementChoice:
    """Choose the placement of a new handle's copies from DRAM.

    May store into an empty slot of the region for some milliseconds, and blocks meanwhile.
    """
    medium, node = region.info.medium, config.numa_node
    if region.staged:
        return PlacementChoice("staged", f"{medium}: stores need syncs, always staged", paged=True)
    if config.placement == "direct" or config.placement == "staged":
        return PlacementChoice(config.placement, f"placement is {config.placement!r}")
    if config.write_limit:
        store_rate, what = float(config.write_limit), "the write limit is"
    elif node is None and is_memory(medium):
        return PlacementChoice("direct", f"{medium}: the region is DRAM")
    else:
        what = f"{medium} takes" if node is None else f"{medium} on NUMA node {node} takes"
        measured = measure_stores(region, config.threads, config.chunk_bytes)
        if measured is None:
            why = f"{medium}: not measured, no slot is empty and large enough"
            return PlacementChoice("direct", why, may_be_late=True)
        store_rate = measured
    plain = dram_rate()
    slow = TOO_SLOW * store_rate < plain
    why = f"{what} {1e-9 * store_rate:.2f} GB/s, DRAM {1e-9 * plain:.2f} GB/s from one thread"
    return PlacementChoice("staged" if slow else "direct", why, plain, may_be_late=not slow)


def measure_stores(region: Region, threads: int, chunk_bytes: int) -> float | None:
    """Measure bytes per second of stores into the region, by as many threads as copies take.

    Stores go to a slot that holds no snapshot, so that none is lost: I6 (old before new). The slot
    is as empty afterwards, and the workers are others than training's, so that no counter moves.
    Returns None if there is no such slot, or none with room for the samples.
    """
    slot = _empty_slot(region)
    space = allocator.Space(region.info.segments)
    if slot is None or region.info.segments[0].slot_bytes < SAMPLES * SAMPLE_BYTES:
        return None
    source = np.ones(SAMPLE_BYTES, np.uint8)
    copies = np.zeros(SAMPLES, COPY_DTYPE)
    copies["offset"] = space.offsets(np.arange(SAMPLES, dtype=np.uint64) * SAMPLE_BYTES, slot)
    copies["source"], copies["length"] = source.ctypes.data, len(source)
    pool = NativePool(threads, chunk_bytes, idle=False)
    try:
        snapshot = NativeSnapshot(pool, region.native, slot)
        try:
            best = min(_seconds(snapshot, copies[i : i + 1]) for i in range(SAMPLES))
        finally:
            snapshot.free()
    except RegionBusyError:  # a reader has taken the slot meanwhile
        return None
    finally:
        pool.close()
    return SAMPLE_BYTES / best


def _empty_slot(region: Region) -> int | None:
    """Return the number of a slot that holds no snapshot, none that is damaged either, or None."""
    for slot in region.slots:
        try:
            region.native.read_record(slot.index)
        except NoSnapshotError:
            return slot.index
        except LightckError:
            continue
    return None


def _seconds(snapshot: NativeSnapshot, copies: npt.NDArray[Any]) -> float:
    """Make copies into a slot, and return the seconds they took."""
    batch = snapshot.add(copies)
    begin = time.perf_counter()
    snapshot.capture(batch)
    return time.perf_counter() - begin


def dram_rate(sample_bytes: int = 16 << 20) -> float:
    """Measure bytes per second of one thread's plain copy, the best of three; some milliseconds."""
    source, target = np.zeros(sample_bytes, np.uint8), np.ones(sample_bytes, np.uint8)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = max(best, sample_bytes / (time.perf_counter() - begin))
    return best


@dataclass(eq=False)
class HostPlacement:
    """Places each snapshot's copies from DRAM as chosen. Used by the training thread."""

    choice: PlacementChoice = DIRECT
    free: Callable[[], int] = free_dram_bytes
    staging: bool = False
    """True if snapshots go through DRAM that was mapped here."""
    room_bytes: int = 0
    """The bytes of DRAM that staging may take."""
    _late: int = 0
    """The number of late fences in a row; LATE_FENCES once they were told."""

    def prepare(self, payload_bytes: int, pool: NativePool) -> None:
        """Map the DRAM that staging needs, told in an event beforehand. May take a second.

        Raises:
            LightckError: there is none.
        """
        wanted = self.choice.mode == "staged" and not self.choice.paged
        if wanted and payload_bytes > self.room_bytes:
            self.room_bytes = min(payload_bytes, int(SPARE * self.free()))
            event("staging", bytes=self.room_bytes, payload_bytes=payload_bytes)
            pool.stage(self.room_bytes)
            self.staging = True

    def place(self, lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Tell for each copy of a snapshot, given its bytes, whether it goes through DRAM.

        When DRAM is short, as many as fit from the front do.
        """
        if not self.staging:
            return np.zeros(len(lengths), np.bool_)
        return np.cumsum(lengths) <= self.room_bytes

    def fence_waited(self, fence_s: float, payload_bytes: int) -> None:
        """Warn, once, when fences wait for a medium on which `auto` chose `direct`."""
        if not self.choice.may_be_late or self._late == LATE_FENCES:
            return
        plain_s = payload_bytes / (self.choice.dram_rate or dram_rate())
        self._late = self._late + 1 if fence_s > max(LATE_S, TOO_SLOW * plain_s) else 0
        if self._late == LATE_FENCES:
            event(
                "fence_waits",
                logging.WARNING,
                fence_s=fence_s,
                plain_copy_s=plain_s,
                remedy="the fence waits for the medium: set placement='staged'",
            )
