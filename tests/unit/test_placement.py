"""The medium's kind, or one measurement, decides which copies go through DRAM."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightck.config import Config
from lightck.errors import NoSnapshotError
from lightck.pipeline import placement
from lightck.pipeline.placement import (
    DIRECT,
    LATE_FENCES,
    LATE_S,
    SAMPLE_BYTES,
    SAMPLES,
    SPARE,
    HostPlacement,
    PlacementChoice,
    choose_placement,
    measure_stores,
)
from lightck.region import _ffi as native
from lightck.region import location
from lightck.region.native_pool import NativePool
from lightck.region.region import Region
from support.regions import Book, Bytes, random_contents, same, stored

LENGTHS = np.array([600, 300, 100], np.uint64)
PAYLOAD = 1000
DRAM = 10e9
STAGED = PlacementChoice("staged", "asked for")


class Dram(NativePool):
    """Stands for the pool that maps memory."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def stage(self, size: int) -> None:
        self.asked.append(size)


class Kernel:
    """Stands for the native library on a machine with this much free DRAM, and much swap."""

    def __init__(self, dram: int | None) -> None:
        self._dram = dram

    def lck_memory_available(self, swap: int) -> int:
        """Answer as the native one does: all ones where nobody says."""
        return 2**64 - 1 if self._dram is None else self._dram + swap * 10 * PAYLOAD


def on(medium: str, *, staged: bool = False) -> Any:
    """Make a region on a medium."""
    return SimpleNamespace(staged=staged, info=SimpleNamespace(medium=medium))


# ---- the choice at attach ------------------------------------------------------------------------


