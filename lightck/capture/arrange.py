"""How the live tensors are arranged: their extents, and which copies go together.

Kept while nothing moves, so that a snapshot costs a few list comprehensions and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.capture import staging
from lightck.capture.state import Live
from lightck.region import allocator
from lightck.region.layout import Entry
from lightck.region.region import Region


@dataclass(frozen=True)
class Sources:
    """Where the copies of one part start from, and what keeps that memory alive.

    A parameter does not own its memory for good: `p.data = ...` lets go of it while workers read.
    """

    tensors: list[torch.Tensor]
    pointers: npt.NDArray[np.uint64]
    storages: list[torch.UntypedStorage]


@dataclass(eq=False)
class Part:
    """Copies whose sources the same optimizers change, in the order of release."""

    holders: frozenset[int]
    owned: bool
    """Sources are private copies made at (b)."""
    positions: npt.NDArray[np.intp]
    order: tuple[int, ...]
    """The positions as Python integers."""
    last: Sources | None = None
    """Of the last snapshot: while no pointer has moved, its storages are the ones to hold."""


@dataclass(eq=False)
class Arrangement:
    """Plan and parts for the tensors of the last snapshot. Used by the training thread."""

    region: Region
    lives: tuple[Live, ...] = ()
    forms: list[Any] = field(default_factory=list)
    """What an entry depends on besides the name; `p.data = ...` changes it in place."""
    entries: tuple[Entry, ...] = ()
    parts: tuple[Part, ...] = ()
    versions: list[int] = field(default_factory=list)
    """Version counters at the last snapshot; empty when the layout is new."""
    _plan: allocator.Plan | None = None

    def update(self, lives: Sequence[Live], boundary_bytes: int) -> allocator.Plan:
        """Arrange these tensors; the last arrangement serves when nothing moved.

        Args:
            lives: every tensor, in the order of the layout.
            boundary_bytes: of the boundary state, for the room of the manifest.

        Raises:
            RegionFullError: the medium has no room; the last arrangement stays.
        """
        tensors = [live.tensor for live in lives]
        forms = [
            [t.shape for t in tensors],
            [t.stride() for t in tensors],
            [t.dtype for t in tensors],
            [t.device for t in tensors],
            [t.is_conj() for t in tensors],
        ]
        found = tuple(lives)
        if found != self.lives or forms != self.forms:
            entries = tuple(staging.describe(live) for live in lives)
            plan = self._fit(entries, boundary_bytes)
            self.parts = _parts(found, entries)
            self.lives, self.forms = found, forms
            return plan
        self.lives = found
        return self._fit(self.entries, boundary_bytes)

    def _fit(self, entries: tuple[Entry, ...], boundary_bytes: int) -> allocator.Plan:
        plan = self._plan
        needed = 4 * len(entries) + boundary_bytes + allocator.MANIFEST_SLACK_BYTES
        if plan is None or entries != self.entries or needed > plan.manifest_bytes:
            capacity = allocator.manifest_capacity(len(entries), boundary_bytes)
            plan = self.region.fit(entries, capacity)
            self._plan, self.entries, self.versions = plan, entries, []
        return plan

    def unmoved(self, versions: list[int]) -> npt.NDArray[np.bool_]:
        """Tensors that no optimizer holds and whose version is that of the last snapshot.

        Only those may be skipped as unchanged, if their digest agrees. Remembers `versions`.
        """
        before = self.versions or [-1] * len(versions)
        self.versions = versions
        pairs = zip(self.lives, versions, before, strict=True)
        return np.array([not v.holders and now == then for v, now, then in pairs], np.bool_)


def _parts(lives: tuple[Live, ...], entries: tuple[Entry, ...]) -> tuple[Part, ...]:
    """The largest first: the copies left for the fence are small, whatever the model's order."""
    members: dict[tuple[bool, frozenset[int]], list[int]] = {}
    for i, live in enumerate(lives):
        if entries[i].length:
            own = staging.must_own(live)
            members.setdefault((own, frozenset() if own else live.holders), []).append(i)
    parts = []
    for (own, holders), wanted in members.items():
        order = sorted(wanted, key=lambda i: -entries[i].length)
        parts.append(Part(holders, own, np.array(order, np.intp), tuple(order)))
    return tuple(parts)


def sources(part: Part, arrangement: Arrangement) -> Sources:
    """What the part's copies start from; private copies are made now."""
    lives, entries = arrangement.lives, arrangement.entries
    if part.owned:
        tensors = [staging.owned(lives[i], entries[i]) for i in part.order]
    else:
        tensors = [lives[i].tensor for i in part.order]
    pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    if part.owned:
        return Sources(tensors, pointers, [])
    # An address cannot be another storage's while the last one at it is still held.
    if part.last is not None and np.array_equal(pointers, part.last.pointers):
        part.last = Sources(tensors, pointers, part.last.storages)
    else:
        part.last = Sources(tensors, pointers, [t.untyped_storage() for t in tensors])
    return part.last


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Version counters; those that have none (inference tensors) read as -1."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
