"""Healing: ranks that lack a snapshot of replicated state receive it from a rank that has it.

    connect -> header -> chunks ... -> end -> every checksum is verified -> copied to live tensors
               or, at any point: failure, and why

`selection.plan_healing` says who sends to whom. The sender verifies its snapshot, then reads its
regions a chunk at a time into one buffer and checks every extent on the way; a chunk is sent to all
receivers before the next one is read. A receiver keeps the chunks in private memory, and trusts
nothing before the end has come and every tensor's checksum holds: nothing live is touched before
all ranks have said that theirs holds. Buffers, generators, extras and data position are not
replicated: the receiver's own are used where its region or journal has them (`LocalState`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.restore.local_state import LocalState, is_complete, joined
from lightck.distributed.restore.selection import Key
from lightck.distributed.sharding import is_own
from lightck.errors import CoordinationError, CorruptSnapshotError, LightckError
from lightck.events import event
from lightck.reader.assembly import AssembledSnapshot, RegionPart, boundary_trees
from lightck.region import layout
from lightck.region.layout import Entry, Layout
from lightck.region.manifest import Manifest
from lightck.region.native_region import Record, crc32c_at, crc32c_combined
from lightck.region.region import Candidate
from lightck.state import tensor_layout

SLOWEST_BYTES_S = 100e6
"""The rate in bytes per second at which a rank is still believed to be reading, or sending."""
CHUNK_BYTES = 8 << 20
HEADER, CHUNK, END, FAILURE = 1, 2, 3, 4
"""The kinds of messages."""


class HealingError(LightckError):
    """A replica from another rank did not come, or is not valid; nothing live has changed."""


# ---- one snapshot's healing, seen from one rank --------------------------------------------------


@dataclass(eq=False)
class Healing:
    """The sending and receiving of one snapshot. Used by the thread that restores."""

    ranks: Rendezvous
    key: Key
    heals: Mapping[int, int]
    """The sending rank of each receiving rank."""
    seconds: float
    """Time to wait for each message; connections together may take half of it."""
    received: ReceivedSnapshot | None = None
    _sender: ReplicaSender | None = None
    _channels: list[P2PChannel] = field(default_factory=list)

    @property
    def is_receiver(self) -> bool:
        """Tell whether this rank is sent the snapshot."""
        return self.ranks.rank in self.heals

    def connect(self) -> None:
        """Connect to each rank that this one sends to, or receives from.

        Raises:
            HealingError: the rank that sends to this one did not connect in time.
        """
        rank, rounds = self.ranks.rank, self.ranks.rounds
        pairs = [(r, donor) for r, donor in sorted(self.heals.items()) if rank in (r, donor)]
        if not pairs:
            return
        assert rounds is not None, "a single rank is not healed"
        # The store is asked first: a receiver that waits for its server waits for no other rank.
        stores = [self.ranks.store.plain(f"heal/{rounds.number}/{d}-{r}") for r, d in pairs]
        # The connections are made one after the other, with one deadline for all, long before any
        # rank's time-out in the round that follows: there the ranks learn of each other's failures,
        # and take an older step.
        until = time.monotonic() + self.seconds / 2
        for (receiver, donor), store in zip(pairs, stores, strict=True):
            what, ends = f"step {self.key.step}", (donor, receiver)
            try:
                channel = P2PChannel.between(store, ends, rank, what, self.seconds, until)
            except CoordinationError as error:
                if rank == receiver:
                    raise HealingError(str(error)) from error
                self._warn(str(error))
                continue
            self._channels.append(channel)

    def receive(self) -> ReceivedSnapshot:
        """Receive the snapshot.

        Raises:
            HealingError: it did not come.
        """
        try:
            self.received = receive(self._channels[0], self.key, self.heals[self.ranks.rank])
        except LightckError as error:
            raise HealingError(str(error)) from error
        return self.received

    def announce(self, snapshot: AssembledSnapshot) -> None:
        """Send the header of this rank's snapshot to the ranks that lack it."""
        if self._channels:
            self._sender = ReplicaSender(snapshot, [*self._channels])
            self._sender.announce()

    def send(self) -> None:
        """Send the snapshot, which is now verified, to the ranks that lack it.

        Raises:
            CorruptSnapshotError, RegionIOError: it cannot be read any more.
        """
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.send()
            for why in sender.lost:
                self._warn(why)

    def __enter__(self) -> Healing:
        """Return it; `connect` is called inside the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close all connections; where the bytes were not sent, tell the receivers why first."""
        if self._sender is not None and isinstance(error, LightckError):
            self._sender.fail(str(error))
        for channel in self._channels:
            channel.close()

    def description(self) -> str:
        """Describe what this rank received, in words; empty if nothing."""
        if self.received is None:
            return ""
        rank, donor, header = self.ranks.rank, self.received.donor, self.received.header
        own = "buffers, generators and data position are its own"
        if self.received.local is None:
            own = f"buffers and data position are those of rank {header.record.rank}, too"
        size = header.payload_bytes
        return f"rank {rank} got {size} bytes of step {self.key.step} from rank {donor}; {own}"

    def _warn(self, why: str) -> None:
        event("not_given", logging.WARNING, step=self.key.step, why=why)


