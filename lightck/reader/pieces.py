"""Puts shares together: where the bytes of every tensor lie in the regions of several ranks.

Ranks that hold the same state write it once among them: each its *share*, whole tensors and ranges
of their bytes. An entry of a share has `begin`, also where it holds the whole tensor; everything
else in a region is its rank's own, and has namesakes with other content in the regions of others.

The digest in every record is that of the share map: which rank holds which bytes of what. It can be
computed again from the layout tables of all that share, and from no smaller set of them. So a
snapshot is known to be complete, or not, from what its pieces say of themselves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from lightck.errors import CorruptSnapshotError
from lightck.region.layout import Entry
from lightck.region.native_region import HOLDS_ALL
from lightck.region.region import Candidate
from lightck.state import tensor_layout

_NAMED = 8
Placed = tuple[int, Entry, int | None, int]
"""The rank that holds bytes of a tensor, the tensor's entry, and first byte and number of the
bytes."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
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
    pieces: dict[str, tuple[Piece, ...]]
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
    found = _Found()
    for source, candidate in enumerate(candidates):
        rank = candidate.record.rank
        tensor_layout.check(candidate.layout.entries, context=f"rank {rank}: layout table")
        found.take(source, candidate)
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
class _Found:
    """Collects what the candidates hold; the rank's own is taken first."""

    forms: dict[str, Entry] = field(default_factory=dict)
    """The first entry found of each name."""
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def take(self, source: int, candidate: Candidate) -> None:
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
                piece = Piece(entry.begin or 0, entry.length, source, position)
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


def _gaps(name: str, size: int, held: Sequence[Piece]) -> list[str]:
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
