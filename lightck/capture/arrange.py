"""How the live tensors are arranged: their extents, and which copies go together.

Kept while nothing moves, so that a snapshot reads every tensor's form, version and address, and
compares them with the last ones: no Python code runs per tensor.

Of a DTensor, form and address are those of the local tensor, and the version is the sum of both
counters, which only grow: operations on the DTensor move its own, those on its part the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.capture import dtensor, staging
from lightck.capture.device import Device
from lightck.capture.holders import flat, holder
from lightck.capture.state import Live
from lightck.region import allocator
from lightck.region.layout import Entry
from lightck.region.region import Region

_FORM: tuple[Callable[[torch.Tensor], Any], ...] = (
    operator.attrgetter("shape"),
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
    operator.attrgetter("is_cpu"),
)
"""What an entry depends on besides the name; `p.data = ...` changes it in place."""
_RARE_FORM: tuple[tuple[Callable[[torch.Tensor], bool], Callable[[torch.Tensor], Any]], ...] = (
    (lambda tensor: not tensor.is_cpu, operator.attrgetter("device")),
    (torch.Tensor.is_complex, torch.Tensor.is_conj),
    # A lazily negated view is the imaginary part of a conjugate: with two elements or more its
    # strides tell it from a dense tensor.
    (lambda tensor: tensor.numel() == 1, torch.Tensor.is_neg),
)
"""More of it: which tensors it may differ for, whose other form stays, and what it is."""
_version = operator.attrgetter("_version")
_RUN = 512
"""Tensors that are read together: what one reading brings into the cache serves the next."""


@dataclass(frozen=True)
class Sources:
    """Where the copies of one part start from at (b), and what keeps that memory alive.

    A parameter does not own its memory for good: `p.data = ...` lets go of it while workers read.
    """

    tensors: list[torch.Tensor]
    pointers: npt.NDArray[np.uint64]
    versions: npt.NDArray[np.int64]
    """Of the live tensors."""
    storages: list[torch.UntypedStorage]
    flats: list[torch.Tensor] = field(default_factory=list)
    """On a device: the bytes of each copy, which keep that memory alive, too."""

    def changed(self) -> list[int]:
        """Which of the live tensors, that the copies started from, were touched since (b).

        Run by run, so that what was read is compared and forgotten while it is in the cache.
        """
        moved: list[int] = []
        for at in range(0, len(self.tensors), _RUN):
            pointers, versions = read(self.tensors[at : at + _RUN])
            others = pointers != self.pointers[at : at + _RUN]
            others |= versions != self.versions[at : at + _RUN]
            moved += (np.flatnonzero(others) + at).tolist()
        return moved


@dataclass(eq=False)
class Part:
    """Copies whose sources the same optimizers change, in the order of release."""

    holders: frozenset[int]
    owned: bool
    """Sources are private copies made at (b), or copied before the opening returns."""
    at_once: bool
    """The latter: they lie as they are stored, where the workers can read them."""
    device: Device | None
    """Whose memory holds the sources, private ones too; None: the workers can read it."""
    positions: npt.NDArray[np.intp]
    order: tuple[int, ...]
    """The positions as Python integers."""
    free: npt.NDArray[np.bool_]
    """Per copy, whether no optimizer holds the tensor."""
    begins: npt.NDArray[np.uint64]
    """First byte of each source that is copied."""
    total_bytes: int = 0
    versions: npt.NDArray[np.int64] | None = None
    """Of the live tensors at the last snapshot."""
    last: Sources | None = None
    """Of the last snapshot: while no pointer has moved, its storages are the ones to hold."""

    def unmoved(self, versions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tensors that no optimizer holds and whose version is that of the last snapshot.

        Only those may be skipped as unchanged, if their digest agrees. Remembers `versions`.
        """
        before, self.versions = self.versions, versions
        if before is None or not self.free.any():
            return np.zeros(len(versions), np.bool_)
        same: npt.NDArray[np.bool_] = versions == before
        return same & self.free