# ---- the header: what a snapshot holds, sent before its bytes ------------------------------------


@dataclass(frozen=True, eq=False)
class ReplicaHeader:
    """The description of a snapshot that is sent before its bytes."""

    record: Record
    at_step: bytes
    """The boundary blob of the step end, as in a manifest; `at_forward` is the other one."""
    at_forward: bytes
    entries: tuple[Entry, ...]
    crcs: tuple[int, ...]
    """The CRC32C of each entry, over all of its bytes."""

    @property
    def payload_bytes(self) -> int:
        """Return the number of bytes that will be sent."""
        return sum(entry.length for entry in self.entries)


def encode_header(state: AssembledSnapshot) -> torch.Tensor:
    """Encode a header: a line of JSON, then the layout table, checksums and both boundary blobs."""
    manifest = state.parts[0].candidate.manifest
    table = layout.encode(state.entries, np.zeros(len(state.entries), np.uint64))
    parts = [table, whole_sums(state).tobytes(), manifest.at_step, manifest.at_forward]
    record = {**asdict(state.record), "share_digest": state.record.share_digest.hex()}
    head = json.dumps({"record": record, "lengths": [len(part) for part in parts]}).encode()
    return _as_tensor(b"".join([head, b"\n", *parts]))


def decode_header(message: torch.Tensor, key: Key, label: str) -> ReplicaHeader:
    """Decode a header, and check it before memory is allocated from it.

    Raises:
        CorruptSnapshotError: it is no header, or of another snapshot.
    """
    try:
        head, _, body = bytes(message.numpy()).partition(b"\n")
        fields, parts, at = json.loads(head), [], 0
        record = fields["record"]
        record = Record(**{**record, "share_digest": bytes.fromhex(record["share_digest"])})
        for length in fields["lengths"]:
            parts.append(body[at : at + length])
            at += length
        if at != len(body):
            raise ValueError(f"{len(body)} bytes, {at} are announced")
        table, sums, at_step, at_forward = parts
        crcs = tuple(map(int, np.frombuffer(sums, np.uint32)))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptSnapshotError(f"{label}: what came is no table: {error!r}") from error
    if Key.of(record) != key:
        raise CorruptSnapshotError(f"{label}: step {record.step} came, of another timeline or job")
    entries = layout.decode(table, context=label).entries
    tensor_layout.check(entries, context=label)
    if len(crcs) != len(entries) or any(e.begin is not None or e.shard for e in entries):
        raise CorruptSnapshotError(f"{label}: {len(crcs)} checksums for {len(entries)} tensors")
    return ReplicaHeader(record, at_step, at_forward, entries, crcs)


def whole_sums(state: AssembledSnapshot) -> npt.NDArray[np.uint32]:
    """Return the CRC32C of each entry's bytes, which may lie in several ranks' parts."""
    sums = np.zeros(len(state.entries), np.uint32)
    columns = [(p.entries, p.begins, p.rows["length"], p.rows["crc"]) for p in state.parts]
    entries, begins, lengths, crcs = map(np.concatenate, zip(*columns, strict=True))
    last = -1
    for row in np.lexsort((begins, entries)):
        i, crc = int(entries[row]), int(crcs[row])
        sums[i] = crc if i != last else crc32c_combined(int(sums[i]), crc, int(lengths[row]))
        last = i
    return sums


# ---- sending -------------------------------------------------------------------------------------


