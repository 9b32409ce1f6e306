"""Assemble one rank's whole state from regions; lease, verify and read it.

Usually one region holds all of it: its layout table is then taken as it is, without a look at
single tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError
from lightck.reader import validation
from lightck.reader.pieces import assemble
from lightck.region import native_region
from lightck.region.choice import is_there
from lightck.region.layout import Entry
from lightck.region.native_pool import usual_threads
from lightck.region.native_region import HOLDS_ALL, Record
from lightck.region.region import Candidate, Region

Source = tuple[Region, Candidate]


class Snapshot(Protocol):
    """One rank's whole state, wherever its bytes are."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Layout entries of all tensors."""

    @property
    def index(self) -> Mapping[str, int]:
        """Position in `entries` of each tensor's name."""

    @property
    def record(self) -> Record:
        """Commit record of the snapshot that the rank's own state is from."""


@dataclass(frozen=True, eq=False)
class Part:
    """Extents of the state that one region holds."""

    region: Region
    candidate: Candidate
    rows: npt.NDArray[Any]
    """One row of READ_DTYPE for each extent that has bytes; destinations are 0."""
    entries: npt.NDArray[np.intp]
    """For each row, the index of the state's entry that its bytes belong to."""
    begins: npt.NDArray[np.uint64]
    """For each row, the offset in bytes of its first byte in that tensor."""

    @property
    def label(self) -> str:
        """Name of the region's file and the step, for messages."""
        return f"{self.region.place.file} step {self.candidate.record.step}"


