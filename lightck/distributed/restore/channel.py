"""Transfer of bytes from one rank to another, over a gloo group of two made for one transfer.

The job's own groups are not used: a time-out closes gloo's connections for good, and the job may
well run on another back end. A message is a head (kind, length, CRC32C) and bytes in host memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightck.errors import CoordinationError
from lightck.region.native_region import crc32c_at

CHUNK_BYTES = 8 << 20
MOST_BYTES = 1 << 32
"""The longest message in bytes; a head that states more is rejected."""
_HEAD = 3  # numbers in a head
_SHORTEST_S = 0.01  # gloo counts milliseconds, and reads 0 as no limit

Message = tuple[int, torch.Tensor]
"""The kind of a message, and its bytes."""


@dataclass(eq=False)
class Channel:
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
    ) -> Channel:
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