@dataclass(eq=False)
class ReplicaSender:
    """The sending side of one snapshot. Used by one thread."""

    state: AssembledSnapshot
    channels: list[P2PChannel]
    lost: list[str] = field(default_factory=list)
    """Descriptions of receivers that are gone; the others get what they need."""

    def announce(self) -> None:
        """Send the header to every receiver."""
        self._to_all(HEADER, encode_header(self.state))

    def send(self) -> None:
        """Send every byte, read from leased slots.

        Raises:
            CorruptSnapshotError, RegionIOError: the source cannot be read; the receivers are told.
        """
        try:
            for chunk in read_chunks(self.state):
                self._to_all(CHUNK, chunk)
        except LightckError as error:
            self.fail(str(error))
            raise
        self._to_all(END, _as_tensor(b""))

    def fail(self, why: str) -> None:
        """Tell every receiver that nothing more will come, and why."""
        self._to_all(FAILURE, _as_tensor(why.encode("ascii", "replace")[:1000]))

    def _to_all(self, kind: int, data: torch.Tensor) -> None:
        begun = []
        for channel in [*self.channels]:
            with self._dropping(channel):
                begun.append((channel, channel.begin_send(kind, data)))
        for channel, works in begun:
            with self._dropping(channel):
                channel.wait(works)

    @contextlib.contextmanager
    def _dropping(self, channel: P2PChannel) -> Iterator[None]:
        """Drop a receiver that is gone."""
        try:
            yield
        except CoordinationError as error:
            self.lost.append(str(error))
            self.channels.remove(channel)


def read_chunks(state: AssembledSnapshot) -> Iterator[torch.Tensor]:
    """Yield the bytes of all entries, end to end, a chunk at a time in one buffer.

    Raises:
        CorruptSnapshotError: an extent does not match its checksum; the bytes sent of it are
            invalid.
        RegionIOError: the medium cannot read it.
    """
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    filled = 0
    for part, row in _in_order(state):
        extent, done, crc = part.rows[row], 0, 0
        while done < int(extent["length"]):
            size = min(CHUNK_BYTES - filled, int(extent["length"]) - done)
            address = buffer.data_ptr() + filled
            part.region.native.peek(int(extent["offset"]) + done, size, address)
            crc = crc32c_at(address, size, crc)
            done, filled = done + size, filled + size
            if done == int(extent["length"]) and crc != int(extent["crc"]):
                name = state.entries[part.entries[row]].name
                raise CorruptSnapshotError(
                    f"{part.label}: the bytes of {name} do not match their checksum any more"
                )
            if filled == CHUNK_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _in_order(state: AssembledSnapshot) -> list[tuple[RegionPart, int]]:
    rows = [
        (int(entry), int(begin), which, row)
        for which, part in enumerate(state.parts)
        for row, (entry, begin) in enumerate(zip(part.entries, part.begins, strict=True))
    ]
    return [(state.parts[which], row) for _, _, which, row in sorted(rows)]


# ---- receiving -----------------------------------------------------------------------------------


def receive(channel: P2PChannel, key: Key, donor: int) -> ReceivedSnapshot:
    """Receive the whole snapshot into private memory; its checksums are not yet verified.

    Raises:
        CorruptSnapshotError: the donor's source is damaged, or a message is not what was announced.
        CoordinationError: a message did not come, or was changed on the way.
    """
    header = decode_header(_expected(channel, HEADER), key, channel.label)
    found = ReceivedSnapshot(header, None, donor, channel.label)
    usual, size = channel.seconds, 0
    channel.seconds += header.payload_bytes / SLOWEST_BYTES_S  # the donor verifies all of it first
    while True:
        kind, data = channel.receive()
        channel.seconds = usual
        if kind == END and size == header.payload_bytes:
            return found
        _must_be(CHUNK, kind, data, channel)
        size += data.numel()
        if size > header.payload_bytes:
            raise CorruptSnapshotError(f"{channel.label}: more than was announced")
        found.chunks.append(data)


def _expected(channel: P2PChannel, kind: int) -> torch.Tensor:
    found, data = channel.receive()
    _must_be(kind, found, data, channel)
    return data


def _must_be(kind: int, found: int, data: torch.Tensor, channel: P2PChannel) -> None:
    if found == FAILURE:
        why = bytes(data.numpy()).decode("ascii", "replace")
        raise CorruptSnapshotError(f"{channel.label}: {why}")
    if found != kind:
        raise CorruptSnapshotError(f"{channel.label}: a message of kind {found}, expected {kind}")


