"""The watchdog costs little while nothing happens, and says when time will not suffice."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from lightck.errors import LightckError
from lightck.failure.budget import SnapshotCost
from lightck.failure.hang import ALONE_LOOK_S, LOOK_S, CollectivePosition, HangWatch
from lightck.failure.signals import Signals
from lightck.failure.watchdog import (
    HANG_STATUS,
    HandleGuard,
    SaveTask,
    Watchdog,
)
from lightck.types import Failure, Saved
from support.proof import record
from support.savers import LoneSaver

LOOKS = 2000


class Rescue(LoneSaver):
    """A loop that goes on, and is never to be saved."""

    step = 0
    updating = inside = False
    step_s = 0.5
    thread = threading.get_ident()

    @property
    def ticks(self) -> int:
        return time.monotonic_ns()

    def progress(self) -> Rescue:
        return self

    def save(self, reason: str, deadline: float) -> Saved:
        raise AssertionError(reason)


def _raises(error: LightckError) -> None:
    raise error


def guard_of(
    saver: LoneSaver, failure: Failure, report: Any = _raises, world: int = 1
) -> HandleGuard:
    return HandleGuard(saver, HangWatch.of_world(failure, world), report, world)


def test_an_idle_watchdog_costs_seconds_of_an_hour() -> None:
    """Its own turns, run as fast as they go; the waiting between them is the kernel's."""
    seconds = {}
    for world, period_s in ((1, ALONE_LOOK_S), (2, LOOK_S)):
        watchdog, signals = Watchdog(), Signals()
        watchdog._guards = [guard_of(Rescue(), Failure(), world=world)]
        began = time.thread_time()
        for _ in range(LOOKS):
            assert watchdog._pause_s() == period_s
            watchdog._turn(signals, signals.wait(0.0))
        each_s = (time.thread_time() - began) / LOOKS
        seconds[f"world {world}"] = {
            "look_us": round(each_s * 1e6, 1),
            "looks_per_s": 1 / period_s,
            "cpu_s_per_hour": round(each_s * 3600 / period_s, 2),
        }
        signals.give_back()
        assert 1 / period_s <= 4
    record("watchdog", seconds)


def test_a_snapshot_that_does_not_fit_is_told_once_as_soon_as_it_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known: list[SnapshotCost] = []
    guard = guard_of(Rescue(), Failure(signals=()))
    others = {*threading.enumerate()}  # pytest's own
    guard.saver.snapshot_cost = lambda usable_s: known[0] if known else None  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "lightck"):
        guard.check_budget(1000.0)
        assert not guard._warned, "nothing is known yet"
        known.append(SnapshotCost(1, 1e9))
        guard.check_budget(1000.5)
        known[0] = SnapshotCost(10**12, 1e9, step_s=1.0)
        guard.check_budget(1001.0)
        assert not guard._warned, "asked rarely"
        for now_s in (1011.0, 1022.0, 1033.0):
            guard.check_budget(now_s)
        for thread in {*threading.enumerate()} - others:  # it is told on a thread of its own
            thread.join(30.0)
    (told,) = [r for r in caplog.records if getattr(r, "lightck_event", "") == "budget"]
    assert "a policy of 1000 steps" in told.getMessage()


def test_the_watchdog_goes_on_after_an_error_of_its_own() -> None:
    class Broken(Rescue):
        def progress(self) -> Rescue:
            looks.append(1)
            enough.release()
            raise ValueError("broken")

    looks: list[int] = []
    enough, told = threading.Semaphore(0), threading.Event()
    errors: list[str] = []

    def report(error: LightckError) -> None:
        errors.append(str(error))
        told.set()

    watchdog, guard = Watchdog(), guard_of(Broken(), Failure(signals=()), report)
    watchdog.watch(guard)
    for _ in range(3):
        assert watchdog._signals is not None
        watchdog._signals.wake()
        assert enough.acquire(timeout=100)
    assert told.wait(100)
    watchdog.release(guard)
    assert len(errors) == 1 and "broken" in errors[0]


