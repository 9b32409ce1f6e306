"""A snapshot that another rank gave: like `Assembled`, in private memory instead of regions.

Nothing live is touched before all of it has come and every checksum holds. It is given up piece by
piece while it is read, so that what it fills is not in memory twice for long.
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

from lightck.capture import parts
from lightck.distributed.halves import Half
from lightck.distributed.replicas import is_own
from lightck.errors import CorruptSnapshotError
from lightck.region.layout import Entry, Layout
from lightck.region.manifest import Manifest
from lightck.region.native import Record, crc32c_at
from lightck.region.region import Candidate


@dataclass(frozen=True, eq=False)
class Given:
    """What a donor says of a snapshot before it sends its bytes."""

    record: Record
    at_step: bytes
    at_forward: bytes
    entries: tuple[Entry, ...]
    crcs: tuple[int, ...]
    """CRC32C per entry, of all of its bytes."""

    @property
    def payload_bytes(self) -> int:
        """Of all that will be sent."""
        return sum(entry.length for entry in self.entries)


@dataclass(eq=False)
class Healed:
    """One rank's state: replicated tensors from another rank, and its own where that is there."""

    given: Given
    half: Half | None
    """None: the other rank's own state stands in."""
    donor: int
    label: str
    chunks: list[torch.Tensor | None] = field(default_factory=list)
    """The bytes of all given entries, end to end; chunks are as long as they came."""
    _freed: int = 0

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every tensor; ties come behind what they are tied to."""
        if self.half is None:
            return self.given.entries
        shared = [e for e in self.given.entries if not is_own(e)]
        held = [*shared, *(entry for entry, _ in self.half.tensors)]
        ties = self._ties({e.name: e for e in held}) if self.half.ties is None else self.half.ties
        return (*held, *ties)

    def _ties(self, held: dict[str, Entry]) -> tuple[Entry, ...]:
        """The donor's, where this rank has what they are tied to, in the form that it has here."""
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
        """Position of each name."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    def drop_half(self) -> None:
        """The other rank's own state stands in after all."""
        self.half = None
        for cached in ("entries", "index"):
            self.__dict__.pop(cached, None)

    @property
    def record(self) -> Record:
        """Of the snapshot that the own state is from; the donor's if this rank has none."""
        if self.half is None:
            return self.given.record
        return self.half.record or replace(self.given.record, rank=self.half.rank)

    @property
    def kept(self) -> Record | None:
        """Of the snapshot in this rank's own region that its own state is from."""
        return self.half.record if self.half is not None else None

    @property
    def early(self) -> bool:
        """All of it is of the instant before (b)."""
        return self.given.record.early

    @property
    def suspect(self) -> bool:
        """Replicas were found to differ."""
        return self.given.record.suspect

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `Assembled.trees`."""
        own: Half | Given = self.half or self.given
        step, nothing = self.given.record.step, np.zeros(len(self.entries), np.uint32)
        said = Manifest(step, 0, nothing, own.at_step, own.at_forward)
        layout = Layout(self.entries, np.zeros(len(self.entries), np.uint64))
        found = Candidate(self.given.record, layout, said)
        return parts.read(found, self.entries, context=self.label)

    @contextlib.contextmanager
    def leased(self) -> Iterator[contextlib.ExitStack]:
        """It is in memory already."""
        with contextlib.ExitStack() as held:
            yield held

    def verify(
        self,
        unowned: npt.NDArray[np.uint64] | None = None,
        done: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Check every tensor against the checksum that the donor's region has of it.

        Args:
            unowned: as of `Assembled.verify`; left alone, for what was given is in memory already.
            done: likewise; nothing of it is.

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
        """Copy into memory, once.

        Args:
            addresses: per entry; 0 leaves it out.
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
        """Every entry that has bytes, with its checksum and its pieces: chunk, address, length."""
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
