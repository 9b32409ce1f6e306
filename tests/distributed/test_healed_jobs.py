"""Jobs go on after a node has lost what it had: exactly, where a rank's own state was there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from support.distributed import ranks
from support.distributed.islands import Islands, check
from support.distributed.training import Training
from support.distributed.written import Rank

LAST = 8


def begin(me: ranks.Me) -> Training:
    training = Training(me.rank)
    torch.manual_seed(300 + me.rank)
    return training


def losses_of(training: Training, count: int) -> list[float]:
    """The losses of some further steps; they depend on data and generators of the rank's own."""
    found = []
    for _ in range(count):
        training.optimizer.zero_grad()
        loss = training.model(training.batch() + torch.rand(())).square().mean()
        loss.backward()
        training.optimizer.step()
        found.append(loss.item())
    return found


def state_of(training: Training) -> dict[str, torch.Tensor]:
    state = training.module.state_dict()
    held = {f"model/{k}": v.clone() for k, v in state.items() if k != "mean_too"}
    for i, parameter in enumerate(training.module.parameters()):
        for key, value in training.optimizer.state[parameter].items():
            held[f"optim/{i}/{key}"] = torch.as_tensor(value).clone()
    return held


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@cache
def golden() -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    def train(me: ranks.Me) -> tuple[list[float], dict[str, torch.Tensor]]:
        training = begin(me)
        return losses_of(training, LAST), state_of(training)

    with ranks.started(2, train) as job:
        return job.results()


def trained(folder: Path) -> Islands:
    """Return two nodes whose ranks have trained and closed at step 5."""
    islands = Islands(folder, 2, 2)

    def train(me: ranks.Me) -> None:
        path, training = islands.enter(me.rank), begin(me)
        with training.attach(path, extras={"data": training.data}, policy=1000):
            losses_of(training, 5)

    with ranks.started(2, train) as job:
        job.results()
    return islands


def go_on(islands: Islands) -> list[Any]:
    """(info, losses, last state) of each rank."""

    def train(me: ranks.Me) -> Any:
        path, training = islands.enter(me.rank), begin(me)
        torch.manual_seed(1)  # as another process would: restore has to set the generators
        extras = {"data": training.data}
        info = lightck.restore(training.model, training.optimizer, path, extras=extras)
        assert info is not None
        with training.attach(path, extras=extras):
            losses = losses_of(training, LAST - info.step)
        return info, losses, state_of(training)

    with ranks.started(2, train) as job:
        return job.results()


@pytest.mark.parametrize("tied", [False, True])
def test_a_killed_node_costs_one_minibatch_and_goes_on_exactly(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot is periodic: the survivor saves, the journal has what was the dead rank's."""
    golden()
    if tied:  # a buffer of two names, as of a module that is used twice; journals have one of them
        make = Training.__init__

        def two_names(training: Training, rank: int) -> None:
            make(training, rank)
            mean = training.module[1].running_mean
            training.module.register_buffer("mean_too", mean)

        monkeypatch.setattr(Training, "__init__", two_names)  # ranks are forked from here
    islands = Islands(tmp_path, 2, 2)

    def train(me: ranks.Me) -> None:
        path, training = islands.enter(me.rank), begin(me)
        extras = {"data": training.data}
        with training.attach(path, extras=extras, failure="jit", policy=1000, on_error="warn"):
            losses_of(training, 5)
            if me.rank == 1:

                def stop(*_: object) -> None:
                    me.send("in the forward of step 6")
                    me.pause()

                training.module.register_forward_pre_hook(stop)
            losses_of(training, 1)

    with ranks.started(2, train) as job:
        job.receive(1)
        job.kill(1)
        (survivor,) = job.outcomes([0])
        assert isinstance(survivor, Exception)
    results = go_on(islands)
    for rank, (info, losses, state) in enumerate(results):
        assert info.step == 5 and info.rank == rank and not info.skipped
        assert "rank 1 got " in info.healed[0] and "are its own" in info.healed[0]
        assert losses == golden()[rank][0][5:]
        assert same(state, golden()[rank][1])


def test_a_damaged_replica_is_mended_and_the_job_goes_on_exactly(tmp_path: Path) -> None:
    islands = trained(tmp_path)
    islands.alter(1, 5, "model/0.weight")
    for rank, (info, losses, state) in enumerate(go_on(islands)):
        assert info.step == 5 and info.healed and not info.skipped
        assert losses == golden()[rank][0][5:]
        assert same(state, golden()[rank][1])
    # What was mended is in its own region since the first snapshot.
    islands.node(0).joinpath("run", "region-00000.lck").unlink()
    (first, _, _), (second, _, _) = go_on(islands)
    assert first.step == second.step == LAST and "from rank 1" in first.healed[0]


def test_what_a_donor_alone_had_lies_on_both_nodes_a_step_later_whatever_the_policy(
    tmp_path: Path,
) -> None:
    islands = trained(tmp_path)
    islands.file(1).unlink()

    def life(me: ranks.Me) -> Any:
        path, training = islands.enter(me.rank), begin(me)
        extras = {"data": training.data}
        info = lightck.restore(training.model, training.optimizer, path, extras=extras)
        assert info is not None
        if info.step == 6:
            return info.healed, replicated(state_of(training))
        handle = training.attach(path, extras=extras, policy=1000)
        losses_of(training, 1)
        me.send((info.healed, replicated(state_of(training))))
        losses_of(training, 1)
        handle.wait(6)
        me.send("committed")
        me.pause()

    with ranks.started(2, life) as job:
        said = [job.receive(rank) for rank in range(2)]
        assert all("rank 1 got " in healed[0] for healed, _ in said)
        assert [job.receive(rank) for rank in range(2)] == ["committed"] * 2
        job.kill(0)
        job.kill(1)
    islands.file(0).unlink()
    with ranks.started(2, life) as job:
        for healed, state in job.results():
            assert "rank 0 got " in healed[0]
            assert same(state, said[0][1]) and same(state, said[1][1])


def replicated(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that ranks hold alike: all but the statistics of batches."""
    return {name: value for name, value in state.items() if "running" not in name}


@pytest.mark.parametrize("lost", ["region", "tensor"])
def test_a_second_failure_before_the_first_snapshot_is_healed_again(
    tmp_path: Path, lost: str
) -> None:
    islands = Islands(tmp_path, 2, 2)
    with islands.crew() as crew:
        for step in (1, 2, 5):
            crew.train(step)
    islands.settle(crew)
    if lost == "region":
        islands.file(1).unlink()
    else:
        islands.alter(1, 5, "model/first.weight")

    def crash(me: ranks.Me) -> None:
        path, live = islands.enter(me.rank), Rank(me.rank)
        info = lightck.restore(live.net, live.optimizer, path, extras=live.extras)
        lightck.attach(live.net, live.optimizer, path, extras=live.extras, policy=1000)
        me.send((info is not None and info.step, info is not None and len(info.healed)))
        me.pause()

    for _ in range(2):
        with ranks.started(2, crash) as job:
            assert [job.receive(rank) for rank in range(2)] == [(5, 1), (5, 1)]
            job.kill(0)
            job.kill(1)
    check(islands.restored(), crew, 5, lent={1: 0} if lost == "region" else None)
