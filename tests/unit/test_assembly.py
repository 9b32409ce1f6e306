"""Shares put together: which snapshots belong together, what is missing, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightck.errors import CorruptSnapshotError
from lightck.reader import assembly
from lightck.reader.assembly import Assembly, ShardPiece, assemble, peers_of
from lightck.region.layout import Entry, Layout
from lightck.region.manifest import Manifest
from lightck.region.native_region import HOLDS_ALL, RECORD_EARLY, Record
from lightck.region.region import Candidate

OWN = Entry("model/bn.mean", "buffer", "float32", (4,), (1,), 16)
THREE = Entry("model/w", "parameter", "float32", (3072,), (1,), 12288)
EMPTY = Entry("model/none", "parameter", "float32", (0,), (1,), 0)
COUNT = Entry("optim/0/w/step", "optimizer", "float32", (), (), 4)
TIED = replace(THREE, name="model/tied", alias_of="model/w", length=0)


def part(entry: Entry, begin: int = 0, end: int | None = None) -> Entry:
    """A range of an entry's bytes, in a share."""
    return replace(entry, begin=begin, length=(entry.length if end is None else end) - begin)


def digest(world: int, placed: Sequence[tuple[int, Entry]]) -> bytes:
    return assembly.digest(world, [(rank, e, e.begin, e.length) for rank, e in placed])


SHARES = {
    0: [OWN, part(THREE, 0, 4096), TIED, part(EMPTY)],
    1: [OWN, part(THREE, 4096, 8192), TIED],
    2: [OWN, part(THREE, 8192), TIED, part(COUNT)],
}


def candidate(
    rank: int,
    entries: Sequence[Entry],
    share: bytes,
    *,
    step: int = 7,
    timeline: int = 5,
    flags: int = 0,
) -> Candidate:
    layout = Layout(tuple(entries), np.arange(len(entries), dtype=np.uint64))
    record = Record(
        sequence=1, step=step, timeline=timeline, parent=0, layout_offset=0, layout_length=0,
        manifest_offset=0, manifest_length=0, payload_bytes=0, wall_time_ns=0, flags=flags, slot=0,
        rank=rank, world=3, share_digest=share,
    )  # fmt: skip
    crcs = np.full(len(entries), rank, np.uint32)  # every rank's are its own
    return Candidate(record, layout, Manifest(step, 1, crcs, b"", b""))


def map_of(shares: dict[int, list[Entry]], world: int = 3) -> bytes:
    shared = {"model/w", "model/none", "optim/0/w/step", "model/tied"}
    return digest(world, [(r, e) for r, held in shares.items() for e in held if e.name in shared])


WHOLE = map_of(SHARES)


def all_of(
    shares: dict[int, list[Entry]] = SHARES, share: bytes = WHOLE, first: int = 0
) -> list[Candidate]:
    ranks = [first, *(rank for rank in shares if rank != first)]
    return [candidate(rank, shares[rank], share) for rank in ranks]


def places(found: Assembly, name: str) -> list[tuple[int, int, int]]:
    return [(p.source, p.begin, p.length) for p in found.pieces[name]]


def test_a_tensor_in_three_pieces_is_found_in_the_order_of_its_bytes() -> None:
    found = assemble(all_of(first=1))  # sources: ranks 1, 0, 2
    assert not found.missing
    assert places(found, "model/w") == [(1, 0, 4096), (0, 4096, 4096), (2, 8192, 4096)]
    assert found.entries["model/w"] == THREE


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_not_shared_is_taken_from_the_ranks_own_region(rank: int) -> None:
    candidates = all_of(first=rank)
    found = assemble(candidates)
    assert found.pieces[OWN.name] == (ShardPiece(0, 16, 0, 0),)
    source, position = found.pieces[OWN.name][0].source, found.pieces[OWN.name][0].position
    assert candidates[source].manifest.crcs[position] == rank
    assert found.entries[OWN.name] == OWN


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_empty_tensors_and_counters_are_there_for_every_rank(rank: int) -> None:
    found = assemble(all_of(first=rank))
    assert found.entries[EMPTY.name] == EMPTY
    assert found.pieces[EMPTY.name] == ()
    assert found.entries[COUNT.name] == COUNT
    assert len(found.pieces[COUNT.name]) == 1


def test_an_alias_is_there_for_a_rank_that_holds_nothing_of_its_target() -> None:
    shares = {0: [OWN], 1: [OWN, part(THREE), TIED]}
    found = assemble(all_of(shares, map_of(shares)))
    assert not found.missing
    assert found.entries[TIED.name] == TIED
    assert TIED.name not in found.pieces


def test_a_rank_that_holds_all_needs_no_other() -> None:
    alone = candidate(0, [OWN, THREE, EMPTY, TIED], HOLDS_ALL)
    found = assemble([alone, candidate(1, [], HOLDS_ALL)])
    assert not found.missing
    assert found.entries == {e.name: e for e in (OWN, THREE, EMPTY, TIED)}
    assert places(found, "model/w") == [(0, 0, 12288)]
    assert peers_of(alone, [candidate(1, [OWN, THREE], HOLDS_ALL)]) == []


