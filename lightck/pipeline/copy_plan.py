"""Plan a snapshot's copies: the tensors' extents in the region, and which copies form a group.

The plan is kept while nothing changes: a snapshot reads every tensor's form, version and address
and compares them with the last ones, and no Python code runs per tensor.

For a DTensor, form and address are those of the local tensor, and the version is the sum of two
counters, which only grow: operations on the DTensor count in its own, those on its local tensor in
the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._dynamo.guards import TensorGuards

from lightck.device.base import Device
from lightck.device.lookup import flat, holder
from lightck.region import allocator
from lightck.region.layout import Entry
from lightck.region.region import Region
from lightck.state import tensor_layout, tensor_support
from lightck.state.boundary_codec import identical
from lightck.state.inventory import StateTensor, refuse_twins

_FORM: tuple[Callable[[torch.Tensor], Any], ...] = (
    operator.attrgetter("shape"),
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
    operator.attrgetter("is_cpu"),
)
"""Attributes that a layout entry depends on besides the name; `p.data = ...` changes them."""
_RARE_FORM: tuple[tuple[Callable[[torch.Tensor], bool], Callable[[torch.Tensor], Any]], ...] = (
    (lambda tensor: not tensor.is_cpu, operator.attrgetter("device")),
    (torch.Tensor.is_complex, torch.Tensor.is_conj),
    # A lazily negated view is the imaginary part of a conjugate: with two elements or more its
    # strides tell it from a dense tensor.
    (lambda tensor: tensor.numel() == 1, torch.Tensor.is_neg),
)
"""Further such attributes, each behind a predicate: only for the tensors that this accepts can the
attribute differ while those in `_FORM` are equal."""
_ALL_DIMENSIONS = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
"""Arguments of torch's check by which it compares every size and stride."""
_version = operator.attrgetter("_version")
_RUN = 512
"""Tensors that are read together: what one reading brings into the cache serves the next."""


@dataclass(frozen=True)
class TensorReading:
    """Holds tensors, and their addresses and versions of one instant: by these changes are seen.

    A version grows with every write that torch counts. All are arrays: Python integers would be
    memory of their own, out of the cache when freed.
    """

    tensors: list[torch.Tensor]
    pointers: npt.NDArray[np.uint64]
    versions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> TensorReading:
        """Read tensors now; of a DTensor, see the module's text."""
        return TensorReading(tensors, *_read(tensors))

    def changed(self) -> list[int]:
        """Return the indices of tensors whose address or version has changed since this was made.

        Compares run by run, so that what was read is compared and dropped while it is in the cache.
        """
        moved: list[int] = []
        for at in range(0, len(self.tensors), _RUN):
            pointers, versions = _read(self.tensors[at : at + _RUN])
            others = pointers != self.pointers[at : at + _RUN]
            others |= versions != self.versions[at : at + _RUN]
            moved += (np.flatnonzero(others) + at).tolist()
        return moved


@dataclass(frozen=True)
class CopySources(TensorReading):
    """Holds the tensors that one group's copies read, as at forward start, and their memory.

    The memory is held because `p.data = ...` would free it while workers still read it. Versions
    are those of the live tensors, also where private copies are read.
    """

    storages: list[torch.UntypedStorage]
    flats: list[torch.Tensor] = field(default_factory=list)
    """For tensors on a device, the bytes of each as a view, which keeps that memory alive, too."""


