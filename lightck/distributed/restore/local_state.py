"""The state of a rank's own, apart from what ranks hold alike, and both joined to one snapshot.

Buffers, generators, extras and data position belong to one rank; no other has them. Where the rest
of a snapshot comes from elsewhere (another rank, or the node's failure region), they are read from
the rank's own region: from one of its snapshots, or from its journal; or from the failure region,
which has the journal entries of all ranks of its node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.distributed.restore.selection import Key
from lightck.distributed.sharding import is_own
from lightck.errors import CorruptSnapshotError, LightckError
from lightck.journal.entry import RankEntry, decode_entry, entries_in
from lightck.reader.assembly import AssembledSnapshot, RegionPart, boundary_trees
from lightck.reader.fill import empty_tensor
from lightck.region import layout
from lightck.region.layout import Entry, Layout
from lightck.region.manifest import Manifest
from lightck.region.native_region import FORWARD, READ_DTYPE, STEP_END, Record
from lightck.region.region import Candidate, Region
from lightck.state import boundary_blob, tensor_layout


@dataclass(frozen=True, eq=False)
class LocalState:
    """The rank-local state of one rank at one instant of one step, in private memory."""

    key: Key
    rank: int
    early: bool
    at_step: bytes
    """The blob of the step end, as in a manifest; `at_forward` is that of the forward start."""
    at_forward: bytes
    tensors: tuple[tuple[Entry, torch.Tensor], ...]
    ties: tuple[Entry, ...] | None = None
    """Further names of these or of shared tensors; None if not known, as from the journal."""
    record: Record | None = None
    """The record of the snapshot it comes from; None if it comes from the journal."""


# ---- the rank-local state that a rank's own region still has -------------------------------------


def local_state_of_snapshot(region: Region, candidate: Candidate) -> LocalState | None:
    """Read the rank-local state that one snapshot holds; None if any of it is damaged."""
    record, layout = candidate.record, candidate.layout
    own = [(i, e) for i, e in enumerate(layout.entries) if is_own(e) and e.begin is None]
    rows = [(i, entry) for i, entry in own if entry.alias_of is None]
    ties = tuple(entry for _, entry in own if entry.alias_of is not None)
    try:
        tensor_layout.check([entry for _, entry in rows], context="layout table")
        held = [(entry, empty_tensor(entry)) for _, entry in rows]
        reads = np.zeros(len(rows), READ_DTYPE)
        at = np.array([i for i, _ in rows], np.intp)
        reads["offset"], reads["length"] = layout.offsets[at], layout.lengths[at]
        reads["crc"] = candidate.manifest.crcs[at]
        reads["destination"] = [tensor.data_ptr() for _, tensor in held]
        filled = reads["length"] > 0
        names = [entry.name for (_, entry), full in zip(rows, filled, strict=True) if full]
        region.native.lease(record.slot, True)
        try:
            region.fetch(candidate, reads[filled], names, 1)
            if region.native.read_record(record.slot) != record:
                return None
        finally:
            region.native.lease(record.slot, False)
    except LightckError:
        return None
    key = Key.of(record)
    state = candidate.manifest
    return LocalState(
        key, record.rank, record.early, state.at_step, state.at_forward, tuple(held), ties, record
    )


def local_states_of_journal(region: Region) -> list[LocalState]:
    """Read the boundary journal's rank-local states: the newest timeline's last instants."""
    label, found = f"{region.place.file}: journal", []
    for kind in (FORWARD, STEP_END):
        try:
            entry = region.native.read_journal(kind)
        except LightckError:  # another rank's state is used instead
            continue
        if entry is not None:
            found.append(_of_entry(RankEntry(region.info.rank, entry), label))
    return [state for state in found if state is not None]


def local_states_of(source: AssembledSnapshot) -> list[LocalState]:
    """Read what a failure region's snapshot has of every rank's own; nothing of what is damaged."""
    record, manifest = source.record, source.parts[0].candidate.manifest
    try:
        second = boundary_blob.opened(manifest.at_forward, context=source.label)
        entries = entries_in(second, record, context=source.label)
    except CorruptSnapshotError:
        return []
    states = (_of_entry(each, source.label) for each in entries)
    return [state for state in states if state is not None and state.key == Key.of(record)]


def _of_entry(held: RankEntry, label: str) -> LocalState | None:
    entry = held.entry
    try:
        state = decode_entry(entry, context=label)
        second = boundary_blob.opened(state.at_forward, context=label)
        world = second["share"]["world"] if "share" in second else 1
        tensors = tuple((tensor_layout.describe(live), live.tensor) for live in state.lives)
    except (LightckError, KeyError, TypeError):
        return None
    own = tuple((each, tensor) for each, tensor in tensors if is_own(each))
    key = Key(entry.timeline, entry.step, world)
    return LocalState(key, held.rank, held.early, state.at_step, state.at_forward, own)


# ---- the rank-local state joined with replicated state from elsewhere ----------------------------


def joined(shared: Sequence[Entry], local: LocalState) -> tuple[Entry, ...]:
    """Return the entries of replicated state with a rank's own in place of their writer's own."""
    held = [*(e for e in shared if not is_own(e)), *(entry for entry, _ in local.tensors)]
    if local.ties is not None:
        return (*held, *local.ties)
    return (*held, *_ties_of_writer(shared, {entry.name: entry for entry in held}))


def _ties_of_writer(shared: Sequence[Entry], held: dict[str, Entry]) -> Iterable[Entry]:
    """Yield the writer's ties to tensors of this rank, in the form that these have here."""
    for e in shared:
        if e.alias_of in held and e.name not in held:
            target = held[e.alias_of]
            yield replace(
                target, name=e.name, role=e.role, layer=e.layer, length=0, alias_of=e.alias_of
            )


