"""Bytes from one rank to another: two-member gloo groups, made for one transfer and then closed.

The job's own groups are not touched: a time-out closes gloo's connections for good, and the job may
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
from lightck.region.native import crc32c_at

CHUNK_BYTES = 8 << 20
MOST_BYTES = 1 << 32
"""Of one message; a head that claims more is none."""
_HEAD = 3  # numbers
_SHORTEST_S = 0.01  # gloo counts milliseconds, and takes none for no limit

Message = tuple[int, torch.Tensor]
"""Kind, and bytes."""


@dataclass(eq=False)
class Channel:
    """One end. Used by one thread; every call blocks, for `seconds` at most without progress."""

    group: Any
    """A process group of two."""
    here: int
    """0 or 1: this end in the group."""
    label: str
    """Names both ranks, for messages."""
    seconds: float

    @classmethod
    def between(
        cls, store: Any, ends: tuple[int, int], rank: int, what: str, seconds: float, until: float
    ) -> Channel:
        """Connect; both ends must, with a store (torch's) of which nobody else uses the keys.

        Args:
            store: see above.
            ends: who gives, and who gets.
            rank: this one of them.
            what: is sent; for messages.
            seconds: see the class.
            until: on the monotonic clock; no connection by then is none.

        Raises:
            CoordinationError: the other end did not come.
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
        """Begin to send a message; give the result to `wait`, and leave the bytes as they are."""
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
        """Until everything was taken from here.

        Raises:
            CoordinationError: nothing was, in time, or the other end is gone.
        """
        for work, _ in works:
            self._wait(work)

    def send(self, kind: int, data: torch.Tensor) -> None:
        """Both."""
        self.wait(self.begin_send(kind, data))

    def receive(self) -> Message:
        """The next message.

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
        """Let go of the connection: an end that still waits gets an error. Idempotent."""
        group, self.group = self.group, None
        if group is not None:
            group.shutdown()


def as_bytes(data: bytes) -> torch.Tensor:
    """For `send`."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
