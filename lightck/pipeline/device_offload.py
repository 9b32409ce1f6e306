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
from lightck.region.native_region import crc32c_at
from lightck.region.slot_writer import SlotWriter

PEAK_STEPS = 1
"""Steps to wait, from when all optimizer state exists, until training's peak on a device is
known."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position of the training thread's stream on a device at an instant, as an event."""

    device: Device
    stream: Any
    event: DeviceEvent


@dataclass(eq=False)
class _Room:
    """One device's part of one snapshot: its transfer mode, and room in spare memory."""

    mode: TransferMode
    copy: torch.Tensor | None
    """The room in the device's spare memory, for all groups; None: there is none."""
    used: int = 0


@dataclass(eq=False)
class DeviceOffload:
    """Moves the tensors that devices hold into the region, and owns what does so.

    Used by the training thread, or by others under the checkpointer's lock.
    """

    placement: DevicePlacement
    engine: TransferEngine
    _writer: SlotWriter | None = None
    """The writer of the snapshot whose copies are being queued."""
    _rooms: dict[str, _Room] = field(default_factory=dict)
    """Each device's part of that snapshot, by the device's name."""
    _copied: list[DeviceTransfer] = field(default_factory=list)
    """The transfers that use devices' spare memory."""
    stream_positions: tuple[StreamPosition, ...] = ()
    """The streams' positions at the last instant."""
    _at_forward: bool = False
    """True if the last instant was forward start (else step end)."""
    _is_earlier: bool = False
    """True if `stream_positions` is of an earlier forward start, as `as_of` sets it."""
    _prepared: int = 0
    """The step at whose end `prepare` was called."""
    _thread: int = 0
    _loaded: dict[str, Device] = field(default_factory=dict)
    """The devices that have loaded what they need, by name."""
    _reserve: list[torch.Tensor] = field(default_factory=list)
    """Memory that is freed when another thread makes private copies, so that it finds room then."""
    _want_reserve: bool = True
    """True if `_reserve` is to be allocated at the next instant."""
    failure: DeviceError | None = None
    """The first error of a device; from then on the content of its memory is not trusted."""

    @property
    def spare_in_use(self) -> bool:
        """Tell whether spare memory still holds bytes of an earlier snapshot."""
        self._copied = [each for each in self._copied if not each.fed.is_set()]
        return bool(self._copied)

    @property
    def is_reached(self) -> bool:
        """Tell whether devices have done what the training thread had queued at the last instant.

        Raises:
            DeviceError: one has failed.
        """
        return all(each.event.query() for each in self.stream_positions)

    def prepare(self, plan: CopyPlan, step: int) -> None:
        """Choose each device's transfer mode at the end of a step; may take a second.

        Loading, pinning and registering are all done here, because later they might wait for a
        device that hangs. Spare memory is asked for during training, once the peak of another step
        is known. An error is raised when a snapshot is made.
        """
        self._want_reserve, self._prepared = True, step
        for device, size in plan.devices.values():
            try:
                mode, _ = self.placement.choose(device, size, ask=False)
                if device.name not in self._loaded:
                    self._loaded[device.name] = device
                    device.preload()
                if self.placement.needs_measuring(device) or not self.placement.in_place(
                    device, mode
                ):
                    self.engine.reserve(device)
            except LightckError as error:  # told by whoever makes a snapshot
                self.keep_error(error)

    def keep_error(self, error: BaseException) -> None:
        """Keep the first error of a device; no device is asked for anything again after it."""
        if self.failure is None and isinstance(error, DeviceError):
            self.failure = error

    def note_streams(self, plan: CopyPlan, *, at_forward: bool) -> None:
        """Note that the training thread is at forward start, or else at step end.

        A thread that saves just in time starts from there: see `side_streams`.
        """
        self._thread = get_ident()
        try:
            devices = [device for device, _ in plan.devices.values()]
            positions = (StreamPosition(d, d.stream(), d.record_event()) for d in devices)
            self._at_forward, self.stream_positions = at_forward, tuple(positions)
            if self._want_reserve:
                self._want_reserve = False
                self._reserve = _allocate_reserve(plan)
        except LightckError as error:  # told by whoever makes a snapshot
            self.keep_error(error)

    @contextmanager
    def side_streams(self) -> Iterator[None]:
        """Let another thread than the training thread queue to streams of its own, in the body.

        After forward start these streams begin where the training's streams stood then: what those
        were given since may hang, and changes nothing that a snapshot has. Before forward start
        they begin after all of the training's work.
        """
        with ExitStack() as streams:
            if self._on_side_streams:
                self._reserve, self._want_reserve = [], True
                self.enter_thread()
                for each in self.stream_positions:
                    event = (
                        each.event if self._at_forward else each.device.record_event(each.stream)
                    )
                    streams.enter_context(each.device.side_stream(event))
            yield

    @contextmanager
    def as_of(self, positions: Sequence[StreamPosition]) -> Iterator[None]:
        """Take this earlier forward start for the last instant, in the body."""
        before = self.stream_positions, self._at_forward, self._is_earlier
        self.stream_positions, self._at_forward, self._is_earlier = tuple(positions), True, True
        try:
            yield
        finally:
            self.stream_positions, self._at_forward, self._is_earlier = before

    @property
    def _on_side_streams(self) -> bool:
        """True if the copies do not depend on what the calling thread's stream has come to."""
        return self._is_earlier or get_ident() != self._thread

    def enter_thread(self) -> None:
        """Make the calling thread ready to use every device; see `Device.enter_thread`."""
        for each in self.stream_positions:
            each.device.enter_thread()

    def mark_streams(
        self, events: Mapping[tuple[str, Any], DeviceEvent]
    ) -> dict[tuple[str, Any], DeviceEvent]:
        """Return these events, and a new one in each of the thread's streams that has none.

        The new one comes before whatever is queued next; a stream that records a graph gets none.
        """
        found = dict(events)
        for device in (each.device for each in self.stream_positions):
            stream = device.stream()
            if (device.name, stream) not in found and not device.recording():
                found[device.name, stream] = device.record_event(stream)
        return found

    def recording(self, plan: CopyPlan) -> bool:
        """Tell whether what is queued now is recorded into a graph."""
        return any(device.recording() for device, _ in plan.devices.values())

    def queue(
        self,
        step: int,
        writer: SlotWriter,
        group: PlannedGroup,
        chosen: CopySources,
        staged: npt.NDArray[np.bool_],
        plan: CopyPlan,
    ) -> DeviceTransfer:
        """Add one group's copies to the snapshot of `step`; nothing is copied before `start`."""
        device = group.device
        assert device is not None
        at, layout = group.positions, writer.layout
        places = layout.offsets[at].tolist(), layout.lengths[at].tolist()
        known = step >= self._prepared + PEAK_STEPS
        own_thread = self._thread in (0, get_ident())
        enough = group.total_bytes >= self.engine.chunk_bytes and not staged[at].any()
        if own_thread and enough and self.placement.needs_measuring(device):
            with self.engine.lend_place() as place:
                self.placement.measure(device, chosen.flats, self.placement.extents(*places), place)
        if self._writer is not writer:
            self._writer, self._rooms = writer, {}
        if device.name not in self._rooms:
            size = plan.devices[device.name]
            mode, copy = self.placement.choose(*size, ask=known and own_thread)
            if copy is not None and self.spare_in_use:
                mode, copy = TransferMode.HOST, None
            self._rooms[device.name] = _Room(mode, copy)
        room = self._rooms[device.name]
        in_place = self.placement.in_place(device, room.mode) and not staged[at].any()
        batch = writer.add_fed(at, staged[at])
        extents = self.placement.extents(*places) if in_place else None
        copy = None
        if room.copy is not None:
            copy = room.copy[room.used : room.used + batch.total_bytes]
            room.used += batch.total_bytes
        pieces = self.placement.pieces(device)
        return DeviceTransfer(
            device, writer.snapshot, batch, chosen.flats, extents, pieces, spare=copy
        )

    def start(self, transfers: Sequence[DeviceTransfer]) -> None:
        """Start all copies, from where the calling thread's streams are now, at forward start."""
        self._writer, self._rooms, events = None, {}, {}
        for transfer in transfers:
            device = transfer.device
            if device.name not in events:
                events[device.name] = device.record_event()
            transfer.begin(events[device.name])
            if transfer.spare is not None:
                self._copied.append(transfer)
        self.engine.start(transfers)

    def fence(self, transfer: DeviceTransfer, *, wait: bool) -> None:
        """Make the calling thread's stream wait for the copies before anything more.

        With `wait`, return only when they are done, so that every thread's stream may go on.

        Raises:
            LightckError: the transfer has failed, or that cannot be.
        """
        if transfer.device.recording():
            raise LightckError(
                f"{transfer.device.name} records a graph, and an update is marked in it: call"
                " handle.before_update() and after_update() around its replays instead"
            )
        if wait and get_ident() != self._thread:
            transfer.device.enter_thread()
        self.engine.fence(transfer, wait=wait)

    def arrived(self, transfers: Sequence[DeviceTransfer], timeout_s: float | None) -> bool:
        """Tell, after waiting, whether the pool has read everything.

        Raises:
            LightckError: a transfer has failed.
        """
        return all(self.engine.arrived(each, timeout_s) for each in transfers)

    def differs(self, transfer: DeviceTransfer, sources: CopySources) -> int | None:
        """Return the index of the first copy that is not of the live bytes, or None.

        Waits for everything, and compares all bytes.

        Raises:
            LightckError: the transfer has failed.
        """
        self.engine.arrived(transfer, None)
        digests = transfer.snapshot.digests(transfer.batch.number, len(sources.flats))
        device, most = transfer.device, self.engine.chunk_bytes
        held = device.pinned(most)
        begun = transfer.start_event if self._on_side_streams else None
        device.copy_stream_wait(begun or device.record_event())
        for i, live in enumerate(sources.flats):
            crc = 0
            for piece in live.split(most):
                there = held[: piece.numel()]
                device.copy([there], [piece]).synchronize()
                crc = crc32c_at(there.data_ptr(), there.numel(), crc)
            if crc != digests[i]:
                return i
        return None

    def close(self) -> None:
        """Let go of what the devices were given; every snapshot has been forgotten. Idempotent."""
        try:
            for device in self._loaded.values():
                device.record_event()  # does it still answer?
        except LightckError as error:
            self.keep_error(error)
        self._reserve.clear()
        self.engine.close(lost=self.failure is not None)
        self.placement.close()


def _allocate_reserve(plan: CopyPlan) -> list[torch.Tensor]:
    """Allocate memory for one snapshot's private copies, on their devices."""
    found: list[torch.Tensor] = []
    for group in plan.groups:
        if group.is_private and group.device is not None:
            lengths = [plan.entries[i].length for i in group.order]
            found += group.device.reserve(lengths)
    return found