def test_a_gap_is_named_with_its_bytes() -> None:
    found = assemble([c for c in all_of() if c.record.rank != 1])
    assert found.missing == ("model/w: bytes [4096, 8192) of 12288",)
    first = assemble([c for c in all_of(first=1) if c.record.rank != 0])
    assert first.missing == ("model/w: bytes [0, 4096) of 12288",)
    last = assemble([c for c in all_of() if c.record.rank != 2])
    assert last.missing == ("model/w: bytes [8192, 12288) of 12288",)


def test_a_share_without_a_trace_in_the_others_is_missed_all_the_same() -> None:
    shares = {0: [OWN, part(THREE)], 1: [OWN, part(COUNT)]}
    found = assemble(all_of(shares, map_of(shares))[:1])
    assert len(found.missing) == 1
    assert "rank(s) 0 are not all" in found.missing[0]
    assert not assemble(all_of(shares, map_of(shares))).missing


def test_a_map_of_more_than_is_there_is_never_complete() -> None:
    wider = {**SHARES, 1: [*SHARES[1], part(replace(COUNT, name="optim/0/v/step"))]}
    assert assemble(all_of(SHARES, digest(3, [(r, e) for r in wider for e in wider[r]]))).missing


def test_shared_entries_under_a_record_that_says_it_holds_all_are_not_complete() -> None:
    assert assemble([candidate(0, SHARES[0], HOLDS_ALL)]).missing


def test_pieces_upon_each_other_are_refused() -> None:
    shares = {**SHARES, 1: [OWN, part(THREE, 4000, 8192), TIED]}
    with pytest.raises(CorruptSnapshotError, match=r"model/w: bytes \[4000, 4096\) are in two"):
        assemble(all_of(shares))


def test_the_same_piece_twice_is_refused() -> None:
    shares = {**SHARES, 1: [OWN, part(THREE, 0, 4096), TIED]}
    with pytest.raises(CorruptSnapshotError, match=r"\[0, 4096\) are in two"):
        assemble(all_of(shares))


def test_pieces_of_other_forms_are_refused() -> None:
    other = replace(part(THREE, 4096, 8192), shape=(64, 48), strides=(48, 1))
    with pytest.raises(CorruptSnapshotError, match="shares it"):
        assemble(all_of({**SHARES, 1: [OWN, other]}))


def test_a_tensor_that_one_rank_calls_its_own_is_not_completed_by_others() -> None:
    with pytest.raises(CorruptSnapshotError, match="shares it"):
        assemble(all_of({**SHARES, 0: [OWN, THREE]}))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (candidate(1, SHARES[1], WHOLE, step=8), "step 8"),
        (candidate(1, SHARES[1], WHOLE, timeline=6), "timeline 6"),
        (candidate(1, SHARES[1], bytes(15) + b"!"), "share map 0000"),
        (candidate(1, SHARES[1], WHOLE, flags=RECORD_EARLY), r"step 7 \(early\)"),
        (candidate(0, SHARES[0], WHOLE), "two snapshots of rank 0"),
    ],
    ids=["another step", "another timeline", "another map", "another instant", "the same rank"],
)
def test_a_mixture_is_refused_and_never_chosen(other: Candidate, named: str) -> None:
    own, third = candidate(0, SHARES[0], WHOLE), candidate(2, SHARES[2], WHOLE)
    with pytest.raises(CorruptSnapshotError, match=named):
        assemble([own, other, third])
    assert peers_of(own, [other, third]) == [third]


def test_a_table_that_no_tensor_fits_is_refused() -> None:
    beyond = part(THREE, 8192, 16384)
    with pytest.raises(CorruptSnapshotError, match="rank 2: layout table"):
        assemble(all_of({**SHARES, 2: [OWN, beyond]}))


CHANGES = {
    "a name": replace(part(COUNT), name="optim/0/v/step"),
    "a role": replace(part(COUNT), role="parameter"),
    "a dtype": replace(part(COUNT), dtype="int32"),
    "a shape": replace(part(COUNT), shape=(1,), strides=(1,)),
    "strides": replace(part(COUNT), shape=(1,), strides=(4,)),
    "a length": replace(part(COUNT), length=8),
    "a cut": replace(part(COUNT), begin=4),
    "an alias": replace(COUNT, alias_of="model/w", length=0),
}


def test_the_digest_differs_when_anything_differs() -> None:
    base = [(0, part(THREE)), (1, part(COUNT))]
    seen = {digest(2, base), digest(3, base), digest(2, base[:1]), digest(2, [])}
    seen.add(digest(2, [(1, part(THREE)), (1, part(COUNT))]))  # other peers
    seen |= {digest(2, [base[0], (1, entry)]) for entry in CHANGES.values()}
    assert len(seen) == 5 + len(CHANGES)
    assert digest(2, base[::-1]) == digest(2, base)