@dataclass(eq=False)
class Arrangement:
    """Plan and parts for the tensors of the last snapshot. Used by the training thread."""

    region: Region
    lives: tuple[Live, ...] = ()
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Of `lives`."""
    entries: tuple[Entry, ...] = ()
    parts: tuple[Part, ...] = ()
    plan: allocator.Plan | None = None
    """Of the entries; None before the first."""
    may_wait: bool = True
    """Whether training may wait for the medium at (b); else what must not wait is cloned."""
    _forms: list[list[Any]] = field(default_factory=list)
    _shards: list[Any] = field(default_factory=list)
    """Mesh and placements of each DTensor; empty where there is none."""
    _rare: list[list[int]] = field(default_factory=list)
    """For each of `_RARE_FORM`, the tensors it concerns."""
    _rare_forms: list[list[Any]] = field(default_factory=list)

    def update(self, lives: Sequence[Live], boundary_bytes: int) -> allocator.Plan:
        """Arrange these tensors; the last arrangement serves when nothing moved.

        Args:
            lives: every tensor, in the order of the layout.
            boundary_bytes: of the boundary state, for the room of the manifest.

        Raises:
            RegionFullError: the medium has no room; the last arrangement stays.
        """
        found = tuple(lives)
        tensors = [live.tensor for live in found]
        held = dtensor.locals_of(tensors)
        shards = [] if held is tensors else dtensor.forms_of(tensors)
        if self._known(found) and shards == self._shards and self._formed(held):
            plan = self._fit(self.entries, boundary_bytes)
        else:
            entries = tuple(staging.describe(live) for live in found)
            plan = self._fit(entries, boundary_bytes)
            self.parts = _parts(found, entries, self.may_wait)
            self._shards = shards
            self._forms = [list(map(form, held)) for form in _FORM]
            self._rare = [
                [i for i, tensor in enumerate(held) if concerns(tensor)]
                for concerns, _ in _RARE_FORM
            ]
            self._rare_forms = _rare_forms(self._rare, held)
        self.lives, self.tensors = found, tensors
        return plan

    def _formed(self, tensors: list[torch.Tensor]) -> bool:
        """Whether no tensor has another form than last time.

        Run by run: 200,000 tuples at a time, for 100,000 tensors, would bring on the garbage
        collector, which takes longer than everything here.
        """
        return (
            not any(
                list(map(form, tensors[at : at + _RUN])) != then[at : at + _RUN]
                for at in range(0, len(tensors), _RUN)
                for form, then in zip(_FORM, self._forms, strict=True)
            )
            and _rare_forms(self._rare, tensors) == self._rare_forms
        )

    def _known(self, found: tuple[Live, ...]) -> bool:
        """Whether the same is known of the tensors, which may be other objects than last time.

        Another object may have no version counter (an inference tensor); the same one keeps its
        own, whatever its `data`.
        """
        if len(found) == len(self.lives) and all(map(operator.is_, found, self.lives)):
            return True
        return found == self.lives and all(
            now.tensor is then.tensor or now.tensor.is_inference() == then.tensor.is_inference()
            for now, then in zip(found, self.lives, strict=True)
        )

    def _fit(self, entries: tuple[Entry, ...], boundary_bytes: int) -> allocator.Plan:
        plan = self.plan
        needed = 4 * len(entries) + boundary_bytes + allocator.MANIFEST_SLACK_BYTES
        if plan is None or entries != self.entries or needed > plan.manifest_bytes:
            capacity = allocator.manifest_capacity(len(entries), boundary_bytes)
            plan = self.region.fit(entries, capacity)
            self.plan, self.entries = plan, entries
        return plan


def _rare_forms(rare: list[list[int]], tensors: list[torch.Tensor]) -> list[list[Any]]:
    """Of `_RARE_FORM`, for the tensors that each concerns."""
    forms = zip(rare, _RARE_FORM, strict=True)
    return [list(map(form, map(tensors.__getitem__, some))) for some, (_, form) in forms]


def _parts(lives: tuple[Live, ...], entries: tuple[Entry, ...], may_wait: bool) -> tuple[Part, ...]:
    """The largest first: the copies left for the fence are small, whatever the model's order."""
    members: dict[tuple[bool, bool, frozenset[int], str], list[int]] = {}
    devices: dict[str, Device | None] = {"": None}
    for i, live in enumerate(lives):
        if entries[i].length:
            device = holder(live.local)
            own = staging.must_own(live, device)
            at_once = own and may_wait and device is None and staging.lies_as_stored(live.local)
            where = "" if device is None else device.name
            devices.setdefault(where, device)
            key = (own, at_once, frozenset() if own else live.holders, where)
            members.setdefault(key, []).append(i)
    parts = []
    for (own, at_once, holders, where), wanted in members.items():
        order = sorted(wanted, key=lambda i: -entries[i].length)
        free = np.array([not lives[i].holders for i in order], np.bool_)
        # A private copy is made of the part alone.
        private = own and not at_once
        begins = np.array([0 if private else entries[i].begin or 0 for i in order], np.uint64)
        positions = np.array(order, np.intp)
        total = sum(entries[i].length for i in order)
        at = positions, tuple(order), free, begins, total
        parts.append(Part(holders, own, at_once, devices[where], *at))
    return tuple(parts)