@dataclass(frozen=True, eq=False)
class Assembled:
    """One rank's state from one or more regions, which their opener closes. For one thread."""

    entries: tuple[Entry, ...]
    """Entry of every tensor, as if one region held all of them."""
    parts: tuple[Part, ...]
    """Part in each region, the rank's own region first."""

    @classmethod
    def of(cls, sources: Sequence[Source]) -> Assembled:
        """Assemble the state from snapshots in one or more regions.

        Args:
            sources: the rank's own snapshot first, then those that share with it.

        Raises:
            CorruptSnapshotError: they do not belong together, or something is missing.
        """
        region, own = sources[0]
        layout = own.layout
        if own.record.share_digest == HOLDS_ALL and all(e.begin is None for e in layout.entries):
            filled = np.flatnonzero(layout.lengths > 0)
            part = _part(region, own, filled, filled, np.zeros(len(filled), np.uint64))
            return cls(layout.entries, (part,))
        found = assemble([candidate for _, candidate in sources])
        if found.missing:
            more = f" and {len(found.missing) - 1} more" if len(found.missing) > 1 else ""
            raise CorruptSnapshotError(
                f"{region.place.file} step {own.record.step}: missing {found.missing[0]}{more}"
            )
        number = {name: i for i, name in enumerate(found.entries)}
        pieces = [(number[name], p) for name, held in found.pieces.items() for p in held]
        cut = [
            _part(
                region,
                candidate,
                np.array([p.position for _, p in pieces if p.source == source], np.intp),
                np.array([i for i, p in pieces if p.source == source], np.intp),
                np.array([p.begin for _, p in pieces if p.source == source], np.uint64),
            )
            for source, (region, candidate) in enumerate(sources)
        ]
        return cls(tuple(found.entries.values()), tuple(cut))

    @property
    def record(self) -> Record:
        """Commit record of the rank's own snapshot."""
        return self.parts[0].candidate.record

    @property
    def label(self) -> str:
        """Name of the rank's own region file and the step, for messages."""
        return self.parts[0].label

    @property
    def early(self) -> bool:
        """Tell whether a rank finished the snapshot before forward start."""
        return any(part.candidate.record.early for part in self.parts)

    @property
    def suspect(self) -> bool:
        """Tell whether any of the regions says that replicas were found to differ."""
        return any(part.candidate.record.suspect for part in self.parts)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position in `entries` of each tensor's name."""
        if len(self.parts) == 1 and self.entries is self.parts[0].candidate.layout.entries:
            return self.parts[0].candidate.layout.index
        return {entry.name: i for i, entry in enumerate(self.entries)}

    @cached_property
    def replica(self) -> int | None:
        """First rank of the node whose replica this is, if all ranks held the same state.

        None: the snapshot does not say so, or is sharded. State that a single rank wrote may be
        given to any rank, and says 0.
        """
        if any(entry.shard is not None for entry in self.entries):
            return None
        if self.record.world == 1:
            return 0
        try:
            named, alike = validation.share(self.parts[0].candidate, context=self.label)
        except CorruptSnapshotError:
            return None
        return min(named) if alike and named else None

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the boundary states of step end and of forward start, checked.

        Raises:
            CorruptSnapshotError: they do not have the form in which they were written.
        """
        return validation.read(self.parts[0].candidate, self.entries, context=self.label)

    def is_there(self) -> bool:
        """Tell whether no trainer has overwritten any of it since it was found."""
        return all(is_there(part.region, part.candidate) for part in self.parts)

    @contextlib.contextmanager
    def leased(self) -> Iterator[contextlib.ExitStack]:
        """Hold every slot for reading in the block; leases taken off the stack there stay held.

        Raises:
            RegionBusyError: a trainer is overwriting one.
            CorruptSnapshotError: one was overwritten since it was found.
        """
        with contextlib.ExitStack() as held:
            for part in self.parts:
                lease, slot = part.region.native.lease, part.candidate.record.slot
                lease(slot, True)
                held.callback(lease, slot, False)
                if not is_there(part.region, part.candidate):
                    raise CorruptSnapshotError(f"{part.label}: overwritten while it was read")
            yield held

    def verify(
        self,
        unowned: npt.NDArray[np.uint64] | None = None,
        done: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Check every byte against its checksum.

        Args:
            unowned: per entry, the address of memory that nobody owns yet, which is filled with
                what is checked; 0: none.
            done: per entry, whether it has been checked already.

        Raises:
            CorruptSnapshotError: a checksum differs; names file, slot, step and tensor.
            RegionIOError: the medium cannot read the bytes.
        """
        for part in self.parts:
            rows, entries = part.rows, part.entries
            if unowned is not None:
                starts = unowned[entries]
                rows = rows.copy()
                rows["destination"] = np.where(starts, starts + part.begins, 0)
            if done is not None:
                rows, entries = rows[~done[entries]], entries[~done[entries]]
            self._fetch(part, rows, entries)

    def read(self, addresses: npt.NDArray[np.uint64]) -> None:
        """Read the bytes into memory, and check them on the way.

        Args:
            addresses: per entry, where its bytes go; 0 leaves it out.

        Raises:
            CorruptSnapshotError: as `verify`; the content of the memory is then undefined.
            RegionIOError: as `verify`; the content is undefined, too.
        """
        for part in self.parts:
            starts = addresses[part.entries]
            wanted = np.flatnonzero(starts)
            rows = part.rows[wanted]
            rows["destination"] = starts[wanted] + part.begins[wanted]
            self._fetch(part, rows, part.entries[wanted])

    def _fetch(self, part: Part, rows: npt.NDArray[Any], entries: npt.NDArray[np.intp]) -> None:
        names = [self.entries[i].name for i in entries]
        part.region.fetch(part.candidate, rows, names, usual_threads())


def _part(
    region: Region,
    candidate: Candidate,
    positions: npt.NDArray[np.intp],
    entries: npt.NDArray[np.intp],
    begins: npt.NDArray[np.uint64],
) -> Part:
    rows = np.zeros(len(positions), native_region.READ_DTYPE)
    rows["offset"] = candidate.layout.offsets[positions]
    rows["length"] = candidate.layout.lengths[positions]
    rows["crc"] = candidate.manifest.crcs[positions]
    return Part(region, candidate, rows, entries, begins)
