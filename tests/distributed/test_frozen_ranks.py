"""A rank stands still with no snapshot due, ever: another one saves the step whole, and the job
that is started anew goes on as if nothing had happened."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_peer_death import AT, BEFORE, KIND, LAST, NEVER, PHASES, Mortal, go_on, golden, until

import lightck
from support.distributed import ranks
from support.distributed.resumed import same, state_of


class Frozen(Mortal):
    """Stands still at one instant, once, where its like kills itself: by SIGSTOP."""

    def _die_in(self, phase: str) -> None:
        if phase == self.phase and self.iteration == self.last:
            self.last = 0
            self.stand()

    def stand(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Deaf(Frozen):
    """Holds Python's lock in C: none of its threads runs any more."""

    def stand(self) -> None:
        ctypes.PyDLL(None).sleep(1000)


def frozen_life(
    path: Path,
    frozen: dict[int, str],
    last: int = NEVER,
    kind: type[Frozen] = Frozen,
    **settings: Any,
) -> Callable[..., Any]:
    """Trains, and each rank of `frozen` stops in its phase of iteration AT."""

    def train(me: ranks.Me) -> Any:
        job = kind(me.rank, KIND, frozen.get(me.rank, ""))
        job.resume(path, 300 + me.rank)
        job.handle = job.attach(path, on_error=lambda error: None, policy=NEVER, **settings)
        with suppress(RuntimeError), job.handle:  # who is left alone cannot reduce any more
            losses = [job.iterate() for _ in range(AT - 1)]
            me.send("trains")
            losses += [job.iterate() for _ in range(job.handle.step, last)]
            return losses, state_of(job)
        return None

    return train


def whole_steps(path: Path) -> set[int]:
    """Return the steps that failure regions hold, committed and whole for every rank."""
    with suppress(lightck.LightckError):
        rows = lightck.snapshots(path).to_pylist()
        whole = [row for row in rows if row["state"] == "whole"]
        return {row["step"] for row in whole if "failure-" in row["file"]}
    return set()


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_stands_still_costs_no_step_that_another_has(
    region_dir: Path, phase: str
) -> None:
    """Both are killed then; the job goes on from the newest step that a rank has completed."""
    with ranks.started(2, frozen_life(region_dir, {1: phase})):
        until(lambda: whole_steps(region_dir))
    info = go_on(region_dir, 2)
    assert info is not None and info.step == (AT - 1 if phase in BEFORE else AT)
    assert info.early == (phase not in BEFORE)


@pytest.mark.parametrize("phase", ["backward", "half"])
def test_a_rank_that_holds_python_s_lock_costs_no_step(region_dir: Path, phase: str) -> None:
    with ranks.started(2, frozen_life(region_dir, {0: phase}, kind=Deaf)):
        until(lambda: whole_steps(region_dir))
    info = go_on(region_dir, 2)
    assert info is not None and info.step == (AT - 1 if phase in BEFORE else AT)


@pytest.mark.parametrize("frozen", [{0: "half"}, {0: "half", 2: "backward"}])
def test_one_healthy_rank_of_three_is_enough(region_dir: Path, frozen: dict[int, str]) -> None:
    with ranks.started(3, frozen_life(region_dir, frozen)):
        until(lambda: whole_steps(region_dir))
    step = AT - 1 if "backward" in frozen.values() else AT
    info = go_on(region_dir, 3)
    assert info is not None and info.step == step


def random_stop(path: Path, dice: random.Random) -> None:
    with ranks.started(2, frozen_life(path, {})) as job:
        assert [job.receive(rank) for rank in range(2)] == ["trains"] * 2
        time.sleep(dice.uniform(0.0, 0.3))
        job.stop(dice.randrange(2))
        until(lambda: whole_steps(path))
    (step,) = whole_steps(path)
    info = go_on(path, 2, last=step + 5)
    assert info is not None and info.step == step


def test_a_rank_that_stops_at_any_instant_costs_no_step(region_dir: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    for i in range(2):
        random_stop(region_dir / f"{i}", random.Random(seed + i))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_rank_that_stops_at_any_of_a_hundred_instants_costs_no_step(region_dir: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    for i in range(100):
        random_stop(region_dir / f"{i}", random.Random(seed + i))


def test_who_goes_on_after_all_has_lost_nothing(region_dir: Path) -> None:
    with ranks.started(2, frozen_life(region_dir, {1: "half"}, last=LAST)) as job:
        until(lambda: whole_steps(region_dir))
        job.go_on(1)
        results = job.results()
    for (losses, state), (all_losses, last) in zip(results, golden(2, Mortal), strict=True):
        assert losses == all_losses and same(state, last)
    assert not [*region_dir.glob("failure-*")], "gone with the run"


def test_all_killed_right_after_a_recovery_come_back_to_the_same_step(region_dir: Path) -> None:
    with ranks.started(2, frozen_life(region_dir, {1: "half"})):
        until(lambda: whole_steps(region_dir))

    def recovered(me: ranks.Me) -> None:
        job = Mortal(me.rank, KIND)
        job.resume(region_dir, 300 + me.rank)
        job.attach(region_dir, policy=NEVER)
        for _ in range(2):
            job.iterate()
        me.send("recovered")
        me.pause()

    for _ in range(2):
        with ranks.started(2, recovered) as job:
            assert [job.receive(rank) for rank in range(2)] == ["recovered"] * 2
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT


def digests(path: Path) -> dict[str, str]:
    files = (each for each in path.iterdir() if ".left" not in each.name)
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


@pytest.mark.parametrize("phase", ["half", "loop"])
def test_a_rank_of_an_earlier_life_that_wakes_changes_nothing(region_dir: Path, phase: str) -> None:
    def later(me: ranks.Me) -> Any:
        job = Mortal(me.rank, KIND)
        info = job.resume(region_dir, 300 + me.rank)
        with job.attach(region_dir, policy=NEVER) as handle:
            losses = [job.iterate()]
            me.send("attached")
            me.pause()
            losses += [job.iterate() for _ in range(handle.step, LAST)]
        return info, losses, state_of(job)

    with ranks.started(2, frozen_life(region_dir, {1: phase})) as earlier:
        until(lambda: whole_steps(region_dir))
        earlier.kill(0)
        with ranks.started(2, later) as job:
            assert [job.receive(rank) for rank in range(2)] == ["attached"] * 2
            before = digests(region_dir)
            earlier.go_on(1)
            assert earlier.outcomes([1]) == [None]
            assert digests(region_dir) == before
            job.let_go()
            results = job.results()
    for (info, losses, state), (all_losses, last) in zip(results, golden(2, Mortal), strict=True):
        assert info is not None and info.step == AT
        assert losses == all_losses[AT:] and same(state, last)


def test_without_the_store_a_rank_that_dies_and_one_that_stops_cost_no_step(
    region_dir: Path,
) -> None:
    def train(me: ranks.Me) -> None:
        job = Frozen(me.rank, KIND)
        job.handle = job.attach(region_dir, on_error=lambda error: None, policy=NEVER)
        for _ in range(3):
            job.iterate()
        me.send("trained")
        me.pause()
        with suppress(RuntimeError), job.handle:
            job.iterate()
            me.pause()

    with ranks.started(3, train) as job:
        assert [job.receive(rank) for rank in range(3)] == ["trained"] * 3
        job.kill_store()
        job.kill(1)
        job.stop(2)
        job.let_go(0)
        until(lambda: whole_steps(region_dir))
    info = go_on(region_dir, 3)
    assert info is not None and info.step == 3
