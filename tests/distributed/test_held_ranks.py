"""Ranks that train on while a signal is saved for come to a halt at one step, and save that."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer would load on first use, in every rank by itself
import torch.distributed as dist
from test_golden import Job, golden
from test_resume import state_of

from lightck.failure.watchdog import SaveTask
from lightck.types import Failure
from support import faults
from support.distributed import ranks
from support.distributed.ranks import Me

WORLD, NEVER = 2, 10**6
SLOW_S = 0.1  # of every sync: dozens of steps would fit into a commit


def first_life(path: Path, told: Path) -> Any:
    def train(me: Me) -> Any:
        job = Job(me.rank, "plain", policy=NEVER)
        mine = told / str(me.rank)
        failure = Failure(grace_s=20.0, hang_steps=1e6)
        with job.attach(path, failure=failure, on_error=lambda error: None) as handle:
            for _ in range(10**6):  # the same number everywhere: a signal ends it
                job.iterate()
                mine.write_text(str(handle.step))
                if handle.step == 3:
                    faults.delay(faults.SYNC, SLOW_S)
                    me.send("there")

    return train


def second_life(path: Path) -> Any:
    def restore(me: Me) -> Any:
        job = Job(me.rank, "plain", policy=NEVER)
        torch.manual_seed(1)
        info = job.restore(path)
        return info and info.step, state_of(job)

    with ranks.started(WORLD, restore) as job:
        return job.results()


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    """Make a folder on an ordinary file system, where commits sync."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/var/tmp"))
    yield folder / "run"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("signalled", [(0, 1), (1, 0)])
def test_ranks_that_are_ended_have_saved_the_last_step_that_both_have_trained(
    disk_dir: Path, tmp_path: Path, signalled: tuple[int, ...]
) -> None:
    with ranks.started(WORLD, first_life(disk_dir, tmp_path)) as job:
        for rank in range(WORLD):
            assert job.receive(rank) == "there"
        for rank in signalled:
            os.kill(job.pid(rank), signal.SIGTERM)
        ended = [str(outcome) for outcome in job.outcomes()]
        assert any(f"status {-signal.SIGTERM}" in each for each in ended), ended
    trained = {int((tmp_path / str(rank)).read_text()) for rank in range(WORLD)}
    lives = second_life(disk_dir)
    (step,) = {step for step, _ in lives}
    assert trained == {step}
    for (_, found), (_, wanted) in zip(lives, golden(WORLD, count=step), strict=True):
        assert all(torch.equal(found[k], wanted[k]) for k in wanted if k[:5] in ("model", "optim"))


def test_a_rank_is_not_held_before_an_update_that_another_has_made(disk_dir: Path) -> None:
    """The rank before its update must come to what the other saves: each has only its last step."""

    class Apart(Job):
        iteration = 0

        def iterate(self) -> float:
            self.iteration += 1
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.reached(0)
            self.optimizer.step()
            self.reached(1)
            self.schedule.step()
            return loss.item()

        def reached(self, rank: int) -> None:
            if (rank, self.iteration) == (dist.get_rank(), 4):
                os.kill(os.getpid(), signal.SIGTERM)
                assert heard.wait(ranks.LONG_S)
                time.sleep(0.3)  # the watchdog saves

    heard, start = threading.Event(), SaveTask.start

    def starting(saving: SaveTask) -> SaveTask:
        begun = start(saving)
        heard.set()
        return begun

    def train(me: Me) -> Any:
        SaveTask.start = starting  # type: ignore[method-assign]
        job = Apart(me.rank, "plain", policy=NEVER)
        failure = Failure(grace_s=20.0, hang_steps=1e6)
        with job.attach(disk_dir, failure=failure, on_error=lambda error: None):
            for _ in range(10**6):
                job.iterate()

    with ranks.started(WORLD, train) as job:
        ended = [str(outcome) for outcome in job.outcomes()]
        assert any(f"status {-signal.SIGTERM}" in each for each in ended), ended
    assert [step for step, _ in second_life(disk_dir)] == [4, 4]