@dataclass(eq=False)
class PlannedGroup:
    """One planned group: copies of tensors that the same optimizers update, in order of release."""

    holders: frozenset[int]
    is_private: bool
    """True if sources are private copies of forward start, or change behind it and are copied
    before the opening returns: no copy can be torn."""
    copied_at_open: bool
    """True if the sources are read as stored, and copied before the opening returns."""
    device: Device | None
    """Device whose memory holds the sources, private copies too; None: workers can read them."""
    positions: npt.NDArray[np.intp]
    order: tuple[int, ...]
    """Indices into the plan's tensors, those of `positions`, as Python integers."""
    free: npt.NDArray[np.bool_]
    """For each copy, True if no optimizer updates the tensor."""
    begins: npt.NDArray[np.uint64]
    """Offset in bytes of the first byte that is copied from each source."""
    total_bytes: int = 0
    versions: npt.NDArray[np.int64] | None = None
    """Versions of the live tensors at the last snapshot; None before the first."""
    last: CopySources | None = None
    """Sources of the last snapshot; while no address has changed, its storages serve again."""

    def unmoved(self, versions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mark the tensors that no optimizer updates and whose version is the last snapshot's.

        Only those may be skipped as unchanged, if their digest agrees. Stores `versions` for the
        next call.
        """
        before, self.versions = self.versions, versions
        if before is None or not self.free.any():
            return np.zeros(len(versions), np.bool_)
        same: npt.NDArray[np.bool_] = versions == before
        return same & self.free


@dataclass(eq=False)
class CopyPlan:
    """Copy plan for the tensors of the last snapshot. Used by the training thread."""

    region: Region
    lives: tuple[StateTensor, ...] = ()
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors of `lives`, in the same order."""
    entries: tuple[Entry, ...] = ()
    groups: tuple[PlannedGroup, ...] = ()
    devices: dict[str, tuple[Device, int]] = field(default_factory=dict)
    """Each device that holds tensors, and the bytes that it holds, by the device's name."""
    allocation: allocator.SlotPlan | None = None
    """Allocation of the entries in the region; None before the first snapshot."""
    may_block_at_boundary: bool = True
    """True if training may wait for the medium at forward start; else clones are made there."""
    measure_at_once: Callable[[int], int] | None = None
    """Returns, for the bytes of a state, those up to which it is copied at once; None: none is."""
    at_once_bytes: int = 0
    """The bytes up to which a state is copied at once, as measured when the last plan was made."""
    is_at_once: bool = False
    """True if all that workers could read is copied before the opening returns."""
    _forms: list[list[Any]] = field(default_factory=list)
    _shards: list[Any] = field(default_factory=list)
    """Mesh and placements of each DTensor, None for others; empty if there is no DTensor."""
    _rare: list[list[int]] = field(default_factory=list)
    """For each of `_RARE_FORM`, the indices of the tensors that it concerns."""
    _rare_forms: list[list[Any]] = field(default_factory=list)
    _guard: Any = None
    """Torch's own check of all these attributes at once; None before the first comparison."""

    def update(self, lives: Sequence[StateTensor], boundary_bytes: int) -> allocator.SlotPlan:
        """Plan the copies of these tensors, and return their allocation in the region.

        While nothing has changed, the last plan serves.

        Args:
            lives: every tensor, in the order of the layout.
            boundary_bytes: size of the boundary state, for the room of the manifest.

        Raises:
            RegionFullError: the medium has no room; the last plan stays.
        """
        found = tuple(lives)
        tensors = self.tensors if found is self.lives else [live.tensor for live in found]
        held = tensor_support.locals_of(tensors)
        shards = [] if held is tensors else tensor_support.forms_of(tensors)
        known = self.allocation is not None and self._known(found)
        if known and shards == self._shards and self._formed(held):
            allocation = self._fit(self.entries, boundary_bytes)
        else:
            refuse_twins(found)
            entries = tuple(tensor_layout.describe(live) for live in found)
            allocation = self._fit(entries, boundary_bytes)
            self._choose_at_once(entries)
            self.groups = _groups(found, entries, self.may_block_at_boundary, self.is_at_once)
            self.devices = _devices(self.groups)
            self._shards = shards
            self._forms = [list(map(form, held)) for form in _FORM]
            self._rare = [
                [i for i, tensor in enumerate(held) if concerns(tensor)]
                for concerns, _ in _RARE_FORM
            ]
            self._rare_forms = _rare_forms(self._rare, held)
            self._guard = None
        self.lives, self.tensors = found, tensors
        return allocation

    def _choose_at_once(self, entries: tuple[Entry, ...]) -> None:
        """Measure anew whether a state of these entries is copied at once."""
        if self.measure_at_once is not None and self.may_block_at_boundary:
            total = sum(entry.length for entry in entries)
            self.at_once_bytes = self.measure_at_once(total)
            self.is_at_once = total <= self.at_once_bytes

    def sources(self, group: PlannedGroup, reading: TensorReading | None = None) -> CopySources:
        """Return what the group's copies read; private copies are made now.

        Args:
            group: the group.
            reading: of all of the plan's tensors at this instant, where somebody has made it.
        """
        live = [self.tensors[i] for i in group.order]
        if group.is_private and not group.copied_at_open:
            lives, entries = self.lives, self.entries
            copies = [tensor_layout.owned(lives[i], entries[i], group.device) for i in group.order]
            flats = [flat(c, 0, c.nbytes) for c in copies] if group.device is not None else []
            versions = _versions(live, tensor_support.locals_of(live))
            return CopySources(copies, _addresses(copies), versions, [], flats)
        if reading is None:
            pointers, versions = _read(live)
        else:
            assert len(reading.tensors) == len(self.tensors), "a reading of other tensors"
            at = group.positions
            pointers, versions = reading.pointers[at], reading.versions[at]
        # While the last storage at an address is held, no other storage can be there.
        if group.last is not None and np.array_equal(pointers, group.last.pointers):
            storages, flats = group.last.storages, group.last.flats
        else:
            held = tensor_support.locals_of(live)
            storages, flats = [t.untyped_storage() for t in held], []
            if group.device is not None:
                lengths = [self.entries[i].length for i in group.order]
                rows = zip(held, map(int, group.begins), lengths, strict=True)
                flats = [flat(*row) for row in rows]
        group.last = CopySources(live, pointers, versions, storages, flats)
        return group.last

    def _formed(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether every tensor has the form that it had last time.

        Torch's check looks at more (gradients on or off, autocast), and takes a quarter of the
        time. Where it says no the attributes are compared, run by run: 200,000 tuples at a time,
        for 100,000 tensors, would start the garbage collector, which takes longer than everything
        here.
        """
        if self._guard is not None and self._guard.check(*tensors):
            return True
        same = (
            not any(
                list(map(form, tensors[at : at + _RUN])) != then[at : at + _RUN]
                for at in range(0, len(tensors), _RUN)
                for form, then in zip(_FORM, self._forms, strict=True)
            )
            and _rare_forms(self._rare, tensors) == self._rare_forms
        )
        if same:
            self._guard = TensorGuards(*tensors, **_ALL_DIMENSIONS)
        return same

    def _known(self, found: tuple[StateTensor, ...]) -> bool:
        """Tell whether what is known of the tensors is as last time, though objects may differ.

        Another object may have no version counter (an inference tensor); the same one keeps its
        own, whatever its `data`.
        """
        if found is self.lives or identical(found, self.lives):
            return True
        return found == self.lives and all(
            now.tensor is then.tensor or now.tensor.is_inference() == then.tensor.is_inference()
            for now, then in zip(found, self.lives, strict=True)
        )

    def _fit(self, entries: tuple[Entry, ...], boundary_bytes: int) -> allocator.SlotPlan:
        allocation = self.allocation
        needed = 4 * len(entries) + boundary_bytes + allocator.MANIFEST_SLACK_BYTES
        if allocation is None or entries != self.entries or needed > allocation.manifest_bytes:
            capacity = allocator.manifest_capacity(len(entries), boundary_bytes)
            allocation = self.region.fit(entries, capacity)
            self.allocation, self.entries = allocation, entries
        return allocation


def _rare_forms(rare: list[list[int]], tensors: list[torch.Tensor]) -> list[list[Any]]:
    """Return, for each of `_RARE_FORM`, the attribute of every tensor that it concerns."""
    forms = zip(rare, _RARE_FORM, strict=True)
    return [list(map(form, map(tensors.__getitem__, some))) for some, (_, form) in forms]


def _groups(
    lives: tuple[StateTensor, ...],
    entries: tuple[Entry, ...],
    may_block_at_boundary: bool,
    all_at_once: bool,
) -> tuple[PlannedGroup, ...]:
    """Group the copies, in each group the largest first.

    The copies left for the fence are then small, whatever the model's order. With `all_at_once`,
    none of what the CPU holds is left.
    """
    members: dict[tuple[bool, bool, frozenset[int], str], list[int]] = {}
    devices: dict[str, Device | None] = {"": None}
    for i, live in enumerate(lives):
        if entries[i].length:
            device = holder(live.local)
            own = tensor_layout.must_own(live, device)
            at_open = device is None and (
                may_block_at_boundary and tensor_layout.lies_as_stored(live.local)
                if own
                else all_at_once
            )
            where = "" if device is None else device.name
            devices.setdefault(where, device)
            key = (own, at_open, frozenset() if own or at_open else live.holders, where)
            members.setdefault(key, []).append(i)
    groups = []
    for (own, at_open, holders, where), wanted in members.items():
        order = sorted(wanted, key=lambda i: -entries[i].length)
        free = np.array([not lives[i].holders for i in order], np.bool_)
        # A private copy has only the bytes that this rank captures of the tensor.
        private = own and not at_open
        begins = np.array([0 if private else entries[i].begin or 0 for i in order], np.uint64)
        positions = np.array(order, np.intp)
        total = sum(entries[i].length for i in order)
        at = positions, tuple(order), free, begins, total
        groups.append(PlannedGroup(holders, own, at_open, devices[where], *at))
    return tuple(groups)


def _devices(groups: Sequence[PlannedGroup]) -> dict[str, tuple[Device, int]]:
    """Return every device of the groups and the bytes that it holds, by name."""
    found: dict[str, tuple[Device, int]] = {}
    for group in groups:
        if group.device is not None:
            _, size = found.get(group.device.name, (group.device, 0))
            found[group.device.name] = group.device, size + group.total_bytes
    return found


def _read(
    tensors: Sequence[torch.Tensor],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return addresses of first elements, and versions, see `TensorReading`."""
    pointers = np.empty(len(tensors), np.uint64)
    versions = np.empty(len(tensors), np.int64)
    for at in range(0, len(tensors), _RUN):
        run = list(tensors[at : at + _RUN])
        held = tensor_support.locals_of(run)
        pointers[at : at + _RUN] = _addresses(held)
        versions[at : at + _RUN] = _versions(run, held)
    return pointers, versions


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Return the tensors' versions, as a `TensorReading` has them."""
    found: list[int] = _versions(tensors, tensor_support.locals_of(tensors)).tolist()
    return found


def _versions(tensors: list[torch.Tensor], held: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return each tensor's versions, of a DTensor the sum with its local tensor's.

    A tensor's must not depend on those it is read with: what is read here among all of the plan is
    read again group by group, and the counts of steps of DTensors on a device are in DRAM.
    """
    counts = _counters(tensors)
    if held is not tensors:
        at = [i for i, part in enumerate(held) if part is not tensors[i]]
        counts[at] += _counters([held[i] for i in at])
    return counts


def _addresses(tensors: list[torch.Tensor]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


def _counters(tensors: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return version counters, -1 for tensors that have none (inference tensors)."""
    try:
        return np.fromiter(map(_version, tensors), np.int64, len(tensors))
    except RuntimeError:
        some = (-1 if tensor.is_inference() else tensor._version for tensor in tensors)
        return np.fromiter(some, np.int64, len(tensors))
