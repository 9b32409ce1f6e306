"""Copies that begin right after their layer's update hold what a snapshot must hold, and a step
that stops half-way is never committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck.layerwise.checkpointer import LayerPipeline
from support import faults, internals
from support.loops import Loop, digest, mlp, of_live, of_stored, steps_at

WIDTH = 32


class Stop(Exception):
    """A test raises this inside a backward."""


class Queued(list[int]):
    """Says, per snapshot that reached forward start, how many layers had been queued by then."""


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queued]:
    """Watches snapshots join."""
    found, joined = Queued(), LayerPipeline.open

    def watched(self: LayerPipeline, *args: Any, **kwargs: Any) -> Any:
        done = 0 if self.begun is None else len(self.begun.queued)
        found.append(done)
        return joined(self, *args, **kwargs)

    monkeypatch.setattr(LayerPipeline, "open", watched)
    yield found


def make(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Loop:
    model = mlp(WIDTH)
    model.insert(1, nn.BatchNorm1d(WIDTH))
    return Loop(model, kind(model.parameters(), lr=0.1, **options), width=WIDTH)


def attach(path: Path, loop: Loop, **settings: Any) -> lightck.Handle:
    defaults: dict[str, Any] = {
        "update": "layerwise", "slots": 8, "proof": True, "placement": "direct",
    }  # fmt: skip
    return lightck.attach(loop.model, list(loop.optimizers), path, **defaults | settings)


def committed(loop: Loop, path: Path, handle: lightck.Handle, steps: list[int]) -> None:
    """Check after the close that these snapshots are whole and right; nothing was torn or lost."""
    loop.check(path, steps)
    stats = handle.stats()
    assert (stats.torn, stats.failed, stats.slipped) == (0, 0, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_layers_are_copied_after_their_own_update_and_hold_the_step(
    run_dir: Path, queued: Queued, fused: bool
) -> None:
    loop = make(torch.optim.Adam, fused=fused)
    with attach(run_dir, loop) as handle:
        for _ in range(7):
            loop.run(1)
            handle.wait()
        loop.note()
    committed(loop, run_dir, handle, [1, 2, 3, 4, 5, 6, 7])
    assert queued == [0, 0, 4, 4, 4, 4, 4]


def test_slow_copies_are_waited_for_layer_by_layer(run_dir: Path, queued: Queued) -> None:
    loop = make()
    with faults.delayed(faults.COPY, 0.002), attach(run_dir, loop, chunk_bytes=4096) as handle:
        loop.run(6)
        loop.note()
    stats = handle.stats()
    assert stats.torn == stats.failed == 0
    for step in steps_at(run_dir):
        assert of_stored(run_dir, step) == loop.seen[step]
    assert max(queued) == 4


def test_with_two_slots_copies_begin_at_the_forward_and_none_is_lost(
    run_dir: Path, queued: Queued
) -> None:
    loop = make()
    with attach(run_dir, loop, slots=2, trace=True) as handle:
        for _ in range(5):
            loop.forward().backward()
            loop.update()
            handle.wait()
        loop.note()
    committed(loop, run_dir, handle, [4, 5])


def test_on_media_that_sync_the_snapshots_are_the_same(disk_dir: Path, queued: Queued) -> None:
    loop = make()
    with attach(disk_dir, loop, policy=2) as handle:
        for _ in range(6):
            loop.run(1)
            handle.wait()
        loop.note()
    committed(loop, disk_dir, handle, [2, 4, 6])
    assert queued == [0, 4, 4]


def clip_in_place(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight.clamp_(-0.01, 0.01)


def test_weights_that_the_loop_changes_after_the_step_are_copied_at_the_forward(
    run_dir: Path, queued: Queued
) -> None:
    loop = make()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        loop.run(1)
        clip_in_place(loop)
        with pytest.warns(UserWarning, match="model/0.weight changed between its layer's update"):
            loop.forward().backward()
        loop.update()
        for _ in range(2):
            clip_in_place(loop)
            handle.wait()
            loop.run(1)
        clip_in_place(loop)
        loop.note()
    committed(loop, run_dir, handle, [1, 2, 3, 4, 5, 6])
    assert queued == [0, 0, 4, 3, 3, 3], "and only those of that layer"


def test_what_changes_silently_after_the_step_is_found_torn(run_dir: Path) -> None:
    loop = make()
    torn = pytest.raises(lightck.TornSnapshotError, match="snapshot of step 3 .* model/2.weight")
    with torn, attach(run_dir, loop, on_error=lambda error: None) as handle:
        loop.run(3)
        pipeline = internals.pipeline(handle)
        assert isinstance(pipeline, LayerPipeline) and pipeline.begun is not None
        for group in pipeline.begun.queued.values():  # from here on every copy is made
            pipeline.begun.snapshot.writer.finish_copies(group.batch)
        loop.model[2].weight.detach().numpy()[...] += 1
        loop.run(1)
        assert handle.stats().torn == 1


def fail_in(layer: nn.Module) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        raise Stop

    return layer.weight.register_post_accumulate_grad_hook(hook)


def test_a_backward_that_fails_half_way_never_commits_a_mixture(
    run_dir: Path, queued: Queued
) -> None:
    loop = make()
    with attach(run_dir, loop) as handle:
        loop.run(4)
        handle.wait()
        before = {n: digest(p) for n, p in loop.model.named_parameters()}
        hook = fail_in(loop.model[1])
        with pytest.raises(Stop):
            loop.forward().backward()
        hook.remove()
        moved = [n for n, p in loop.model.named_parameters() if digest(p) != before[n]]
        assert "3.weight" in moved and "0.weight" not in moved, "the step is half done"
        with pytest.raises(lightck.ConfigError, match="another gradient after its update"):
            loop.forward().backward()
        with pytest.raises(lightck.ConfigError, match="state is mixed"):
            loop.update()
        handle.wait()
    loop.check(run_dir, [1, 2, 3, 4])
    info = lightck.restore(loop.model, list(loop.optimizers), run_dir)
    assert info is not None and info.step == 4
    assert of_live(loop.model, loop.optimizers) == loop.seen[4]


def test_an_update_that_fails_half_way_never_commits_a_mixture(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make(torch.optim.SGD, momentum=0.9)
    with attach(run_dir, loop) as handle:
        loop.run(4)
        state = loop.optimizers[0].state[loop.model[2].bias]
        kept, state["momentum_buffer"] = state["momentum_buffer"], torch.zeros(3)
        with pytest.raises(RuntimeError):
            loop.forward().backward()
        state["momentum_buffer"] = kept
        with pytest.raises(lightck.ConfigError, match="the update of 2.weight and 1 more failed"):
            loop.forward().backward()
        assert handle.step == 4
    assert max(steps_at(run_dir)) <= 4
    for step in steps_at(run_dir):
        assert of_stored(run_dir, step) == loop.seen[step]


@pytest.mark.parametrize(("policy", "kept"), [(1, [1, 2, 3, 4]), (100, [])])
def test_a_close_in_a_half_done_step_commits_what_was_open_and_nothing_else(
    run_dir: Path, policy: int, kept: list[int]
) -> None:
    model = mlp(WIDTH)  # no buffers: they would keep the close from making a snapshot, too
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=WIDTH)
    with attach(run_dir, loop, policy=policy):
        loop.run(4)
        hook = fail_in(loop.model[1])
        with pytest.raises(Stop):
            loop.forward().backward()
        hook.remove()
    loop.check(run_dir, kept)


def test_an_interrupt_inside_the_step_leaves_the_optimizer_whole(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make()
    optimizer = loop.optimizers[0]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with attach(run_dir, loop, policy=2):
        loop.run(4)
        monkeypatch.setattr(optimizer, "_optimizer_step_code", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run(1)
        assert optimizer.param_groups == []
    assert len(optimizer.param_groups[0]["params"]) == 8
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    loop.check(run_dir, [2, 4])


def test_a_snapshot_on_request_is_of_the_last_complete_step(run_dir: Path) -> None:
    loop = make()
    with attach(run_dir, loop, policy=100) as handle:
        loop.run(3)
        loop.note()
        assert handle.snapshot().result(30) == 3
        loop.forward()
        inside = []
        hook = loop.model[0].weight.register_post_accumulate_grad_hook(
            lambda p: inside.append(handle.snapshot())
        )
        loop.model(torch.ones(2, WIDTH)).square().mean().backward()
        hook.remove()
        loop.update()
        assert not inside[0].done()
        loop.run(1)
        assert inside[0].result(30) == 4
        loop.note()
    loop.check(run_dir, [3, 4, 5])


def test_layers_carry_the_step_of_their_content(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fences, counters and audits the tags alone keep a mixture from being sealed."""
    loop = make(torch.optim.SGD)
    monkeypatch.setattr(LayerPipeline, "_concerns", lambda self, group, who: who in (None, 0))
    monkeypatch.setattr("lightck.pipeline.copy_plan.CopySources.changed", lambda self: [])
    monkeypatch.setattr("lightck.region.slot_writer.SlotWriter.audit", lambda *_: None)
    torn = pytest.raises(lightck.TornSnapshotError, match="snapshot of step 2 .* model/")
    with torn, attach(run_dir, loop, on_error=lambda error: None) as handle:
        loop.run(3)
        assert handle.stats().torn == 1