@dataclass(eq=False)
class ReceivedSnapshot:
    """One rank's state in private memory: replicated tensors received, and its rank-local state.

    It is read as an `AssembledSnapshot` is. Its chunks are freed while it is read, so that the
    state is not in memory twice for long.
    """

    header: ReplicaHeader
    local: LocalState | None
    """The rank-local state; None if the donor's is used instead."""
    donor: int
    label: str
    chunks: list[torch.Tensor | None] = field(default_factory=list)
    """The bytes of all sent entries, end to end, in chunks as they came; None once freed."""
    _freed: int = 0

    def join(self, local: LocalState | None) -> None:
        """Use this rank's own rank-local state, if it fits the received one, else the donor's."""
        self._set_local(local)
        if local is not None and not self._is_complete(local):
            self._set_local(None)

    def _set_local(self, local: LocalState | None) -> None:
        self.local = local
        for cached in ("entries", "index"):
            self.__dict__.pop(cached, None)

    def _is_complete(self, local: LocalState) -> bool:
        """Tell whether the rank's own state fits the received one, and no tensor is missing."""
        try:
            self.trees()
        except LightckError:
            return False
        return is_complete(self.header.entries, self.entries, local)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of every tensor; a tied entry follows the one that it is tied to."""
        return (
            self.header.entries if self.local is None else joined(self.header.entries, self.local)
        )

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the position of each name in `entries`."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    @property
    def in_memory(self) -> Collection[str]:
        """Return the names of all tensors: none is read from a region here."""
        return self.index.keys()

    @property
    def record(self) -> Record:
        """Return the record of the snapshot that the rank-local state is from, or the donor's.

        The donor's is used if this rank has no such state, and, under this rank's number, if the
        state is from the journal.
        """
        if self.local is None:
            return self.header.record
        return self.local.record or replace(self.header.record, rank=self.local.rank)

    @property
    def own_record(self) -> Record | None:
        """Return the record of the snapshot in this rank's own region that its own state is from.

        It is None if there is no own state, or if that is from the journal.
        """
        return self.local.record if self.local is not None else None

    @property
    def early(self) -> bool:
        """Tell whether all of it was finished before forward start."""
        return self.header.record.early

    @property
    def suspect(self) -> bool:
        """Tell whether replicas were found to differ at this snapshot or before."""
        return self.header.record.suspect

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both boundary states, decoded, as `AssembledSnapshot.trees` does."""
        own: LocalState | ReplicaHeader = self.local or self.header
        record, count = self.header.record, len(self.entries)
        manifest = Manifest(record.step, 0, np.zeros(count, np.uint32), own.at_step, own.at_forward)
        table = Layout(self.entries, np.zeros(count, np.uint64))
        return boundary_trees(Candidate(record, table, manifest), self.entries, context=self.label)

    def verify(
        self,
        unowned: npt.NDArray[np.uint64] | None = None,
        done: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Check every received tensor against the checksum that the donor's region has of it.

        Args:
            unowned: as in `AssembledSnapshot.verify`; not used, for the state is in memory already.
            done: as in `AssembledSnapshot.verify`; not used, for nothing is copied yet.

        Raises:
            CorruptSnapshotError: names the tensor and the donor.
        """
        for entry, expected, pieces in self._pieces():
            crc = 0
            for _, address, length in pieces:
                crc = crc32c_at(address, length, crc)
            if crc != expected:
                raise CorruptSnapshotError(
                    f"{self.label}: the bytes of {entry.name} from rank {self.donor} have checksum"
                    f" {crc:08x}, expected {expected:08x}"
                )

    def read(self, addresses: npt.NDArray[np.uint64]) -> None:
        """Copy the state to the given addresses, once: chunks are freed on the way.

        Args:
            addresses: one per entry; an entry with address 0 is left out.
        """
        for entry, tensor in self.local.tensors if self.local is not None else ():
            address = int(addresses[self.index[entry.name]])
            if address and entry.length:
                ctypes.memmove(address, tensor.data_ptr(), entry.length)
        for entry, _, pieces in self._pieces():
            i = self.index.get(entry.name)
            wanted = i is not None and (self.local is None or not is_own(entry))
            at = int(addresses[i]) if i is not None and wanted else 0
            for chunk, address, length in pieces:
                if at:
                    ctypes.memmove(at, address, length)
                    at += length
                while self._freed < chunk:
                    self.chunks[self._freed] = None
                    self._freed += 1

    def _pieces(self) -> Iterator[tuple[Entry, int, Sequence[tuple[int, int, int]]]]:
        """Yield each entry that has bytes, its checksum and its pieces (chunk, address, length)."""
        chunk = used = 0
        for entry, crc in zip(self.header.entries, self.header.crcs, strict=True):
            left, pieces = entry.length, []
            while left:
                data = self.chunks[chunk]
                assert data is not None, "read before"
                size = min(left, data.numel() - used)
                pieces.append((chunk, data.data_ptr() + used, size))
                left, used = left - size, used + size
                if used == data.numel():
                    chunk, used = chunk + 1, 0
            if pieces:
                yield entry, crc, pieces


# ---- bytes from one rank to another, over a gloo group of two ------------------------------------
# The group is made for one transfer. The job's own groups are not used: a time-out closes gloo's
# connections for good, and the job may well run on another back end. A message is a head (kind,
# length, CRC32C) and bytes in host memory.

MOST_BYTES = 1 << 32
"""The longest message in bytes; a head that states more is rejected."""
_HEAD = 3  # numbers in a head
_SHORTEST_S = 0.01  # gloo counts milliseconds, and reads 0 as no limit

Message = tuple[int, torch.Tensor]
"""The kind of a message, and its bytes."""


@dataclass(eq=False)
class P2PChannel:
    """One end of a connection between two ranks.

    Used by one thread. `send`, `wait` and `receive` block, for `seconds` at most without progress.
    """

    group: Any
    """The process group of the two ends."""
    here: int
    """The rank of this end in the group: 0 (the donor) or 1 (the receiver)."""
    label: str
    """A label that names both ranks, for error messages."""
    seconds: float

    @classmethod
    def between(
        cls, store: Any, ends: tuple[int, int], rank: int, what: str, seconds: float, until: float
    ) -> P2PChannel:
        """Connect the two ends; both ranks must call this.

        Args:
            store: a torch store whose keys nobody else uses.
            ends: the rank that sends and the rank that receives.
            rank: this rank, one of the two.
            what: a name for the transfer in error messages.
            seconds: the longest time that a call waits without progress.
            until: deadline for the connection, on the monotonic clock.

        Raises:
            CoordinationError: the other end did not connect in time.
        """
        donor, receiver = ends
        here = int(rank == receiver)
        label = f"{what} from rank {donor} to rank {receiver}"
        began = time.monotonic()
        try:
            left = until - began
            if left < _SHORTEST_S:
                raise ValueError("no time was left, for others did not come either")
            group = dist.ProcessGroupGloo(store, here, 2, timedelta(seconds=left))
        except (RuntimeError, ValueError) as error:
            waited = time.monotonic() - began
            other = donor if here else receiver
            raise CoordinationError(
                f"{label}: no connection after {waited:.1f} s; see whether rank {other} lives, and"
                f" whether this host reaches it (GLOO_SOCKET_IFNAME): {_first_line(error)}"
            ) from error
        return cls(group, here, label, seconds)

    def begin_send(self, kind: int, data: torch.Tensor) -> list[Any]:
        """Start sending a message; pass the result to `wait`, and keep the bytes until then."""
        crc = crc32c_at(data.data_ptr(), data.numel()) if data.numel() else 0
        head = torch.tensor([kind, data.numel(), crc], dtype=torch.int64)
        try:
            works = [(self.group.send([head], 1 - self.here, 0), head)]
            if data.numel():
                works.append((self.group.send([data], 1 - self.here, 0), data))
        except RuntimeError as error:
            raise self._gone(error, 0.0) from error
        return works

    def wait(self, works: list[Any]) -> None:
        """Wait until gloo has taken every byte of these sends.

        Raises:
            CoordinationError: no progress in time, or the other end is gone.
        """
        for work, _ in works:
            self._wait(work)

    def send(self, kind: int, data: torch.Tensor) -> None:
        """Send a message and wait until gloo has taken every byte of it."""
        self.wait(self.begin_send(kind, data))

    def receive(self) -> Message:
        """Receive the next message.

        Raises:
            CoordinationError: none came in time, the other end is gone, or the bytes are not those
                that were sent.
        """
        head = torch.zeros(_HEAD, dtype=torch.int64)
        self._receive(head)
        kind, length, crc = head.tolist()
        if not 0 <= length <= MOST_BYTES:
            raise CoordinationError(f"{self.label}: a message of {length} bytes is none of ours")
        data = torch.empty(length, dtype=torch.uint8)
        if length:
            self._receive(data)
        found = crc32c_at(data.data_ptr(), length) if length else 0
        if found != crc:
            raise CoordinationError(
                f"{self.label}: {length} bytes came with checksum {found:08x}, expected {crc:08x}:"
                " they were changed on the way"
            )
        return kind, data

    def _receive(self, tensor: torch.Tensor) -> None:
        try:
            work = self.group.recv([tensor], 1 - self.here, 0)
        except RuntimeError as error:
            raise self._gone(error, 0.0) from error
        self._wait(work)

    def _wait(self, work: Any) -> None:
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            raise self._gone(error, time.monotonic() - began) from error

    def _gone(self, error: Exception, waited: float) -> CoordinationError:
        return CoordinationError(
            f"{self.label}: no progress after {waited:.1f} s of {self.seconds:.0f} s; the other"
            f" rank died, failed or is too slow: {_first_line(error)}"
        )

    def close(self) -> None:
        """Close the connection; the other end, if it still waits, gets an error. Idempotent."""
        group, self.group = self.group, None
        if group is not None:
            group.shutdown()


def _as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes into a tensor that `send` accepts."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
