"""The fence's waits decide which copies go through DRAM."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import numpy as np
import pytest

from lightck.pipeline.placement import SPARE, HostPlacement, Mode, behind
from lightck.pipeline.trial import LOOKS, PATIENCE
from lightck.region import _ffi as native

LENGTHS = np.array([600, 300, 100], np.uint64)
PAYLOAD = 1000
RATE = 1000.0  # bytes per second of DRAM: a plain copy of the payload takes one second


class Dram:
    """Stands for the pool that maps memory."""

    def __init__(self, *, later: bool = False) -> None:
        self.asked: list[int] = []
        self.future: Future[None] = Future()
        if not later:
            self.future.set_result(None)

    def __call__(self, size: int) -> Future[None]:
        self.asked.append(size)
        return self.future


class Kernel:
    """Stands for the native library on a machine with this much free DRAM, and much swap."""

    def __init__(self, dram: int | None) -> None:
        self._dram = dram

    def lck_memory_available(self, swap: int) -> int:
        """Answer as the native one does: all ones where nobody says."""
        return 2**64 - 1 if self._dram is None else self._dram + swap * 10 * PAYLOAD


def placed(
    dram: Dram, mode: Mode = "auto", *, free: int = 10_000, paged: bool = False
) -> HostPlacement:
    return HostPlacement(mode, paged, dram, free=lambda: free, rate=lambda: RATE)


def snapshots(placement: HostPlacement, count: int, fence_s: float) -> list[bool]:
    """Return whether each of some snapshots went through DRAM."""
    went = []
    for _ in range(count):
        went.append(bool(placement.choose(LENGTHS).any()))
        placement.waited(fence_s, PAYLOAD)
    return went


def test_a_fence_that_waits_no_longer_than_for_memory_keeps_copies_direct() -> None:
    dram = Dram()
    assert not any(snapshots(placed(dram), 200, 1.9))
    assert dram.asked == []


def test_a_medium_slower_than_the_window_is_tried_through_dram_and_stays_there() -> None:
    dram = Dram()
    placement = placed(dram)
    assert not any(snapshots(placement, LOOKS, 5.0))
    assert dram.asked == [PAYLOAD]
    assert all(snapshots(placement, 200, 0.3))
    assert dram.asked == [PAYLOAD]


def test_staging_that_does_not_help_is_given_up_and_tried_ever_more_rarely() -> None:
    dram = Dram()
    placement = placed(dram)
    went = snapshots(placement, 2000, 5.0)  # the fence waits for something else
    trials = [i for i in range(1, len(went)) if went[i] and not went[i - 1]]
    gaps = np.diff(trials)
    assert sum(went) == LOOKS * len(trials)
    assert len(trials) >= 3
    assert gaps[0] >= PATIENCE
    assert all(later > 1.5 * sooner for sooner, later in zip(gaps, gaps[1:], strict=False))


def test_copies_stay_direct_until_the_dram_is_mapped() -> None:
    dram = Dram(later=True)
    placement = placed(dram)
    assert not any(snapshots(placement, 50, 5.0))
    dram.future.set_result(None)
    assert all(snapshots(placement, 10, 0.1))


def test_dram_that_cannot_be_had_leaves_copies_direct() -> None:
    dram = Dram(later=True)
    placement = placed(dram)
    snapshots(placement, LOOKS, 5.0)
    dram.future.set_exception(MemoryError())
    assert not any(snapshots(placement, PATIENCE, 5.0))


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_whatever_ends_the_mapping_ends_the_wait_for_it(error: BaseException) -> None:
    def map_dram(size: int) -> None:
        raise error

    placement = HostPlacement("staged", reserve=lambda size: behind(map_dram, size))
    with pytest.raises(type(error)):
        placement.prepare(PAYLOAD)
    assert not placement.staging


def test_a_machine_without_another_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        behind(lambda size: None, PAYLOAD).result(timeout=0)


def test_short_dram_takes_the_copies_that_fit_and_leaves_the_rest_direct() -> None:
    dram = Dram()
    placement = placed(dram, "staged", free=int(950 / SPARE))
    placement.prepare(PAYLOAD)
    assert placement.choose(LENGTHS).tolist() == [True, True, False]
    assert dram.asked == [placement.room_bytes]
    assert 900 <= placement.room_bytes < 1000


def test_where_nobody_says_what_dram_is_free_nothing_is_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", lambda: Kernel(None))
    dram = Dram()
    placement = HostPlacement("staged", False, dram, rate=lambda: RATE)
    placement.prepare(PAYLOAD)
    assert dram.asked == [0]
    assert not placement.choose(LENGTHS).any()


def test_what_dram_is_free_is_asked_for_without_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: Kernel(int(600 / SPARE)))
    dram = Dram()
    placement = HostPlacement("staged", False, dram, rate=lambda: RATE)
    placement.prepare(PAYLOAD)
    assert dram.asked == [600]


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_placement_that_was_set_never_changes(mode: Mode) -> None:
    placement = placed(Dram(), mode)
    placement.prepare(PAYLOAD)
    assert set(snapshots(placement, 100, 50.0)) == {mode == "staged"}


def test_nothing_is_chosen_where_the_native_side_stages_everything() -> None:
    dram = Dram()
    placement = placed(dram, "auto", paged=True)
    assert not any(snapshots(placement, 100, 50.0))
    placement = placed(dram, "staged", paged=True)
    placement.prepare(PAYLOAD)
    assert not any(snapshots(placement, 100, 50.0))
    assert dram.asked == []
