"""The global commit with its threads: several ranks in one process over a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lightck.distributed.commit.coordinator import LATE, CommitCoordinator, Limits
from lightck.distributed.commit.due_steps import DueCalendar, DueStep
from lightck.distributed.commit.protocol import (
    BLOCK,
    WHOLE,
    AbortReason,
    Add,
    Claim,
    CommitProtocol,
)
from lightck.errors import CoordinationError
from lightck.types import Fate
from support.distributed.memory import Fault, MemoryStore, Server

LONG_S = 100.0  # far beyond what any of these needs


@contextmanager
def job(
    world: int,
    *,
    every: int | None = 1,
    fault: Callable[[int], Fault] = lambda rank: lambda operation, key: None,
    limits: Limits | None = None,
    on_trouble: Callable[[CoordinationError], None] | None = None,
    server: Server | None = None,
) -> Iterator[list[CommitCoordinator]]:
    server = server or Server()
    ranks = [
        CommitCoordinator(
            MemoryStore(server, fault(rank)),
            CommitProtocol(rank, world),
            DueCalendar(every=every, announced=every is None),
            limits=limits,
            on_trouble=on_trouble or (lambda error: None),
        )
        for rank in range(world)
    ]
    yield ranks
    closing = [threading.Thread(target=rank.close, args=(LONG_S,)) for rank in ranks]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.002)


def due(rank: CommitCoordinator, step: int) -> DueStep:
    found = rank.due(step)
    assert found
    return found


def test_a_step_is_whole_once_the_last_rank_has_committed_it() -> None:
    with job(3) as ranks:
        for rank in ranks:
            rank.opened(due(rank, 1))
        for rank in ranks[:2]:
            rank.committed(1)
        assert [rank.wait(1, 0.05) for rank in ranks] == [Fate.UNKNOWN] * 3
        assert not any(rank.reusable(0, 1) for rank in ranks)
        ranks[2].committed(1)
        assert [rank.wait(1, LONG_S) for rank in ranks] == [Fate.WHOLE] * 3


def test_one_rank_that_slips_makes_the_step_dead_and_reusable_everywhere() -> None:
    with job(3) as ranks:
        for rank in ranks[:2]:
            rank.opened(due(rank, 1))
            rank.committed(1)
        ranks[2].lost(due(ranks[2], 1), "slipped: every slot is busy")
        assert [rank.wait(1, LONG_S) for rank in ranks] == [Fate.DEAD] * 3
        assert all(rank.reusable(0, 1) for rank in ranks)


def test_ranks_with_other_states_hear_of_it_once_and_go_on_once_they_agree() -> None:
    troubles: list[CoordinationError] = []
    with job(3, on_trouble=troubles.append) as ranks:
        for step, forms in enumerate(["aab", "aba", "ccc", "cdd"], start=1):
            for rank, form in zip(ranks, forms, strict=True):
                rank.opened(due(rank, step))
                rank.committed(step, form.encode())
            fate = Fate.WHOLE if step == 3 else Fate.DEAD
            assert [rank.wait(step, LONG_S) for rank in ranks] == [fate] * 3
            until(lambda told=3 * (1 + (step > 3)): len(troubles) >= told)
    assert len(troubles) == 6, "each rank, once before step 3 and once after it"
    assert all("replicated state differs" in str(error) for error in troubles)


def test_forms_count_at_the_largest_world_without_an_overflow() -> None:
    last = CommitProtocol(0, 1 << 19)
    last.opened(DueStep(1, 0), 0.0)
    last.committed(1, 0.0, b"\xff" * 16)
    call = last.next_call(0.0)
    assert isinstance(call, Add)
    total = (1 << 19) * call.amount
    assert total < 1 << 63
    last.answered(total, 0.0)
    assert last.next_call(0.0) == Claim("f/1", WHOLE)


def test_the_restored_snapshot_is_kept_until_a_newer_one_is_whole() -> None:
    ledger = CommitProtocol(0, 1, restored=(7, 40), timeline=8)
    assert not ledger.reusable(7, 40)
    assert ledger.reusable(7, 39)
    commit = CommitCoordinator(MemoryStore(), ledger, DueCalendar(every=1, start=40))
    commit.lost(due(commit, 41), "torn")
    assert commit.wait(41, LONG_S) is Fate.DEAD
    assert not commit.reusable(7, 40)
    commit.opened(due(commit, 42))
    commit.committed(42)
    assert commit.wait(42, LONG_S) is Fate.WHOLE
    assert commit.reusable(7, 40)
    assert not commit.reusable(8, 42)
    assert commit.close() == []


def test_an_outage_at_any_call_ends_in_one_fate_and_snapshots_go_on() -> None:
    for broken in range(6):
        for how in ("before", "after"):
            calls = [0]
            troubles: list[CoordinationError] = []

            def fault(
                rank: int, how: str = how, broken: int = broken, calls: list[int] = calls
            ) -> Fault:
                def decide(operation: str, key: str) -> str | None:
                    if rank != 1 or operation == "wait":
                        return None
                    calls[0] += 1
                    return how if calls[0] == broken + 1 else None

                return decide

            with job(2, fault=fault, on_trouble=troubles.append) as ranks:
                for step in (1, 2, 3):
                    for rank in ranks:
                        rank.opened(due(rank, step))
                        rank.committed(step)
                fates = [[rank.wait(step, LONG_S) for step in (1, 2, 3)] for rank in ranks]
                assert fates[0] == fates[1], f"call {broken} failed {how}"
                assert Fate.UNKNOWN not in fates[0]
                until(lambda r=ranks: not any(rank.why_not_open() for rank in r))
            assert len(troubles) <= 1


def test_a_store_that_is_away_stops_snapshots_until_it_answers_again() -> None:
    away = threading.Event()
    troubles: list[CoordinationError] = []
    fault = lambda rank: lambda operation, key: "before" if away.is_set() and rank else None  # noqa: E731
    with job(2, fault=fault, on_trouble=troubles.append) as ranks:
        away.set()
        ranks[1].opened(due(ranks[1], 1))
        ranks[1].committed(1)
        until(lambda: ranks[1].why_not_open() == "the job's store does not answer")
        assert ranks[0].why_not_open() is None
        ranks[0].opened(due(ranks[0], 1))
        ranks[0].committed(1)
        assert ranks[1].fate(1) is Fate.UNKNOWN
        assert not ranks[1].reusable(0, 1)
        ranks[1].lost(due(ranks[1], 2), "no store")
        away.clear()
        until(lambda: ranks[1].why_not_open() is None)
        ranks[0].lost(due(ranks[0], 2), "slip")
        # Its count may have been lost: only dead is sure.
        assert [rank.wait(1, LONG_S) for rank in ranks] == [Fate.DEAD] * 2
        assert [rank.wait(2, LONG_S) for rank in ranks] == [Fate.DEAD] * 2
    assert len(troubles) == 1


def test_a_call_that_hangs_counts_as_unreachable_and_blocks_no_caller() -> None:
    hang = threading.Event()

    def fault(rank: int) -> Fault:
        def decide(operation: str, key: str) -> str | None:
            if operation == "add":
                hang.wait(LONG_S)
            return None

        return decide

    with job(1, fault=fault, limits=Limits(call_s=0.05)) as (rank,):
        rank.opened(due(rank, 1))
        rank.committed(1)
        until(lambda: "has not answered for" in (rank.why_not_open() or ""))
        assert rank.fate(1) is Fate.UNKNOWN
        hang.set()
        assert rank.wait(1, LONG_S) is Fate.WHOLE
        until(lambda: rank.why_not_open() is None)


def test_patience_ends_the_wait_for_a_rank_that_stopped_in_its_commit() -> None:
    with job(2, limits=Limits(patience_s=0.1)) as ranks:
        for rank in ranks:
            rank.opened(due(rank, 1))
        ranks[0].committed(1)
        assert ranks[0].wait(1, LONG_S) is Fate.DEAD
        ranks[1].committed(1)  # it wakes up, and learns what was decided without it
        assert ranks[1].wait(1, LONG_S) is Fate.DEAD


def test_a_rank_that_takes_no_more_snapshots_stops_all_of_them() -> None:
    troubles: list[CoordinationError] = []
    with job(2, on_trouble=troubles.append) as ranks:
        ranks[0].opened(due(ranks[0], 1))
        ranks[0].committed(1)
        ranks[1].lost(due(ranks[1], 1), "its region is latched", for_good=True)
        assert ranks[0].wait(1, LONG_S) is Fate.DEAD
        assert ranks[0].why_not_open() == "rank 1 takes no more: its region is latched"
        until(lambda: len(troubles) == 2)
        assert "rank 1 takes no more snapshots: its region is latched" in str(troubles[0])


def test_a_step_from_before_a_rank_ended_may_still_become_whole() -> None:
    ledger = CommitProtocol(0, 3)
    for step in (1, 2):
        ledger.opened(DueStep(step, step - 1), 0.0)
    ledger.committed(1, 0.0)
    assert ledger.next_call(0.0) == Add("c/1", 1)
    ledger.heard(2, AbortReason(2, "its region is latched", for_good=True).encode())
    ledger.answered(2, 0.0)  # rank 2 has counted step 1, rank 1 has not yet
    assert ledger.next_call(0.0) is None and ledger.watched == 1
    ledger.heard(1, WHOLE)
    assert ledger.fate(1) is Fate.WHOLE and ledger.fate(2) is Fate.DEAD


def test_closing_waits_for_no_rank_beyond_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    lonely = CommitCoordinator(MemoryStore(server), CommitProtocol(0, 2), DueCalendar(every=1))
    lonely.opened(due(lonely, 1))
    lonely.committed(1)
    until(lambda: lonely._ledger.watched == 1)
    waits, wait_for = [0.1, LONG_S, LONG_S, LONG_S], lonely._changed.wait_for
    limits: list[float] = []

    def waiting(ready: Callable[[], object], seconds: float | None = None) -> object:
        if seconds is None:
            return wait_for(ready)
        limits.append(seconds)
        return wait_for(ready, waits.pop(0))

    monkeypatch.setattr(lonely._changed, "wait_for", waiting)
    assert lonely.close(60.0) == []
    assert limits == [30.0, 30.0], "the time is for both waits"
    assert server.values["f/1"] == AbortReason(0, "rank 0 closed").encode()
    assert lonely.close(60.0) == []
    assert lonely.why_not_open() == "closed"


def test_a_close_without_a_store_says_which_fates_it_never_learned() -> None:
    commit = CommitCoordinator(
        MemoryStore(fault=lambda operation, key: "before"),
        CommitProtocol(0, 2),
        DueCalendar(every=1),
    )
    commit.opened(due(commit, 1))
    commit.committed(1)
    assert commit.close(0.2) == [1]


def test_the_store_does_not_grow_and_messages_per_snapshot_are_constant() -> None:
    server, steps = Server(), 4 * BLOCK
    with job(3, server=server) as ranks:
        for step in range(1, steps + 1):
            for rank in ranks:
                rank.opened(due(rank, step))
                rank.committed(step)
            for rank in ranks:
                assert rank.wait(step, LONG_S) is Fate.WHOLE
        until(lambda: len(server.values) <= 2 * BLOCK)
        sent = sum(
            rank.traffic.reports + rank.traffic.claims + rank.traffic.watches for rank in ranks
        )
    assert sent / steps / 3 <= 3.5
    assert server.messages["delete"] == 4 * (2 * BLOCK + 1)
    assert not server.values


def test_announced_steps_are_due_on_every_rank_and_missed_ones_are_dead() -> None:
    fates: list[tuple[DueStep, Fate, AbortReason | None]] = []
    with job(2, every=None) as ranks:
        ranks[0]._told = lambda due, fate, death: fates.append((due, fate, death))
        target = ranks[0].announce(1, step_s=1000.0)
        assert target == 3
        until(lambda: ranks[1]._calendar.learned == 1)
        for rank in ranks:
            assert rank.due(2) is None
            rank.opened(due(rank, 3))
            rank.committed(3)
        assert [rank.wait(3, LONG_S) for rank in ranks] == [Fate.WHOLE] * 2
        assert ranks[1].due(50) is None  # far ahead before the announcement is there
        again = ranks[0].announce(4, step_s=1000.0)
        assert again == 6
        until(lambda: ranks[0]._calendar.learned == 2)
        ranks[0].opened(due(ranks[0], again))
        ranks[0].committed(again)
        assert ranks[0].wait(again, LONG_S) is Fate.DEAD
        until(lambda: len(fates) == 2)
        assert fates[1][2] == AbortReason(1, LATE)
        assert ranks[0]._announcer._margin == 2, "rank 0 looks further ahead from now on"
        with pytest.raises(ValueError, match="rank 1 announces nothing"):
            ranks[1].announce(60)


def test_a_listener_that_raises_is_not_swallowed() -> None:
    heard: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda a: heard.append(a.exc_value)  # type: ignore
    try:
        ledger = CommitProtocol(0, 1, on_fate=lambda due, fate, death: 1 / 0)  # type: ignore[arg-type, return-value]
        commit = CommitCoordinator(MemoryStore(), ledger, DueCalendar(every=1))
        commit.opened(due(commit, 1))
        commit.committed(1)
        until(lambda: heard)
        until(commit.why_not_open)
        assert "ended: ZeroDivisionError" in (commit.why_not_open() or "")
        commit.close(LONG_S)
    finally:
        threading.excepthook = hook
    assert isinstance(heard[0], ZeroDivisionError)
