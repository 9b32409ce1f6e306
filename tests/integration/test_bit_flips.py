"""Any single bit that flips anywhere: the newest snapshot, or the older one and the reason why, or
`NoSnapshotError`; never wrong bytes, never a crash; `None` only when there is nothing at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import lightck
from lightck.region import location
from lightck.region.region import Region
from support import proof
from support.loops import Digests, Loop, mlp, of_live
from support.regions import Book, Contents, newest, random_contents, same

SUPERBLOCK_BYTES, RECORD_BYTES, PAGE = 960, 256, 4096
OLDER, NEWEST = 7, 8
SIZES = {"a": 300, "b": 5000, "empty": 0, "c": 70_000, "d": 64}


counts = {"tried": 0, "detected": 0, "harmless": 0, "silently_wrong": 0}
"""Harmless: the newest snapshot came back, byte for byte, and nothing was passed over: the bit was
of a superblock that has a twin, of the older snapshot's payload, or of no structure at all."""


@pytest.fixture(scope="module", autouse=True)
def numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    proof.record_whole(request, "flips", counts)


class Flipper:
    """Flips bits of a region file, one at a time, and flips them back."""

    active = False

    def __init__(self, file: Path) -> None:
        self.fd = os.open(file, os.O_RDWR)
        self.size = os.fstat(self.fd).st_size

    @contextmanager
    def flipped(self, *bits: int) -> Iterator[None]:
        for bit in bits:
            self._flip(bit)
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for bit in bits:
                self._flip(bit)

    def _flip(self, bit: int) -> None:
        byte = os.pread(self.fd, 1, bit // 8)[0]
        os.pwrite(self.fd, bytes([byte ^ (1 << bit % 8)]), bit // 8)


def bits_of(offset: int, length: int) -> range:
    return range(offset * 8, (offset + length) * 8)


class Written:
    """A region with snapshots of two steps, and where their parts lie."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.expected: dict[int, Contents] = {}
        with Book(folder) as book:
            book.region.begin_timeline(None)
            for step in (OLDER, NEWEST):
                self.expected[step] = random_contents(rng, SIZES)
                assert book.commit(step, self.expected[step])
        self.where = location.locate(folder, 0, create=False)
        self.flipper = Flipper(self.where.file)
        self.parts: dict[str, list[range]] = {}
        self.region = Region.open(self.where, writable=False)
        for candidate in self.region.recover().candidates:
            record = candidate.record
            of = "newest" if record.step == NEWEST else "older"
            self.parts |= {
                f"{of} record": [bits_of((2 + record.slot) * PAGE, RECORD_BYTES)],
                f"{of} table": [bits_of(record.layout_offset, record.layout_length)],
                f"{of} manifest": [bits_of(record.manifest_offset, record.manifest_length)],
                f"{of} payload": [
                    bits_of(int(offset), entry.length)
                    for offset, entry in zip(
                        candidate.layout.offsets, candidate.layout.entries, strict=True
                    )
                    if entry.length
                ],
            }

    def check(self, region: Region) -> tuple[int | None, list[str]]:
        """Check that what recovery gives is right, byte for byte, if it gives anything."""
        step, found, problems = newest(region)
        right = step is None or same(found, self.expected[step])
        if self.flipper.active:
            harmless = step == NEWEST and right and not problems
            counts["tried"] += 1
            counts["silently_wrong"] += not right
            counts["harmless"] += harmless
            counts["detected"] += right and not harmless
        assert right, f"step {step} with wrong bytes"
        return step, problems

    def close(self) -> None:
        self.region.close()
        os.close(self.flipper.fd)


@pytest.fixture
def written(run_dir: Path, rng: np.random.Generator) -> Iterator[Written]:
    made = Written(run_dir, rng)
    yield made
    made.close()


def sample(rng: np.random.Generator, ranges: list[range], count: int) -> list[int]:
    """Up to `count` bits, the first and last of every range among them."""
    every = [bit for each in ranges for bit in (each[0], each[-1])]
    for _ in range(count - len(every)):
        chosen = ranges[rng.integers(len(ranges))]
        every.append(chosen[int(rng.integers(len(chosen)))])
    return every


@pytest.mark.parametrize("copy", [0, 1])
def test_every_bit_of_a_superblock_is_spare(written: Written, copy: int) -> None:
    for bit in bits_of(copy * PAGE, SUPERBLOCK_BYTES):
        with written.flipper.flipped(bit):
            region = Region.open(written.where, writable=False)
            try:
                assert written.check(region) == (NEWEST, []), bit
            finally:
                region.close()


@pytest.mark.parametrize("part", ["record", "table", "manifest", "payload"])
def test_a_bit_of_the_newest_snapshot_costs_that_one_and_says_so(
    written: Written, rng: np.random.Generator, part: str
) -> None:
    ranges = written.parts[f"newest {part}"]
    bits = [*ranges[0]] if part == "record" else sample(rng, ranges, 1500)
    for bit in bits:
        with written.flipper.flipped(bit):
            step, problems = written.check(written.region)
            assert step == OLDER, bit
            assert len(problems) == 1, bit
            assert "slot 1" in problems[0], bit
    assert written.check(written.region) == (NEWEST, [])


@pytest.mark.parametrize("part", ["record", "table", "manifest", "payload"])
def test_a_bit_of_the_older_snapshot_never_hides_the_newest(
    written: Written, rng: np.random.Generator, part: str
) -> None:
    ranges = written.parts[f"older {part}"]
    bits = [*ranges[0]] if part == "record" else sample(rng, ranges, 300)
    for bit in bits:
        with written.flipper.flipped(bit):
            assert written.check(written.region)[0] == NEWEST, bit


def test_bits_that_belong_to_nothing_change_nothing(
    written: Written, rng: np.random.Generator
) -> None:
    used = [
        *(r for ranges in written.parts.values() for r in ranges),
        *(bits_of(copy * PAGE, SUPERBLOCK_BYTES) for copy in (0, 1)),
        # Records of slots that are not there.
        *(bits_of((4 + slot) * PAGE, RECORD_BYTES) for slot in range(14)),
    ]
    for _ in range(1500):
        bit = int(rng.integers(written.flipper.size * 8))
        if any(bit in each for each in used):
            continue
        with written.flipper.flipped(bit):
            assert written.check(written.region) == (NEWEST, []), bit


@pytest.mark.parametrize("parts", [("record", "record"), ("payload", "table"), ("manifest",) * 2])
def test_a_bit_of_each_snapshot_leaves_none_and_says_why_for_both(
    written: Written, rng: np.random.Generator, parts: tuple[str, str]
) -> None:
    pairs = zip(
        sample(rng, written.parts[f"newest {parts[0]}"], 200),
        sample(rng, written.parts[f"older {parts[1]}"], 200),
        strict=True,
    )
    for pair in pairs:
        with written.flipper.flipped(*pair):
            step, problems = written.check(written.region)
            assert step is None, pair
            assert len(problems) == 2, pair
            assert not written.region.recover().is_empty, pair


def test_a_bit_of_both_superblocks_is_an_error_and_never_an_empty_region(
    written: Written, rng: np.random.Generator
) -> None:
    first = sample(rng, [bits_of(0, SUPERBLOCK_BYTES)], 300)
    second = sample(rng, [bits_of(PAGE, SUPERBLOCK_BYTES)], 300)
    for pair in zip(first, second, strict=True):
        with written.flipper.flipped(*pair):
            with pytest.raises((lightck.CorruptSnapshotError, lightck.RegionFormatError)):
                Region.open(written.where, writable=False)
            counts["tried"] += 1
            counts["detected"] += 1


def test_a_writer_repairs_the_superblock_that_was_hit(
    run_dir: Path, rng: np.random.Generator
) -> None:
    written = Written(run_dir, rng)
    for copy in (0, 1):
        for bit in sample(rng, [bits_of(copy * PAGE, SUPERBLOCK_BYTES)], 10):
            written.flipper._flip(bit)
            Region.open(written.where, writable=True).close()
            other = (1 - copy) * PAGE * 8 + bit % (PAGE * 8)
            with written.flipper.flipped(other):
                region = Region.open(written.where, writable=False)
                assert written.check(region) == (NEWEST, []), bit
                region.close()
    written.close()


def test_what_is_read_after_a_flip_in_one_bit_of_a_word_is_caught_in_every_bit_of_it(
    written: Written,
) -> None:
    """Every bit of one whole cache line of payload, and of the line where an extent ends."""
    for each in written.parts["newest payload"]:
        for bit in (*each[:512], *each[-512:]):
            with written.flipper.flipped(bit):
                assert written.check(written.region)[0] == OLDER, bit


# ---- The same through the public functions ------------------------------------------------------


@pytest.fixture
def trained(run_dir: Path) -> tuple[Path, dict[int, Digests]]:
    model = mlp(16, 2)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)
    with lightck.attach(model, list(loop.optimizers), run_dir) as handle:
        for _ in range(3):
            loop.run(1)
            handle.wait()
        loop.note()
    return run_dir, loop.seen


def used_bytes(path: Path) -> list[range]:
    """Bits of everything that a snapshot of the region at `path` consists of."""
    region = Region.open(location.locate(path, 0, create=False), writable=False)
    found = [bits_of(copy * PAGE, SUPERBLOCK_BYTES) for copy in (0, 1)]
    for c in region.recover().candidates:
        found.append(bits_of((2 + c.record.slot) * PAGE, RECORD_BYTES))
        found.append(bits_of(c.record.layout_offset, c.record.layout_length))
        found.append(bits_of(c.record.manifest_offset, c.record.manifest_length))
        found += [
            bits_of(int(offset), int(length))
            for offset, length in zip(c.layout.offsets, c.layout.lengths, strict=True)
            if length
        ]
    region.close()
    return found


def test_restore_gives_a_whole_snapshot_whatever_bit_flips(
    trained: tuple[Path, dict[int, Digests]], rng: np.random.Generator
) -> None:
    path, seen = trained
    flipper = Flipper(path / "region-00000.lck")
    model = mlp(16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fell = 0
    for bit in sample(rng, used_bytes(path), 400):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        with flipper.flipped(bit):
            info = lightck.restore(model, optimizer, path)
        assert info is not None, bit
        assert info.step in (2, 3), bit
        assert bool(info.fell_back) >= (info.step == 2), bit
        assert of_live(model, [optimizer]) == seen[info.step], bit
        fell += info.step == 2
    assert fell > 50
    os.close(flipper.fd)


def test_load_and_snapshots_agree_with_restore_about_a_flipped_bit(
    trained: tuple[Path, dict[int, Digests]], rng: np.random.Generator
) -> None:
    path, _ = trained
    flipper = Flipper(path / "region-00000.lck")
    for bit in sample(rng, used_bytes(path), 150):
        with flipper.flipped(bit):
            step = lightck.load(path)["step"]
            states = lightck.snapshots(path)["state"].to_pylist()
        assert step in (2, 3), bit
        # A payload is looked at by `load` only: there a damaged one still counts as whole.
        assert set(states) <= {"whole", "damaged"} and "whole" in states, bit
        assert "damaged" not in states or states.count("damaged") == 1, bit
    os.close(flipper.fd)


def test_damage_to_every_snapshot_is_an_error_that_names_each_and_changes_nothing(
    trained: tuple[Path, dict[int, Digests]],
) -> None:
    path, _ = trained
    flipper = Flipper(path / "region-00000.lck")
    region = Region.open(location.locate(path, 0, create=False), writable=False)
    bits = [int(c.layout.offsets[0]) * 8 for c in region.recover().candidates]
    region.close()
    model = mlp(16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = of_live(model, [optimizer])
    with flipper.flipped(*bits):
        with pytest.raises(lightck.NoSnapshotError, match="step 3.*\n.*step 2") as caught:
            lightck.restore(model, optimizer, path)
        assert str(caught.value).count("do not match their checksum") == 2
        assert of_live(model, [optimizer]) == before
        with pytest.raises(lightck.NoSnapshotError):
            lightck.load(path)
    os.close(flipper.fd)


def test_after_a_fallback_training_goes_on_and_the_damaged_slot_is_used_first(
    trained: tuple[Path, dict[int, Digests]],
) -> None:
    path, seen = trained
    flipper = Flipper(path / "region-00000.lck")
    region = Region.open(location.locate(path, 0, create=False), writable=False)
    flipper._flip(int(region.recover().candidates[0].layout.offsets[0]) * 8 + 3)
    region.close()
    os.close(flipper.fd)
    model = mlp(16, 2)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)
    info = lightck.restore(model, list(loop.optimizers), path)
    assert info is not None and info.step == 2
    assert len(info.fell_back) == 1 and "step 3" in info.fell_back[0]
    loop.step, loop.seen = 2, {2: seen[2]}
    with lightck.attach(model, list(loop.optimizers), path) as handle:
        loop.run(1)
        loop.forward()
        handle.wait()
        loop.check(path, [2, 3])  # 2 is still there: 3 went to the damaged slot


def test_a_flipped_bit_in_a_region_without_snapshots_is_not_taken_for_one(
    run_dir: Path, rng: np.random.Generator
) -> None:
    model = mlp(16, 2)
    lightck.attach(model, torch.optim.SGD(model.parameters()), run_dir).detach()
    flipper = Flipper(run_dir / "region-00000.lck")
    for bit in sample(rng, [bits_of((2 + slot) * PAGE, RECORD_BYTES) for slot in (0, 1)], 100):
        with flipper.flipped(bit):
            # None: nothing is there; the error: something is, and it is no snapshot.
            with contextlib.suppress(lightck.NoSnapshotError):
                assert lightck.restore(model, None, run_dir) is None, bit
    os.close(flipper.fd)