@pytest.fixture
def rate(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The rate that a measurement of the medium finds; empty: nobody may measure."""
    found: list[float | None] = []
    monkeypatch.setattr(placement, "measure_stores", lambda *given: found[0])
    monkeypatch.setattr(placement, "dram_rate", lambda: DRAM)
    return found


@pytest.mark.parametrize("medium", ["tmpfs", "hugetlbfs"])
def test_a_region_in_dram_is_written_directly_and_not_measured(
    medium: str, rate: list[float]
) -> None:
    chosen = choose_placement(on(medium), Config())
    assert (chosen.mode, chosen.dram_rate, chosen.may_be_late) == ("direct", 0.0, False)


@pytest.mark.parametrize(("took", "mode"), [(DRAM / 2, "direct"), (0.49 * DRAM, "staged")])
@pytest.mark.parametrize(
    ("medium", "node"), [("fsdax", None), ("devdax", None), ("tmpfs", 1), ("hugetlbfs", 1)]
)
def test_other_memory_is_measured_and_staged_if_half_as_fast_as_dram(
    medium: str, node: int | None, took: float, mode: str, rate: list[float]
) -> None:
    rate.append(took)
    chosen = choose_placement(on(medium), Config(numa_node=node))
    assert (chosen.mode, chosen.dram_rate) == (mode, DRAM)
    assert chosen.may_be_late is (mode == "direct")
    assert f"{1e-9 * took:.2f} GB/s" in chosen.why and f"{1e-9 * DRAM:.2f} GB/s" in chosen.why


@pytest.mark.parametrize(("limit", "mode"), [(5_000_000_000, "direct"), (4_900_000_000, "staged")])
def test_a_write_limit_is_the_rate_of_the_medium(limit: int, mode: str, rate: list[float]) -> None:
    assert choose_placement(on("tmpfs"), Config(write_limit=limit)).mode == mode


@pytest.mark.parametrize("wanted", ["direct", "staged"])
@pytest.mark.parametrize("medium", ["tmpfs", "fsdax"])
def test_an_explicit_placement_wins_unmeasured(medium: str, wanted: Any, rate: list[float]) -> None:
    chosen = choose_placement(on(medium), Config(placement=wanted, write_limit=1))
    assert (chosen.mode, chosen.may_be_late) == (wanted, False)


@pytest.mark.parametrize("wanted", ["auto", "direct", "staged"])
def test_a_medium_with_syncs_is_staged_by_the_native_part(wanted: Any, rate: list[float]) -> None:
    chosen = choose_placement(on("file", staged=True), Config(placement=wanted))
    assert (chosen.mode, chosen.paged) == ("staged", True)


def test_without_an_empty_slot_copies_go_directly_and_late_fences_are_told(
    rate: list[float | None],
) -> None:
    rate.append(None)
    chosen = choose_placement(on("fsdax"), Config())
    assert (chosen.mode, chosen.may_be_late) == ("direct", True)


# ---- the measurement -----------------------------------------------------------------------------


def test_the_measurement_touches_no_slot_that_holds_a_snapshot(region_dir: Path) -> None:
    rng = np.random.default_rng(7)
    with Book(region_dir, slot_bytes=(SAMPLES + 1) * SAMPLE_BYTES) as book:
        held: dict[int, dict[str, Bytes]] = {}
        for step in (1, 2):
            rate = measure_stores(book.region, 1, 1 << 18)
            assert rate is not None and rate > 0
            assert stored(region_dir).keys() == held.keys()
            held[step] = random_contents(rng, {"a": SAMPLE_BYTES, "b": 5000})
            assert book.commit(step, held[step])
        assert measure_stores(book.region, 1, 1 << 18) is None  # no slot is empty
        found = stored(region_dir)
        assert found.keys() == held.keys()
        assert all(same(found[step], held[step]) for step in held)


def test_a_measured_slot_stays_empty_and_serves(region_dir: Path) -> None:
    with Book(region_dir, slot_bytes=(SAMPLES + 1) * SAMPLE_BYTES) as book:
        before = book.pool.stats()
        assert measure_stores(book.region, 1, 1 << 18) is not None
        assert book.pool.stats() == before
        assert book.region.recover().is_empty
        with pytest.raises(NoSnapshotError):
            book.region.native.read_record(0)
        assert len(book.region.free_slots()) == 2


def test_a_slot_without_room_for_the_samples_is_not_measured(region_dir: Path) -> None:
    with Book(region_dir, slot_bytes=SAMPLE_BYTES) as book:
        assert measure_stores(book.region, 1, 1 << 18) is None


def test_a_slot_that_a_reader_holds_is_not_measured(region_dir: Path) -> None:
    with Book(region_dir, slot_bytes=SAMPLES * SAMPLE_BYTES) as book:
        reader = Region.open(location.locate(region_dir, 0, create=False), writable=False)
        reader.native.lease(0, True)
        assert measure_stores(book.region, 1, 1 << 18) is None
        reader.close()


# ---- what follows from it ------------------------------------------------------------------------


def test_short_dram_takes_the_copies_that_fit_and_leaves_the_rest_direct() -> None:
    dram = Dram()
    placed = HostPlacement(STAGED, free=lambda: int(950 / SPARE))
    placed.prepare(PAYLOAD, dram)
    assert placed.place(LENGTHS).tolist() == [True, True, False]
    assert dram.asked == [placed.room_bytes]
    assert 900 <= placed.room_bytes < 1000


def test_dram_is_mapped_again_only_for_a_larger_state() -> None:
    dram, placed = Dram(), HostPlacement(STAGED, free=lambda: 10**6)
    for size in (PAYLOAD, 10, PAYLOAD, 2 * PAYLOAD):
        placed.prepare(size, dram)
    assert dram.asked == [PAYLOAD, 2 * PAYLOAD]


@pytest.mark.parametrize("error", [ZeroDivisionError(), MemoryError(), KeyboardInterrupt()])
def test_dram_that_cannot_be_mapped_is_not_used(error: BaseException) -> None:
    def stage(size: int) -> None:
        raise error

    placed = HostPlacement(STAGED, free=lambda: 10**6)
    with pytest.raises(type(error)):
        placed.prepare(PAYLOAD, SimpleNamespace(stage=stage))  # type: ignore[arg-type]
    assert not placed.place(LENGTHS).any()


@pytest.mark.parametrize(("free", "asked"), [(None, 0), (int(600 / SPARE), 600)])
def test_what_dram_is_free_is_asked_for_without_swap(
    monkeypatch: pytest.MonkeyPatch, free: int | None, asked: int
) -> None:
    monkeypatch.setattr(native, "library", lambda: Kernel(free))
    dram, placed = Dram(), HostPlacement(STAGED)
    placed.prepare(PAYLOAD, dram)
    assert dram.asked == [asked]
    assert placed.place(LENGTHS)[0] == bool(asked)


@pytest.mark.parametrize("choice", [DIRECT, PlacementChoice("staged", "syncs", paged=True)])
def test_no_dram_is_mapped_where_copies_are_direct_or_the_native_part_stages(
    choice: PlacementChoice,
) -> None:
    dram, placed = Dram(), HostPlacement(choice)
    placed.prepare(PAYLOAD, dram)
    assert dram.asked == []
    assert not placed.place(LENGTHS).any()


@pytest.mark.parametrize(
    ("may_be_late", "waits", "told"),
    [
        (True, [1.0] * 10, 1),
        (True, [1.0] * (LATE_FENCES - 1) + [0.0] + [1.0] * (LATE_FENCES - 1), 0),
        (True, [0.99 * LATE_S] * 10, 0),
        (False, [1.0] * 10, 0),
    ],
)
def test_fences_that_wait_for_the_medium_are_told_once(
    may_be_late: bool, waits: list[float], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    placed = HostPlacement(PlacementChoice("direct", "", DRAM, may_be_late=may_be_late))
    for fence_s in waits:
        placed.fence_waited(fence_s, PAYLOAD)
    events = [r for r in caplog.records if getattr(r, "lightck_event", "") == "fence_waits"]
    assert [r.levelno for r in events] == [logging.WARNING] * told
    assert all("placement='staged'" in r.getMessage() for r in events)


def test_a_large_payload_may_take_the_fence_two_plain_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    placed = HostPlacement(PlacementChoice("direct", "", DRAM, may_be_late=True))
    for fence_s in (1.99, 1.99, 1.99):
        placed.fence_waited(fence_s, int(DRAM))
    assert not caplog.records
    for _ in range(LATE_FENCES):
        placed.fence_waited(2.01, int(DRAM))
    assert len(caplog.records) == 1
