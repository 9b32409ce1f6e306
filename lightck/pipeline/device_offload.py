"""A pipeline copies devices' tensors, from forward start until the pool has their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.device.base import Device, DeviceEvent
from lightck.errors import DeviceError, LightckError
from lightck.pipeline.copy_plan import CopyPlan, CopySources, PlannedGroup
from lightck.pipeline.device_placement import DevicePlacement
from lightck.pipeline.device_transfer import DeviceTransfer, TransferEngine, TransferMode
from lightck.pipeline.inflight import CopyGroup, InflightSnapshot
from lightck.region.native_region import crc32c_at

PEAK_STEPS = 1
"""Steps to wait, from when all optimizer state exists, until training's peak on a device is
known."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position of the training thread's stream on a device at an instant, as an event."""

    device: Device
    stream: Any
    mark: DeviceEvent


@dataclass(eq=False)
class _Room:
    """One device's part of one snapshot: its transfer mode, and room in spare memory."""

    way: TransferMode
    copy: torch.Tensor | None
    """The room in the device's spare memory, for all groups; None: there is none."""
    used: int = 0


@dataclass(eq=False)
class DeviceOffload:
    """Moves the tensors that devices hold into the region, and owns what does so.

    Used by the training thread, or by others under the checkpointer's lock.
    """

    ways: DevicePlacement
    transfers: TransferEngine
    _flight: InflightSnapshot | None = None
    """The snapshot whose copies are being queued."""
    _rooms: dict[str, _Room] = field(default_factory=dict)
    """Each device's part of that snapshot, by the device's name."""
    _copied: list[DeviceTransfer] = field(default_factory=list)
    """The transfers that use devices' spare memory."""
    standing: tuple[StreamPosition, ...] = ()
    """The streams' positions at the last instant."""
    _begun: bool = False
    """True if the last instant was forward start (else step end)."""
    _back: bool = False
    """True if `standing` is of an earlier forward start, as `back_at` sets it."""
    _prepared: int = 0
    """The step at whose end `prepare` was called."""
    _thread: int = 0
    _warm: dict[str, Device] = field(default_factory=dict)
    """The devices that have loaded what they need, by name."""
    _reserved: list[torch.Tensor] = field(default_factory=list)
    """Memory that is freed when another thread makes private copies, so that it finds room then."""
    _lent: bool = True
    """True if `_reserved` is to be allocated at the next instant."""
    _failure: DeviceError | None = None
    """The first error of a device; from then on the content of its memory is not trusted."""

    @property
    def copy_taken(self) -> bool:
        """Tell whether spare memory still holds bytes of an earlier snapshot."""
        self._copied = [each for each in self._copied if not each.fed.is_set()]
        return bool(self._copied)

    @property
    def has_come(self) -> bool:
        """Tell whether devices have done what the training thread had queued at the last instant.

        Raises:
            DeviceError: one has failed.
        """
        return all(each.mark.passed() for each in self.standing)

    def prepare(self, arrangement: CopyPlan, step: int) -> None:
        """Choose each device's transfer mode at the end of a step; may take a second.

        Loading, pinning and registering are all done here, because later they might wait for a
        device that hangs. Spare memory is asked for during training, once the peak of another step
        is known. An error is raised when a snapshot is made.
        """
        self._lent, self._prepared = True, step
        for device, size in _sizes(arrangement).values():
            try:
                way, _ = self.ways.choose(device, size, ask=False)
                if device.name not in self._warm:
                    self._warm[device.name] = device
                    device.warm()
                if self.ways.needs_measuring(device) or not self.ways.in_place(device, way):
                    self.transfers.reserve(device)
            except LightckError as error:  # told by whoever makes a snapshot
                self.noted(error)

    def check(self) -> None:
        """Raise the error that a device has failed with, if any."""
        if self._failure is not None:
            raise self._failure

    def noted(self, error: BaseException) -> None:
        """Keep the first error of a device; no device is asked for anything again after it."""
        if self._failure is None and isinstance(error, DeviceError):
            self._failure = error

    def stand(self, arrangement: CopyPlan, *, begun: bool) -> None:
        """Note that the training thread is at step end or, if `begun`, at forward start.

        A thread that saves just in time starts from there: see `aside`.
        """
        self._thread = get_ident()
        try:
            self._begun, self.standing = (
                begun,
                tuple(
                    StreamPosition(device, device.stream(), device.mark())
                    for device, _ in _sizes(arrangement).values()
                ),
            )
            if self._lent:
                self._lent = False
                self._reserved = _reserved(arrangement)
        except LightckError as error:  # told by whoever makes a snapshot
            self.noted(error)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let another thread than the training thread queue to streams of its own, in the body.

        After forward start these streams begin where the training's streams stood then: what those
        were given since may hang, and changes nothing that a snapshot has. Before forward start
        they begin after all of the training's work.
        """
        with ExitStack() as apart:
            if self._is_aside:
                self._reserved, self._lent = [], True
                self.enter_thread()
                for each in self.standing:
                    mark = each.mark if self._begun else each.device.mark(each.stream)
                    apart.enter_context(each.device.apart(mark))
            yield

    @contextmanager
    def back_at(self, standing: Sequence[StreamPosition]) -> Iterator[None]:
        """Take this earlier forward start for the last instant, in the body."""
        before = self.standing, self._begun, self._back
        self.standing, self._begun, self._back = tuple(standing), True, True
        try:
            yield
        finally:
            self.standing, self._begun, self._back = before

    @property
    def _is_aside(self) -> bool:
        """True if the copies do not depend on what the calling thread's stream has come to."""
        return self._back or get_ident() != self._thread

    def enter_thread(self) -> None:
        """Make the calling thread ready to use every device; see `Device.enter_thread`."""
        for each in self.standing:
            each.device.enter_thread()

    def marked(
        self, marks: Mapping[tuple[str, Any], DeviceEvent]
    ) -> dict[tuple[str, Any], DeviceEvent]:
        """Return these events, and a new one in each of the thread's streams that has none.

        The new one comes before whatever is queued next; a stream that records a graph gets none.
        """
        found = dict(marks)
        for device in (each.device for each in self.standing):
            stream = device.stream()
            if (device.name, stream) not in found and not device.recording():
                found[device.name, stream] = device.mark(stream)
        return found

    def recording(self, arrangement: CopyPlan) -> bool:
        """Tell whether what is queued now is recorded into a graph."""
        return any(device.recording() for device, _ in _sizes(arrangement).values())

    def queue(
        self,
        flight: InflightSnapshot,
        part: PlannedGroup,
        chosen: CopySources,
        staged: npt.NDArray[np.bool_],
        arrangement: CopyPlan,
    ) -> CopyGroup:
        """Add one group's copies to a snapshot; nothing is copied before `depart`."""
        device = part.device
        assert device is not None
        at, layout = part.positions, flight.writer.layout
        places = layout.offsets[at].tolist(), layout.lengths[at].tolist()
        known = flight.step >= self._prepared + PEAK_STEPS
        own_thread = self._thread in (0, get_ident())
        enough = part.total_bytes >= self.transfers.load_bytes and not staged[at].any()
        if own_thread and enough and self.ways.needs_measuring(device):
            with self.transfers.lend_place() as place:
                self.ways.measure(device, chosen.flats, self.ways.extents(*places), place)
        if self._flight is not flight:
            self._flight, self._rooms = flight, {}
        if device.name not in self._rooms:
            size = _sizes(arrangement)[device.name]
            way, copy = self.ways.choose(*size, ask=known and own_thread)
            if copy is not None and self.copy_taken:
                way, copy = TransferMode.HOST, None
            self._rooms[device.name] = _Room(way, copy)
        room = self._rooms[device.name]
        in_place = self.ways.in_place(device, room.way) and not staged[at].any()
        batch = flight.writer.add_fed(at, staged[at])
        extents = self.ways.extents(*places) if in_place else None
        copy = None
        if room.copy is not None:
            copy = room.copy[room.used : room.used + batch.total_bytes]
            room.used += batch.total_bytes
        snapshot = flight.writer.snapshot
        pieces = self.ways.pieces(device)
        transfer = DeviceTransfer(device, snapshot, batch, chosen.flats, extents, pieces, copy)
        group = CopyGroup(part.holders, batch, chosen, part.owned, transfer)
        flight.groups.append(group)
        return group

    def depart(self, flight: InflightSnapshot) -> None:
        """Start all copies, from where the calling thread's streams are now, at forward start."""
        self._flight, self._rooms, marks = None, {}, {}
        for transfer in flight.transfers:
            device = transfer.device
            if device.name not in marks:
                marks[device.name] = device.mark()
            transfer.begun = marks[device.name]
            if transfer.copy is not None:
                self._copied.append(transfer)
        if flight.transfers:
            self.transfers.depart(flight.transfers)

    def fence(self, group: CopyGroup, *, wait: bool) -> None:
        """Make the calling thread's stream wait for the group's copies before anything more.

        With `wait`, return only when they are done, so that every thread's stream may go on.

        Raises:
            LightckError: the transfer has failed, or that cannot be.
        """
        transfer = group.transfer
        assert transfer is not None
        if group.owned:
            return  # private copies: nothing that the stream does can reach them
        if transfer.device.recording():
            raise LightckError(
                f"{transfer.device.name} records a graph, and an update is marked in it: call"
                " handle.before_update() and after_update() around its replays instead"
            )
        if wait and get_ident() != self._thread:
            transfer.device.enter_thread()
        self.transfers.fence(transfer, wait=wait)

    def arrived(self, flight: InflightSnapshot, timeout_s: float | None) -> bool:
        """Tell, after waiting, whether the pool has read everything.

        Raises:
            LightckError: a transfer has failed.
        """
        return all(self.transfers.arrived(each, timeout_s) for each in flight.transfers)

    def give_up(self, flight: InflightSnapshot) -> None:
        """Return when no copy of a snapshot is under way any more. Blocks; any thread.

        Free the snapshot after that, then call `forget`.
        """
        for transfer in flight.transfers:
            self.transfers.give_up(transfer)

    def forget(self, flight: InflightSnapshot) -> None:
        """Let go of a snapshot's transfers: the pool reads nothing of it any more. Any thread."""
        for transfer in flight.transfers:
            self.transfers.forget(transfer)

    def differs(self, group: CopyGroup) -> int | None:
        """Return the index of the group's first copy that is not of the live bytes, or None.

        Waits for everything, and compares all bytes.

        Raises:
            LightckError: the transfer has failed.
        """
        transfer, sources = group.transfer, group.sources
        assert transfer is not None and sources is not None
        self.transfers.arrived(transfer, None)
        digests = transfer.snapshot.digests(transfer.batch.number, len(sources.flats))
        device, most = transfer.device, self.transfers.load_bytes
        held = device.pinned(most)
        device.follow(transfer.begun if self._is_aside and transfer.begun else device.mark())
        for i, live in enumerate(sources.flats):
            crc = 0
            for piece in live.split(most):
                there = held[: piece.numel()]
                device.copy([there], [piece]).wait()
                crc = crc32c_at(there.data_ptr(), there.numel(), crc)
            if crc != digests[i]:
                return i
        return None

    def close(self) -> None:
        """Let go of what the devices were given; every snapshot has been forgotten. Idempotent."""
        try:
            for device in self._warm.values():
                device.mark()  # does it still answer?
        except LightckError as error:
            self.noted(error)
        self._reserved.clear()
        self.transfers.close(lost=self._failure is not None)
        self.ways.close()


def _reserved(arrangement: CopyPlan) -> list[torch.Tensor]:
    """Allocate memory for one snapshot's private copies, on their devices."""
    found: list[torch.Tensor] = []
    for part in arrangement.parts:
        if part.owned and part.device is not None:
            lengths = [arrangement.entries[i].length for i in part.order]
            found += part.device.reserve(lengths)
    return found


def _sizes(arrangement: CopyPlan) -> dict[str, tuple[Device, int]]:
    """Return every device and the bytes that it holds, by name."""
    found: dict[str, tuple[Device, int]] = {}
    for part in arrangement.parts:
        if part.device is not None:
            _, size = found.get(part.device.name, (part.device, 0))
            found[part.device.name] = part.device, size + part.total_bytes
    return found
