"""A rank stands still with no snapshot due, ever: another one saves the step whole, and the job
that is started anew goes on as if nothing had happened."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_peer_death import (
    AT,
    BEFORE,
    KIND,
    LAST,
    NEVER,
    PHASES,
    Events,
    Mortal,
    go_on,
    golden,
    until,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.failure import whole_save
from lightck.region.native_pool import NativePool
from lightck.region.region import Region
from support import internals
from support.distributed import ranks
from support.distributed.resumed import same, state_of
from support.proof import record


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
    record(f"frozen {phase.replace(' ', '-')}", {"lost": AT - info.step})


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


def hanging_pool(*arguments: Any, **options: Any) -> NativePool:
    pool = NativePool(*arguments, **options)
    pool.limit(1)  # a byte per second: what is written to the medium never gets there
    return pool


@pytest.mark.parametrize("file", ["its own", "the node's"])
def test_a_rank_whose_disk_hangs_while_it_saves_costs_no_step(region_dir: Path, file: str) -> None:
    """One of three stands still; the lowest healthy one never gets its snapshot written."""

    def train(me: ranks.Me) -> None:
        job = Frozen(me.rank, KIND, "backward" if me.rank == 2 else "")
        job.handle = job.attach(region_dir, on_error=lambda error: None, policy=NEVER)
        if me.rank == 0 and file == "its own":
            internals.pipeline(job.handle).pool.limit(1)
        elif me.rank == 0:
            whole_save.NativePool = hanging_pool  # type: ignore[misc, assignment]
        with suppress(RuntimeError), job.handle:
            while True:
                job.iterate()

    with ranks.started(3, train):
        until(lambda: whole_steps(region_dir))
    assert whole_steps(region_dir) == {AT - 1}
    info = go_on(region_dir, 3)
    assert info is not None and info.step == AT - 1


def test_another_number_of_ranks_saves_whole_in_the_file_that_is_there(region_dir: Path) -> None:
    with ranks.started(3, frozen_life(region_dir, {0: "half"})):
        until(lambda: whole_steps(region_dir))

    def fewer(me: ranks.Me) -> None:
        job = Frozen(me.rank, KIND, "half" if me.rank else "")
        info = job.resume(region_dir, 300 + me.rank)
        assert info is not None and info.world == 3
        job.last = AT + 3
        job.handle = job.attach(region_dir, on_error=lambda error: None, policy=NEVER)
        with suppress(RuntimeError), job.handle:
            while True:
                job.iterate()

    def restored(me: ranks.Me) -> Any:
        info = Mortal(me.rank, KIND).resume(region_dir, 300 + me.rank)
        return info and (info.step, info.world)

    with ranks.started(2, fewer):
        until(lambda: AT + 3 in whole_steps(region_dir))
    with ranks.started(2, restored) as job:
        assert job.results() == [(AT + 3, 2)] * 2
    assert len([*region_dir.glob("failure-*")]) == 1


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
    record("frozen-anywhere", {"stops": 100})


def test_who_goes_on_after_all_has_lost_nothing(region_dir: Path) -> None:
    with ranks.started(2, frozen_life(region_dir, {1: "half"}, last=LAST)) as job:
        until(lambda: whole_steps(region_dir))
        job.go_on(1)
        results = job.results()
    for (losses, state), (all_losses, last) in zip(results, golden(2, Mortal), strict=True):
        assert losses == all_losses and same(state, last)
    assert not [*region_dir.glob("failure-*")], "gone with the run"


def test_a_close_behind_a_failure_keeps_what_was_saved_whole(region_dir: Path) -> None:
    """The survivor closes its handle in a `finally`: the last step is whole nowhere else."""

    def train(me: ranks.Me) -> None:
        job = Mortal(me.rank, KIND, "half" if me.rank else "")
        job.handle = job.attach(
            region_dir, on_error=lambda error: None, policy=NEVER, close_timeout_s=3.0
        )
        try:
            with suppress(RuntimeError):
                while True:
                    job.iterate()
            until(lambda: whole_steps(region_dir))
        finally:
            with suppress(lightck.LightckError):
                job.handle.close()

    with ranks.started(2, train) as job:
        assert job.outcomes([0]) == [None]
    assert whole_steps(region_dir) == {AT}
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT


class Mixture(nn.Module):
    """Has a layer that DDP keeps alike, and an expert of each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = DistributedDataParallel(nn.Linear(4, 4))
        torch.manual_seed(30 + rank)
        self.expert = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.expert(self.shared(batch))


