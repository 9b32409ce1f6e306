"""A snapshot received from another rank is an `AssembledSnapshot` in private memory.

Nothing live is touched before all of it has come and every checksum holds. Its chunks are freed
while it is read, so that the state is not in memory twice for long.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.distributed.restore.local_state import LocalState
from lightck.distributed.sharding import is_own
from lightck.errors import CorruptSnapshotError
from lightck.reader import validation
from lightck.region.layout import Entry, Layout
from lightck.region.manifest import Manifest
from lightck.region.native_region import Record, crc32c_at
from lightck.region.region import Candidate


@dataclass(frozen=True, eq=False)
class ReplicaHeader:
    """The description of a snapshot that a donor sends before its bytes."""

    record: Record
    at_step: bytes
    at_forward: bytes
    entries: tuple[Entry, ...]
    crcs: tuple[int, ...]
    """The CRC32C of each entry, over all of its bytes."""

    @property
    def payload_bytes(self) -> int:
        """Return the number of bytes that will be sent."""
        return sum(entry.length for entry in self.entries)


@dataclass(eq=False)
class ReceivedSnapshot:
    """The state of one rank: replicated tensors from another rank, and its own rank-local state."""

    given: ReplicaHeader
    half: LocalState | None
    """The rank-local state; None if the other rank's is used instead."""
    donor: int
    label: str
    chunks: list[torch.Tensor | None] = field(default_factory=list)
    """The bytes of all sent entries, end to end, in chunks as they came; None once freed."""
    _freed: int = 0

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of every tensor; a tied entry follows the one that it is tied to."""
        if self.half is None:
            return self.given.entries
        shared = [e for e in self.given.entries if not is_own(e)]
        held = [*shared, *(entry for entry, _ in self.half.tensors)]
        ties = self._ties({e.name: e for e in held}) if self.half.ties is None else self.half.ties
        return (*held, *ties)

    def _ties(self, held: dict[str, Entry]) -> tuple[Entry, ...]:
        """Return the donor's ties to tensors of this rank, in the form that these have here."""
        return tuple(
            replace(
                held[e.alias_of],
                name=e.name,
                role=e.role,
                layer=e.layer,
                length=0,
                alias_of=e.alias_of,
            )
            for e in self.given.entries
            if e.alias_of in held and e.name not in held
        )

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the position of each name in `entries`."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    def drop_half(self) -> None:
        """Discard this rank's own state and use the other rank's instead."""
        self.half = None
        for cached in ("entries", "index"):
            self.__dict__.pop(cached, None)

    @property
    def record(self) -> Record:
        """Return the record of the snapshot that the rank-local state is from, or the donor's.

        The donor's is used if this rank has no such state, and, under this rank's number, if the
        state is from the journal.
        """
        if self.half is None:
            return self.given.record
        return self.half.record or replace(self.given.record, rank=self.half.rank)

    @property
    def kept(self) -> Record | None:
        """Return the record of the snapshot in this rank's own region that its own state is from.

        It is None if there is no own state, or if that is from the journal.
        """
        return self.half.record if self.half is not None else None

    @property
    def early(self) -> bool:
        """Tell whether all of it was finished before forward start."""
        return self.given.record.early

    @property
    def suspect(self) -> bool:
        """Tell whether replicas were found to differ at this snapshot or before."""
        return self.given.record.suspect

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both boundary states, decoded, as `AssembledSnapshot.trees` does."""
        own: LocalState | ReplicaHeader = self.half or self.given
        step, nothing = self.given.record.step, np.zeros(len(self.entries), np.uint32)
        said = Manifest(step, 0, nothing, own.at_step, own.at_forward)
        layout = Layout(self.entries, np.zeros(len(self.entries), np.uint64))
        found = Candidate(self.given.record, layout, said)
        return validation.read(found, self.entries, context=self.label)

    @contextlib.contextmanager
    def leased(self) -> Iterator[contextlib.ExitStack]:
        """Do nothing, unlike `AssembledSnapshot.leased`: the state is in memory already."""
        with contextlib.ExitStack() as held:
            yield held

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
        for entry, expected, pieces in self._laid_out():
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
        for entry, tensor in self.half.tensors if self.half is not None else ():
            address = int(addresses[self.index[entry.name]])
            if address and entry.length:
                ctypes.memmove(address, tensor.data_ptr(), entry.length)
        for entry, _, pieces in self._laid_out():
            i = self.index.get(entry.name)
            wanted = i is not None and (self.half is None or not is_own(entry))
            at = int(addresses[i]) if i is not None and wanted else 0
            for chunk, address, length in pieces:
                if at:
                    ctypes.memmove(at, address, length)
                    at += length
                while self._freed < chunk:
                    self.chunks[self._freed] = None
                    self._freed += 1

    def _laid_out(self) -> Iterator[tuple[Entry, int, Sequence[tuple[int, int, int]]]]:
        """Yield each entry that has bytes, its checksum and its pieces (chunk, address, length)."""
        chunk = used = 0
        for entry, crc in zip(self.given.entries, self.given.crcs, strict=True):
            left, pieces = entry.length, []
            while left:
                held = self.chunks[chunk]
                assert held is not None, "read before"
                take = min(left, held.numel() - used)
                pieces.append((chunk, held.data_ptr() + used, take))
                left, used = left - take, used + take
                if used == held.numel():
                    chunk, used = chunk + 1, 0
            if pieces:
                yield entry, crc, pieces
