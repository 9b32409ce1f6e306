"""Golden trajectories: ranks killed at any instant go on as if nothing had happened.

Every loss that a rank reports, of every life of the job, is that of the uninterrupted run at that
step, and so is every tensor at the end.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.errors import LightckError
from support.distributed import ranks
from support.distributed.resumed import same, state_of
from support.distributed.training import Training

LAST = 24
LIVES = 4

Options = dict[str, Any]
OPTIONS: dict[str, Options] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}


class Job(Training):
    """A training with a schedule, micro-batches and other features that a loop may have."""

    def __init__(self, rank: int, kind: str, **settings: Any) -> None:
        optimizer = lightck.optim.AdamW if kind == "streamed" else torch.optim.AdamW
        super().__init__(rank, wrap=False, optimizer=optimizer)
        options = OPTIONS.get(kind, {})
        self.kind, self.settings = kind, settings
        self.model = DistributedDataParallel(self.module, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.progress = {"rank": rank}
        self.extras = {"data": self.data, "schedule": self.schedule, "progress": self.progress}
        torch.manual_seed(300 + rank)

    def loss(self) -> torch.Tensor:
        noisy = self.batch() + torch.rand(())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "autocast"):
            return self.model(noisy).float().square().mean()

    def iterate(self) -> float:
        """One step; its loss."""
        self.optimizer.zero_grad()
        if self.kind == "accumulated":
            with self.model.no_sync():  # type: ignore[operator]
                self.loss().backward()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def restore(self, path: Path) -> lightck.types.RestoreInfo | None:
        """Restore; if it is early, also do what the loop has still to do behind the update."""
        info = lightck.restore(self.model, self.optimizer, path, extras=self.extras)
        if info is not None and info.early and self.schedule.last_epoch < info.step:
            with warnings.catch_warnings():  # torch has not seen the update, of another process
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self.schedule.step()
        return info

    def attach(self, path: Path | str, **settings: Any) -> lightck.Handle:
        return super().attach(path, extras=self.extras, **self.settings, **settings)


def golden(world: int, kind: str = "plain", count: int = LAST) -> list[Any]:
    """Losses and last state of each rank of a run that nothing interrupts."""

    def train(me: ranks.Me) -> Any:
        job = Job(me.rank, kind)
        return [job.iterate() for _ in range(count)], state_of(job)

    with ranks.started(world, train) as job:
        return job.results()


_golden = cache(golden)


def life(path: Path, kind: str, dies: bool = False) -> Callable[[ranks.Me], Any]:
    """One life of a job: goes on from what is there, tells every loss.

    Where it `dies`, who has done everything waits: what is killed late is killed all the same.
    """

    def train(me: ranks.Me) -> Any:
        job = Job(me.rank, kind)
        torch.manual_seed(1)  # as another process would: restore sets the generators
        if job.restore(path) is None:
            torch.manual_seed(300 + me.rank)
        with job.attach(path, close_timeout_s=30.0) as handle:
            me.send(("from", handle.step))
            for step in range(handle.step + 1, LAST + 1):
                me.send((step, job.iterate()))
        if dies:
            me.pause()
        return state_of(job)

    return train


def compare(said: list[tuple[Any, Any]], wanted: list[float], context: str) -> int:
    """Every loss is the uninterrupted run's; returns the last step that was seen."""
    seen = 0
    for step, value in said:
        if step == "from":
            seen = value
        else:
            assert value == wanted[step - 1], f"{context}: step {step}"
            assert step == seen + 1, f"{context}: step {step} after {seen}"
            seen = step
    return seen


def drain(job: ranks.Job, rank: int) -> list[tuple[Any, Any]]:
    """Collect what a rank has still said before it ended."""
    found = []
    while True:
        try:
            found.append(job.receive(rank))
        except Exception:
            return found


@pytest.fixture
def dice() -> random.Random:
    """Prints its seed, which LIGHTCK_TEST_SEED sets."""
    seed = int(os.environ.get("LIGHTCK_TEST_SEED") or secrets.randbits(32))
    print(f"LIGHTCK_TEST_SEED={seed}", file=sys.stderr)
    return random.Random(seed)


