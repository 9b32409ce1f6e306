from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightck.region import allocator
from lightck.region.allocator import UNBOUNDED, SlotPlan, Space, plan
from lightck.region.layout import Entry
from lightck.region.native_region import LINE_BYTES, Segment

GRANULE = 2 << 20
MIB = 1 << 20

lengths = st.lists(
    st.one_of(
        st.integers(0, 300),
        st.integers(0, 200_000),
        st.sampled_from([64, 65, 65_535, 65_536, 65_537, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1]),
        st.integers(0, 40 * MIB),
    ),
    max_size=30,
)
pages = st.sampled_from([4096, GRANULE])


def entries_of(sizes: list[int]) -> list[Entry]:
    return [
        Entry(f"t{i:03}", "parameter", "uint8", (n,), (1,), n, f"l{i % 3}")
        for i, n in enumerate(sizes)
    ]


def segments_of(slot_granules: list[int], slots: int) -> list[Segment]:
    """Segments as a region has them: one after the other, with space for each slot."""
    found, offset = [], GRANULE
    for count in slot_granules:
        found.append(Segment(offset, slots * count * GRANULE, count * GRANULE))
        offset += slots * count * GRANULE
    return found


def extents_of(found: SlotPlan) -> list[tuple[int, int]]:
    """(start, end) of everything that the plan places, in the order of the space."""
    spans = [
        (found.table_at, found.table_at + found.table_bytes),
        (found.manifest_at, found.manifest_at + found.manifest_bytes),
    ]
    spans += [
        (int(at), int(at) + entry.length)
        for at, entry in zip(found.at, found.entries, strict=True)
        if entry.length
    ]
    return sorted(spans)


def check_plan(found: SlotPlan, page_bytes: int) -> None:
    for (_, end), (start, _) in pairwise(extents_of(found)):
        assert allocator.align(end, LINE_BYTES) <= start, "two extents share a cache line"
    assert extents_of(found)[-1][1] <= found.needed_bytes
    for at, entry in zip(found.at, found.entries, strict=True):
        if entry.length:
            assert at % LINE_BYTES == 0
        if entry.length >= allocator.LARGE_BYTES:
            assert at % allocator.PAGE_BYTES == 0
        if entry.length >= allocator.HUGE_BYTES:
            assert at % page_bytes == 0


@given(lengths, pages, st.integers(0, 100_000))
def test_extents_are_aligned_and_share_no_cache_line(
    sizes: list[int], page_bytes: int, manifest_bytes: int
) -> None:
    found = plan(entries_of(sizes), UNBOUNDED, manifest_bytes, page_bytes)
    assert found is not None
    check_plan(found, page_bytes)


@given(lengths, pages)
def test_a_plan_fits_exactly_into_the_space_it_says_it_needs(
    sizes: list[int], page_bytes: int
) -> None:
    entries = entries_of(sizes)
    wanted = plan(entries, UNBOUNDED, 4096, page_bytes)
    assert wanted is not None
    size = wanted.needed_bytes
    found = plan(entries, Space([Segment(0, size, size)]), 4096, page_bytes)
    assert found is not None
    assert np.array_equal(found.at, wanted.at)
    if any(sizes):
        assert plan(entries, Space([Segment(0, size, size - 1)]), 4096, page_bytes) is None


@given(lengths, pages, st.randoms(use_true_random=False))
def test_the_space_needed_does_not_depend_on_the_order(
    sizes: list[int], page_bytes: int, dice: object
) -> None:
    entries = entries_of(sizes)
    first = plan(entries, UNBOUNDED, 4096, page_bytes)
    dice.shuffle(entries)  # type: ignore[attr-defined]
    second = plan(entries, UNBOUNDED, 4096, page_bytes)
    assert first is not None and second is not None
    assert first.needed_bytes == second.needed_bytes


@given(lengths, lengths, pages)
def test_more_entries_never_need_less_space(
    sizes: list[int], more: list[int], page_bytes: int
) -> None:
    small = plan(entries_of(sizes), UNBOUNDED, 4096, page_bytes)
    large = plan(entries_of(sizes + more), UNBOUNDED, 4096, page_bytes)
    assert small is not None and large is not None
    assert large.needed_bytes >= small.needed_bytes


@given(
    lengths,
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(2, 4),
    pages,
)
def test_slots_never_overlap_and_every_extent_lies_in_one_part_of_its_slot(
    sizes: list[int], granules: list[int], slots: int, page_bytes: int
) -> None:
    segments = segments_of(granules, slots)
    space = Space(segments)
    assert space.size == sum(granules) * GRANULE
    found = plan(entries_of(sizes), space, 4096, page_bytes)
    if found is None:
        return
    check_plan(found, page_bytes)
    taken = []
    for slot in range(slots):
        starts = np.array([start for start, _ in extents_of(found)], np.uint64)
        for offset, (start, end) in zip(
            space.offsets(starts, slot).tolist(), extents_of(found), strict=True
        ):
            length = end - start
            assert any(
                s.offset + slot * s.slot_bytes <= offset
                and offset + length <= s.offset + (slot + 1) * s.slot_bytes
                for s in segments
            ), "an extent leaves its part"
            assert offset % LINE_BYTES == start % LINE_BYTES == 0
            taken.append((offset, offset + length))
        large = [i for i, e in enumerate(found.entries) if e.length >= allocator.HUGE_BYTES]
        assert not np.any(space.offsets(found.at[large], slot) % np.uint64(page_bytes))
    for (_, end), (start, _) in pairwise(sorted(taken)):
        assert end <= start


@given(lengths, st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 200))
def test_what_fits_still_fits_in_the_same_place_after_a_growth(
    sizes: list[int], granules: list[int], more: int
) -> None:
    entries = entries_of(sizes)
    before = plan(entries, Space(segments_of(granules, 2)), 4096, 4096)
    after = plan(entries, Space(segments_of([*granules, more], 2)), 4096, 4096)
    if before is not None:
        assert after is not None
        assert np.array_equal(before.at, after.at)
        assert (before.table_at, before.manifest_at) == (after.table_at, after.manifest_at)


@given(lengths)
def test_a_growth_by_all_that_is_needed_is_always_enough(sizes: list[int]) -> None:
    entries = entries_of(sizes)
    wanted = plan(entries, UNBOUNDED, 4096, 4096)
    assert wanted is not None
    granules = -(-wanted.needed_bytes // GRANULE)
    assert plan(entries, Space(segments_of([1, granules], 2)), 4096, 4096) is not None


@given(st.integers(0, 10_000), st.integers(0, 1 << 20))
def test_a_manifest_of_the_expected_size_fits_its_room(count: int, boundary_bytes: int) -> None:
    room = allocator.manifest_capacity(count, boundary_bytes)
    assert room % allocator.PAGE_BYTES == 0
    assert room >= 4 * count + 2 * boundary_bytes + allocator.MANIFEST_SLACK_BYTES


def test_aliases_and_empty_tensors_take_no_space() -> None:
    entries = entries_of([1000, 0, 0])
    alias = Entry("z", "parameter", "uint8", (1000,), (1,), 0, alias_of="t000")
    found = plan([*entries, alias], UNBOUNDED, 4096, 4096)
    assert found is not None
    assert found.needed_bytes == int(found.at[0]) + 1024
