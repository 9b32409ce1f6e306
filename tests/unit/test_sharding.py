"""Replicated tensors are divided: every byte once, evenly, the same whoever asks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.distributed.sharding import PAGE_BYTES, ByteRange, SharedTensor, divide

LENGTHS = st.one_of(
    st.just(0),
    st.integers(1, 64),
    st.integers(1, 40).map(lambda pages: pages * PAGE_BYTES),
    st.integers(1, 3_000_000),
)


@st.composite
def inventories(draw: st.DrawFn, *, may_cut: bool | None = None) -> list[SharedTensor]:
    count = draw(st.integers(0, 25))
    names = draw(st.permutations([f"t{i}" for i in range(count)]))
    flag = st.booleans()
    return [
        SharedTensor(n, draw(LENGTHS), draw(flag) if may_cut is None else may_cut, draw(flag))
        for n in names
    ]


def by_name(cuts: list[ByteRange]) -> dict[str, list[ByteRange]]:
    found: dict[str, list[ByteRange]] = {}
    for cut in sorted(cuts, key=lambda c: (c.name, c.begin, c.end)):
        found.setdefault(cut.name, []).append(cut)
    return found


def loads(cuts: list[ByteRange], ranks: int) -> list[int]:
    return [sum(c.end - c.begin for c in cuts if c.peer == peer) for peer in range(ranks)]


@given(inventories(), st.integers(1, 8))
def test_every_byte_is_written_by_exactly_one_rank(items: list[SharedTensor], ranks: int) -> None:
    found = by_name(divide(items, ranks))
    assert found.keys() == {item.name for item in items}
    for item in items:
        at = 0
        for cut in found[item.name]:
            assert 0 <= cut.peer < ranks
            assert cut.begin == at, "a gap, or bytes twice"
            assert cut.end > cut.begin or item.length == 0
            at = cut.end
        assert at == item.length
        assert len(found[item.name]) == len({c.peer for c in found[item.name]})
        if item.length == 0 or not item.may_cut:
            assert len(found[item.name]) == 1


@given(inventories(), st.integers(1, 8))
def test_cuts_fall_on_pages_of_the_tensor(items: list[SharedTensor], ranks: int) -> None:
    for cuts in by_name(divide(items, ranks)).values():
        assert all(cut.begin % PAGE_BYTES == 0 for cut in cuts)


@given(inventories(may_cut=True), st.integers(1, 8))
def test_no_rank_writes_two_pages_more_than_its_part(items: list[SharedTensor], ranks: int) -> None:
    written = loads(divide(items, ranks), ranks)
    part = sum(item.length for item in items) / ranks
    assert max(abs(each - part) for each in written) <= 2 * PAGE_BYTES


@given(inventories(may_cut=True), st.integers(1, 8))
def test_what_is_written_once_only_is_divided_by_itself(
    items: list[SharedTensor], ranks: int
) -> None:
    held = {item.name for item in items if item.held}
    written = loads([c for c in divide(items, ranks) if c.name in held], ranks)
    part = sum(item.length for item in items if item.held) / ranks
    assert max(abs(each - part) for each in written) <= PAGE_BYTES


@given(inventories(), st.integers(1, 8))
def test_what_can_be_cut_evens_out_what_cannot(items: list[SharedTensor], ranks: int) -> None:
    alike = [item for item in items if item.held]
    written = loads(divide(alike, ranks), ranks)
    whole = [item for item in alike if not item.may_cut]
    blocks = loads(divide(whole, ranks), ranks)
    # The level: no rank is above it but for what it holds whole.
    part = sum(item.length for item in alike) / ranks
    assert max(written, default=0) <= max(part, *blocks) + PAGE_BYTES


@given(inventories(), st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_the_tensors_does_not_matter(
    items: list[SharedTensor], ranks: int, rng: random.Random
) -> None:
    mixed = list(items)
    rng.shuffle(mixed)
    assert divide(mixed, ranks) == divide(items, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_equal_tensors_that_cannot_be_cut_go_round(ranks: int) -> None:
    items = [SharedTensor(f"t{i}", 1000, False, True) for i in range(3 * ranks)]
    assert loads(divide(items, ranks), ranks) == [3000] * ranks
