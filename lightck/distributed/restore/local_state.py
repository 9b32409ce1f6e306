"""The rank-local state that a rank's own region still has where the rest of a snapshot is missing.

Buffers, generators, extras and data position belong to one rank; no other has them. They are in its
snapshot of the step, even if a share or another tensor of that is damaged, or in the boundary
journal, which keeps them for the last step while the failure path is armed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from lightck.distributed.restore.offers import Key
from lightck.distributed.sharding import is_own
from lightck.errors import LightckError
from lightck.journal.entry import decode_entry
from lightck.reader.fill import fresh
from lightck.region.layout import Entry
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


@dataclass(eq=False)
class LocalStates:
    """All rank-local states in a rank's own region; each is read once, when first asked for."""

    region: Region
    candidates: Sequence[Candidate]
    _read: dict[int, LocalState | None] = field(default_factory=dict)

    def found(self, besides: Collection[Key] = ()) -> list[LocalState]:
        """Return the states of snapshots, then of the journal; none of a key in `besides`."""
        held = []
        for i, candidate in enumerate(self.candidates):
            if key_of(candidate.record) not in besides:
                if i not in self._read:
                    self._read[i] = of_snapshot(self.region, candidate)
                held.append(self._read[i])
        return [half for half in (*held, *self._journal) if half and half.key not in besides]

    @cached_property
    def _journal(self) -> list[LocalState]:
        return of_journal(self.region)


def key_of(record: Record) -> Key:
    """Return the key of the snapshot, over all ranks, that a region's record belongs to."""
    return Key(record.timeline, record.step, record.world)


def of_snapshot(region: Region, candidate: Candidate) -> LocalState | None:
    """Read the rank-local state that one snapshot holds; None if any of it is damaged."""
    record, layout = candidate.record, candidate.layout
    own = [(i, e) for i, e in enumerate(layout.entries) if is_own(e) and e.begin is None]
    rows = [(i, entry) for i, entry in own if entry.alias_of is None]
    ties = tuple(entry for _, entry in own if entry.alias_of is not None)
    try:
        tensor_layout.check([entry for _, entry in rows], context="layout table")
        held = [(entry, fresh(entry)) for _, entry in rows]
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
    key = key_of(record)
    state = candidate.manifest
    return LocalState(
        key, record.rank, record.early, state.at_step, state.at_forward, tuple(held), ties, record
    )


def of_journal(region: Region) -> list[LocalState]:
    """Read the boundary journal's rank-local states: the newest timeline's last instants."""
    found = []
    for kind in (FORWARD, STEP_END):
        try:
            entry = region.native.read_journal(kind)
            if entry is None:
                continue
            state = decode_entry(entry, context=f"{region.place.file}: journal")
            second = boundary_blob.opened(state.at_forward, context="journal")
            world = second["share"]["world"] if "share" in second else 1
            key = Key(entry.timeline, entry.step, world)
            held = tuple((tensor_layout.describe(live), live.tensor) for live in state.lives)
        except (LightckError, KeyError, TypeError):  # another rank's state is used instead
            continue
        own = tuple((each, tensor) for each, tensor in held if is_own(each))
        early = kind == STEP_END or entry.early
        found.append(LocalState(key, region.info.rank, early, state.at_step, state.at_forward, own))
    return found
