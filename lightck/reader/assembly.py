"""Assemble one rank's whole state from regions; check, lease, verify and read it.

Usually one region holds all of it: its layout table is then taken as it is, without a look at
single tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightck.errors import CorruptSnapshotError
from lightck.region import native_region
from lightck.region.layout import Entry
from lightck.region.native_pool import usual_threads
from lightck.region.native_region import HOLDS_ALL, Record
from lightck.region.region import Candidate, Region, is_there
from lightck.state import boundary_blob, key_order, rng, tensor_layout
from lightck.state.boundary_codec import TAG, rebuild
from lightck.state.inventory import BASE_ATTRIBUTES

# ---- shares put together: where every tensor's bytes lie in the regions of several ranks ---------
# Ranks that hold the same state write it once among them: each its *share*, whole tensors and
# ranges of their bytes. An entry of a share has `begin`, also where it holds the whole tensor;
# everything else in a region is its rank's own, and has namesakes with other content in the
# regions of others.
#
# The digest in every record is that of the share map: which rank holds which bytes of what. It can
# be computed again from the layout tables of all that share, and from no smaller set of them. So a
# snapshot is known to be complete, or not, from what its pieces say of themselves.

_NAMED = 8
Placed = tuple[int, Entry, int | None, int]
"""The rank that holds bytes of a tensor, the tensor's entry, and first byte and number of the
bytes."""


@dataclass(frozen=True, slots=True, order=True)
class ShardPiece:
    """A range of a tensor's bytes, in one rank's region."""

    begin: int
    """The first byte's position in the tensor."""
    length: int
    source: int
    """The index of the candidate that holds the bytes."""
    position: int
    """The entry in that candidate's layout: its extent holds these bytes, its CRC is over them."""


@dataclass(frozen=True)
class Assembly:
    """One rank's whole state: the tensors of its own, and those that it shares."""

    entries: dict[str, Entry]
    """Every tensor's entry by name, as if one region held all of it."""
    pieces: dict[str, tuple[ShardPiece, ...]]
    """The pieces of each tensor, in the order of its bytes; none for an alias and an empty
    tensor."""
    missing: tuple[str, ...]
    """Descriptions of what is missing; with none the state is complete."""


def peers_of(own: Candidate, others: Iterable[Candidate]) -> list[Candidate]:
    """Return the snapshots among `others` that hold the other shares of `own`'s share map.

    None for a rank that holds all. What another timeline, step, world or share map wrote is never
    among them.
    """
    if own.record.share_digest == HOLDS_ALL:
        return []
    alike = [c for c in others if _identity(c) == _identity(own)]
    return [c for c in alike if c.record.rank != own.record.rank]


def assemble(candidates: Sequence[Candidate]) -> Assembly:
    """Find the pieces of one rank's state.

    Args:
        candidates: the rank's own snapshot first, then those of its peers in any order.

    Returns:
        Every tensor and its pieces, or what is missing of them. Complete exactly if the share map
        of these candidates gives the digest in their records.

    Raises:
        CorruptSnapshotError: the candidates do not belong together, or hold pieces that cannot be
            of one state: other forms, or bytes that two ranks hold.
    """
    own = candidates[0]
    if own.record.share_digest == HOLDS_ALL:
        candidates = [own]
    _must_belong_together(candidates)
    found = _Collected()
    for source, candidate in enumerate(candidates):
        rank = candidate.record.rank
        tensor_layout.check(candidate.layout.entries, context=f"rank {rank}: layout table")
        found.add(source, candidate)
    entries = {name: _whole(entry) for name, entry in found.forms.items()}
    pieces = {name: tuple(sorted(held)) for name, held in found.pieces.items()}
    missing = [text for n, held in pieces.items() for text in _gaps(n, entries[n].length, held)]
    missing += [
        f"{name}, of which {alias} is an alias"
        for alias, entry in entries.items()
        if (name := entry.alias_of) is not None and name not in entries
    ]
    if not missing and not _complete(candidates):
        ranks = ", ".join(str(c.record.rank) for c in candidates[:_NAMED])
        missing.append(f"a share: those of rank(s) {ranks} are not all that their share map has")
    filled = {n: tuple(p for p in held if p.length) for n, held in pieces.items()}
    return Assembly(entries, filled, tuple(missing))


