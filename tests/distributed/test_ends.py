"""A job of several ranks ends together, one by one, or with some of it gone; it never hangs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_attach import records
from test_fates_of_steps import settled, step, until

import lightck.policy
from lightck.distributed.rounds import AgreementRounds
from lightck.distributed.store import JobStore
from lightck.errors import CoordinationError
from support import internals
from support.distributed import ranks
from support.distributed.missing import never_come
from support.distributed.training import Training

SHORT = timedelta(seconds=3)


def of_job() -> dist.Store:
    """The job's store, from which every connection of ours takes its time-out."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lightck")]


def test_close_commits_a_last_step_that_is_not_due(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir, policy=4) as handle:
            training.steps(6)
        until(lambda: not our_threads())
        return handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [6, 6]
    assert [set(records(region_dir, rank)) for rank in range(2)] == [{4, 6}, {4, 6}]


def test_close_takes_the_last_step_again_where_it_was_lost(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir, on_error=print) as handle:
            for _ in range(3):
                step(training, handle)
            if me.rank == 1:
                internals.checkpointer(handle).due = False
                internals.pipeline(handle).barrier.lost(3, "for the test")
            else:
                handle._requests._open_missed()
            until(lambda: settled(handle))
            dead = handle.stats().dead
        return dead, handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [(1, 3), (0, 3)]
    assert all(3 in records(region_dir, rank) for rank in range(2))


def test_what_ranks_have_waited_for_is_exact_once_they_have_closed(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir) as handle:
            for _ in range(3):
                step(training, handle)
            handle.wait(3, timeout=100)
        again = Training(me.rank)
        info = lightck.restore(again.model, again.optimizer, region_dir)
        return handle.last_committed_step, info and (info.step, info.early)

    with ranks.started(2, train) as job:
        assert job.results() == [(3, (3, False))] * 2


def test_a_job_can_be_attached_again_where_it_was_closed(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir) as first:
            training.steps(3)
        with training.attach(region_dir) as second:
            training.steps(2)
        return first.last_committed_step, second.last_committed_step, second.step

    with ranks.started(2, train) as job:
        assert job.results() == [(3, 5, 5)] * 2


