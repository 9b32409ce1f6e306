"""From a device's memory to the pool: cut into loads, through a ring of pinned DRAM or in place.

One thread per pipeline queues the copies of one group after the other, a load at a time; another
feeds what has arrived. A load ends where the pool's chunks do. What orders it all:

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

from lightck.capture.device import Device, Mark
from lightck.region.pool import NativeSnapshot
from lightck.region.writer import Batch

MOST_BYTES = 1 << 30
"""Of one tensor in one call: of 2 GiB and more, torch before 2.9 counts elements in 32 bits."""


class Way(StrEnum):
    """How tensors on a device reach the region."""

    DIRECT = "direct"
    HOST = "host"
    DEVICE = "device"


@dataclass(eq=False)
class Load:
    """What is copied at once."""

    end: int
    """Of its bytes in the batch."""
    mark: Mark
    """Behind its copy."""
    place: torch.Tensor | None
    """Of the ring; None: the bytes are in their extents."""


@dataclass(eq=False)
class Transfer:
    """The copies of one group. Made by the training thread, moved by `Transfers`' own."""

    device: Device
    snapshot: NativeSnapshot
    batch: Batch
    sources: list[torch.Tensor]
    """Bytes of each copy, on the device. They keep the memory alive."""
    extents: list[torch.Tensor] | None
    """Where the device stores each copy itself; None: through the ring."""
    pieces: Sequence[int] = ()
    """In ascending order, addresses that no copy to an extent may lie on both sides of."""
    copy: torch.Tensor | None = None
    """Room for all of it in the device's spare memory, to be copied to first."""
    begun: Mark | None = None
    """The mark of forward start: nothing is copied before."""
    left: Mark | None = None
    """Behind the last copy from live memory; set once that is queued."""
    queued: Event = field(default_factory=Event)
    """`left` is set, or `error`."""
    fed: Event = field(default_factory=Event)
    """There is nothing more to do for it: all is fed, or `error` is set, or it is given up;
    no copy of the device's is under way."""
    departed: bool = False
    error: BaseException | None = None
    given_up: bool = False
    held: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    """Places of the ring that the pool has not been seen to have read, with their ends."""
    touching: RLock = field(default_factory=RLock)
    """Held while the thread asks the pool: the snapshot must not be freed meanwhile."""
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """Of the first load that arrived, and of the last one: where it ends, and when it was there."""
    _live: list[torch.Tensor] = field(default_factory=list)
    """Live memory that is being copied within the device."""

    def __post_init__(self) -> None:
        """Where each copy begins in the batch."""
        self.lengths = [source.numel() for source in self.sources]
        self.starts = [0, *accumulate(self.lengths)]
        self.in_place = self.extents is not None
        assert self.starts[-1] == self.batch.total_bytes, (self.starts[-1], self.batch.total_bytes)

    @property
    def over(self) -> bool:
        """Nothing more of it is to be queued or fed."""
        return self.given_up or self.error is not None

    def fail(self, error: BaseException) -> None:
        """It cannot be brought to its end; nobody waits for it any more."""
        self.error = self.error or error
        self.queued.set()

    def came(self, load: Load) -> None:
        """It has arrived. The feeding thread's."""
        self.arrivals[1:] = [(load.end, time.perf_counter())]

    def loads(self, most: int) -> Iterator[tuple[int, int]]:
        """First and end byte of each load, of `most` bytes or of one chunk."""
        cuts = [*map(int, self.snapshot.cuts(self.batch.number)), self.starts[-1]]
        begin = 0
        for cut, following in pairwise(cuts):
            if following - begin > most and cut > begin:
                yield begin, cut
                begin = cut
        if self.starts[-1] > begin:
            yield begin, self.starts[-1]

    def leave_live_memory(self) -> None:
        """Into the device's own copy, all at once."""
        assert self.copy is not None
        targets, sources = list(self.copy.split(self.lengths)), list(self.sources)
        if max(self.lengths) > MOST_BYTES:
            targets = [part for each in targets for part in each.split(MOST_BYTES)]
            sources = [part for each in sources for part in each.split(MOST_BYTES)]
        self.left = self.device.copy(targets, sources)
        # From now on the copy's bytes are the sources; the live ones are held until it is made.
        self._live, self.sources = self.sources, list(self.copy.split(self.lengths))

    def views(self, tensors: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        """Of one tensor for each copy, what lies in these bytes of the batch."""
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
        """The same copies, none of them over the edge of a piece."""
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
        """Nothing is read from the device any more."""
        self.sources, self._live, self.copy, self.extents = [], [], None, None


def took(run: Sequence[Transfer]) -> tuple[int, float]:
    """Bytes of transfers that were moved one behind the other, and the seconds they took.

    Not those of the first load, which waited for its turn. All are fed.
    """
    seen = [each.arrivals for each in run if each.arrivals]
    if not seen:
        return 0, 0.0
    (head, begin), (_, end) = seen[0][0], seen[-1][-1]
    return sum(arrivals[-1][0] for arrivals in seen) - head, end - begin