def digest(world: int, placed: Iterable[Placed]) -> bytes:
    """Return 16 bytes that identify a share map; the order of its rows does not matter.

    Args:
        world: number of ranks.
        placed: of every share, aliases among them.
    """
    rows = set()
    for rank, entry, begin, length in placed:
        form = (entry.name, entry.role, entry.dtype, entry.shape, entry.strides)
        where = (entry.alias_of,) if entry.alias_of else (rank, begin, length)
        rows.add(repr((form, where)))
    head = repr((world, len(rows)))
    return hashlib.blake2b("\n".join([head, *sorted(rows)]).encode(), digest_size=16).digest()


@dataclass(eq=False)
class _Collected:
    """Collects what the candidates hold; the rank's own is taken first."""

    forms: dict[str, Entry] = field(default_factory=dict)
    """The first entry found of each name."""
    pieces: dict[str, list[ShardPiece]] = field(default_factory=dict)

    def add(self, source: int, candidate: Candidate) -> None:
        """Take all entries of the first candidate, and of the others only those of their shares."""
        for position, entry in enumerate(candidate.layout.entries):
            if source and not _is_shared(candidate, entry):
                continue
            known = self.forms.setdefault(entry.name, entry)
            if _form(known) != _form(entry):
                raise CorruptSnapshotError(
                    f"{entry.name} is {_form(known)} for one rank, and {_form(entry)} for rank"
                    f" {candidate.record.rank}, which shares it"
                )
            if entry.alias_of is None:
                piece = ShardPiece(entry.begin or 0, entry.length, source, position)
                self.pieces.setdefault(entry.name, []).append(piece)


def _is_shared(candidate: Candidate, entry: Entry) -> bool:
    layout = candidate.layout
    target = entry if entry.alias_of is None else layout.entries[layout.index[entry.alias_of]]
    return target.begin is not None


def _form(entry: Entry) -> tuple[object, ...]:
    """Return what all ranks that hold a part of a tensor must say alike of it."""
    shared = entry.alias_of is not None or entry.begin is not None
    return entry.role, entry.dtype, entry.shape, entry.strides, entry.alias_of, shared


def _whole(entry: Entry) -> Entry:
    size = math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
    return replace(entry, begin=None, length=0 if entry.alias_of else size)


def _gaps(name: str, size: int, held: Sequence[ShardPiece]) -> list[str]:
    """Describe the ranges of bytes that no piece holds.

    Raises:
        CorruptSnapshotError: two pieces hold the same byte.
    """
    for a, b in pairwise(held):
        if a.begin + a.length > b.begin:
            raise CorruptSnapshotError(
                f"{name}: bytes [{b.begin}, {min(a.begin + a.length, b.begin + b.length)}) are in"
                " two shares"
            )
    ends = [0, *(piece.begin + piece.length for piece in held)]
    begins = [*(piece.begin for piece in held), size]
    return [
        f"{name}: bytes [{a}, {b}) of {size}" for a, b in zip(ends, begins, strict=True) if a < b
    ]


def _complete(candidates: Sequence[Candidate]) -> bool:
    record = candidates[0].record
    if record.share_digest == HOLDS_ALL:
        return not any(e.begin is not None for e in candidates[0].layout.entries)
    placed = (
        (c.record.rank, e, e.begin, e.length)
        for c in candidates
        for e in c.layout.entries
        if _is_shared(c, e)
    )
    return digest(record.world, placed) == record.share_digest


def _identity(candidate: Candidate) -> tuple[object, ...]:
    record = candidate.record
    # Shares of two instants are no one state, should the loop change weights in between: I2 (the
    # two instants).
    return record.timeline, record.step, record.world, record.share_digest, record.early


def _must_belong_together(candidates: Sequence[Candidate]) -> None:
    """Refuse candidates that are not of one snapshot.

    Raises:
        CorruptSnapshotError: two of them differ in what one snapshot has in common; both are named.
    """
    own = candidates[0].record
    seen = {own.rank}
    for candidate in candidates[1:]:
        record = candidate.record
        if record.rank in seen:
            raise CorruptSnapshotError(f"two snapshots of rank {record.rank} cannot be of one step")
        seen.add(record.rank)
        if _identity(candidate) != _identity(candidates[0]):
            raise CorruptSnapshotError(
                f"no one snapshot: rank {own.rank} has {_said(candidates[0])}, rank {record.rank}"
                f" {_said(candidate)}"
            )


def _said(candidate: Candidate) -> str:
    record = candidate.record
    early = " (early)" if record.early else ""
    share = record.share_digest.hex()
    return (
        f"step {record.step}{early} of timeline {record.timeline:x}, world {record.world},"
        f" share map {share}"
    )