def killed_again_and_again(
    world: int, kind: str, path: Path, dice: random.Random, lives: int
) -> None:
    """Kill one rank or all in each life; then let the job end. Everything is golden."""
    wanted = _golden(world, kind)
    for number in range(lives):
        victims = [dice.randrange(world)] if dice.random() < 0.5 else [*range(world)]
        until = dice.randrange(1, 2 + LAST // lives)
        context = f"life {number}, ranks {victims} killed after {until} words"
        said: dict[int, list[Any]] = {rank: [] for rank in range(world)}
        with ranks.started(world, life(path, kind, True)) as job:
            watched = dice.randrange(world)
            said[watched] = [job.receive(watched) for _ in range(until)]
            for rank in victims:
                os.kill(job.pid(rank), signal.SIGKILL)
            for rank in {*range(world)} - {*victims}:
                with suppress(BrokenPipeError):  # it has found out already, and ended
                    job.let_go(rank)
            outcomes = job.outcomes()  # whoever is left finds out, and ends by itself
            for rank, each in enumerate(outcomes):
                assert isinstance(each, ranks.Gone) == (rank in victims), (context, outcomes)
                if not isinstance(each, Exception):  # the kill came after its end
                    assert same(each, wanted[rank][1]), (context, rank)
                # Who has done all steps when another is killed hears of it in close.
                assert not isinstance(each, LightckError) or "did not come" in str(each), outcomes
            for rank in range(world):
                said[rank] += drain(job, rank)
        for rank in range(world):
            compare(said[rank], wanted[rank][0], f"{context}, rank {rank}")
    with ranks.started(world, life(path, kind)) as job:
        states = job.results()
        for rank in range(world):
            assert compare(drain(job, rank), wanted[rank][0], f"last life, rank {rank}") == LAST
    for rank in range(world):
        assert same(states[rank], wanted[rank][1]), rank


@pytest.mark.parametrize(("world", "kind"), [(2, "plain"), (3, "unused"), (4, "plain")])
def test_ranks_that_are_killed_at_any_instant_go_on_as_if_nothing_had_happened(
    world: int, kind: str, region_dir: Path, dice: random.Random
) -> None:
    """The order of summation must not change where there are three ranks and more.

    DDP makes its buckets anew after the first iteration, but with `find_unused_parameters`.
    """
    killed_again_and_again(world, kind, region_dir, dice, 3 if world == 2 else 1)


@pytest.mark.parametrize("kind", ["static", "views", "accumulated", "autocast", "streamed"])
def test_ddp_s_options_change_nothing_of_that(
    kind: str, region_dir: Path, dice: random.Random
) -> None:
    killed_again_and_again(2, kind, region_dir, dice, 1)


def test_each_rank_s_update_writes_the_share_of_that_rank(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        job = Job(me.rank, "streamed")
        with job.attach(region_dir, slots=4) as handle:
            for _ in range(LAST):
                job.iterate()
            return handle.stats().streamed

    with ranks.started(2, train) as job:
        assert all(count > 0 for count in job.results())


def test_a_kill_between_the_first_update_and_the_schedule_leaves_the_schedule_to_the_loop(
    region_dir: Path,
) -> None:
    """Nothing else is there: the step that the survivor has made whole is restored, early."""

    def first(me: ranks.Me) -> None:
        job = Job(me.rank, "plain")
        if me.rank == 1:
            job.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with job.attach(region_dir, policy=10**6):
            for _ in range(LAST):
                job.iterate()

    with ranks.started(2, first) as job:
        assert isinstance(job.outcomes()[1], ranks.Gone)
    with ranks.started(2, life(region_dir, "plain")) as job:
        states = job.results()
        said = drain(job, 0)
    assert said[0] == ("from", 1)
    wanted = _golden(2)
    assert compare(said, wanted[0][0], "rank 0") == LAST
    assert all(same(states[rank], wanted[rank][1]) for rank in range(2))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_kills(region_dir: Path, dice: random.Random) -> None:
    for number in range(10):
        for world, kind in ((2, "plain"), (3, "plain"), (4, "unused")):
            path = region_dir / f"{number}-{world}"
            path.mkdir()
            killed_again_and_again(world, kind, path, dice, LIVES)


def test_a_rank_that_stands_still_makes_others_wait_for_its_gradients_only(
    region_dir: Path,
) -> None:
    """SIGSTOP at any instant, among them in its commit: nothing breaks, and all goes on."""
    wanted = _golden(2)
    with ranks.started(2, life(region_dir, "plain")) as job:
        said = [job.receive(1) for _ in range(5)]
        job.stop(1)
        heard = [job.receive(0) for _ in range(5)]  # it comes as far as its gradients do
        job.go_on(1)
        states = job.results()
        said, heard = said + drain(job, 1), heard + drain(job, 0)
    assert compare(heard, wanted[0][0], "rank 0") == LAST
    assert compare(said, wanted[1][0], "rank 1") == LAST
    assert all(same(states[rank], wanted[rank][1]) for rank in range(2))
