"""Every tensor of snapshot t holds step t's value, whatever the update does and however slow the
workers are: digests noted by the loop at forward start against what was committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lightck
from support import faults, internals
from support.loops import Loop, Overwriter, mlp, of_live, of_stored, steps_at

STEPS = 5


def overwriter_loop(width: int = 64) -> Loop:
    model = mlp(width)
    return Loop(model, Overwriter(model.parameters()), width=width)


@pytest.mark.parametrize("schedule", ["eager", "backward"])
@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 262_144])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pause_s", [0, 0.0005])
def test_an_update_that_overwrites_everything_at_once_changes_no_snapshot(
    run_dir: Path, schedule: str, chunk_bytes: int, threads: int, pause_s: float
) -> None:
    loop = overwriter_loop()
    faults.delay(faults.COPY, pause_s)
    with lightck.attach(
        loop.model,
        list(loop.optimizers),
        run_dir,
        slots=8,
        schedule=schedule,
        chunk_bytes=chunk_bytes,
        threads=threads,
    ) as handle:
        for _ in range(STEPS):
            loop.forward().backward()
            loop.update()
            handle.wait()
        loop.note()
    stats = handle.stats()
    assert (stats.captured, stats.committed, stats.torn, stats.failed) == (STEPS, STEPS, 0, 0)
    loop.check(run_dir, range(1, STEPS + 1))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_staged_snapshot_holds_its_step_while_the_medium_lags_behind(
    disk_dir: Path, threads: int
) -> None:
    loop = overwriter_loop()
    faults.delay(faults.COPY, 0.0005)
    faults.delay(faults.SYNC, 0.005)
    with lightck.attach(
        loop.model, list(loop.optimizers), disk_dir, slots=8, threads=threads, chunk_bytes=4096
    ) as handle:
        loop.run(STEPS)
        loop.note()
    stats = handle.stats()
    assert (stats.torn, stats.failed) == (0, 0)
    there = steps_at(disk_dir)
    assert STEPS in there
    loop.check(disk_dir, there)


@pytest.mark.parametrize("schedule", ["eager", "backward"])
def test_steps_without_a_pause_between_them_are_all_whole(run_dir: Path, schedule: str) -> None:
    loop = overwriter_loop(width=16)
    with lightck.attach(
        loop.model, list(loop.optimizers), run_dir, slots=16, schedule=schedule, chunk_bytes=4096
    ) as handle:
        loop.run(40)
        loop.note()
    there = steps_at(run_dir)
    stats = handle.stats()
    assert there[-1] == 40
    # A step without a snapshot was due and slipped; no other way leads past one.
    assert stats.committed + stats.slipped == 40
    assert (stats.torn, stats.failed) == (0, 0)
    loop.check(run_dir, there)


def test_what_the_workers_have_not_copied_when_the_fence_comes_is_copied_before_the_update(
    run_dir: Path,
) -> None:
    loop = overwriter_loop()
    with lightck.attach(
        loop.model, list(loop.optimizers), run_dir, slots=4, schedule="backward"
    ) as handle:
        internals.pipeline(handle).pool.pace(0)  # the workers copy only when somebody waits
        for _ in range(3):
            copied = handle.stats().bytes_copied
            loop.forward().backward()
            assert handle.stats().bytes_copied == copied
            loop.update()
        loop.note()
    loop.check(run_dir, [1, 2, 3])


# ---- Several optimizers ----------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = mlp(32, 2), mlp(32, 2)


@pytest.mark.parametrize("order", ["judge first", "generator first"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [Overwriter, torch.optim.AdamW])
def test_each_optimizer_of_a_gan_fences_what_it_changes(
    run_dir: Path, order: str, threads: int, kind: type[torch.optim.Optimizer]
) -> None:
    gan = Gan()
    of_judge, of_generator = kind(gan.judge.parameters()), kind(gan.generator.parameters())
    optimizers = [of_generator, of_judge]
    seen = {}
    faults.delay(faults.COPY, 0.0005)

    def train_judge() -> None:
        real = gan.judge(torch.ones(2, 32)).mean()
        fake = gan.judge(gan.generator(torch.ones(2, 32)).detach()).mean()
        (real - fake).backward()
        of_judge.step()
        of_judge.zero_grad()

    def train_generator() -> None:
        gan.judge(gan.generator(torch.ones(2, 32))).mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        of_judge.zero_grad()

    phases = [train_judge, train_generator]
    if order == "generator first":
        phases.reverse()
    with lightck.attach(
        gan, optimizers, run_dir, slots=8, threads=threads, chunk_bytes=4096
    ) as handle:
        for step in range(STEPS):
            seen[step] = of_live(gan, optimizers)
            for phase in phases:
                phase()
            assert handle.step == step + 1
        seen[STEPS] = of_live(gan, optimizers)
    assert handle.stats().torn == 0
    there = steps_at(run_dir)
    assert there[-1] == STEPS
    for step in there:
        assert of_stored(run_dir, step) == seen[step]


def test_a_parameter_that_two_optimizers_change_is_fenced_by_both(run_dir: Path) -> None:
    model = mlp()
    optimizers = [Overwriter(model.parameters()), Overwriter(model[0].parameters())]
    loop = Loop(model, *optimizers)
    faults.delay(faults.COPY, 0.0005)
    with lightck.attach(model, optimizers, run_dir, slots=8, chunk_bytes=4096) as handle:
        loop.run(STEPS)
        loop.note()
    assert handle.stats().torn == 0
    loop.check(run_dir, steps_at(run_dir))
    assert steps_at(run_dir)[-1] == STEPS


# ---- Edits between the step and the next forward: part of the snapshot ------------------------


def clip(model: nn.Module, spare: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)


def swap(model: nn.Module, spare: nn.Module) -> None:
    """Swap weights as an EMA does for its evaluation, but leave them that way."""
    with torch.no_grad():
        for p, q in zip(model.parameters(), spare.parameters(), strict=True):
            kept = p.clone()
            p.copy_(q)
            q.copy_(kept)


def swap_data(model: nn.Module, spare: nn.Module) -> None:
    """Give the same parameters new storage: pointers move, counters do not."""
    for p, q in zip(model.parameters(), spare.parameters(), strict=True):
        p.data, q.data = q.data, p.data


def overwrite_through_numpy(model: nn.Module, spare: nn.Module) -> None:
    for p in model.parameters():
        p.detach().numpy()[...] *= 0.5


@pytest.mark.parametrize("edit", [clip, swap, swap_data, overwrite_through_numpy])
@pytest.mark.parametrize("schedule", ["eager", "backward"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lightck.optim.AdamW])
def test_weights_edited_between_step_and_forward_are_part_of_the_snapshot(
    run_dir: Path, edit: object, schedule: str, kind: type[torch.optim.AdamW]
) -> None:
    model, spare = mlp(), mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    loop = Loop(model, optimizer)
    faults.delay(faults.COPY, 0.0005)
    with lightck.attach(
        model, optimizer, run_dir, slots=8, proof=True, schedule=schedule, chunk_bytes=4096
    ) as handle:
        for _ in range(STEPS):
            loop.run(1)
            edit(model, spare)  # type: ignore[operator]
        loop.note()
    assert handle.stats().torn == 0
    there = steps_at(run_dir)
    assert there[-1] == STEPS
    loop.check(run_dir, there)


def test_a_target_network_that_is_updated_before_the_forward_belongs_to_the_step(
    run_dir: Path,
) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = mlp(32), mlp(32).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.online(x) - self.target(x)

    agent = Agent()
    loop = Loop(agent, torch.optim.AdamW(agent.online.parameters(), lr=0.1), width=32)
    faults.delay(faults.COPY, 0.0005)
    with lightck.attach(
        agent, list(loop.optimizers), run_dir, slots=8, proof=True, chunk_bytes=4096
    ) as handle:
        for _ in range(STEPS):
            loop.run(1)
            if loop.step % 2:
                agent.target.load_state_dict(agent.online.state_dict())
        loop.note()
    assert handle.stats().torn == 0
    there = steps_at(run_dir)
    assert there[-1] == STEPS
    loop.check(run_dir, there)


def test_a_tensor_that_nobody_changes_is_skipped_only_while_it_really_stays(run_dir: Path) -> None:
    """Unchanged frozen weights are not written again; an edit that moves no counter still is."""
    model = mlp(64, 2)
    model[0].requires_grad_(False)
    loop = Loop(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    with lightck.attach(model, list(loop.optimizers), run_dir, slots=2) as handle:
        for step in range(8):
            loop.run(1)
            if step == 5:
                model[0].weight.detach().numpy()[...] += 1
            handle.wait()
        loop.note()
    stats = handle.stats()
    assert stats.committed == 8
    assert stats.skipped_unchanged_bytes > 0
    loop.check(run_dir, [7, 8])
