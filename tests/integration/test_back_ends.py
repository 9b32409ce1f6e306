"""One suite for every back end: what holds for a region holds whoever maps it."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightck.errors import CorruptSnapshotError, RegionBusyError, RegionFullError
from lightck.region import location
from lightck.region.medium import POWER_LOSS
from lightck.region.region import Region, open_and_recover
from support import faults, processes, proof
from support.back_ends import KINDS, Ground, Kind, prepared
from support.regions import contents_of, newest, random_contents, same, stored

SIZES = {"a": 1, "b": 63, "c": 4097, "d": 100_000, "empty": 0}
RECORDS_AT = 8192

_shown: dict[str, dict[str, int]] = {}


@pytest.fixture(scope="module", autouse=True)
def numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what was shown of each back end."""
    yield
    proof.record_whole(request, "back_ends", _shown)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    kind: Kind = request.param
    with prepared(kind) as made:
        _shown.setdefault(kind.name, {"flips": 0, "flips_detected": 0, "properties": 0})
        yield made
        _shown[kind.name]["properties"] += 1


def test_what_was_committed_comes_back_after_a_reopen_newest_first(
    ground: Ground, rng: np.random.Generator
) -> None:
    wrote = {step: random_contents(rng, SIZES) for step in range(1, 5)}
    with ground.book() as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            assert book.commit(step, wrote[step])
    with ground.book() as book:  # the back end's own way in
        step, found, problems = newest(book.region)
        assert (step, problems) == (2, []) and same(found, wrote[2])
        for step in (3, 4):
            assert book.commit(step, wrote[step])
    found_all = stored(ground.path)
    assert list(found_all) == [4, 3]
    assert all(same(found_all[step], wrote[step]) for step in found_all)


def test_two_slots_take_turns_and_the_newest_is_never_touched(
    ground: Ground, rng: np.random.Generator
) -> None:
    with ground.book() as book:
        book.region.begin_timeline(None)
        used = []
        for step in range(1, 7):
            before = newest(book.region)[0]
            writer = book.open(random_contents(rng, SIZES))
            assert writer is not None
            assert newest(book.region)[0] == before
            book.seal(writer, step)
            assert writer.wait(None)
            used.append(next(c.record.slot for c in book.region.recover().candidates))
        assert used == [used[0], 1 - used[0]] * 3


def test_a_kill_inside_a_snapshot_leaves_the_older_one(
    ground: Ground, rng: np.random.Generator
) -> None:
    wrote = {step: random_contents(rng, SIZES) for step in (1, 2, 3)}

    def write(parent: processes.Parent) -> None:
        book = ground.book()
        book.region.begin_timeline(None)
        for step in (1, 2):
            book.commit(step, wrote[step])
        writer = book.open(wrote[3])
        assert writer is not None
        faults.delay(faults.RECORD, 60.0)  # payload, table and manifest are there, no record
        threading.Thread(target=book.seal, args=(writer, 3), daemon=True).start()
        parent.send("sealed")
        parent.pause()

    child = processes.start(write)
    assert child.receive() == "sealed"
    child.kill()
    assert child.join() == -signal.SIGKILL
    found = stored(ground.path)
    # On page media the slot is invalidated in the background: killed before, it keeps step 1.
    assert list(found) in ([2], [2, 1]) and all(same(found[step], wrote[step]) for step in found)
    with ground.book() as book:
        assert newest(book.region)[0] == 2
        assert book.commit(3, wrote[3])
    assert list(stored(ground.path)) == [3, 2]


def test_a_flipped_bit_anywhere_is_found_and_the_older_snapshot_comes_back(
    ground: Ground, rng: np.random.Generator
) -> None:
    wrote = {step: random_contents(rng, SIZES) for step in (1, 2)}
    with ground.book() as book:
        book.region.begin_timeline(None)
        for step in (1, 2):
            book.commit(step, wrote[step])
        best, _ = book.region.recover().candidates
    begin = _start_of_region(ground.file)
    record, layout = best.record, best.layout
    spots = {
        "record": RECORDS_AT + 4096 * record.slot + int(rng.integers(8, 256)),
        "table": record.layout_offset + int(rng.integers(record.layout_length)),
        "manifest": record.manifest_offset + int(rng.integers(record.manifest_length)),
    }
    spots |= {
        entry.name: int(offset) + int(rng.integers(entry.length))
        for entry, offset in zip(layout.entries, layout.offsets, strict=True)
        if entry.length
    }
    for name, offset in spots.items():
        bit = 1 << int(rng.integers(8))
        _flip(ground.file, begin + offset, bit)
        _shown[ground.kind.name]["flips"] += 1
        region, _ = open_and_recover(location.locate(ground.path, 0, create=False))
        step, found, problems = newest(region)
        region.close()
        assert step == 1 and same(found, wrote[1]), name
        assert len(problems) == 1, name
        _shown[ground.kind.name]["flips_detected"] += 1
        _flip(ground.file, begin + offset, bit)
    assert list(stored(ground.path)) == [2, 1]


