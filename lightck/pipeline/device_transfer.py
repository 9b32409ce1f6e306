"""Copies from a device's memory to the pool: cut into chunks, and moved by threads through a ring.

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

# ---- the copies of one group, cut into chunks, by the ring or in place --------------------------
# Groups are queued one after the other, a chunk (the bytes copied at once) at a time, to the
# extents or to the ring. It ends where one of the pool's chunks does. The order is:
#
#     start    at forward start an event in the stream that computes; the copying stream follows it
#     fence    that stream waits for an event behind the group's last copy from live memory, which
#              is queued by then: the calling thread waits for the queueing, never for the copies
#     ring     a place is written again when the pool has read it; the pool reads it once the event
#              behind its copy has passed
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
    event: DeviceEvent
    """The event after its copy."""
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
    spare: torch.Tensor | None = None
    """Room in the device's spare memory for all of it, to be copied to first; None: there is
    none."""
    start_event: DeviceEvent | None = None
    """The event of forward start: nothing is copied before."""
    captured_event: DeviceEvent | None = None
    """The event after the last copy from live memory; set once that copy is queued."""
    queued: Event = field(default_factory=Event)
    """Set once `captured_event` is set, or `error`."""
    fed: Event = field(default_factory=Event)
    """Set once there is nothing more to do for it: all is fed, or `error` is set, or it is given
    up; no copy of the device's is under way."""
    started: bool = False
    error: BaseException | None = None
    given_up: bool = False
    places: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    """Places of the ring that the pool is not known to have read, with the ends of their bytes."""
    pool_lock: RLock = field(default_factory=RLock)
    """Held while a thread asks the pool: the snapshot must not be freed meanwhile."""
    _live: list[torch.Tensor] = field(default_factory=list)
    """Live memory that is being copied within the device."""

    def __post_init__(self) -> None:
        """Compute where each copy begins in the batch."""
        self.lengths = [source.numel() for source in self.sources]
        self.starts = [0, *accumulate(self.lengths)]
        assert self.starts[-1] == self.batch.total_bytes, (self.starts[-1], self.batch.total_bytes)

    def begin(self, event: DeviceEvent) -> None:
        """Let the copies begin behind `event`, the one of forward start."""
        self.start_event = event

    @property
    def is_over(self) -> bool:
        """True if nothing more of it is to be queued or fed."""
        return self.given_up or self.error is not None

    def fail(self, error: BaseException) -> None:
        """Note that it has failed; whoever waits for its queueing goes on."""
        self.error = self.error or error
        self.queued.set()

    def chunks(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield first and end byte of each chunk, of `most` bytes or of one chunk of the pool."""
        cuts = [*map(int, self.snapshot.cuts(self.batch.number)), self.starts[-1]]
        begin = 0
        for cut, following in pairwise(cuts):
            if following - begin > most and cut > begin:
                yield begin, cut
                begin = cut
        if self.starts[-1] > begin:
            yield begin, self.starts[-1]

    def copy_to_spare(self) -> None:
        """Copy everything, at once, into the device's spare memory."""
        assert self.spare is not None
        targets, sources = list(self.spare.split(self.lengths)), list(self.sources)
        if max(self.lengths) > MOST_BYTES:
            targets = [part for each in targets for part in each.split(MOST_BYTES)]
            sources = [part for each in sources for part in each.split(MOST_BYTES)]
        self.captured_event = self.device.copy(targets, sources)
        # From now on the copy's bytes are the sources; the live ones are held until it is made.
        self._live, self.sources = self.sources, list(self.spare.split(self.lengths))

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

    def copies(
        self, begin: int, end: int, place: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return targets and sources of a chunk, by way of a place of the ring if one is given."""
        sources = self.views(self.sources, begin, end)
        if place is None:
            assert self.extents is not None
            return self.within_pieces(self.views(self.extents, begin, end), sources)
        if self.spare is not None:
            return [place[: end - begin]], [self.spare[begin:end]]
        return place[: end - begin].split([each.numel() for each in sources]), sources

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

    def release(self) -> None:
        """Let go of the memory: nothing is read from the device any more."""
        self.sources, self._live, self.spare, self.extents = [], [], None, None


# ---- the threads, and the ring -------------------------------------------------------------------

CHUNK_BYTES = 16 << 20
"""The bytes copied at once; other uses of the device's copy engine (input, a loss) wait no longer
than for these, 0.3 ms on an H100. To queue and feed a chunk takes 0.2 ms of Python whatever its
size: with chunks of 4 MiB an H100's bus was used to 0.37, with these to 0.68."""
RING_BYTES = 128 << 20
_SOON_S = 0.002
_LOOK_S = 0.05
"""Seconds between two looks, during a wait for the pool, whether the wait is still wanted."""


class TransferEngine:
    """Owns the threads and the ring.

    Methods above the line are for other threads.
    """

    def __init__(self, chunk_bytes: int, seal: Callable[[], bool]) -> None:
        """Start and pin nothing before the first transfer.

        Args:
            chunk_bytes: the size of the pool's chunks.
            seal: called on the feeding thread when a transfer may be over; if it returns False, it
                is called once more, soon.
        """
        self._seal = seal
        self.chunk_bytes = max(CHUNK_BYTES, chunk_bytes)
        self.most_places = max(2, RING_BYTES // self.chunk_bytes)
        self.moved_bytes = 0
        self.made = 0
        """The number of places of the ring that were made so far."""
        self._changed = Condition()
        """Guards the attributes that follow, and wakes the threads when they change."""
        self._to_queue: deque[DeviceTransfer] = deque()
        """The transfers to be queued; the first one is being queued."""
        self._free: list[torch.Tensor] = []
        self._closing = False
        self._again = False
        self._hurry = 0
        """The number of fences that wait for the queueing."""
        self._copying: deque[tuple[DeviceTransfer, TransferChunk]] = deque()
        """The chunks that are queued and not fed yet, with their transfers."""
        self._place_wanted = False
        """True if the ring is full, and a copy waits for a place."""
        self._threads: list[Thread] = []
        self._awaited: list[DeviceEvent] = []
        """The events that the copying streams wait for, as far as they are not known to be
        passed."""
        self._readers: deque[DeviceTransfer] = deque()
        """The transfers whose places of the ring are read next, in order; used by the feeding
        thread only."""

    @property
    def ring_bytes(self) -> int:
        """The bytes that are pinned now."""
        return self.made * self.chunk_bytes

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

    def start(self, transfers: Sequence[DeviceTransfer]) -> None:
        """Begin the transfers, in this order, each from its event.

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
                transfer.started = True
            self._to_queue.extend(transfers)
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
        if transfer.captured_event is not None:
            if wait:
                transfer.captured_event.synchronize()
            else:
                transfer.device.make_stream_wait(transfer.captured_event)

    @property
    def is_waiting(self) -> bool:
        """True if a device has not come to a copy that is wanted: all later copies wait for it.

        Raises:
            DeviceError: one has failed.
        """
        with self._changed:
            begun = [
                transfer.start_event
                for transfer in self._to_queue
                if transfer.start_event is not None
            ]
            return not all(event.query() for event in (*self._awaited, *begun))

    def wake(self) -> None:
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
            waits = transfer in self._to_queue and transfer is not self._to_queue[0]
            if waits:
                self._to_queue.remove(transfer)
            if waits or not transfer.started:
                transfer.queued.set()
                transfer.fed.set()
            self._changed.notify_all()
        transfer.fed.wait()
        with transfer.pool_lock:
            pass  # whoever asked the pool for a place of it has its answer, and asks no more

    def forget(self, transfer: DeviceTransfer) -> None:
        """Free a transfer's places of the ring: the pool has read all, or its snapshot is freed."""
        with transfer.pool_lock:
            transfer.given_up = True
            places = [place for _, place in transfer.places]
            transfer.places.clear()
            transfer.release()
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
                while not (self._to_queue or self._closing):
                    self._changed.wait()
                if not self._to_queue:
                    return
                transfer = self._to_queue[0]
            try:
                self._queue(transfer)
            except BaseException as error:  # noqa: BLE001 - told where the transfer is waited for
                transfer.fail(error)
            transfer.queued.set()
            with self._changed:
                self._to_queue.popleft()
                self._settle(transfer)

    def _queue(self, transfer: DeviceTransfer) -> None:
        """Queue all chunks of a transfer, as places of the ring become free."""
        assert transfer.start_event is not None
        transfer.device.enter_thread()
        if transfer.is_over:
            return
        with self._changed:
            self._awaited = [m for m in self._awaited if not m.query()] + [transfer.start_event]
        transfer.device.copy_stream_wait(transfer.start_event)
        if transfer.spare is not None:
            transfer.copy_to_spare()
            transfer.queued.set()
        event = None
        for begin, end in transfer.chunks(self.chunk_bytes):
            place = None if transfer.extents is not None else self._place(transfer)
            if transfer.is_over or (place is None and transfer.extents is None):
                self._give_back(place)
                return
            try:
                event = transfer.device.copy(*transfer.copies(begin, end, place))
            except BaseException:
                self._give_back(place)
                raise
            self.moved_bytes += end - begin
            with self._changed:
                self._copying.append((transfer, TransferChunk(end, event, place)))
                self._changed.notify_all()
        if transfer.spare is None:
            transfer.captured_event = event

    def _place(self, transfer: DeviceTransfer) -> torch.Tensor | None:
        """Return a free place of the ring, after waiting; None if the transfer is given up."""
        with self._changed:
            if not self._free and self.made == self.most_places:
                self._place_wanted = True
                self._changed.notify_all()
                while not (self._free or transfer.is_over):
                    self._changed.wait()
                self._place_wanted = False
            if transfer.is_over:
                return None
            if self._free:
                return self._free.pop()
        return self._new_place(transfer.device)

    def _new_place(self, device: Device) -> torch.Tensor | None:
        """Make one more place of the ring; None if there are as many as there may be."""
        with self._changed:
            if self.made == self.most_places:
                return None
            self.made += 1
        try:
            return device.pinned(self.chunk_bytes)
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
                wanted, oldest = self._place_wanted, self._copying[0] if self._copying else None
                if oldest is None and self._closing:
                    return
            if wanted and self._retire(0.0 if oldest is not None else _LOOK_S):
                continue
            if oldest is not None:
                self._feed(*oldest)
            self._again = not self._seal()

    @property
    def _idle(self) -> bool:
        return not (self._copying or (self._place_wanted and self._readers))

    def _feed(self, transfer: DeviceTransfer, chunk: TransferChunk) -> None:
        """Wait for the oldest copy and give it to the pool."""
        unread = chunk.place
        try:
            transfer.device.enter_thread()
            chunk.event.synchronize()
            with transfer.pool_lock:
                if not transfer.is_over:
                    if unread is not None:
                        transfer.places.append((chunk.end, unread))
                        self._readers.append(transfer)
                    there = 0 if unread is None else unread.data_ptr()
                    unread = None
                    transfer.snapshot.feed(transfer.batch.number, chunk.end, there)
        except BaseException as error:  # noqa: BLE001 - told where the transfer is waited for
            transfer.fail(error)
        self._give_back(unread)
        with self._changed:
            self._copying.popleft()
            self._settle(transfer)
            self._changed.notify_all()

    def _settle(self, transfer: DeviceTransfer) -> None:
        """Set `fed` if there is nothing more to do for a transfer. Called under the lock."""
        if transfer not in self._to_queue and not any(
            transfer is other for other, _ in self._copying
        ):
            transfer.fed.set()

    def _retire(self, wait_s: float) -> bool:
        """Free the oldest place of the ring if the pool has read it, after waiting; else False."""
        while self._readers:
            oldest = self._readers[0]
            with oldest.pool_lock:
                if oldest.given_up or not oldest.places:
                    self._readers.popleft()
                    continue
                end, place = oldest.places[0]
                try:
                    number = oldest.batch.number
                    if not oldest.snapshot.taken(number, end, wait_s, self._hurry > 0):
                        return False
                except LightckError as error:  # the pool has stopped, and reads none of them
                    oldest.fail(error)
                    while oldest.places:
                        self._give_back(oldest.places.popleft()[1])
                    continue
                oldest.places.popleft()
                self._readers.popleft()
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
