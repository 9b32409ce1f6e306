"""Copies of one group from a device's memory to the pool, cut into loads, by a ring or in place.

One thread per pipeline queues the copies of one group after the other, a load (the bytes copied at
once) at a time, to the extents or to a ring of pinned DRAM; another feeds to the pool what has
arrived. A load ends where the pool's chunks do. A mark is a place in a stream's order, as a CUDA
event. The order is:

    start    at forward start a mark in the stream that computes; the copying stream follows it
    fence    that stream waits for a mark behind the group's last copy from live memory, which is
             queued by then: the calling thread waits for the queueing, never for the copies
    ring     a place is written again when the pool has read it; the pool reads it once the mark
             behind its copy is passed
    release  a transfer holds the sources, and the slot's memory, until both are let go of
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from threading import Event, RLock

import torch

from lightck.device.base import Device, Mark
from lightck.region.native_pool import NativeSnapshot
from lightck.region.slot_writer import Batch

MOST_BYTES = 1 << 30
"""The most bytes of one tensor in one call: of 2 GiB and more, torch before 2.9 counts elements in
32 bits."""


class Way(StrEnum):
    """The transfer modes: how tensors on a device reach the region."""

    DIRECT = "direct"
    HOST = "host"
    DEVICE = "device"


@dataclass(eq=False)
class Load:
    """The bytes of a transfer that are copied at once."""

    end: int
    """The end of its bytes in the batch."""
    mark: Mark
    """The mark (event) after its copy."""
    place: torch.Tensor | None
    """The place of the ring that it is in; None: the bytes are in their extents."""


@dataclass(eq=False)
class Transfer:
    """The copies of one group from a device.

    Made by the training thread, moved by the threads of `Transfers`.
    """

    device: Device
    snapshot: NativeSnapshot
    batch: Batch
    sources: list[torch.Tensor]
    """The bytes of each copy, on the device; they keep the memory alive."""
    extents: list[torch.Tensor] | None
    """The extents in which the device stores each copy itself; None: it goes through the ring."""
    pieces: Sequence[int] = ()
    """Addresses, in ascending order, that no copy to an extent may cross."""
    copy: torch.Tensor | None = None
    """Room in the device's spare memory for all of it, to be copied to first; None: there is
    none."""
    begun: Mark | None = None
    """The mark of forward start: nothing is copied before."""
    left: Mark | None = None
    """The mark after the last copy from live memory; set once that copy is queued."""
    queued: Event = field(default_factory=Event)
    """Set once `left` is set, or `error`."""
    fed: Event = field(default_factory=Event)
    """Set once there is nothing more to do for it: all is fed, or `error` is set, or it is given
    up; no copy of the device's is under way."""
    departed: bool = False
    error: BaseException | None = None
    given_up: bool = False
    held: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    """Places of the ring that the pool is not known to have read, with the ends of their bytes."""
    touching: RLock = field(default_factory=RLock)
    """Held while a thread asks the pool: the snapshot must not be freed meanwhile."""
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """The end and the arrival time, in seconds, of the first load that arrived and of the last
    one."""
    _live: list[torch.Tensor] = field(default_factory=list)
    """Live memory that is being copied within the device."""

    def __post_init__(self) -> None:
        """Compute where each copy begins in the batch."""
        self.lengths = [source.numel() for source in self.sources]
        self.starts = [0, *accumulate(self.lengths)]
        self.in_place = self.extents is not None
        assert self.starts[-1] == self.batch.total_bytes, (self.starts[-1], self.batch.total_bytes)

    @property
    def over(self) -> bool:
        """True if nothing more of it is to be queued or fed."""
        return self.given_up or self.error is not None

    def fail(self, error: BaseException) -> None:
        """Note that it has failed; whoever waits for its queueing goes on."""
        self.error = self.error or error
        self.queued.set()

    def came(self, load: Load) -> None:
        """Note that a load has arrived. Called by the feeding thread."""
        self.arrivals[1:] = [(load.end, time.perf_counter())]

    def loads(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield first and end byte of each load, of `most` bytes or of one chunk."""
        cuts = [*map(int, self.snapshot.cuts(self.batch.number)), self.starts[-1]]
        begin = 0
        for cut, following in pairwise(cuts):
            if following - begin > most and cut > begin:
                yield begin, cut
                begin = cut
        if self.starts[-1] > begin:
            yield begin, self.starts[-1]

    def leave_live_memory(self) -> None:
        """Copy everything, at once, into the device's spare memory."""
        assert self.copy is not None
        targets, sources = list(self.copy.split(self.lengths)), list(self.sources)
        if max(self.lengths) > MOST_BYTES:
            targets = [part for each in targets for part in each.split(MOST_BYTES)]
            sources = [part for each in sources for part in each.split(MOST_BYTES)]
        self.left = self.device.copy(targets, sources)
        # From now on the copy's bytes are the sources; the live ones are held until it is made.
        self._live, self.sources = self.sources, list(self.copy.split(self.lengths))

    def views(self, tensors: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        """Return the parts of the copies' tensors that lie in these bytes of the batch."""
        i = bisect_right(self.starts, begin) - 1
        found = []
        while begin < end:
            stop = min(end, self.starts[i + 1])
            whole = begin == self.starts[i] and stop == self.starts[i + 1]
            if stop > begin:
                part = slice(begin - self.starts[i], stop - self.starts[i])
                found.append(tensors[i] if whole else tensors[i][part])
            begin, i = stop, i + 1
        return found

    def within_pieces(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Cut the copies so that none crosses the edge of a piece."""
        cut: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for target, source in zip(targets, sources, strict=True):
            begin, size = target.data_ptr(), target.numel()
            inside = self.pieces[bisect_right(self.pieces, begin) :]
            edges = [edge - begin for edge in inside if edge < begin + size]
            for first, last in pairwise([0, *edges, size]):
                cut[0].append(target[first:last] if edges else target)
                cut[1].append(source[first:last] if edges else source)
        return cut

    def let_go(self) -> None:
        """Let go of the memory: nothing is read from the device any more."""
        self.sources, self._live, self.copy, self.extents = [], [], None, None


def took(run: Sequence[Transfer]) -> tuple[int, float]:
    """Return bytes and seconds of transfers that were moved in turn, without the first load.

    That one waited for its turn. All transfers must be fed.
    """
    seen = [each.arrivals for each in run if each.arrivals]
    if not seen:
        return 0, 0.0
    (head, begin), (_, end) = seen[0][0], seen[-1][-1]
    return sum(arrivals[-1][0] for arrivals in seen) - head, end - begin
