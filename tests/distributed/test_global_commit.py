"""The global commit with its threads: several ranks in one process over a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lightck.distributed.commit.distributed_barrier import LATE, DistributedBarrier
from lightck.distributed.commit.due_steps import DueStep
from lightck.distributed.commit.protocol import (
    BLOCK,
    WHOLE,
    AbortReason,
    Add,
    Claim,
    CommitProtocol,
)
from lightck.errors import LightckError
from lightck.types import Fate
from support.distributed.barriers import barrier, due, lose, open_step, wait
from support.distributed.memory import Fault, MemoryStore, Server

LONG_S = 100.0  # far beyond what any of these needs


@contextmanager
def job(
    world: int,
    *,
    every: int | None = 1,
    fault: Callable[[int], Fault] = lambda rank: lambda operation, key: None,
    server: Server | None = None,
    **limits: float,
) -> Iterator[list[DistributedBarrier]]:
    server = server or Server()
    ranks = [
        barrier(MemoryStore(server, fault(rank)), rank, world, every=every, **limits)
        for rank in range(world)
    ]
    yield ranks
    closing = [threading.Thread(target=rank._settle, args=(LONG_S,)) for rank in ranks]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.002)


def heard(ranks: list[DistributedBarrier], troubles: list[LightckError]) -> list[LightckError]:
    """Add what the ranks have noted since; return all."""
    for rank in ranks:
        troubles += rank.troubles()
    return troubles


def test_a_step_is_whole_once_the_last_rank_has_committed_it() -> None:
    with job(3) as ranks:
        for rank in ranks:
            open_step(rank, 1)
        for rank in ranks[:2]:
            rank.committed(1, b"")
        assert [wait(rank, 1, 0.05) for rank in ranks] == [Fate.UNKNOWN] * 3
        assert not any(rank.reusable(0, 1) for rank in ranks)
        ranks[2].committed(1, b"")
        assert [wait(rank, 1, LONG_S) for rank in ranks] == [Fate.WHOLE] * 3


def test_one_rank_that_slips_makes_the_step_dead_and_reusable_everywhere() -> None:
    with job(3) as ranks:
        for rank in ranks[:2]:
            open_step(rank, 1)
            rank.committed(1, b"")
        lose(ranks[2], 1, "slipped: every slot is busy")
        assert [wait(rank, 1, LONG_S) for rank in ranks] == [Fate.DEAD] * 3
        assert all(rank.reusable(0, 1) for rank in ranks)


def test_ranks_with_other_states_hear_of_it_once_and_go_on_once_they_agree() -> None:
    troubles: list[LightckError] = []
    with job(3) as ranks:
        for step, forms in enumerate(["aab", "aba", "ccc", "cdd"], start=1):
            for rank, form in zip(ranks, forms, strict=True):
                open_step(rank, step)
                rank.committed(step, form.encode())
            fate = Fate.WHOLE if step == 3 else Fate.DEAD
            assert [wait(rank, step, LONG_S) for rank in ranks] == [fate] * 3
            told = 3 * (1 + (step > 3))
            until(lambda told=told: len(heard(ranks, troubles)) >= told)  # type: ignore[misc]
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
    protocol = CommitProtocol(0, 1, restored=(7, 40), timeline=8)
    assert not protocol.reusable(7, 40)
    assert protocol.reusable(7, 39)
    commit = barrier(MemoryStore(), 0, 1, start=40, timeline=8, restored=(7, 40))
    lose(commit, 41, "torn")
    assert wait(commit, 41, LONG_S) is Fate.DEAD
    assert not commit.reusable(7, 40)
    open_step(commit, 42)
    commit.committed(42, b"")
    assert wait(commit, 42, LONG_S) is Fate.WHOLE
    assert commit.reusable(7, 40)
    assert not commit.reusable(8, 42)
    assert commit._settle(LONG_S) == []


def test_an_outage_at_any_call_ends_in_one_fate_and_snapshots_go_on() -> None:
    for broken in range(6):
        for how in ("before", "after"):
            calls = [0]
            troubles: list[LightckError] = []

            def fault(
                rank: int, how: str = how, broken: int = broken, calls: list[int] = calls
            ) -> Fault:
                def decide(operation: str, key: str) -> str | None:
                    if rank != 1 or operation == "wait":
                        return None
                    calls[0] += 1
                    return how if calls[0] == broken + 1 else None

                return decide

            with job(2, fault=fault) as ranks:
                for step in (1, 2, 3):
                    for rank in ranks:
                        until(lambda rank=rank: not rank.why_not_open())
                        open_step(rank, step)
                        rank.committed(step, b"")
                fates = [[wait(rank, step, LONG_S) for step in (1, 2, 3)] for rank in ranks]
                assert fates[0] == fates[1], f"call {broken} failed {how}"
                assert Fate.UNKNOWN not in fates[0]
                until(lambda r=ranks: not any(rank.why_not_open() for rank in r))
            assert len(heard(ranks, troubles)) <= 1


def test_a_store_that_is_away_stops_snapshots_until_it_answers_again() -> None:
    away = threading.Event()
    fault = lambda rank: lambda operation, key: "before" if away.is_set() and rank else None  # noqa: E731
    with job(2, fault=fault) as ranks:
        away.set()
        open_step(ranks[1], 1)
        ranks[1].committed(1, b"")
        until(lambda: ranks[1].why_not_open() == "the job's store does not answer")
        assert ranks[0].why_not_open() is None
        open_step(ranks[0], 1)
        ranks[0].committed(1, b"")
        assert ranks[1].fate(1) is Fate.UNKNOWN
        assert not ranks[1].reusable(0, 1)
        lose(ranks[1], 2, "no store")
        away.clear()
        until(lambda: ranks[1].why_not_open() is None)
        lose(ranks[0], 2, "slip")
        # Its count may have been lost: only dead is sure.
        assert [wait(rank, 1, LONG_S) for rank in ranks] == [Fate.DEAD] * 2
        assert [wait(rank, 2, LONG_S) for rank in ranks] == [Fate.DEAD] * 2
    assert len(heard(ranks, [])) == 1


def test_a_call_that_hangs_counts_as_unreachable_and_blocks_no_caller() -> None:
    hang = threading.Event()

    def fault(rank: int) -> Fault:
        def decide(operation: str, key: str) -> str | None:
            if operation == "add":
                hang.wait(LONG_S)
            return None

        return decide

    with job(1, fault=fault, answer_s=0.05) as (rank,):
        open_step(rank, 1)
        rank.committed(1, b"")
        until(lambda: "has not answered for" in (rank.why_not_open() or ""))
        assert rank.fate(1) is Fate.UNKNOWN
        hang.set()
        assert wait(rank, 1, LONG_S) is Fate.WHOLE
        until(lambda: rank.why_not_open() is None)


def test_patience_ends_the_wait_for_a_rank_that_stopped_in_its_commit() -> None:
    with job(2, patience_s=0.1) as ranks:
        for rank in ranks:
            open_step(rank, 1)
        ranks[0].committed(1, b"")
        assert wait(ranks[0], 1, LONG_S) is Fate.DEAD
        ranks[1].committed(1, b"")  # it wakes up, and learns what was decided without it
        assert wait(ranks[1], 1, LONG_S) is Fate.DEAD


def test_a_step_that_is_given_up_is_dead_everywhere_unless_its_outcome_was_set_before() -> None:
    with job(2) as ranks:
        for step in (1, 2):
            for rank in ranks:
                open_step(rank, step)
        ranks[0].abandon(1)  # not committed here: nothing to give up
        for step in (1, 2):
            ranks[0].committed(step, b"")
        ranks[1].committed(1, b"")
        assert [wait(rank, 1, LONG_S) for rank in ranks] == [Fate.WHOLE] * 2
        ranks[0].abandon(1)
        until(lambda: ranks[0].abandon(2) or wait(ranks[0], 2, 0.01) is not Fate.UNKNOWN)
        ranks[1].committed(2, b"")
        assert [wait(rank, 2, LONG_S) for rank in ranks] == [Fate.DEAD] * 2
        assert all(rank.reusable(0, 2) for rank in ranks)
        assert [rank.fate(1) for rank in ranks] == [Fate.WHOLE] * 2


def test_a_rank_that_takes_no_more_snapshots_stops_all_of_them() -> None:
    troubles: list[LightckError] = []
    with job(2) as ranks:
        open_step(ranks[0], 1)
        ranks[0].committed(1, b"")
        lose(ranks[1], 1, "its region is latched", for_good=True)
        assert wait(ranks[0], 1, LONG_S) is Fate.DEAD
        assert ranks[0].why_not_open() == "rank 1 takes no more: its region is latched"
        until(lambda: len(heard(ranks, troubles)) == 2)
        assert "rank 1 takes no more snapshots: its region is latched" in str(troubles[0])


def test_a_step_from_before_a_rank_ended_may_still_become_whole() -> None:
    protocol = CommitProtocol(0, 3)
    for step in (1, 2):
        protocol.opened(DueStep(step, step - 1), 0.0)
    protocol.committed(1, 0.0)
    assert protocol.next_call(0.0) == Add("c/1", 1)
    protocol.outcome_read(2, AbortReason(2, "its region is latched", for_good=True).encode())
    protocol.answered(2, 0.0)  # rank 2 has counted step 1, rank 1 has not yet
    assert protocol.next_call(0.0) is None and protocol.watched == 1
    protocol.outcome_read(1, WHOLE)
    assert protocol.fate(1) is Fate.WHOLE and protocol.fate(2) is Fate.DEAD


def test_closing_waits_for_no_rank_beyond_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    lonely = barrier(MemoryStore(server), 0, 2)
    open_step(lonely, 1)
    lonely.committed(1, b"")
    until(lambda: lonely._protocol.watched == 1)
    waits, wait_for = [0.1, LONG_S, LONG_S, LONG_S], lonely._changed.wait_for
    limits: list[float] = []

    def waiting(ready: Callable[[], object], seconds: float | None = None) -> object:
        if seconds is None:
            return wait_for(ready)
        limits.append(seconds)
        return wait_for(ready, waits.pop(0))

    monkeypatch.setattr(lonely._changed, "wait_for", waiting)
    assert lonely._settle(60.0) == []
    assert limits == [30.0, 30.0], "the time is for both waits"
    assert server.values["f/1"] == AbortReason(0, "rank 0 closed").encode()
    assert lonely._settle(60.0) == []
    assert lonely.why_not_open() == "closed"


def test_a_close_without_a_store_says_which_fates_it_never_learned() -> None:
    commit = barrier(MemoryStore(fault=lambda operation, key: "before"), 0, 2)
    open_step(commit, 1)
    commit.committed(1, b"")
    assert commit._settle(0.2) == [1]


def test_the_store_does_not_grow_and_messages_per_snapshot_are_constant() -> None:
    server, steps = Server(), 4 * BLOCK
    with job(3, server=server) as ranks:
        for step in range(1, steps + 1):
            for rank in ranks:
                open_step(rank, step)
                rank.committed(step, b"")
            for rank in ranks:
                assert wait(rank, step, LONG_S) is Fate.WHOLE
        until(lambda: len(server.values) <= 2 * BLOCK)
        sent = sum(server.messages[kind] for kind in ("add", "claim", "read", "wait"))
    assert sent / steps / 3 <= 3.5
    assert server.messages["delete"] == 4 * (5 * BLOCK + 1)
    assert not server.values


def test_announced_steps_are_due_on_every_rank_and_missed_ones_are_dead() -> None:
    with job(2, every=None) as ranks:
        target = ranks[0].announce(1, step_s=1000.0)
        assert target == 3
        until(lambda: ranks[1]._calendar.learned == 1)
        for rank in ranks:
            assert not due(rank, 2)
            open_step(rank, 3)
            rank.committed(3, b"")
        assert [wait(rank, 3, LONG_S) for rank in ranks] == [Fate.WHOLE] * 2
        assert not due(ranks[1], 50)  # far ahead before the announcement is there
        again = ranks[0].announce(4, step_s=1000.0)
        assert again == 6
        until(lambda: ranks[0]._calendar.learned == 2)
        open_step(ranks[0], again)
        ranks[0].committed(again, b"")
        assert wait(ranks[0], again, LONG_S) is Fate.DEAD
        assert ranks[0].why_dead(again) == f"rank 1: {LATE}"
        assert ranks[0]._announcer._margin == 2, "rank 0 looks further ahead from now on"
        with pytest.raises(ValueError, match="rank 1 announces nothing"):
            ranks[1].announce(60)


def test_a_defect_in_a_thread_is_not_swallowed() -> None:
    raised: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda a: raised.append(a.exc_value)  # type: ignore
    try:
        commit = barrier(MemoryStore(fault=lambda operation, key: 1 / 0), 0, 1)  # type: ignore
        open_step(commit, 1)
        commit.committed(1, b"")
        until(lambda: raised)
        until(commit.why_not_open)
        assert "ended: ZeroDivisionError" in (commit.why_not_open() or "")
        commit._settle(LONG_S)
    finally:
        threading.excepthook = hook
    assert isinstance(raised[0], ZeroDivisionError)