def sources(part: Part, arrangement: Arrangement) -> Sources:
    """What the part's copies start from; private copies are made now."""
    live = [arrangement.tensors[i] for i in part.order]
    if part.owned and not part.at_once:
        lives, entries = arrangement.lives, arrangement.entries
        copies = [staging.owned(lives[i], entries[i], part.device) for i in part.order]
        flats = [flat(c, 0, c.nbytes) for c in copies] if part.device is not None else []
        versions = _versions(live, dtensor.locals_of(live))
        return Sources(copies, _addresses(copies), versions, [], flats)
    pointers, versions = read(live)
    # An address cannot be another storage's while the last one at it is still held.
    if part.last is not None and np.array_equal(pointers, part.last.pointers):
        storages, flats = part.last.storages, part.last.flats
    else:
        held = dtensor.locals_of(live)
        storages, flats = [t.untyped_storage() for t in held], []
        if part.device is not None:
            lengths = [arrangement.entries[i].length for i in part.order]
            rows = zip(held, map(int, part.begins), lengths, strict=True)
            flats = [flat(*row) for row in rows]
    part.last = Sources(live, pointers, versions, storages, flats)
    return part.last


def read(
    tensors: Sequence[torch.Tensor],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Addresses of the first elements, and versions, which every write moves that torch counts.

    Arrays: numbers as objects would be memory of their own, cold again when they are let go.
    """
    pointers = np.empty(len(tensors), np.uint64)
    versions = np.empty(len(tensors), np.int64)
    for at in range(0, len(tensors), _RUN):
        run = list(tensors[at : at + _RUN])
        held = dtensor.locals_of(run)
        pointers[at : at + _RUN] = _addresses(held)
        versions[at : at + _RUN] = _versions(run, held)
    return pointers, versions


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """As `read` has them."""
    found: list[int] = _versions(tensors, dtensor.locals_of(tensors)).tolist()
    return found


def _versions(tensors: list[torch.Tensor], held: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    counts = _counters(tensors)
    return counts if held is tensors else counts + _counters(held)


def _addresses(tensors: list[torch.Tensor]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


def _counters(tensors: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Version counters; those of tensors that have none (inference tensors) read as -1."""
    try:
        return np.fromiter(map(_version, tensors), np.int64, len(tensors))
    except RuntimeError:
        some = (-1 if tensor.is_inference() else tensor._version for tensor in tensors)
        return np.fromiter(some, np.int64, len(tensors))
