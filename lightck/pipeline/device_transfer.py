"""Copies from a device's memory to the pool: cut into loads, and moved by threads through a ring.

One thread per pipeline queues copies to the devices, the other waits for them and feeds the pool:
queueing never waits for a device, unless the ring of pinned DRAM is full.
"""

from __future__ import annotations

import ctypes
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from threading import Condition, Event, RLock, Thread

import torch

from lightck.device.base import Device, DeviceEvent
from lightck.errors import DeviceError, LightckError
from lightck.region.native_pool import NativeSnapshot
from lightck.region.slot_writer import Batch

# ---- the copies of one group, cut into loads, by the ring or in place ----------------------------
# Groups are queued one after the other, a load (the bytes copied at once) at a time, to the extents
# or to the ring. A load ends where the pool's chunks do. A mark is a place in a stream's order, as
# a CUDA event. The order is:
#
#     start    at forward start a mark in the stream that computes; the copying stream follows it
#     fence    that stream waits for a mark behind the group's last copy from live memory, which is
#              queued by then: the calling thread waits for the queueing, never for the copies
#     ring     a place is written again when the pool has read it; the pool reads it once the mark
#              behind its copy is passed
#     release  a transfer holds the sources, and the slot's memory, until both are let go of

MOST_BYTES = 1 << 30
"""The most bytes of one tensor in one call: of 2 GiB and more, torch before 2.9 counts elements in
32 bits."""


class TransferMode(StrEnum):
    """The transfer modes: how tensors on a device reach the region."""

    DIRECT = "direct"
    HOST = "host"
    DEVICE = "device"


@dataclass(eq=False)
class TransferChunk:
    """The bytes of a transfer that are copied at once."""

    end: int
    """The end of its bytes in the batch."""
    mark: DeviceEvent
    """The mark (event) after its copy."""
    place: torch.Tensor | None
    """The place of the ring that it is in; None: the bytes are in their extents."""