def test_without_any_step_there_is_nothing_to_commit(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        with Training(me.rank).attach(region_dir) as handle:
            pass
        return handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [None, None]


def test_ranks_that_close_at_different_steps_say_so(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank, wrap=False)
        handle = training.attach(region_dir, policy=100, on_error=print)
        training.steps(3 + me.rank)
        with pytest.raises(CoordinationError) as caught:
            handle.close()
        return str(caught.value)

    with ranks.started(2, train) as job:
        for text in job.results():
            assert "the last step does not count: rank 0 holds step 3; rank 1 holds step 4" in text


def test_a_rank_that_leaves_on_an_error_keeps_nobody_waiting(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank, wrap=False)
        began = time.monotonic()
        try:
            with training.attach(region_dir, policy=100, close_timeout_s=1000, on_error=print):
                training.steps(3)
                if me.rank == 1:
                    raise ZeroDivisionError
        except (ZeroDivisionError, CoordinationError) as error:
            assert time.monotonic() - began < ranks.LONG_S
            return str(error)
        return "closed"

    with ranks.started(2, train) as job:
        first, _ = job.results()
        assert "no rank can close: rank 1: detached" in first


def test_a_dead_rank_is_named_and_waited_for_no_longer_than_told(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        handle = training.attach(region_dir, close_timeout_s=30.0, on_error=print)
        step(training, handle)
        step(training, handle)
        me.send("two steps")
        me.pause()
        waits = never_come([1])
        with pytest.raises(CoordinationError) as caught:
            handle.close()
        until(lambda: not our_threads())
        return str(caught.value), handle.last_committed_step, waits

    with ranks.started(3, train) as job:
        for rank in range(3):
            job.receive(rank)
        job.kill(1)
        job.let_go(0, 2)
        for text, last, waits in job.outcomes([0, 2]):
            assert "rank(s) 1 of 3 did not come in" in text
            assert last == 1
            assert max(waits) < 30.1 and len(waits) == 1


def test_a_store_that_dies_stops_snapshots_and_nothing_else(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        heard: list[str] = []
        training = Training(me.rank)
        handle = training.attach(
            region_dir, close_timeout_s=4.0, on_error=lambda error: heard.append(str(error))
        )
        step(training, handle)
        step(training, handle)
        me.send("two steps")
        me.pause()
        of_job().set_timeout(SHORT)
        barrier: Any = internals.pipeline(handle).barrier
        reachable = torch.ones(1)
        end = time.monotonic() + ranks.LONG_S
        while reachable.any() and time.monotonic() < end:
            training.step()
            reachable.fill_(barrier.reachable)
            dist.all_reduce(reachable)  # all ranks train the same number of steps
        slipped = handle.stats().slipped
        training.steps(5)
        assert handle.stats().slipped == slipped + 5, "none is opened any more"
        with pytest.raises(CoordinationError):
            handle.close()
        return handle.last_committed_step, heard

    with ranks.started(2, train) as job:
        for rank in range(2):
            job.receive(rank)
        job.kill_store()
        job.let_go()
        for last, heard in job.results():
            assert last is not None
            assert len([text for text in heard if "the job's store did not" in text]) == 1


def test_a_snapshot_that_all_ask_for_is_given_to_all(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir, policy=100) as handle:
            training.steps(3)
            now = handle.snapshot().result(timeout=ranks.LONG_S)
            again = handle.snapshot().result(timeout=ranks.LONG_S)
            training.optimizer.zero_grad()
            training.model(training.batch()).square().mean().backward()
            later: Future[int] = handle.snapshot()  # at the next boundary
            training.optimizer.step()
            training.step()
            at_boundary = later.result(timeout=ranks.LONG_S)
            handle.wait(timeout=ranks.LONG_S)
            return now, again, at_boundary, handle.stats().committed

    with ranks.started(2, train) as job:
        assert job.results() == [(3, 3, 4, 2)] * 2


def test_a_snapshot_that_one_rank_asks_for_counts_for_nobody(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        with training.attach(region_dir, policy=5, on_error=print) as handle:
            training.steps(3)
            future = handle.snapshot() if me.rank == 1 else None
            training.steps(3)
            handle.wait(5, timeout=ranks.LONG_S)
            if future is None:
                return handle.last_committed_step
            with pytest.raises(CoordinationError, match="not committed on every rank when step 5"):
                future.result(timeout=ranks.LONG_S)
            return handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [5, 5]


def test_a_policy_of_seconds_gives_the_same_steps_on_every_rank(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank)
        policy = lightck.policy.EverySeconds(0.05)
        with training.attach(region_dir, policy=policy, on_error=print) as handle:
            end = time.monotonic() + ranks.LONG_S
            enough = torch.zeros(1)
            while not enough and time.monotonic() < end:
                step(training, handle)
                enough = torch.tensor([float(handle.stats().committed >= 3)])
                dist.all_reduce(enough, dist.ReduceOp.MIN)
            last = handle.last_committed_step
        return last, handle.last_committed_step == handle.step

    with ranks.started(2, train) as job:
        (last, closed), other = job.results()
        assert (last, closed) == other and closed


def test_detach_with_an_open_window_on_one_rank(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank, wrap=False)
        handle = training.attach(region_dir, on_error=print, close_timeout_s=20)
        step(training, handle)
        loss = training.model(training.batch()).square().mean()  # opens step 1
        if me.rank == 1:
            handle.detach()
        loss.backward()
        training.optimizer.step()
        training.steps(2)
        if me.rank == 0:
            until(lambda: settled(handle))
            handle.detach()
        return handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [1, 1]


def bounds() -> list[float]:
    """Note how long, at most, this thread would wait each time from here on; it soon gives up.

    It must not ask the store itself: nothing bounds how long that takes.
    """
    here, limits = threading.current_thread(), []
    join, wait_for, call = threading.Thread.join, threading.Condition.wait_for, JobStore._call

    def least(limit: float | None) -> float | None:
        if threading.current_thread() is not here:
            return limit
        assert limit is not None, "a wait without end"
        limits.append(limit)
        return min(limit, 0.1)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        # The watchdog's waits for nobody else.
        join(thread, timeout if thread.name == "lightck-watchdog" else least(timeout))

    def asked(store: JobStore, *args: Any) -> Any:
        assert threading.current_thread() is not here, "the store hangs, and so would this thread"
        return call(store, *args)

    threading.Thread.join = joined  # type: ignore[method-assign]
    threading.Condition.wait_for = (  # type: ignore[method-assign]
        lambda condition, ready, timeout=None: wait_for(condition, ready, least(timeout))
    )
    JobStore._call = asked  # type: ignore[method-assign]
    return limits


def test_a_store_that_hangs_delays_the_close_by_a_bounded_time(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        training = Training(me.rank, wrap=False)
        handle = training.attach(region_dir, close_timeout_s=1.0, on_error=print)
        step(training, handle)
        step(training, handle)
        me.send("two steps")
        me.pause()
        limits = bounds()
        with pytest.raises(CoordinationError, match="gave no answer within|does not answer"):
            handle.close()
        return limits

    with ranks.started(2, train) as job:
        for rank in range(2):
            job.receive(rank)
        job.stop_store()
        job.let_go()
        for limits in job.results():
            # For the others 2 s, the least, and 5 more for an answer; 2 for fates, and 1 for each
            # of four threads.
            assert limits and sum(limits) <= 13.0, limits


def read_late() -> None:
    """Rank 0 has decided, and could be gone, before this one reads what."""
    kept = AgreementRounds._await

    def late(rounds: AgreementRounds, *args: Any) -> Any:
        time.sleep(1.0)
        return kept(rounds, *args)

    AgreementRounds._await = late  # type: ignore[method-assign]


def test_rank_0_may_serve_the_store_and_end_first(region_dir: Path) -> None:
    """The store ends with rank 0's process, as with `init_method="env://"` and no agent."""
    told = region_dir / "port"

    def train(me: ranks.Me) -> Any:
        if me.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            (region_dir / "port.new").write_text(str(store.port))
            (region_dir / "port.new").rename(told)
        else:
            until(told.exists)
            store = dist.TCPStore("127.0.0.1", int(told.read_text()), wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world)
        training = Training(me.rank, wrap=False)
        path = region_dir / "run"
        with training.attach(path, policy=100, on_error=print) as handle:
            training.steps(2)
            if me.rank:
                read_late()
        return handle.last_committed_step

    with ranks.started(3, train, initialized=False) as job:
        assert job.results() == [2, 2, 2]
