"""Jobs of several ranks that are stopped and go on: bit for bit what an uninterrupted one does."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightck
from lightck.errors import CoordinationError, NoSnapshotError
from support.distributed import ranks
from support.distributed.missing import never_come
from support.distributed.training import Training

LAST = 8


def losses_of(training: Training, count: int) -> list[float]:
    """The losses of some further steps."""
    found = []
    for _ in range(count):
        training.optimizer.zero_grad()
        batch = torch.randn(4, 8, generator=training.data)
        loss = training.model(batch + torch.rand(())).square().mean()
        loss.backward()
        training.optimizer.step()
        found.append(loss.item())
    return found


def state_of(training: Training) -> dict[str, torch.Tensor]:
    """Every tensor that a restored run must have the same."""
    held = {f"model/{k}": v.clone() for k, v in training.module.state_dict().items()}
    for i, parameter in enumerate(training.module.parameters()):
        for key, value in training.optimizer.state[parameter].items():
            held[f"optim/{i}/{key}"] = torch.as_tensor(value).clone()
    return {**held, "data": training.data.get_state(), "rng": torch.get_rng_state()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def begin(me: ranks.Me) -> Training:
    training = Training(me.rank)
    torch.manual_seed(300 + me.rank)
    return training


def restore(training: Training, path: Path, **options: Any) -> lightck.types.RestoreInfo | None:
    given = {"extras": {"data": training.data}, **options}
    return lightck.restore(training.model, training.optimizer, path, **given)


def attach(training: Training, path: Path, **settings: Any) -> lightck.Handle:
    return training.attach(path, extras={"data": training.data}, **settings)


@cache
def golden(world: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return what each rank has after `LAST` steps that nothing interrupted."""

    def train(me: ranks.Me) -> tuple[list[float], dict[str, torch.Tensor]]:
        training = begin(me)
        return losses_of(training, LAST), state_of(training)

    with ranks.started(world, train) as job:
        return job.results()


def run(path: Path, world: int, steps: int, copies: Path | None = None) -> list[Any]:
    """(losses, state) of a job from the start; region files are copied at each snapshot."""

    def train(me: ranks.Me) -> Any:
        training, losses = begin(me), []
        with attach(training, path) as handle:
            for step in range(1, steps + 1):
                losses += losses_of(training, 1)
                handle.snapshot()
                handle.wait()
                if copies is not None:
                    name = f"region-{me.rank:05d}.lck"
                    (copies / str(step)).mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path / name, copies / str(step) / name)
                dist.barrier()
        return losses, state_of(training)

    with ranks.started(world, train) as job:
        return job.results()


def go_on(path: Path, world: int, until: int = LAST) -> list[Any]:
    """(info, restored state, losses, last state) of each rank that goes on, or its error."""

    def train(me: ranks.Me) -> Any:
        training = begin(me)
        torch.manual_seed(1)  # as another process would: restore has to set the generators
        info = restore(training, path)
        assert info is not None
        restored = state_of(training)
        with attach(training, path):
            losses = losses_of(training, until - info.step)
        return info, restored, losses, state_of(training)

    with ranks.started(world, train) as job:
        return job.outcomes()


def test_a_resumed_job_does_what_an_uninterrupted_one_does(region_dir: Path) -> None:
    wanted = golden(2)
    before = run(region_dir, 2, 5)
    for rank, (info, _, losses, state) in enumerate(go_on(region_dir, 2)):
        assert (info.step, info.rank, info.world) == (5, rank, 2)
        assert before[rank][0] + losses == wanted[rank][0]
        assert same(state, wanted[rank][1])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_job_that_lost_a_rank_does_what_an_uninterrupted_one_does(
    killed: int, region_dir: Path
) -> None:
    """Wherever the ranks were: what they go on from is a step that both have."""
    wanted = golden(2)

    def train(me: ranks.Me) -> None:
        training = begin(me)
        with attach(training, region_dir) as handle:
            for step in range(1, LAST):
                losses_of(training, 1)
                if step == 2:
                    handle.snapshot()
                    handle.wait()
                me.send(step)
            me.pause()  # killed late it is killed all the same

    with ranks.started(2, train) as job:
        while job.receive(killed) < 5:
            pass
        job.kill(killed)
    results = go_on(region_dir, 2)
    assert results[0][0].step >= 2
    for rank, (info, _, losses, state) in enumerate(results):
        assert losses == wanted[rank][0][info.step :]
        assert same(state, wanted[rank][1])


