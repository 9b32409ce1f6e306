"""A pipeline moves devices' tensors, from forward start until the pool has their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.capture.arrange import Arrangement, Part, Sources, sources
from lightck.capture.device import Device, Mark
from lightck.capture.flight import Flight, Group
from lightck.capture.transfer import Transfer, Way, took
from lightck.capture.transfers import Transfers
from lightck.capture.ways import Ways
from lightck.errors import DeviceError, LightckError
from lightck.region.native import crc32c_at

PEAK_STEPS = 1
"""Beside all of the optimizers' state, until the training's peak on a device is known."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the training thread's stream on a device stood at an instant."""

    device: Device
    stream: Any
    mark: Mark


@dataclass(eq=False)
class _Room:
    """One device's part of one flight."""

    way: Way
    copy: torch.Tensor | None
    """In the device's spare memory, for all groups."""
    used: int = 0


@dataclass(eq=False)
class Offload:
    """Used by the training thread, or under the recorder's lock; owns what moves the bytes."""

    ways: Ways
    transfers: Transfers
    _flight: Flight | None = None
    """The one that is being put together."""
    _rooms: dict[str, _Room] = field(default_factory=dict)
    """By device, of that one."""
    _copied: list[Transfer] = field(default_factory=list)
    """Those that use devices' spare memory."""
    standing: tuple[Standing, ...] = ()
    """At the last instant."""
    _begun: bool = False
    """The last instant was forward start."""
    _back: bool = False
    """It is an earlier one, see `back_at`."""
    _prepared: int = 0
    """The step at whose end that was."""
    _thread: int = 0
    _warm: dict[str, Device] = field(default_factory=dict)
    """Devices that have loaded what they need."""
    _reserved: list[torch.Tensor] = field(default_factory=list)
    """Let go of when another thread makes private copies, which find it then."""
    _lent: bool = True
    """It is to be asked for."""
    _failure: DeviceError | None = None
    """Of a device, the first: what its memory holds is not trusted any more."""

    @property
    def copy_taken(self) -> bool:
        """Spare memory still holds bytes of an earlier flight."""
        self._copied = [each for each in self._copied if not each.fed.is_set()]
        return bool(self._copied)

    @property
    def has_come(self) -> bool:
        """Devices have done what the training thread had queued at the last instant.

        Raises:
            DeviceError: one has failed.
        """
        return all(each.mark.passed() for each in self.standing)

    def prepare(self, arrangement: Arrangement, step: int) -> None:
        """Find the way now, where a step has ended, which may take a second; said beforehand.

        Nothing is loaded, pinned or registered then where a device may hang: all that waits for it.
        Spare memory is asked for by training, once the peak of another step is known.
        """
        self._lent, self._prepared = True, step
        for device, size in _sizes(arrangement).values():
            try:
                way, _ = self.ways.choose(device, size, ask=False)
                if device.name not in self._warm:
                    self._warm[device.name] = device
                    device.warm()
                judged = self.ways.judged(device)
                if judged or not self.ways.in_place(device, way):
                    self.transfers.reserve(device)
                if judged:
                    self.ways.measure(device, _live(arrangement, device), self.transfers.load_bytes)
            except LightckError as error:  # told by whoever makes a snapshot
                self.noted(error)

    def check(self) -> None:
        """Raise what a device has failed with."""
        if self._failure is not None:
            raise self._failure

    def noted(self, error: BaseException) -> None:
        """Keep it, if it is of a device; none is asked for anything again."""
        if self._failure is None and isinstance(error, DeviceError):
            self._failure = error

    def stand(self, arrangement: Arrangement, *, begun: bool) -> None:
        """Note that the training thread is at step end or, if `begun`, at forward start.

        For who saves just in time, on another thread: see `aside`.
        """
        self._thread = get_ident()
        try:
            self._begun, self.standing = (
                begun,
                tuple(
                    Standing(device, device.stream(), device.mark())
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
        """Inside, another thread than the training's queues to streams of its own.

        From forward start on these begin where the training's streams stood there: what those were
        given since may hang, and changes nothing that a snapshot has. Before, behind all of it.
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
    def back_at(self, standing: Sequence[Standing]) -> Iterator[None]:
        """Inside, take this earlier forward start for the last instant."""
        before = self.standing, self._begun, self._back
        self.standing, self._begun, self._back = tuple(standing), True, True
        try:
            yield
        finally:
            self.standing, self._begun, self._back = before

    @property
    def _is_aside(self) -> bool:
        """What the calling thread's stream comes to says nothing of what is copied."""
        return self._back or get_ident() != self._thread

    def enter_thread(self) -> None:
        """See `Device`; of all of them."""
        for each in self.standing:
            each.device.enter_thread()

    def marked(self, marks: Mapping[tuple[str, Any], Mark]) -> dict[tuple[str, Any], Mark]:
        """Those, and one in each of the thread's streams that has none: before what comes next."""
        found = dict(marks)
        for device in (each.device for each in self.standing):
            stream = device.stream()
            if (device.name, stream) not in found and not device.recording():
                found[device.name, stream] = device.mark(stream)
        return found

    def recording(self, arrangement: Arrangement) -> bool:
        """What is queued now goes into a graph."""
        return any(device.recording() for device, _ in _sizes(arrangement).values())

    def queue(
        self,
        flight: Flight,
        part: Part,
        chosen: Sources,
        staged: npt.NDArray[np.bool_],
        arrangement: Arrangement,
    ) -> Group:
        """Add a part's copies to a flight; nothing is copied before `depart`."""
        device = part.device
        assert device is not None
        if self._flight is not flight:
            self._flight, self._rooms = flight, {}
        if device.name not in self._rooms:
            known = flight.step >= self._prepared + PEAK_STEPS
            ask = known and self._thread in (0, get_ident())
            way, copy = self.ways.choose(*_sizes(arrangement)[device.name], ask=ask)
            if copy is not None and self.copy_taken:
                way, copy = Way.HOST, None
            self._rooms[device.name] = _Room(way, copy)
        room, at, layout = self._rooms[device.name], part.positions, flight.writer.layout
        in_place = self.ways.in_place(device, room.way) and not staged[at].any()
        batch = flight.writer.add_fed(at, staged[at])
        extents = None
        if in_place:
            extents = self.ways.extents(layout.offsets[at].tolist(), layout.lengths[at].tolist())
        copy = None
        if room.copy is not None:
            copy = room.copy[room.used : room.used + batch.total_bytes]
            room.used += batch.total_bytes
        snapshot = flight.writer.snapshot
        pieces = self.ways.pieces(device)
        transfer = Transfer(device, snapshot, batch, chosen.flats, extents, pieces, copy)
        group = Group(part.holders, batch, chosen, part.owned, transfer)
        flight.groups.append(group)
        return group

    def depart(self, flight: Flight) -> None:
        """Start everything from what the calling thread's streams have now, at forward start."""
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

    def fence(self, group: Group, *, wait: bool) -> None:
        """What the calling thread's stream does from now on comes after the group's copies.

        With `wait`, that of every thread.

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

    def arrived(self, flight: Flight, timeout_s: float | None) -> bool:
        """Whether the pool has read everything, after waiting.

        Raises:
            LightckError: a transfer has failed.
        """
        there = all(self.transfers.arrived(each, timeout_s) for each in flight.transfers)
        if there:
            self._learn(flight)
        return there

    def _learn(self, flight: Flight) -> None:
        """What the way of each device has cost, if enough of its bytes were seen arriving."""
        ran: dict[str, list[list[Transfer]]] = {}
        for name, run in groupby(flight.transfers, lambda each: each.device.name):
            ran.setdefault(name, []).append(list(run))
        for runs in ran.values():
            sizes, seconds = zip(*map(took, runs), strict=True)
            of_it = [each for run in runs for each in run]
            if 0 < sum(each.starts[-1] for each in of_it) <= 2 * sum(sizes):
                in_place = all(each.in_place for each in of_it)
                self.ways.paid(of_it[0].device, sum(seconds) / sum(sizes), in_place=in_place)

    def give_up(self, flight: Flight) -> None:
        """Let no copy be under way any more. Blocks; any thread. Then free, then `forget`."""
        for transfer in flight.transfers:
            self.transfers.give_up(transfer)

    def forget(self, flight: Flight) -> None:
        """The pool reads nothing of it any more. Any thread."""
        for transfer in flight.transfers:
            self.transfers.forget(transfer)

    def differs(self, group: Group) -> int | None:
        """Which copy of the group is not of the live bytes; everything is waited for and compared.

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
        """Every flight has been forgotten. Idempotent."""
        try:
            for device in self._warm.values():
                device.mark()  # does it still answer?
        except LightckError as error:
            self.noted(error)
        self._reserved.clear()
        self.transfers.close(lost=self._failure is not None)
        self.ways.close()


def _reserved(arrangement: Arrangement) -> list[torch.Tensor]:
    """Memory for the private copies of one snapshot, on their devices."""
    found: list[torch.Tensor] = []
    for part in arrangement.parts:
        if part.owned and part.device is not None:
            lengths = [arrangement.entries[i].length for i in part.order]
            found += part.device.reserve(lengths)
    return found


def _live(arrangement: Arrangement, device: Device) -> list[torch.Tensor]:
    """Bytes of tensors on a device, to be looked at at once."""
    found: list[torch.Tensor] = []
    for part in arrangement.parts:
        if part.device is device and not part.owned:
            before = part.last
            found += sources(part, arrangement).flats
            part.last = before  # else it would hold memory that the loop has let go of
    return found


def _sizes(arrangement: Arrangement) -> dict[str, tuple[Device, int]]:
    """By name, every device and the bytes that it holds."""
    found: dict[str, tuple[Device, int]] = {}
    for part in arrangement.parts:
        if part.device is not None:
            _, size = found.get(part.device.name, (part.device, 0))
            found[part.device.name] = part.device, size + part.total_bytes
    return found