@dataclass(eq=False)
class DeviceTransfer:
    """The copies of one group from a device.

    Made by the training thread, moved by the threads of `TransferEngine`.
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
    begun: DeviceEvent | None = None
    """The mark of forward start: nothing is copied before."""
    left: DeviceEvent | None = None
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
    _live: list[torch.Tensor] = field(default_factory=list)
    """Live memory that is being copied within the device."""

    def __post_init__(self) -> None:
        """Compute where each copy begins in the batch."""
        self.lengths = [source.numel() for source in self.sources]
        self.starts = [0, *accumulate(self.lengths)]
        assert self.starts[-1] == self.batch.total_bytes, (self.starts[-1], self.batch.total_bytes)

    @property
    def over(self) -> bool:
        """True if nothing more of it is to be queued or fed."""
        return self.given_up or self.error is not None

    def fail(self, error: BaseException) -> None:
        """Note that it has failed; whoever waits for its queueing goes on."""
        self.error = self.error or error
        self.queued.set()

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


# ---- the threads, and the ring -------------------------------------------------------------------

LOAD_BYTES = 4 << 20
"""The least bytes copied at once; other uses of the device's copy engine (input, a loss) wait no
longer than for these."""
RING_BYTES = 64 << 20
_SOON_S = 0.002
_LOOK_S = 0.05
"""Seconds between two looks, during a wait for the pool, whether the wait is still wanted."""


class TransferEngine:
    """Owns the threads and the ring.

    Methods above the line are for other threads.
    """

    def __init__(self, chunk_bytes: int) -> None:
        """Start and pin nothing before the first transfer."""
        self.load_bytes = max(LOAD_BYTES, chunk_bytes)
        self.places = max(2, RING_BYTES // self.load_bytes)
        self.moved_bytes = 0
        self.made = 0
        """The number of places of the ring that were made so far."""
        self._changed = Condition()
        """Guards the attributes that follow, and wakes the threads when they change."""
        self._jobs: deque[DeviceTransfer] = deque()
        """The transfers to be queued; the first one is being queued."""
        self._free: list[torch.Tensor] = []
        self._closing = False
        self.sealed: Callable[[], bool] = lambda: True
        """Called on the feeding thread when a transfer may be over; if it returns False, it is
        called once more, soon."""
        self._again = False
        self._hurry = 0
        """The number of fences that wait for the queueing."""
        self._out: deque[tuple[DeviceTransfer, TransferChunk]] = deque()
        """The loads that are queued and not fed yet, with their transfers."""
        self._wanting = False
        """True if the ring is full, and a copy waits for a place."""
        self._threads: list[Thread] = []
        self._followed: list[DeviceEvent] = []
        """The marks that the copying streams wait for, as far as they are not known to be
        passed."""
        self._holding: deque[DeviceTransfer] = deque()
        """The transfers whose places of the ring are read next, in order; used by the feeding
        thread only."""

    @property
    def ring_bytes(self) -> int:
        """The bytes that are pinned now."""
        return self.made * self.load_bytes

    def reserve(self, device: Device) -> None:
        """Pin all of the ring now: a driver asked for memory later may wait for what hangs."""
        while (place := self._new_place(device)) is not None:
            self._give_back(place)

    @contextmanager
    def lend_place(self) -> Iterator[torch.Tensor | None]:
        """Lend a free place of the ring in the body; None if there is none."""
        with self._changed:
            place = self._free.pop() if self._free else None
        try:
            yield place
        finally:
            self._give_back(place)

    def depart(self, transfers: Sequence[DeviceTransfer]) -> None:
        """Begin the transfers, in this order, each from its mark.

        Raises:
            LightckError: there are no more threads; none of them has begun.
        """
        with self._changed:
            works = (self._queue_all, "lightck-queue"), (self._feed_all, "lightck-feed")
            for work, name in works[len(self._threads) :]:
                # Daemons: whoever never closes the handle is closed by atexit, after the join.
                thread = Thread(target=work, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # raised, so that nobody waits for it
                    raise LightckError(f"the thread {name} does not start: {error}") from error
                self._threads.append(thread)
            for transfer in transfers:
                transfer.departed = True
            self._jobs.extend(transfers)
            self._changed.notify_all()

    def fence(self, transfer: DeviceTransfer, *, wait: bool) -> None:
        """Make the calling thread's stream wait until every copy has left live memory.

        Returns when all of them are queued; with `wait`, when they are done, so that every thread's
        stream may go on.

        Raises:
            LightckError: the transfer has failed.
        """
        with self._hurried():
            transfer.queued.wait()
        raise_error(transfer)
        if transfer.left is not None:
            if wait:
                transfer.left.wait()
            else:
                transfer.device.hold(transfer.left)

    @property
    def waits(self) -> bool:
        """True if a device has not come to a copy that is wanted: all later copies wait for it.

        Raises:
            DeviceError: one has failed.
        """
        with self._changed:
            begun = [job.begun for job in self._jobs if job.begun is not None]
            return not all(mark.passed() for mark in (*self._followed, *begun))

    def look(self) -> None:
        """Let the feeding thread look for something to seal."""
        with self._changed:
            self._again = True
            self._changed.notify_all()

    def arrived(self, transfer: DeviceTransfer, timeout_s: float | None) -> bool:
        """Tell, after waiting, whether all of it is in the region, or on its way from DRAM.

        Raises:
            LightckError: the transfer has failed.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if not transfer.fed.wait(timeout_s):
            return False
        raise_error(transfer)
        batch, total = transfer.batch.number, transfer.starts[-1]
        while True:
            left = max(0.0, until - time.monotonic())
            if transfer.snapshot.taken(batch, total, min(left, _LOOK_S), False):
                return True
            if not left:
                return False

    def give_up(self, transfer: DeviceTransfer) -> None:
        """Give up a transfer; on return nothing of it is queued or fed, and no copy is under way.

        What was fed is the pool's until the snapshot is freed: see `forget`.
        """
        transfer.given_up = True
        with self._changed:
            waits = transfer in self._jobs and transfer is not self._jobs[0]
            if waits:
                self._jobs.remove(transfer)
            if waits or not transfer.departed:
                transfer.queued.set()
                transfer.fed.set()
            self._changed.notify_all()
        transfer.fed.wait()
        with transfer.touching:
            pass  # whoever asked the pool for a place of it has its answer, and asks no more

    def forget(self, transfer: DeviceTransfer) -> None:
        """Free a transfer's places of the ring: the pool has read all, or its snapshot is freed."""
        with transfer.touching:
            transfer.given_up = True
            places = [place for _, place in transfer.held]
            transfer.held.clear()
            transfer.let_go()
        with self._changed:
            self._free += places
            self._changed.notify_all()

    def close(self, *, lost: bool = False) -> None:
        """End the threads; every transfer must have been forgotten. Idempotent.

        `lost`: a device has failed. Pinned memory that it has used is then never freed, for that
        ends the process: torch asks for an event behind its streams, where errors have no way out.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for place in self._free if lost else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(place))
        self._free, self.made = [], 0

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        with self._changed:
            self._hurry += 1
        try:
            yield
        finally:
            with self._changed:
                self._hurry -= 1

    # ---- the thread that queues ------------------------------------------------------------

    def _queue_all(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._closing):
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                self._queue(job)
            except BaseException as error:  # noqa: BLE001 - told where the transfer is waited for
                job.fail(error)
            job.queued.set()
            with self._changed:
                self._jobs.popleft()
                self._settle(job)

    def _queue(self, job: DeviceTransfer) -> None:
        """Queue all loads of a transfer, as places of the ring become free."""
        assert job.begun is not None
        job.device.enter_thread()
        if job.over:
            return
        with self._changed:
            self._followed = [m for m in self._followed if not m.passed()] + [job.begun]
        job.device.follow(job.begun)
        if job.copy is not None:
            job.leave_live_memory()
            job.queued.set()
        mark = None
        for begin, end in job.loads(self.load_bytes):
            place = None if job.extents is not None else self._place(job)
            if job.over or (place is None and job.extents is None):
                self._give_back(place)
                return
            sources = job.views(job.sources, begin, end)
            if place is None:
                assert job.extents is not None
                targets, sources = job.within_pieces(job.views(job.extents, begin, end), sources)
            elif job.copy is not None:
                sources, targets = [job.copy[begin:end]], [place[: end - begin]]
            else:
                targets = list(place[: end - begin].split([each.numel() for each in sources]))
            mark = job.device.copy(targets, sources)
            self.moved_bytes += end - begin
            with self._changed:
                self._out.append((job, TransferChunk(end, mark, place)))
                self._changed.notify_all()
        if job.copy is None:
            job.left = mark

    def _place(self, job: DeviceTransfer) -> torch.Tensor | None:
        """Return a free place of the ring, after waiting; None if the transfer is given up."""
        with self._changed:
            if not self._free and self.made == self.places:
                self._wanting = True
                self._changed.notify_all()
                while not (self._free or job.over):
                    self._changed.wait()
                self._wanting = False
            if job.over:
                return None
            if self._free:
                return self._free.pop()
        return self._new_place(job.device)

    def _new_place(self, device: Device) -> torch.Tensor | None:
        """Make one more place of the ring; None if there are as many as there may be."""
        with self._changed:
            if self.made == self.places:
                return None
            self.made += 1
        try:
            return device.pinned(self.load_bytes)
        except BaseException:
            with self._changed:  # a place that is not there would be waited for
                self.made -= 1
            raise

    def _give_back(self, place: torch.Tensor | None) -> None:
        if place is not None:
            with self._changed:
                self._free.append(place)
                self._changed.notify_all()

    # ---- the thread that feeds -------------------------------------------------------------

    def _feed_all(self) -> None:
        while True:
            with self._changed:
                while self._idle and not (self._closing or self._again):
                    self._changed.wait()
                if self._idle and self._again:
                    self._changed.wait(_SOON_S)
                wanting, oldest = self._wanting, self._out[0] if self._out else None
                if oldest is None and self._closing:
                    return
            if wanting and self._retire(0.0 if oldest is not None else _LOOK_S):
                continue
            if oldest is not None:
                self._feed(*oldest)
            self._again = not self.sealed()

    @property
    def _idle(self) -> bool:
        return not (self._out or (self._wanting and self._holding))

    def _feed(self, job: DeviceTransfer, load: TransferChunk) -> None:
        """Wait for the oldest copy and give it to the pool."""
        try:
            job.device.enter_thread()
            load.mark.wait()
            with job.touching:
                if load.place is not None:
                    job.held.append((load.end, load.place))
                    self._holding.append(job)
                if not job.over:
                    there = 0 if load.place is None else load.place.data_ptr()
                    job.snapshot.feed(job.batch.number, load.end, there)
        except BaseException as error:  # noqa: BLE001 - told where the transfer is waited for
            job.fail(error)
        with self._changed:
            self._out.popleft()
            self._settle(job)
            self._changed.notify_all()

    def _settle(self, job: DeviceTransfer) -> None:
        """Set `fed` if there is nothing more to do for a transfer. Called under the lock."""
        if job not in self._jobs and not any(job is other for other, _ in self._out):
            job.fed.set()

    def _retire(self, wait_s: float) -> bool:
        """Free the oldest place of the ring if the pool has read it, after waiting; else False."""
        while self._holding:
            oldest = self._holding[0]
            with oldest.touching:
                if oldest.over or not oldest.held:  # its places are given back with it
                    self._holding.popleft()
                    continue
                end, place = oldest.held[0]
                try:
                    number = oldest.batch.number
                    if not oldest.snapshot.taken(number, end, wait_s, self._hurry > 0):
                        return False
                except LightckError as error:
                    oldest.fail(error)
                    with self._changed:
                        self._changed.notify_all()
                    continue
                oldest.held.popleft()
                self._holding.popleft()
            self._give_back(place)
            return True
        return False


def raise_error(transfer: DeviceTransfer) -> None:
    """Raise the error that a transfer has failed with, if any.

    Raises:
        LightckError: whatever it was.
    """
    error = transfer.error
    if isinstance(error, LightckError):
        raise error
    if error is not None:
        name = transfer.device.name
        raise DeviceError(f"a transfer from {name} failed: {error!r}") from error