def is_complete(shared: Sequence[Entry], entries: Sequence[Entry], local: LocalState) -> bool:
    """Tell whether joined entries make a layout, and lack nothing of the model."""
    try:
        table = layout.encode(entries, np.zeros(len(entries), np.uint64))
        layout.decode(table, context="joined")
    except LightckError:
        return False
    # A snapshot has every name of its own rank's model, which may be others than the writer's.
    names = {entry.name for entry in entries}
    return local.ties is not None or all(
        entry.name in names for entry in shared if entry.name.startswith("model/")
    )


@dataclass(frozen=True, eq=False)
class FailureSnapshot(AssembledSnapshot):
    """One rank's state: what ranks hold alike from a failure region, and its own from memory."""

    source: AssembledSnapshot
    """The snapshot in the failure region, of the rank that wrote it."""
    local: LocalState

    @classmethod
    def join(cls, source: AssembledSnapshot, local: LocalState) -> FailureSnapshot:
        """Join a failure region's snapshot with a rank's own state of the same step.

        Raises:
            CorruptSnapshotError: they make no whole state.
        """
        if source.replica is None:
            raise CorruptSnapshotError(f"{source.label}: not all of it was alike on all ranks")
        entries = joined(source.entries, local)
        at = {entry.name: i for i, entry in enumerate(entries)}
        own = {entry.name for entry, _ in local.tensors}
        place = [at.get(e.name, -1) if e.name not in own else -1 for e in source.entries]
        moved = np.array(place, np.intp)
        found = cls(entries, tuple(_cut(part, moved) for part in source.parts), source, local)
        if not is_complete(source.entries, entries, local):
            raise CorruptSnapshotError(
                f"{source.label}: the state of rank {local.rank} there does not make it whole"
            )
        found.trees()
        return found

    @property
    def record(self) -> Record:
        """Return the record of the failure region's snapshot, under this rank's number."""
        return replace(self.source.record, rank=self.local.rank)

    @property
    def early(self) -> bool:
        """Tell whether the rank's own state is of the step end."""
        return self.local.early

    @cached_property
    def in_memory(self) -> Collection[str]:
        """Return the names of the tensors that are in memory already."""
        return frozenset(entry.name for entry, _ in self.local.tensors)

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the rank's boundary states of step end and of forward start, checked."""
        record, count = self.source.record, len(self.entries)
        blobs = self.local.at_step, self.local.at_forward
        manifest = Manifest(record.step, 0, np.zeros(count, np.uint32), *blobs)
        table = Layout(self.entries, np.zeros(count, np.uint64))
        return boundary_trees(Candidate(record, table, manifest), self.entries, context=self.label)

    def read(self, addresses: npt.NDArray[np.uint64]) -> None:
        """Read the bytes into memory; see `AssembledSnapshot.read`."""
        super().read(addresses)
        for entry, tensor in self.local.tensors:
            address = int(addresses[self.index[entry.name]])
            if address and entry.length:
                ctypes.memmove(address, tensor.data_ptr(), entry.length)


def _cut(part: RegionPart, moved: npt.NDArray[np.intp]) -> RegionPart:
    """Return a part without the rows whose entry is at -1, the others with their new entries."""
    entries = moved[part.entries]
    held = entries >= 0
    return RegionPart(
        part.region, part.candidate, part.rows[held], entries[held], part.begins[held]
    )
