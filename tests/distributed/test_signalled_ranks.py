"""Ranks that get a signal, or wait for one that never comes: all of them save the same step.

No step is ever due, so that what a restart finds was saved just in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer would load on first use, in every rank by itself
import torch.distributed as dist
from test_frozen_ranks import whole_steps
from test_golden import Job
from test_peer_death import until

from lightck.failure.watchdog import HANG_STATUS
from lightck.types import Failure, Saved
from support.distributed import ranks
from support.distributed.ranks import Gone, Me
from support.distributed.resumed import same, state_of
from support.proof import record

LAST, AT, WORLD = 7, 4, 2
NEVER = 10**6


class Stopping(Job):
    """Tells what it has saved; stands still for ever in one phase of iteration AT."""

    def __init__(self, me: Me, at: Callable[[str], object] = lambda phase: None) -> None:
        super().__init__(me.rank, "plain", policy=NEVER)
        self.at, self.iteration = at, 0
        self.model.register_forward_pre_hook(lambda *_: self._reached("begun"))
        self.module[3].weight.register_hook(lambda gradient: self._reached("backward"))

    def _reached(self, phase: str) -> None:
        if self.iteration == AT - 1:
            self.at(phase)

    def iterate(self) -> float:
        self._reached("forward")
        loss = super().iterate()
        self.iteration += 1
        return loss


def golden() -> Any:
    def train(me: Me) -> Any:
        job = Stopping(me)
        return [job.iterate() for _ in range(LAST)], state_of(job)

    with ranks.started(WORLD, train) as job:
        return job.results()


@pytest.fixture(scope="module")
def wanted() -> Any:
    return golden()


def first_life(
    path: Path, stands: dict[int, str], then: Callable[[Me], object], **failure: Any
) -> Any:
    """Some ranks stand still in a phase, and tell so before; the others wait for them."""

    def train(me: Me) -> Any:
        def at(phase: str) -> None:
            if stands.get(me.rank) == phase:
                me.send("stands still")
                then(me)

        def decide(saved: Saved) -> None:
            me.send((saved.reason, saved.step, saved.fresh, saved.why))

        job = Stopping(me, at)
        settings = {"grace_s": 20.0, "on_failure": decide, **failure}
        with job.attach(path, failure=Failure(**settings), on_error=lambda error: None):
            while True:
                job.iterate()

    return train


def go_on(path: Path, wanted: Any) -> int:
    """The rest is golden; the step that was restored."""

    def train(me: Me) -> Any:
        job = Stopping(me)
        torch.manual_seed(1)  # as another process would: restore sets the generators
        info = job.restore(path)
        with job.attach(path, failure="jit") as handle:
            return (
                info.step if info else 0,
                [job.iterate() for _ in range(handle.step, LAST)],
                state_of(job),
            )

    with ranks.started(WORLD, train) as job:
        results = job.results()
    (step,) = {step for step, _, _ in results}
    for (_, losses, state), (all_losses, last) in zip(results, wanted, strict=True):
        assert losses == all_losses[step:]
        assert same(state, last)
    return int(step)


def sleep(me: Me) -> None:
    time.sleep(600)


def barrier(me: Me) -> None:
    """Nobody else comes: the others are in an iteration of their own."""
    dist.barrier()


@pytest.mark.parametrize("then", [sleep, barrier])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_sigterm_to_ranks_inside_collectives_and_outside_saves_the_same_step_on_all(
    region_dir: Path, wanted: Any, phase: str, then: Callable[[Me], object]
) -> None:
    patient = {"hang_steps": 1e6}  # no hang: the signal comes first
    code = first_life(region_dir, {1: phase}, then, **patient)
    with ranks.started(WORLD, code) as job:
        assert job.receive(1) == "stands still"
        for rank in range(WORLD):
            os.kill(job.pid(rank), signal.SIGTERM)
        # The first one that ends breaks the other's collective: an exception may be quicker there.
        ended = [str(outcome) for outcome in job.outcomes()]
        assert any(f"status {-signal.SIGTERM}" in each for each in ended), ended
        assert all("status" in each or "Connection closed" in each for each in ended), ended
    assert go_on(region_dir, wanted) == AT - 1


def test_a_rank_that_hears_of_another_s_signal_saves_as_well(region_dir: Path, wanted: Any) -> None:
    code = first_life(region_dir, {0: "backward", 1: "backward"}, sleep)
    with ranks.started(WORLD, code) as job:
        assert [job.receive(rank) for rank in range(WORLD)] == ["stands still"] * WORLD
        os.kill(job.pid(1), signal.SIGUSR1)
        assert job.receive(1) == ("SIGUSR1", AT - 1, True, "")
        assert job.receive(0) == ("rank 1: SIGUSR1", AT - 1, True, "")
        job.kill(0)
        job.kill(1)
    assert go_on(region_dir, wanted) == AT - 1


def test_an_exception_waits_for_a_rank_that_can_only_save_the_instant_before(
    region_dir: Path, wanted: Any
) -> None:
    """The rank waited for has not begun its forward; the failing one has, and both go back."""

    def fail(me: Me) -> None:
        if me.rank == 0:
            raise OSError("gone")
        time.sleep(600)

    stands = {0: "begun", 1: "forward"}
    with ranks.started(WORLD, first_life(region_dir, stands, fail)) as job:
        for rank in range(WORLD):
            assert job.receive(rank) == "stands still"
        assert job.receive(1) == ("rank 0: OSError", AT - 1, True, "")
        assert job.receive(0) == ("OSError", AT - 1, True, "")
        (failed,) = job.outcomes([0])
        assert "gone" in str(failed)
        job.kill(1)
    assert whole_steps(region_dir) == {AT - 1}
    assert go_on(region_dir, wanted) == AT - 1


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_waits_for_one_that_hangs_notices_and_both_save(
    region_dir: Path, wanted: Any, phase: str
) -> None:
    with ranks.started(WORLD, first_life(region_dir, {1: phase}, sleep)) as job:
        assert job.receive(1) == "stands still"
        began = time.monotonic()
        assert job.receive(0) == ("hang", AT - 1, True, "")
        # Steps take milliseconds here: this is the one second that is promised beyond three steps.
        record(f"hang_{phase}", {"saved_after_s": round(time.monotonic() - began, 3)})
        assert job.receive(1) == ("rank 0: hang", AT - 1, True, "")
        if phase == "forward":  # the other has not begun it: both go back to before it
            until(lambda: whole_steps(region_dir) == {AT - 1})
        job.kill(0)
        job.kill(1)
    assert go_on(region_dir, wanted) == AT - 1


def test_a_rank_that_is_ended_for_a_hang_is_heard_by_the_one_that_hangs(
    region_dir: Path, wanted: Any
) -> None:
    code = first_life(region_dir, {1: "backward"}, sleep, hang_exit_s=0.0)
    with ranks.started(WORLD, code) as job:
        assert job.receive(1) == "stands still"
        assert job.receive(0) == ("hang", AT - 1, True, "")
        (ended,) = job.outcomes([0])
        assert isinstance(ended, Gone) and f"status {HANG_STATUS}" in str(ended)
        reason, *saved = job.receive(1)
        assert reason in ("rank 0: hang", "rank 0: killed") and saved == [AT - 1, True, ""]
        job.kill(1)
    assert go_on(region_dir, wanted) == AT - 1