# ---- boundary state: read, and checked before anything relies on it ------------------------------
# Checksums show that the bytes are those that were written, not that lightck wrote them. What does
# not have the form that `boundary_state`, `inventory` and `rng` give it is damage, found before a
# live object has changed.

_NAME = re.compile(r"(model|extras|optim/(0|[1-9][0-9]{0,8}))/.*", re.DOTALL)
_INDEXED = re.compile(r"@#-?[0-9]{1,300}")


def boundary_trees(
    candidate: Candidate, entries: Sequence[Entry], *, context: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a snapshot's states of step end and of forward start, in the form they were written.

    Args:
        candidate: of the rank whose states they are.
        entries: every tensor that they may refer to, those among them that other ranks hold.
        context: for messages.

    Raises:
        CorruptSnapshotError: these parts or the entries' names do not have it.
    """
    state = candidate.manifest
    first = boundary_blob.opened(state.at_step, context=context)
    second = boundary_blob.opened(state.at_forward, context=context)
    try:
        _check_entries(entries)
        _check(candidate, first, second, {e.name for e in entries if e.alias_of is None})
    except CorruptSnapshotError as error:
        raise CorruptSnapshotError(f"{context}: {error}") from error
    return first, second


def share_peers(candidate: Candidate, *, context: str) -> list[int]:
    """Return the ranks that shared the state when this one wrote its snapshot, itself included.

    Raises:
        CorruptSnapshotError: it does not say.
    """
    return share_statement(candidate, context=context)[0]


def share_statement(candidate: Candidate, *, context: str) -> tuple[list[int], bool]:
    """Return `share_peers`, and whether the snapshot says that all ranks held the state alike.

    State here means parameters and optimizers.

    Raises:
        CorruptSnapshotError: it does not say.
    """
    second = boundary_blob.opened(candidate.manifest.at_forward, context=context)
    said = second.get("share") if type(second) is dict else None
    named = said.get("peers") if type(said) is dict else None
    world = candidate.record.world
    if type(named) is not list or not all(type(r) is int and 0 <= r < world for r in named):
        raise CorruptSnapshotError(f"{context}: its share is one of ranks {named!r} of {world}")
    return named, type(said) is dict and said.get("alike") is True


def _check_entries(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if not _NAME.fullmatch(entry.name):
            raise CorruptSnapshotError(f"the layout table names a tensor {entry.name!r}")
    tensor_layout.check(entries, context="layout table")


def _check(candidate: Candidate, first: Any, second: Any, tensors: set[str]) -> None:
    _fields(first, "the state at step end", {"rng": dict, "extras": dict})
    _fields(second, "the state at the forward", {"optimizers": list, "extras": dict, "step": int})
    if not second["step"] == candidate.record.step == candidate.manifest.step:
        raise CorruptSnapshotError(
            f"record of step {candidate.record.step}, manifest of step {candidate.manifest.step},"
            f" state of step {second['step']}"
        )
    for held in (first["extras"], second["extras"]):
        _keys(held, "extras")
        rebuild(held, _finder(tensors, "extras/"))
    for i, tree in enumerate(second["optimizers"]):
        _optimizer(i, tree, tensors)
    rng.check(rebuild(first["rng"]))
    if "rng" in second:
        rng.check(rebuild(_fields(second, "the state", {"rng": dict})["rng"]))


def _optimizer(i: int, tree: Any, tensors: set[str]) -> None:
    label = f"optimizer {i}"
    fields = {"class": str, "groups": list, "state": dict, "attributes": dict}
    _fields(tree, label, fields)
    find = _finder(tensors, f"optim/{i}/")
    for group in tree["groups"]:
        _fields(group, f"{label} group", {"params": list, "options": dict})
        if not all(type(name) is str for name in group["params"]):
            raise CorruptSnapshotError(f"{label} has parameters without a name")
        _keys(group["options"], f"{label} options")
        rebuild(group["options"], find)
    for name, state in _keys(tree["state"], f"{label} state").items():
        if name.startswith("@#") and not _INDEXED.fullmatch(name):
            raise CorruptSnapshotError(f"{label} has state under {name!r}")
        rebuild(_fields(state, f"{label} state", {}), find)
    if "order" in tree:
        key_order.check(tree["order"], label)
    for name, value in _keys(tree["attributes"], f"{label} attributes").items():
        taken = name in BASE_ATTRIBUTES or hasattr(torch.optim.Optimizer, name)
        if taken or not name.isidentifier():
            raise CorruptSnapshotError(f"{label} has an attribute {name!r}")
        rebuild(value, find)


def _fields(tree: Any, label: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    if type(tree) is not dict or TAG in tree:
        raise CorruptSnapshotError(f"{label} is a {type(tree).__name__}, expected a plain dict")
    for name, kind in kinds.items():
        if type(tree.get(name)) is not kind:
            found = type(tree.get(name)).__name__
            raise CorruptSnapshotError(f"{label}: {name} is {found}, expected {kind.__name__}")
    return tree


def _keys(tree: dict[Any, Any], label: str) -> dict[str, Any]:
    if TAG in tree or not all(type(key) is str for key in tree):
        raise CorruptSnapshotError(f"{label} has a key that is no name")
    return tree


def _finder(tensors: set[str], prefix: str) -> Callable[[str], torch.Tensor]:
    """Make a lookup that stands in for the tensors; it refuses names of other parts."""
    nothing = torch.empty(0)

    def find(name: str) -> torch.Tensor:
        if name not in tensors or not name.startswith(prefix):
            raise CorruptSnapshotError(f"a state under {prefix} refers to {name!r}")
        return nothing

    return find


# ---- one rank's whole state: leased, verified, read ----------------------------------------------

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
    def in_memory(self) -> Collection[str]:
        """Names of the tensors whose bytes are in memory already, and are in no region here."""

    @property
    def record(self) -> Record:
        """Commit record of the snapshot that the rank's own state is from."""

    @property
    def early(self) -> bool:
        """Tell whether a rank finished the snapshot before forward start."""

    @property
    def suspect(self) -> bool:
        """Tell whether replicas were found to differ."""

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the boundary states of step end and of forward start, checked."""

    def verify(
        self,
        unowned: npt.NDArray[np.uint64] | None = None,
        done: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Check every byte against its checksum."""

    def read(self, addresses: npt.NDArray[np.uint64]) -> None:
        """Read the bytes into memory, and check them on the way."""


@dataclass(frozen=True, eq=False)
class RegionPart:
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
class AssembledSnapshot:
    """One rank's state from one or more regions, which their opener closes. For one thread."""

    entries: tuple[Entry, ...]
    """Entry of every tensor, as if one region held all of them."""
    parts: tuple[RegionPart, ...]
    """Part in each region, the rank's own region first."""

    @classmethod
    def of(cls, sources: Sequence[Source]) -> AssembledSnapshot:
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
    def in_memory(self) -> Collection[str]:
        """Names of the tensors that are in memory already: none."""
        return ()

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
            named, alike = share_statement(self.parts[0].candidate, context=self.label)
        except CorruptSnapshotError:
            return None
        return min(named) if alike and named else None

    def trees(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the boundary states of step end and of forward start, checked.

        Raises:
            CorruptSnapshotError: they do not have the form in which they were written.
        """
        return boundary_trees(self.parts[0].candidate, self.entries, context=self.label)

    def is_there(self) -> bool:
        """Tell whether no trainer has overwritten any of it since it was found."""
        return all(is_there(part.region, part.candidate) for part in self.parts)

    def lease(self, held: contextlib.ExitStack) -> None:
        """Hold every slot for reading until the stack is closed.

        Raises:
            RegionBusyError: a trainer is overwriting one.
            CorruptSnapshotError: one was overwritten since it was found.
        """
        for part in self.parts:
            lease, slot = part.region.native.lease, part.candidate.record.slot
            lease(slot, True)
            held.callback(lease, slot, False)
            if not is_there(part.region, part.candidate):
                raise CorruptSnapshotError(f"{part.label}: overwritten while it was read")

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

    def _fetch(
        self, part: RegionPart, rows: npt.NDArray[Any], entries: npt.NDArray[np.intp]
    ) -> None:
        names = [self.entries[i].name for i in entries]
        part.region.fetch(part.candidate, rows, names, usual_threads())


def _part(
    region: Region,
    candidate: Candidate,
    positions: npt.NDArray[np.intp],
    entries: npt.NDArray[np.intp],
    begins: npt.NDArray[np.uint64],
) -> RegionPart:
    rows = np.zeros(len(positions), native_region.READ_DTYPE)
    rows["offset"] = candidate.layout.offsets[positions]
    rows["length"] = candidate.layout.lengths[positions]
    rows["crc"] = candidate.manifest.crcs[positions]
    return RegionPart(region, candidate, rows, entries, begins)
