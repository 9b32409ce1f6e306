"""The ranks that the other tests are run on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightck.errors import TornSnapshotError
from support.distributed import ranks


def total(me: ranks.Me) -> float:
    """The sum of all ranks' numbers, over gloo."""
    number = torch.tensor([float(me.rank + 1)])
    dist.all_reduce(number)
    return float(number)


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_every_rank_runs_the_code_in_one_group() -> None:
    with ranks.started(3, total) as job:
        assert job.results() == [6.0, 6.0, 6.0]


def test_what_a_rank_raises_is_raised_here_and_named() -> None:
    def code(me: ranks.Me) -> int:
        dist.barrier()  # a rank that goes before the other is connected fails that one, too
        if me.rank == 1:
            raise ValueError("not mine")
        return me.rank

    with ranks.started(2, code) as job:
        first, second = job.outcomes()
        assert first == 0
        assert repr(second) == repr(ValueError("not mine"))
        with pytest.raises(ValueError, match="not mine") as caught:
            job.results()
        assert "on rank 1" in caught.value.__notes__[0]


def test_an_error_that_does_not_pickle_arrives_as_text() -> None:
    def code(me: ranks.Me) -> None:
        raise TornSnapshotError("torn", names=["w"])

    with ranks.started(1, code) as job:
        (outcome,) = job.outcomes()
        assert "torn" in str(outcome)


def test_a_rank_and_the_test_talk() -> None:
    def code(me: ranks.Me) -> str:
        me.send((me.rank, me.world))
        me.pause()
        return "went on"

    with ranks.started(2, code) as job:
        assert [job.receive(rank) for rank in (1, 0)] == [(1, 2), (0, 2)]
        job.let_go(1)
        assert job.outcomes([1]) == ["went on"]
        job.let_go(0)
        assert job.results() == ["went on"] * 2


def test_killed_and_stopped_ranks_leave_nothing_behind() -> None:
    def code(me: ranks.Me) -> None:
        me.send("here")
        me.pause()

    before = {*_children()}
    with ranks.started(3, code) as job:
        assert [job.receive(rank) for rank in range(3)] == ["here"] * 3
        job.kill(0)
        job.stop(1)
        assert isinstance(job.outcomes([0])[0], ranks.Gone)
        pids = [job.pid(rank) for rank in range(3)]
        children = [pid for pid in _children() if pid not in before]
        assert len(children) == 3  # two ranks and the store
        job.let_go(2)
        job.outcomes([2])
    assert all(is_gone(pid) for pid in pids + children)


def test_a_rank_that_hangs_is_named_and_ended() -> None:
    def code(me: ranks.Me) -> None:
        if me.rank == 1:
            time.sleep(1000)

    with ranks.started(2, code) as job:
        assert job.outcomes([0]) == [None]
        job.timeout_s = 1.0
        with pytest.raises(TimeoutError, match=r"nothing from rank 1 .* still run: \[1\]"):
            job.results()
        pid = job.pid(1)
    assert is_gone(pid)


def test_the_store_can_be_killed_while_ranks_go_on() -> None:
    def code(me: ranks.Me) -> float:
        me.send("here")
        me.pause()
        return total(me)

    with ranks.started(2, code) as job:
        for rank in range(2):
            job.receive(rank)
        job.kill_store()
        job.let_go()
        assert job.results() == [3.0, 3.0]


def test_ranks_need_not_know_each_other() -> None:
    with ranks.started(2, lambda me: dist.is_initialized(), initialized=False) as job:
        assert job.results() == [False, False]


def _children() -> list[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
