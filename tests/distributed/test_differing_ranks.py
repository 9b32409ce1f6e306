"""One rank's replica changes by one bit in memory: found, named, marked, and not restored."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fates_of_steps import until

import lightck
from lightck.distributed import divergence
from lightck.distributed.commit.distributed_barrier import DistributedBarrier
from lightck.errors import DivergenceError, LightckError
from support import internals
from support.distributed import ranks
from support.distributed.training import Training

FIRST, LAST = 4, 9
"""The step after which the bit is flipped, and the last one."""
TURNS = 4
"""A whole round takes so many turns in these tests."""


Momentum = partial(torch.optim.SGD, momentum=0.9)


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "ROTATION", TURNS)
    monkeypatch.setattr(divergence, "LEAST_BYTES", 512)
    monkeypatch.setattr(divergence, "PIECE_BYTES", 64)


def flip(training: Training, name: str) -> None:
    """Flip the lowest bit of a parameter's first number.

    Of its momentum, which fades, a high bit is flipped.
    """
    parameters = dict(training.module.named_parameters())
    tensor: torch.Tensor = parameters[name.partition(":")[0]]
    if ":" in name:
        tensor = training.optimizer.state[tensor][name.partition(":")[2]]
    tensor.data.view(torch.int32).view(-1)[0] ^= 1 << 22 if ":" in name else 1


def train(path: Path, odd: int | None, name: str, named: int = 1, **settings: Any) -> Any:
    """Return what each rank runs: it returns what it was told and what its region holds afterwards.

    Ranks ask each other what differs beside the training, and a close waits for it no longer than
    it must: before that, every rank waits until `named` tensors are named, if there is an odd one.
    """

    def run(me: ranks.Me) -> tuple[list[LightckError], dict[int, bool], tuple[int, int]]:
        told: list[LightckError] = []
        training = Training(me.rank, optimizer=Momentum)
        chosen = {"on_error": told.append, "close_timeout_s": 20.0, **settings}
        handle = training.attach(path, **chosen)
        for step in range(1, LAST + 1):
            training.step()
            handle.wait()
            if step == FIRST and me.rank == odd:
                flip(training, name)
        stats = handle.stats()
        barrier: Any = internals.pipeline(handle).barrier
        until(lambda: odd is None or len(barrier._divergence._named) >= named)
        with suppress(DivergenceError):  # raised once more, as any background error is
            handle.close()
        table = lightck.snapshots(path)
        mine = [row for row in table.to_pylist() if row["rank"] == me.rank]
        kept = {row["step"]: row["suspect"] for row in mine}
        return told, kept, (stats.compared, stats.uncompared)

    return run


def say_in_turns(me: ranks.Me) -> None:
    """Rank 0 says its digest first, so that rank 1 finds that they differ; later it is rank 1."""
    ask, link = DistributedBarrier._ask, me.store.clone()

    def asked(barrier: DistributedBarrier, call: Any) -> object:
        kind, _, step = getattr(call, "key", "").partition("/")
        first = kind in ("d", "c") and me.rank == (int(step) > FIRST)
        if kind == "d" and not first:
            link.wait([f"counted/{step}"])
        answer = ask(barrier, call)
        if kind == "c" and first:
            link.set(f"counted/{step}", "")
        return answer

    DistributedBarrier._ask = asked  # type: ignore[method-assign]


def goes_on(me: ranks.Me, path: Path) -> tuple[lightck.RestoreInfo, dict[int, bool]]:
    """Restore, and train two steps: what was restored, and which snapshots count then."""
    training = Training(me.rank, optimizer=Momentum)
    info = lightck.restore(training.model, training.optimizer, path)
    assert info is not None
    with training.attach(path):
        training.steps(2)
    rows = [row for row in lightck.snapshots(path).to_pylist() if row["state"] == "whole"]
    return info, {row["step"]: row["suspect"] for row in rows}


@pytest.mark.parametrize(
    ("world", "odd", "name"), [(2, 1, "0.weight"), (3, 0, "3.bias"), (3, 2, "1.weight")]
)
def test_one_flipped_bit_is_found_within_a_round_and_named_on_every_rank(
    world: int, odd: int, name: str, region_dir: Path
) -> None:
    with ranks.started(world, train(region_dir, odd, name)) as job:
        results = job.results()
    for told, kept, (compared, uncompared) in results:
        assert [type(error) for error in told] == [DivergenceError], told
        (error,) = told
        assert isinstance(error, DivergenceError)
        assert error.names == (f"model/{name}",)
        assert error.ranks == ((odd,) if world > 2 else (0, 1))
        assert FIRST < error.step <= FIRST + TURNS
        assert kept == {step: step >= error.step for step in kept}
        # Three slots: what was above suspicion has stayed, however many steps came after it.
        assert any(kept.values()) and not all(kept.values()), kept
        assert (compared >= LAST - 1, uncompared) == (True, 0)
    assert len({told[0].step for told, _, _ in results}) == 1


@pytest.mark.parametrize("turns", [False, True], ids=["as they come", "in turns"])
def test_optimizer_state_that_differs_is_named_with_what_it_makes_differ(
    region_dir: Path, turns: bool
) -> None:
    """Whoever is the first to say a digest; at any step, the other finds that they differ."""
    code = train(region_dir, 0, "3.weight:momentum_buffer", 2)

    def run(me: ranks.Me) -> Any:
        if turns:
            say_in_turns(me)
        return code(me)

    with ranks.started(2, run) as job:
        results = job.results()
    for told, kept, _ in results:
        assert {type(error) for error in told} == {DivergenceError}
        names = [name for error in told for name in error.names]
        assert len(names) == len(set(names)), "once per tensor"
        assert set(names) == {"model/3.weight", "optim/0/3.weight/momentum_buffer"}
        assert any(kept.values())


def test_restore_takes_one_from_before_it_and_what_follows_is_not_suspect(
    region_dir: Path,
) -> None:
    with ranks.started(2, train(region_dir, 1, "0.weight")) as job:
        found = job.results()[0][0][0].step
    with ranks.started(2, lambda me: goes_on(me, region_dir)) as job:
        results = job.results()
    assert len({info.step for info, _ in results}) == 1
    for info, kept in results:
        assert info.step < found
        assert not info.suspect
        assert any("suspect" in text for text in info.fell_back), info.fell_back
        assert kept[info.step + 2] is False
        assert not any(kept.values()), kept


def test_ranks_that_agree_are_compared_and_nothing_is_said(region_dir: Path) -> None:
    with ranks.started(3, train(region_dir, None, "")) as job:
        results = job.results()
    for told, kept, compared in results:
        assert told == []
        assert not any(kept.values())
        assert (compared[0] >= LAST - 1, compared[1]) == (True, 0)