def test_before_the_end_other_ranks_are_heard_until_they_cannot_change_anything() -> None:
    said = iter([None, "another rank's snapshot is of the instant before", None, None])
    settled = iter([False, False, True])
    saved: list[str] = []

    class Saving(Rescue):
        def save(self, reason: str, deadline: float) -> Saved:
            saved.append(reason)
            return Saved(reason, 0, fresh=True)

    saver: Any = Saving()
    saver.new_peer_failure, saver.is_settled = lambda: next(said), lambda: next(settled)
    Watchdog()._linger([guard_of(saver, Failure())], time.monotonic() + 30.0)
    assert saved == ["another rank's snapshot is of the instant before"]
    assert next(settled, None) is None


class Ended(Exception):
    """The watchdog raises this here instead of ending the process."""


@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_whose_device_stands_still_hangs_in_a_collective_of_several_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rescue, "ticks", 7)
    said: list[tuple[str, object]] = []

    def start(guard: HandleGuard, reason: str, deadline: float, **told: Any) -> SaveTask:
        said.append((reason, told["about"]["where"]))
        return SaveTask(guard, reason, deadline)

    watchdog, place = Watchdog(), CollectivePosition("a device, before an update", (7, 1))
    monkeypatch.setattr(watchdog, "_start", start)
    guard = guard_of(Rescue(), Failure(signals=()), world=world)
    guard.saver.hung_device = lambda: place  # type: ignore[method-assign]
    guard.hang._steps.append(0.5)
    for look in range(20):
        watchdog._look_for_hang(guard, look * LOOK_S)
    assert said == ([("hang", "a device, before an update")] if world > 1 else [])


def hanging(monkeypatch: pytest.MonkeyPatch, **settings: float) -> tuple[Watchdog, HandleGuard]:
    """Its hang is saved; looks count a second each."""

    def exit(status: int) -> None:
        assert status == HANG_STATUS
        raise Ended

    monkeypatch.setattr("lightck.failure.watchdog.os._exit", exit)
    settings = {"hang_s": 60.0, "grace_s": 10.0, "hang_exit_s": 5.0, **settings}
    guard = guard_of(Rescue(), Failure(signals=(), **settings), world=2)  # type: ignore[arg-type]
    save = SaveTask(guard, "hang", 0.0)
    save.done.set()
    guard.begin_hang(save)
    monkeypatch.setattr(guard, "observe", lambda now_s: None)
    guard.hang.counted_s = 1.0
    return Watchdog(), guard


def looks_until_it_ends(watchdog: Watchdog, guard: HandleGuard) -> int:
    for looks in range(1, 1000):
        try:
            watchdog._look_for_hang(guard, now_s=0.0)
        except Ended:
            return looks
    raise AssertionError("it never ends")


def test_a_hang_is_ended_when_its_time_has_passed_and_every_rank_has_said_its_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks_until_it_ends(*hanging(monkeypatch)) == 1 + 5
    said = iter([False] * 20)
    watchdog, guard = hanging(monkeypatch)
    guard.saver.is_settled = lambda: next(said, True)
    assert looks_until_it_ends(watchdog, guard) == 1 + 5 + 20


def test_a_rank_that_never_says_its_word_is_waited_for_until_its_hang_would_be_noticed_and_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watchdog, guard = hanging(monkeypatch)
    guard.saver.is_settled = lambda: False
    assert looks_until_it_ends(watchdog, guard) == 1 + 5 + 60 + 10


def test_what_is_being_saved_is_waited_for_until_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank's share, say, though that one has said all that it had to."""
    watchdog, guard = hanging(monkeypatch)
    watchdog._saving = [SaveTask(guard, "rank 1: killed", 20.0)]
    for _ in range(30):
        watchdog._look_for_hang(guard, now_s=19.0)
    with pytest.raises(Ended):
        watchdog._look_for_hang(guard, now_s=20.0)


def test_a_rank_that_says_nothing_keeps_nobody_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = guard_of(Rescue(), Failure())
    guard.saver.is_settled = lambda: False  # type: ignore[method-assign]
    Watchdog()._linger([guard], time.monotonic() + 0.01)
    monkeypatch.setattr("lightck.failure.watchdog.LINGER_S", 0.01)
    Watchdog().await_peers(guard)
