"""The region's floor, with bytes and NumPy: no torch is needed to commit and recover."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lightck.errors import (
    PreviousPersistError,
    RegionBusyError,
    RegionFullError,
    RegionIOError,
)
from lightck.region import location, native_region
from lightck.region.region import Region, open_and_recover
from support import faults, forge
from support.regions import Book, contents_of, newest, random_contents, same, stored

MAX_SEGMENTS = 16
SIZES = {"a": 1, "b": 63, "c": 4097, "d": 100_000, "empty": 0}


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    faults.clear()


@pytest.fixture
def run(region_dir: Path) -> Path:
    return region_dir / "run"


def test_this_floor_does_not_import_torch() -> None:
    package = Path(native_region.__file__).parent.parent
    code = [
        "import sys, types",
        "package = sys.modules['lightck'] = types.ModuleType('lightck')",  # not its __init__
        f"package.__path__ = [{str(package)!r}]",
        "import lightck.region.slot_writer",
        "assert 'torch' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=True, timeout=250)


def test_what_was_committed_comes_back_newest_first(run: Path, rng: np.random.Generator) -> None:
    wrote = {step: random_contents(rng, SIZES) for step in range(1, 6)}
    with Book(run, slots=3) as book:
        book.region.begin_timeline(None)
        for step, contents in wrote.items():
            assert book.commit(step, contents)
    found = stored(run)
    assert list(found) == [5, 4, 3]
    assert all(same(found[step], wrote[step]) for step in found)


def test_until_it_is_committed_a_snapshot_is_not_there(run: Path, rng: np.random.Generator) -> None:
    first, second = random_contents(rng, SIZES), random_contents(rng, SIZES)
    with Book(run) as book:
        book.region.begin_timeline(None)
        book.commit(1, first)
        writer = book.open(second)
        assert writer is not None
        assert list(stored(run)) == [1]
        with faults.delayed(faults.RECORD, 3600.0):
            sealing = threading.Thread(target=book.seal, args=(writer, 2))
            sealing.start()  # on memory it commits, too
            assert list(stored(run)) == [1]
        sealing.join()
        assert writer.wait(None)
        assert list(stored(run)) == [2, 1]


def test_an_abandoned_snapshot_leaves_its_slot_empty_and_free(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            book.commit(step, random_contents(rng, SIZES))
        writer = book.open(random_contents(rng, SIZES))
        assert writer is not None
        writer.abandon()
        writer.abandon()
        assert list(stored(run)) == [2]
        contents = random_contents(rng, SIZES)
        assert book.commit(3, contents)
        assert same(stored(run)[3], contents)


def test_the_newest_snapshot_is_never_the_slot_that_is_opened(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run, slots=3) as book:
        book.region.begin_timeline(None)
        book.commit(1, random_contents(rng, SIZES))
        writers = [book.open(random_contents(rng, SIZES)) for _ in range(3)]
        assert [w is None for w in writers] == [False, False, True]
        assert list(stored(run)) == [1]
        assert writers[0] is not None
        book.seal(writers[0], 2)
        writers[0].wait(None)
        assert list(stored(run)) == [2, 1]
        third = book.open(random_contents(rng, SIZES))  # now slot of 1 is free, that of 2 is not
        assert third is not None
        assert list(stored(run)) == [2]


def test_the_layout_table_is_written_once_per_slot_and_again_when_it_changes(
    run: Path, rng: np.random.Generator
) -> None:
    def tables() -> dict[int, bytes]:
        return {slot.index: slot.table_digest for slot in book.region.slots}

    with Book(run) as book:
        book.region.begin_timeline(None)
        for step in range(1, 5):
            book.commit(step, random_contents(rng, SIZES))
        before = tables()
        assert all(before.values()) and before[0] != before[1]  # other offsets in each
        book.commit(5, random_contents(rng, SIZES))
        assert tables() == before
        book.commit(6, random_contents(rng, {**SIZES, "new": 10}))
        assert sum(tables()[i] != before[i] for i in (0, 1)) == 1
    assert sorted(stored(run)) == [5, 6]
    assert "new" in stored(run)[6] and "new" not in stored(run)[5]


def test_growth_keeps_what_is_there_and_offers_more(run: Path, rng: np.random.Generator) -> None:
    small = random_contents(rng, SIZES)
    large = random_contents(rng, {**SIZES, "large": 5 << 20})
    with Book(run) as book:
        book.region.begin_timeline(None)
        book.commit(1, small)
        before = book.region.info
        book.commit(2, large)
        after = book.region.info
        assert len(after.segments) == len(before.segments) + 1
        assert after.segments[:1] == before.segments
        assert after.size == location.locate(run, 0, create=False).file.stat().st_size
        assert same(stored(run)[1], small) and same(stored(run)[2], large)
        book.commit(3, large)
        book.commit(4, small)
        assert book.region.info.segments == after.segments
    assert same(stored(run)[3], large) and same(stored(run)[4], small)


def test_growth_ends_with_the_last_segment_and_an_error_that_says_so(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        contents = random_contents(rng, SIZES)
        while len(book.region.info.segments) < MAX_SEGMENTS:
            book.region.native.grow(1)
            book.region.info = book.region.native.describe()
        book.commit(1, contents)
        with pytest.raises(RegionFullError, match=f"{MAX_SEGMENTS} segments"):
            book.open(random_contents(rng, {"a": 200 << 20}))
        assert same(stored(run)[1], contents)
        assert book.commit(2, contents)


def test_a_failed_commit_latches_and_the_next_owner_starts_clean(
    run: Path, rng: np.random.Generator
) -> None:
    kept = random_contents(rng, SIZES)
    with Book(run) as book:
        book.region.begin_timeline(None)
        book.commit(1, kept)
        faults.arm(faults.RECORD)
        with pytest.raises(RegionIOError, match=r"slot 1.*Input/output error"):
            book.commit(2, random_contents(rng, SIZES))
        with pytest.raises(PreviousPersistError, match="latched"):
            book.commit(3, random_contents(rng, SIZES))
        assert same(stored(run)[1], kept) and len(stored(run)) == 1
    with Book(run) as book:
        again = random_contents(rng, SIZES)
        assert book.commit(2, again)
    assert same(stored(run)[2], again) and same(stored(run)[1], kept)


def test_a_branch_lets_go_of_what_came_after_it_and_keeps_its_ancestors(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run, slots=6) as book:
        book.region.begin_timeline(None)
        for step in (1, 2, 3):
            book.commit(step, random_contents(rng, SIZES))
    with Book(run) as book:
        second = next(c for c in book.region.recover().candidates if c.record.step == 2)
        book.region.begin_timeline(second.record)
        assert sorted(stored(run)) == [1, 2]
        other = random_contents(rng, SIZES)
        book.commit(3, other)
        assert sorted(stored(run)) == [1, 2, 3]
        assert same(stored(run)[3], other)
    region = Region.open(location.locate(run, 0, create=False), writable=False)
    recovery = region.recover()
    # The slot of the abandoned third step was used first.
    assert recovery.abandoned == ()
    assert [c.record.timeline == region.info.timeline for c in recovery.candidates] == [
        True, False, False,
    ]  # fmt: skip
    region.close()


def test_sequences_grow_over_reopens_and_abandoned_branches(
    run: Path, rng: np.random.Generator
) -> None:
    seen = []
    for _ in range(4):
        with Book(run, slots=4) as book:
            recovery = book.region.recover()
            continued = recovery.candidates[-1].record if recovery.candidates else None
            book.region.begin_timeline(continued)
            for step in (1, 2):
                book.commit(step, random_contents(rng, SIZES))
            seen += [c.record.sequence for c in book.region.recover().candidates][:2][::-1]
    assert seen == sorted(set(seen))


def test_more_branches_than_the_superblock_holds_lose_only_the_oldest_ancestors(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run, slots=3) as book:
        book.region.begin_timeline(None)
        book.commit(1, random_contents(rng, SIZES))
    for step in range(2, native_region.MAX_LINEAGE + 8):
        with Book(run) as book:
            best = book.region.recover().candidates[0]
            assert best.record.step == step - 1
            book.region.begin_timeline(best.record)
            book.commit(step, random_contents(rng, SIZES))
    assert len(stored(run)) == 3


def test_a_restart_that_commits_nothing_does_not_use_up_the_ancestors(
    run: Path, rng: np.random.Generator
) -> None:
    kept = random_contents(rng, SIZES)
    with Book(run) as book:
        book.region.begin_timeline(None)
        book.commit(1, kept)
    for _ in range(native_region.MAX_LINEAGE + 8):
        with Book(run) as book:
            best = book.region.recover().candidates[0]
            book.region.begin_timeline(best.record)
            assert book.region.native.describe().lineage == (
                (best.record.timeline, best.record.sequence),
            )
    assert same(stored(run)[1], kept)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({2: native_region.RECORD_EARLY}, [1, 2]),
        ({1: native_region.RECORD_EARLY}, [2, 1]),
        ({1: native_region.RECORD_EARLY, 2: native_region.RECORD_EARLY}, [2, 1]),
        ({}, [2, 1]),
    ],
)
def test_an_early_snapshot_yields_to_an_exact_one_that_is_a_step_older(
    run: Path, rng: np.random.Generator, flags: dict[int, int], expected: list[int]
) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            writer = book.open(random_contents(rng, SIZES))
            assert writer is not None
            writer.seal(step, b"", b"", flags.get(step, 0))
            writer.wait(None)
        assert [c.record.step for c in book.region.recover().candidates] == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("1 2e", [1, 2]),
        ("1 3e", [3, 1]),
        ("2 2e 3e", [2, 3, 2]),
        ("1 2e 3e", [3, 1, 2]),
        ("4 2e", [2, 4]),
    ],
)
def test_an_early_snapshot_yields_to_exact_ones_a_step_older_at_most(
    run: Path, rng: np.random.Generator, steps: str, expected: list[int]
) -> None:
    with Book(run, slots=3) as book:
        book.region.begin_timeline(None)
        for text in steps.split():
            commit_marked(book, rng, text)
        assert [c.record.step for c in book.region.recover().candidates] == expected


@pytest.mark.parametrize(
    ("steps", "kept"),
    [("1 2e 3e 4", "3 4"), ("1 2e 3", "1 3"), ("1 3e 4e", "3 4"), ("1e 2e 3e", "2 3")],
)
def test_the_slot_that_is_protected_is_the_one_that_recovery_would_take(
    run: Path, rng: np.random.Generator, steps: str, kept: str
) -> None:
    """The other one of two slots is written next, whatever it holds."""
    with Book(run) as book:
        book.region.begin_timeline(None)
        for text in steps.split():
            commit_marked(book, rng, text)
            best = book.region.recover().candidates[0].record
            assert book.region.protected == best.slot
        left = sorted(c.record.step for c in book.region.recover().candidates)
        assert left == [int(step) for step in kept.split()]


def test_over_ranks_an_early_step_is_protected_too_and_exact_ones_near_it_go_last(
    run: Path, rng: np.random.Generator
) -> None:
    """Another rank may have an exact share of it, and give up what is older: both protect one."""
    with Book(run, slots=4) as book:
        book.region.begin_timeline(None)
        book.region.follow_ranks(lambda timeline, step: True)
        for text in ["3", "4", "4e", "5e"]:
            commit_marked(book, rng, text)
            (newest,) = [s for s in book.region.slots if s.fate_open]
            book.region.whole(newest)
        assert book.region.protected == newest.index
        free = [s.record for s in book.region.free_slots() if s.record]
        assert [(r.step, r.early) for r in free] == [(3, False), (4, True), (4, False)]


def test_due_snapshots_leave_a_slot_to_a_failure_and_have_the_others_beside_it(run: Path) -> None:
    for failed_first in (False, True):
        with Book(run.with_name(f"failed-{failed_first}"), slots=4) as book:
            region, pool = book.region, book.pool
            region.follow_ranks(lambda timeline, step: False)
            region.prepare_writing(1, spare=1)
            if failed_first:
                assert region.begin(pool, kept=True) is not None
            for _ in range(3):
                assert region.has_room(due=True)
                assert region.begin(pool, due=True) is not None
            assert not region.has_room(due=True) and region.begin(pool, due=True) is None
            assert region.has_room(due=False) is not failed_first
            assert (region.begin(pool, kept=True) is None) is failed_first


def commit_marked(book: Book, rng: np.random.Generator, text: str) -> None:
    """Commit a snapshot of a step; `e` marks an early one."""
    writer = book.open(random_contents(rng, SIZES))
    assert writer is not None
    writer.seal(int(text.rstrip("e")), b"", b"", native_region.RECORD_EARLY if "e" in text else 0)
    writer.wait(None)
    assert writer.record is not None
    book.region.committed(writer.slot, writer.record)


def test_a_leased_slot_is_not_reused_and_one_being_written_is_not_leased(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            book.commit(step, random_contents(rng, SIZES))
        reader = Region.open(book.where, writable=False)
        slots = {c.record.step: c.record.slot for c in reader.recover().candidates}
        reader.native.lease(slots[1], True)
        assert book.open(random_contents(rng, SIZES)) is None
        reader.native.lease(slots[1], False)
        writer = book.open(random_contents(rng, SIZES))
        assert writer is not None
        with pytest.raises(RegionBusyError):
            reader.native.lease(slots[1], True)
        writer.abandon()
        reader.native.lease(slots[1], True)
        reader.close()  # drops the lease
        assert book.commit(3, random_contents(rng, SIZES))


def test_a_slot_is_leased_until_the_last_lease_is_dropped(
    run: Path, rng: np.random.Generator
) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            book.commit(step, random_contents(rng, SIZES))
        reader = Region.open(book.where, writable=False)
        (slot,) = (c.record.slot for c in reader.recover().candidates if c.record.step == 1)
        for hold in (True, True, False):
            reader.native.lease(slot, hold)
            assert book.open(random_contents(rng, SIZES)) is None
        reader.native.lease(slot, False)
        writer = book.open(random_contents(rng, SIZES))
        assert writer is not None
        reader.close()


@pytest.mark.parametrize(("field", "value", "of"), [("rank", 7, "7 of 1"), ("world", 0, "0 of 0")])
def test_a_record_of_another_rank_is_damage(
    run: Path, rng: np.random.Generator, field: str, value: int, of: str
) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            book.commit(step, random_contents(rng, SIZES))
        file = book.where.file
    image = forge.Image(bytearray(file.read_bytes()))
    newer = max("record0", "record1", key=lambda name: image.get(name, "step"))
    image.put(newer, field, value)
    image.seal()
    file.write_bytes(image.raw)
    region, recovery = open_and_recover(book.where)
    region.close()
    assert [c.record.step for c in recovery.candidates] == [1]
    (problem,) = recovery.problems
    assert f"of rank {of}, not of rank 0" in problem


def test_a_second_owner_is_refused_and_readers_are_not(run: Path, rng: np.random.Generator) -> None:
    with Book(run) as book:
        book.region.begin_timeline(None)
        book.commit(1, random_contents(rng, SIZES))
        with pytest.raises(RegionBusyError, match=str(book.where.file)):
            Region.open(book.where, writable=True)
        readers = [Region.open(book.where, writable=False) for _ in range(3)]
        for reader in readers:
            assert newest(reader)[0] == 1
            reader.close()
    Region.open(book.where, writable=True).close()


def test_unchanged_copies_are_skipped_and_changed_ones_written(
    run: Path, rng: np.random.Generator
) -> None:
    contents = random_contents(rng, {"a": 10_000, "b": 10_000})

    def commit(step: int) -> int:
        """Bytes that were found unchanged."""
        before = book.pool.stats()["bytes_skipped"]
        writer = book.open(contents, may_skip=True)
        assert writer is not None
        book.seal(writer, step)
        writer.wait(None)
        candidate = book.region.recover().candidates[0]
        assert candidate.record.step == step
        assert same(contents_of(book.region, candidate), contents)
        return book.pool.stats()["bytes_skipped"] - before

    with Book(run) as book:
        book.region.begin_timeline(None)
        assert [commit(1), commit(2)] == [0, 0]  # nothing is known of the slots yet
        assert [commit(3), commit(4)] == [20_000, 20_000]
        contents["b"] = contents["b"].copy()
        contents["b"][5000] ^= 1
        assert [commit(5), commit(6), commit(7)] == [10_000, 10_000, 20_000]
        writer = book.open(contents, may_skip=True)
        assert writer is not None
        writer.abandon()
        assert commit(8) == 0  # what an abandoned snapshot left in the slot is not known
    with Book(run) as book:
        assert commit(9) == 0  # nor is what another owner wrote, unread
