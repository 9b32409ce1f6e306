"""FSDP2: killed and restored on the same mesh, training goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from support import proof
from support.distributed.ranks import Me, started
from support.distributed.sharded import (
    OPTIMIZERS,
    differing,
    loss_of,
    mesh_of,
    net,
    parts,
    settle,
    train,
)

STEPS, KILLED_AFTER = 6, 3
MANY = 20


compared = {"jobs": 0, "ranks": 0, "losses": 0, "tensors": 0}


@pytest.fixture(scope="module", autouse=True)
def numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    proof.record_whole(request, "fsdp", compared)


def golden(me: Me, kind: str, options: dict[str, Any], steps: int = STEPS) -> Any:
    """The uninterrupted run, without lightck."""
    model = net(mesh_of(me.world), **options)
    optimizer = OPTIMIZERS[kind](model)
    losses = list(train(me, model, optimizer, range(1, steps + 1)))
    return losses, parts(model, optimizer)


def killed(me: Me, kind: str, options: dict[str, Any], path: Path) -> None:
    """Trains until it is killed; says when its last snapshot is committed."""
    model = net(mesh_of(me.world), **options)
    optimizer = OPTIMIZERS[kind](model)
    handle = lightck.attach(model, optimizer, path, threads=1, proof=True)
    for _ in train(me, model, optimizer, range(1, KILLED_AFTER + 1)):
        settle(handle)
    loss_of(model, me, KILLED_AFTER + 1)
    handle.wait(KILLED_AFTER)
    me.send(handle.stats().torn)
    me.pause()


def resumed(me: Me, kind: str, options: dict[str, Any], path: Path, steps: int = STEPS) -> Any:
    """Another process: the state made anew with other numbers, restored, and trained on."""
    model = net(mesh_of(me.world), **options)
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    optimizer = OPTIMIZERS[kind](model)
    info = lightck.restore(model, optimizer, path)
    assert info is not None
    with lightck.attach(model, optimizer, path, threads=1, proof=True) as handle:
        losses = list(train(me, model, optimizer, range(info.step + 1, steps + 1)))
    return info.step, losses, parts(model, optimizer), handle.stats()


@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "adamw for-loop"), *((2, kind) for kind in OPTIMIZERS), (3, "adamw foreach"),
     (4, "adamw fused")],
)  # fmt: skip
def test_a_killed_job_goes_on_bit_for_bit_on_the_same_mesh(
    world: int, kind: str, region_dir: Path
) -> None:
    check(world, kind, {}, region_dir)


@pytest.mark.parametrize("reshard", [True, False])
def test_resharding_after_the_forward_or_not_makes_no_difference(
    reshard: bool, region_dir: Path
) -> None:
    check(2, "adamw foreach", {"reshard_after_forward": reshard}, region_dir)


def test_a_rank_is_killed_at_any_moment_and_all_go_on_from_one_step(region_dir: Path) -> None:
    world, kind = 3, "adamw foreach"

    def running(me: Me) -> None:
        model = net(mesh_of(me.world))
        optimizer = OPTIMIZERS[kind](model)
        handle = lightck.attach(model, optimizer, region_dir, threads=1)
        for _ in train(me, model, optimizer, range(1, MANY + 1)):
            if handle.last_committed_step is not None:
                me.send(handle.last_committed_step)
        me.pause()

    with started(world, lambda me: golden(me, kind, {}, MANY)) as job:
        expected = job.results()
    with started(world, running) as job:
        committed = job.receive(0)
        job.kill(world - 1)
        job.outcomes()  # the others fall over in their next collective
    with started(world, lambda me: resumed(me, kind, {}, region_dir, MANY)) as job:
        found = job.results()
    assert len({step for step, *_ in found}) == 1 and found[0][0] >= committed
    compare(expected, found)


def check(world: int, kind: str, options: dict[str, Any], path: Path) -> None:
    with started(world, lambda me: golden(me, kind, options)) as job:
        expected = job.results()
    with started(world, lambda me: killed(me, kind, options, path)) as job:
        assert [job.receive(rank) for rank in range(world)] == [0] * world
        for rank in range(world):
            job.kill(rank)
    with started(world, lambda me: resumed(me, kind, options, path)) as job:
        found = job.results()
    assert all(step >= KILLED_AFTER for step, *_ in found)
    compare(expected, found)


def compare(expected: list[Any], found: list[Any]) -> None:
    """Every rank's losses from the restored step on, and its last state."""
    compared["jobs"] += 1
    pairs = enumerate(zip(expected, found, strict=True))
    for rank, ((losses, state), (step, on, then, stats)) in pairs:
        compared["ranks"] += 1
        compared["losses"] += len(on)
        compared["tensors"] += len(state)
        assert on == losses[step:], f"rank {rank}"
        assert differing(state, then) == [], f"rank {rank}"
        assert stats.torn == stats.failed == 0
