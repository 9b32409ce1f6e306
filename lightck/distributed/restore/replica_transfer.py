"""Transfer of replicated state from one rank to others: the donor's side and the receiver's.

    table -> chunks ... -> end          or, at any point: failure, and why

The donor reads its regions a chunk at a time, into one buffer, and verifies every extent on the
way; a chunk is sent to all receivers before the next one is read. A receiver keeps the chunks in
private memory, and trusts nothing before the end has come and every tensor's checksum holds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightck.distributed.restore.offers import Key
from lightck.distributed.restore.received_snapshot import ReceivedSnapshot, ReplicaHeader
from lightck.errors import CoordinationError, CorruptSnapshotError, LightckError
from lightck.reader.assembly import AssembledSnapshot, RegionPart
from lightck.region import layout
from lightck.region.native_region import Record, crc32c_at, crc32c_combined
from lightck.state import tensor_layout

# ---- bytes from one rank to another, over a gloo group of two ------------------------------------
# The group is made for one transfer. The job's own groups are not used: a time-out closes gloo's
# connections for good, and the job may well run on another back end. A message is a head (kind,
# length, CRC32C) and bytes in host memory.

CHUNK_BYTES = 8 << 20
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


def as_bytes(data: bytes) -> torch.Tensor:
    """Copy bytes into a tensor that `send` accepts."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


# ---- replicated state as messages: the donor's side and the receiver's ---------------------------

TABLE, CHUNK, END, FAILURE = 1, 2, 3, 4


def described(state: AssembledSnapshot) -> list[torch.Tensor]:
    """Encode the table as two messages: a JSON head, and the layout table, checksums and blobs.

    The blobs are those of both boundary states.
    """
    candidate = state.parts[0].candidate
    table = layout.encode(state.entries, np.zeros(len(state.entries), np.uint64))
    record = {**asdict(state.record), "share_digest": state.record.share_digest.hex()}
    blobs = (candidate.manifest.at_step, candidate.manifest.at_forward)
    parts = [table, whole_sums(state).tobytes(), *blobs]
    head = json.dumps({"record": record, "lengths": [len(part) for part in parts]}).encode()
    return [as_bytes(head), as_bytes(b"".join(parts))]


def whole_sums(state: AssembledSnapshot) -> npt.NDArray[np.uint32]:
    """Return the CRC32C of each entry's bytes, which may lie in several ranks' parts."""
    sums = np.zeros(len(state.entries), np.uint32)
    held = [(p.entries, p.begins, p.rows["length"], p.rows["crc"]) for p in state.parts]
    entries, begins, lengths, crcs = map(np.concatenate, zip(*held, strict=True))
    last = -1
    for row in np.lexsort((begins, entries)):
        i, crc = int(entries[row]), int(crcs[row])
        sums[i] = crc if i != last else crc32c_combined(int(sums[i]), crc, int(lengths[row]))
        last = i
    return sums


def understood(head: torch.Tensor, body: torch.Tensor, key: Key, label: str) -> ReplicaHeader:
    """Decode a table, the inverse of `described`; check it before memory is allocated from it.

    Raises:
        CorruptSnapshotError: it is no such table, or of another snapshot.
    """
    try:
        said = json.loads(bytes(head.numpy()))
        record = said["record"]
        record = Record(**{**record, "share_digest": bytes.fromhex(record["share_digest"])})
        data, pieces, at = bytes(body.numpy()), [], 0
        for length in said["lengths"]:
            pieces.append(data[at : at + length])
            at += length
        table, sums, at_step, at_forward = pieces
        crcs = tuple(map(int, np.frombuffer(sums, np.uint32)))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptSnapshotError(f"{label}: what came is no table: {error!r}") from error
    if Key(record.timeline, record.step, record.world) != key:
        raise CorruptSnapshotError(f"{label}: step {record.step} came, of another timeline or job")
    entries = layout.decode(table, context=label).entries
    tensor_layout.check(entries, context=label)
    if len(crcs) != len(entries) or any(e.begin is not None or e.shard for e in entries):
        raise CorruptSnapshotError(f"{label}: {len(crcs)} checksums for {len(entries)} tensors")
    return ReplicaHeader(record, at_step, at_forward, entries, crcs)


@dataclass(eq=False)
class ReplicaSender:
    """The donor's side of a transfer. Used by one thread."""

    state: AssembledSnapshot
    channels: list[P2PChannel]
    lost: list[str] = field(default_factory=list)
    """Descriptions of receivers that are gone; the others get what they need."""

    def announce(self) -> None:
        """Send the table to every receiver."""
        for part in described(self.state):
            self._to_all(TABLE, part)

    def send(self) -> int:
        """Send every byte, read from leased slots; return how many.

        Raises:
            CorruptSnapshotError, RegionIOError: the source cannot be read; the receivers are told.
        """
        sent = 0
        try:
            for chunk in stream(self.state):
                self._to_all(CHUNK, chunk)
                sent += chunk.numel()
        except LightckError as error:
            self.fail(str(error))
            raise
        self._to_all(END, as_bytes(b""))
        return sent

    def fail(self, why: str) -> None:
        """Tell every receiver that nothing more will come, and why."""
        self._to_all(FAILURE, as_bytes(why.encode("ascii", "replace")[:1000]))

    def _to_all(self, kind: int, data: torch.Tensor) -> None:
        begun = []
        for channel in [*self.channels]:
            with self._losing(channel):
                begun.append((channel, channel.begin_send(kind, data)))
        for channel, works in begun:
            with self._losing(channel):
                channel.wait(works)

    @contextlib.contextmanager
    def _losing(self, channel: P2PChannel) -> Iterator[None]:
        try:
            yield
        except CoordinationError as error:
            self.lost.append(str(error))
            self.channels.remove(channel)


def stream(state: AssembledSnapshot) -> Iterator[torch.Tensor]:
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
            take = min(CHUNK_BYTES - filled, int(extent["length"]) - done)
            address = buffer.data_ptr() + filled
            part.region.native.peek(int(extent["offset"]) + done, take, address)
            crc = crc32c_at(address, take, crc)
            done, filled = done + take, filled + take
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


def receive(channel: P2PChannel, key: Key, donor: int, slow_bytes_s: float) -> ReceivedSnapshot:
    """Receive the whole snapshot into private memory; its checksums are not yet verified.

    Raises:
        CorruptSnapshotError: the donor's source is damaged, or a message is not what was announced.
        CoordinationError: a message did not come, or was changed on the way.
    """
    given = understood(_table(channel), _table(channel), key, channel.label)
    found = ReceivedSnapshot(given, None, donor, channel.label)
    usual, came = channel.seconds, 0
    channel.seconds += given.payload_bytes / slow_bytes_s  # the donor verifies all of it first
    while True:
        kind, data = channel.receive()
        channel.seconds = usual
        if kind == END and came == given.payload_bytes:
            return found
        _expect(kind, CHUNK, data, channel)
        came += data.numel()
        if came > given.payload_bytes:
            raise CorruptSnapshotError(f"{channel.label}: more than was announced")
        found.chunks.append(data)


def _table(channel: P2PChannel) -> torch.Tensor:
    kind, data = channel.receive()
    _expect(kind, TABLE, data, channel)
    return data


def _expect(kind: int, wanted: int, data: torch.Tensor, channel: P2PChannel) -> None:
    if kind == FAILURE:
        why = bytes(data.numpy()).decode("ascii", "replace")
        raise CorruptSnapshotError(f"{channel.label}: {why}")
    if kind != wanted:
        raise CorruptSnapshotError(f"{channel.label}: a message of kind {kind}, expected {wanted}")