@pytest.mark.parametrize("world", [3])
def test_every_tensor_of_every_rank_comes_back(world: int, region_dir: Path) -> None:
    """DDP makes its buckets anew, and gloo's sums of three ranks and more depend on them."""
    before = run(region_dir, world, 3)
    for rank, (info, restored, _, _) in enumerate(go_on(region_dir, world, until=4)):
        assert (info.step, info.rank, info.world) == (3, rank, world)
        assert same(restored, before[rank][1])


@pytest.mark.parametrize(("late", "lag"), [(0, 1), (1, 2)])
def test_a_region_from_a_backup_takes_the_job_back_and_on_again(
    late: int, lag: int, region_dir: Path, tmp_path: Path
) -> None:
    wanted = golden(2)
    run(region_dir, 2, 5, tmp_path)
    name = f"region-{late:05d}.lck"
    shutil.copyfile(tmp_path / str(5 - lag) / name, region_dir / name)
    results = go_on(region_dir, 2)
    for rank, (info, _, losses, state) in enumerate(results):
        assert info.step == 5 - lag
        assert losses == wanted[rank][0][5 - lag :]
        assert same(state, wanted[rank][1])
    assert results[0][0].fell_back == results[1][0].fell_back != ()
    # The steps that were left behind do not come back.
    for info, *_ in go_on(region_dir, 2):
        assert info.step == LAST and info.fell_back == ()


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_and_back_again(
    before: int, now: int, region_dir: Path
) -> None:
    states = [state for _, state in run(region_dir, before, 3)]
    first = go_on(region_dir, now, until=5)
    for rank, (info, restored, _, _) in enumerate(first):
        assert (info.step, info.world, info.rank) == (3, before, rank % before)
        found = {
            name for name in restored if not torch.equal(restored[name], states[info.rank][name])
        }
        assert found == ({"data", "rng"} if rank >= before else set())
    again = go_on(region_dir, before, until=6)
    for rank, (info, *_) in enumerate(again):
        assert (info.step, info.world, info.rank) == (5, now, rank % now)


def test_what_another_world_needs_stays_until_it_has_a_whole_snapshot(region_dir: Path) -> None:
    run(region_dir, 4, 3)

    def crash(me: ranks.Me) -> int:
        training = begin(me)
        info = restore(training, region_dir)
        attach(training, region_dir)  # begins its timeline, and commits nothing
        assert info is not None
        me.send(info.step)
        me.pause()
        return 0

    with ranks.started(2, crash) as job:
        assert [job.receive(rank) for rank in range(2)] == [3, 3]
        job.kill(0)
        job.kill(1)
    for rank, (info, *_) in enumerate(go_on(region_dir, 4, until=4)):
        assert (info.step, info.world, info.rank) == (3, 4, rank)


@pytest.mark.parametrize("gone", [1])
def test_a_rank_without_its_region_stops_every_rank_with_a_reason(
    gone: int, region_dir: Path
) -> None:
    run(region_dir, 2, 2)
    (region_dir / f"region-{gone:05d}.lck").unlink()

    def train(me: ranks.Me) -> None:
        restore(begin(me), region_dir)

    with ranks.started(2, train) as job:
        for result in job.outcomes():
            assert isinstance(result, NoSnapshotError)
            assert f"no region of rank {gone}" in str(result)


def test_a_rank_that_attaches_where_the_other_restores_is_told(region_dir: Path) -> None:
    run(region_dir, 2, 2)

    def train(me: ranks.Me) -> None:
        training = begin(me)
        if me.rank == 0:
            restore(training, region_dir)
        else:
            attach(training, region_dir, overwrite=True)

    with ranks.started(2, train) as job:
        for result in job.outcomes():
            assert isinstance(result, CoordinationError)
            assert "in the same order" in str(result)


def test_a_rank_that_is_killed_before_it_restores_is_named_on_the_other(region_dir: Path) -> None:
    run(region_dir, 2, 2)

    def train(me: ranks.Me) -> None:
        training = begin(me)
        if me.rank == 1:
            me.send("here")
            me.pause()
        never_come([1])
        restore(training, region_dir)

    with ranks.started(2, train) as job:
        job.receive(1)
        job.kill(1)
        (result,) = job.outcomes([0])
        assert isinstance(result, CoordinationError)
        assert "rank(s) 1 of 2 did not come" in str(result)