def test_late_state_takes_what_is_set_aside_and_then_grows_or_says_why_not(
    ground: Ground, rng: np.random.Generator
) -> None:
    small = random_contents(rng, SIZES)
    more = random_contents(rng, {**SIZES, "x": 700_000, "y": 400_000})
    large = random_contents(rng, {**SIZES, "large": 9 << 20})
    with ground.book() as book:
        book.region.begin_timeline(None)
        assert book.commit(1, small)
        assert book.commit(2, more)
        huge = ground.kind.medium == "hugetlbfs"  # a slot has whole pages: it fits at once
        assert len(book.region.info.segments) == 2 - huge
        if ground.kind.grows:
            assert book.commit(3, large)
            assert same(stored(ground.path)[3], large)
            return
        before = book.region.info
        with pytest.raises(
            RegionFullError, match=r"\d+ bytes needed, \d+ free in the mapping, which cannot grow"
        ):
            book.open(large)
        assert book.region.info == before
        assert list(stored(ground.path)) == [2, 1]
        assert book.commit(3, more)
    assert same(stored(ground.path)[3], more)


def test_a_second_owner_is_refused_in_this_process_and_in_another(
    ground: Ground, rng: np.random.Generator
) -> None:
    with ground.book() as book:
        book.region.begin_timeline(None)
        book.commit(1, random_contents(rng, SIZES))
        with pytest.raises(RegionBusyError):
            ground.book()
        with pytest.raises(RegionBusyError):
            processes.run(lambda: ground.book().close())
        assert book.commit(2, random_contents(rng, SIZES))
    processes.run(lambda: ground.book().close())


def test_a_reader_in_another_process_reads_or_is_told_why_not(
    ground: Ground, rng: np.random.Generator
) -> None:
    with ground.book() as book:
        book.region.begin_timeline(None)
        book.commit(1, random_contents(rng, SIZES))
        if ground.kind.shared:
            assert processes.run(lambda: list(stored(ground.path))) == [1]
        else:
            with pytest.raises(RegionBusyError, match="one at a time"):
                processes.run(lambda: list(stored(ground.path)))
        assert list(stored(ground.path)) == [1]  # in this process always
        assert book.commit(2, random_contents(rng, SIZES))
    assert processes.run(lambda: list(stored(ground.path))) == [2, 1]


def test_a_leased_slot_is_not_written(ground: Ground, rng: np.random.Generator) -> None:
    wrote = random_contents(rng, SIZES)
    with ground.book() as book:
        book.region.begin_timeline(None)
        book.commit(1, wrote)
        book.commit(2, random_contents(rng, SIZES))
        reader, recovery = open_and_recover(location.locate(ground.path, 0, create=False))
        older = recovery.candidates[1]
        reader.native.lease(older.record.slot, True)
        assert book.open(random_contents(rng, SIZES)) is None
        assert same(contents_of(reader, older), wrote)
        reader.native.lease(older.record.slot, False)
        assert book.commit(3, random_contents(rng, SIZES))
        with pytest.raises(CorruptSnapshotError):
            contents_of(reader, older)
        reader.close()
        assert book.commit(4, random_contents(rng, SIZES))  # a reader's end unmaps nothing


def test_a_child_that_outlives_a_killed_owner_holds_nothing(
    ground: Ground, rng: np.random.Generator
) -> None:
    contents = random_contents(rng, SIZES)

    def own(parent: processes.Parent) -> None:
        book = ground.book()
        book.region.begin_timeline(None)
        book.commit(1, contents)
        if processes.fork() == 0:
            parent.send(os.getpid())  # what a fork drops is dropped before the child runs this
            time.sleep(600)
            os._exit(0)
        parent.pause()

    owner = processes.start(own)
    survivor = owner.receive()
    try:
        owner.kill()
        assert owner.join() == -signal.SIGKILL
        os.kill(survivor, 0)  # it lives
        with ground.book() as book:
            assert newest(book.region)[0] == 1
            assert book.commit(2, contents)
    finally:
        os.kill(survivor, signal.SIGKILL)


def test_it_says_what_a_commit_survives_and_so_does_every_reader(
    ground: Ground, rng: np.random.Generator
) -> None:
    def told(region: Region) -> tuple[str, Any]:
        return region.survives, region.info.granularity > 0

    expected = (ground.kind.survives, ground.kind.survives == POWER_LOSS)
    with ground.book() as book:
        book.region.begin_timeline(None)
        book.commit(1, random_contents(rng, SIZES))
        assert told(book.region) == expected
    region, _ = open_and_recover(location.locate(ground.path, 0, create=False))
    assert told(region) == expected
    region.close()


def _start_of_region(file: Path) -> int:
    """Return where the superblock lies in the file: at 0, or somewhere in a pool."""
    data = file.read_bytes()
    return next(at for at in range(0, len(data), 4096) if data.startswith(b"LIGHTCK1", at))


def _flip(file: Path, offset: int, bit: int) -> None:
    # hugetlbfs has no write(2).
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as data:
        data[offset] ^= bit