def test_a_rank_s_own_parameters_are_never_replaced_by_another_s(region_dir: Path) -> None:
    def begun(me: ranks.Me) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Mixture(me.rank)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(me: ranks.Me) -> list[str]:
        model, optimizer = begun(me)
        events = Events()
        settings: dict[str, Any] = {"policy": NEVER, "on_error": lambda error: None}
        with suppress(RuntimeError), lightck.attach(model, optimizer, region_dir, **settings):
            for step in range(1, NEVER):
                if (step, me.rank) == (AT, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
        return [told["why"] for told in events.of("not_saved_whole")]

    def restored(me: ranks.Me) -> Any:
        model, optimizer = begun(me)
        return lightck.restore(model, optimizer, region_dir)

    with ranks.started(2, train) as job:
        ((why, *_),) = job.outcomes([0])
    assert "not all parameters" in why and not whole_steps(region_dir)
    with ranks.started(2, restored) as job:
        assert job.results() == [None, None]


def test_who_is_killed_between_the_timelines_of_its_regions_loses_nothing(
    region_dir: Path,
) -> None:
    """Empty failure regions begin a timeline that no rank comes to."""

    def train(me: ranks.Me) -> None:
        job = Mortal(me.rank, KIND)
        job.attach(region_dir, policy=1).__enter__()
        for _ in range(AT):
            job.iterate()
        me.send("trained")
        me.pause()

    def attaches(me: ranks.Me) -> None:
        def killed(*_: Any) -> None:
            until(lambda: me.rank == 0 or begun.exists())
            begun.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        job = Mortal(me.rank, KIND)
        job.resume(region_dir, 300 + me.rank)
        Region.begin_timeline, real = killed, Region.begin_timeline
        if me.rank == 0:  # the failure region's is begun, its own is not
            calls: list[Any] = []

            def second(*arguments: Any) -> None:
                calls.append(arguments)
                (real if len(calls) <= 2 else killed)(*arguments)

            Region.begin_timeline = second
        job.attach(region_dir, policy=1)

    begun = region_dir.with_name(f"{region_dir.name}-begun")
    with ranks.started(2, train) as job:
        assert [job.receive(rank) for rank in range(2)] == ["trained"] * 2
    shutil.copy(region_dir / "failure-00000-0.lck", region_dir / "failure-00000-1.lck")
    before = {row["step"] for row in lightck.snapshots(region_dir).to_pylist()}
    with ranks.started(2, attaches) as job:
        assert all(isinstance(each, ranks.Gone) for each in job.outcomes())
    begun.unlink(missing_ok=True)
    info = go_on(region_dir, 2)
    assert info is not None and info.step in before


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
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.iterdir()}


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


def test_a_job_that_is_stopped_as_a_whole_is_started_anew_beside_it(region_dir: Path) -> None:
    """Ctrl-Z reaches every rank; the later life is killed before it has committed anything."""

    def train(me: ranks.Me) -> None:
        job = Mortal(me.rank, KIND)
        job.resume(region_dir, 300 + me.rank)
        job.handle = job.attach(region_dir, on_error=lambda error: None, policy=1)
        with suppress(RuntimeError), job.handle:
            for _ in range(AT):
                job.iterate()
            job.handle.wait(AT - 1)
            me.send("trained")
            me.pause()
            job.iterate()

    def later(me: ranks.Me) -> int:
        job = Mortal(me.rank, KIND)
        info = job.resume(region_dir, 300 + me.rank)
        job.attach(region_dir, policy=NEVER)
        assert info is not None
        me.send(info.step)
        me.pause()
        return info.step

    with ranks.started(2, train) as earlier:
        assert [earlier.receive(rank) for rank in range(2)] == ["trained"] * 2
        for rank in range(2):
            earlier.stop(rank)
        with ranks.started(2, later) as job:
            steps = [job.receive(rank) for rank in range(2)]
        earlier.let_go()
        for rank in range(2):
            earlier.go_on(rank)
        for told in earlier.outcomes():  # its region is in its place no more
            assert isinstance(told, lightck.RegionError) and "replaced" in str(told), told
        info = go_on(region_dir, 2)
    assert info is not None and [info.step] * 2 == steps


def test_one_rank_gives_up_no_step_that_only_a_failure_region_holds(region_dir: Path) -> None:
    with ranks.started(2, frozen_life(region_dir, {0: "half"})):
        until(lambda: whole_steps(region_dir))

    def alone(me: ranks.Me) -> None:
        Mortal(me.rank, KIND).attach(region_dir)

    with ranks.started(1, alone) as job, pytest.raises(lightck.errors.UnrestoredError):
        job.results()
    assert whole_steps(region_dir) == {AT}


def test_what_a_false_alarm_has_saved_whole_stays_when_a_handle_is_made_anew(
    region_dir: Path,
) -> None:
    """The model goes on, as where a notebook's cell is run again: nothing was restored."""

    def train(me: ranks.Me) -> None:
        job = Frozen(me.rank, KIND, "loop" if me.rank else "")
        job.handle = job.attach(region_dir, policy=NEVER)
        for _ in range(AT + 1):
            job.iterate()
        job.handle.detach()
        job.attach(region_dir, policy=NEVER)
        me.send("attached anew")
        me.pause()

    with ranks.started(2, train) as job:
        until(lambda: whole_steps(region_dir))
        job.go_on(1)
        assert [job.receive(rank) for rank in range(2)] == ["attached anew"] * 2
    steps = whole_steps(region_dir)
    info = go_on(region_dir, 2)
    assert info is not None and info.step == max(steps) >= AT


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
