"""Snapshots that the update writes: exact whatever happens between it and the next forward."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_step_consistency import clip, swap, swap_data
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightck
from lightck import optim
from lightck.region import native_update
from support import internals
from support.loops import Loop, mlp, of_live, of_stored, steps_at

STEPS = 6
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.01),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def streaming_loop(kind: str = "AdamW", model: nn.Module | None = None) -> Loop:
    torch.manual_seed(3)
    model = mlp() if model is None else model
    return Loop(model, KINDS[kind](model.parameters()))


def attach(path: Path, loop: Loop, **settings: Any) -> lightck.Handle:
    return lightck.attach(loop.model, list(loop.optimizers), path, slots=9, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_what_the_update_wrote_is_what_stood_at_forward_start(
    run_dir: Path, kind: str, chunk_bytes: int
) -> None:
    loop = streaming_loop(kind)
    with attach(run_dir, loop, proof=True, chunk_bytes=chunk_bytes) as handle:
        loop.run(STEPS)
        loop.note()
        assert handle.stats().streamed >= STEPS - 3
    assert (handle.stats().torn, handle.stats().failed) == (0, 0)
    loop.check(run_dir, list(range(1, STEPS + 1)))


def test_a_job_restored_from_a_streamed_snapshot_goes_on_bit_for_bit(run_dir: Path) -> None:
    whole = streaming_loop()
    whole.run(2 * STEPS)
    first = streaming_loop()
    with attach(run_dir, first) as handle:
        first.run(STEPS)
        assert handle.stats().streamed > 0
    again = streaming_loop()
    assert lightck.restore(again.model, list(again.optimizers), run_dir).step == STEPS
    again.run(STEPS)
    assert of_live(again.model, again.optimizers) == of_live(whole.model, whole.optimizers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_a_half_type_stream_and_go_on_bit_for_bit(
    run_dir: Path, dtype: torch.dtype
) -> None:
    def loop() -> Loop:
        torch.manual_seed(3)
        model = mlp(33).to(dtype)  # neither whole lines nor whole vectors
        optimizer = optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        return Loop(model, optimizer, width=33)

    whole, first, again = loop(), loop(), loop()
    whole.run(2 * STEPS)
    with attach(run_dir, first, proof=True, chunk_bytes=4096) as handle:
        first.run(STEPS)
        first.note()
        assert handle.stats().streamed >= STEPS - 3
    first.check(run_dir, list(range(1, STEPS + 1)))
    assert lightck.restore(again.model, list(again.optimizers), run_dir).step == STEPS
    again.run(STEPS)
    assert of_live(again.model, again.optimizers) == of_live(whole.model, whole.optimizers)


@pytest.mark.parametrize("theirs", [True, False])
def test_snapshots_restore_into_torch_s_own_class_and_back(run_dir: Path, theirs: bool) -> None:
    kinds = [torch.optim.AdamW, optim.AdamW]
    first, second = kinds if theirs else kinds[::-1]
    model, other = mlp(), mlp()
    loop = Loop(model, first(model.parameters(), lr=0.1, fused=True))
    with attach(run_dir, loop):
        loop.run(3)
        loop.note()
    again = Loop(other, second(other.parameters(), lr=0.1))
    lightck.restore(other, list(again.optimizers), run_dir)
    assert of_live(other, again.optimizers) == loop.seen[3]
    loop.run(2)
    again.run(2)
    assert of_live(other, again.optimizers) == of_live(model, loop.optimizers)


def by_data_ptr_swap(model: nn.Module, spare: nn.Module) -> None:
    swap_data(model, spare)


def clamp_data(model: nn.Module, spare: nn.Module) -> None:
    """Move no version counter."""
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


def through_numpy(model: nn.Module, spare: nn.Module) -> None:
    for p in model.parameters():
        p.detach().numpy()[...] *= np.float32(0.5)


def through_array(model: nn.Module, spare: nn.Module) -> None:
    for p in model.parameters():
        np.asarray(p.detach())[...] *= np.float32(0.5)


def through_dlpack(model: nn.Module, spare: nn.Module) -> None:
    for p in model.parameters():
        torch.from_dlpack(p.detach()).data.mul_(0.5)


def in_the_state(model: nn.Module, spare: nn.Module) -> None:
    """Write what the optimizer keeps, found through the graph of nothing: by its owner."""
    for state in OWNERS[id(model)].state.values():
        state["exp_avg"].data.mul_(0.5)


OWNERS: dict[int, torch.optim.Optimizer] = {}
EDITS = [clip, swap, swap_data, clamp_data, through_numpy, through_array, through_dlpack]
EDITS.append(in_the_state)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_changed_behind_the_update_is_part_of_the_snapshot(
    run_dir: Path,
    edit: Callable[[nn.Module, nn.Module], None],
    every: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, spare = streaming_loop(), mlp()
    OWNERS[id(loop.model)] = loop.optimizers[0]
    with attach(run_dir, loop, proof=True) as handle:
        for step in range(STEPS):
            loop.run(1)
            if step % every == every - 1:
                edit(loop.model, spare)
        loop.note()
        if every > 1:
            assert handle.stats().streamed > 0, "one edit must not end it"
    assert handle.stats().torn == 0
    assert "changed_unseen" not in caplog.text, "found by the comparison, which samples"
    loop.check(run_dir, list(range(1, STEPS + 1)))


def test_what_is_changed_behind_every_update_is_streamed_no_more(run_dir: Path) -> None:
    loop = streaming_loop()
    first = next(loop.model.parameters())
    with attach(run_dir, loop, proof=True) as handle:
        for _ in range(2 * STEPS):
            loop.run(1)
            first.data.clamp_(-0.01, 0.01)
        assert handle.stats().streamed >= STEPS, "the other tensors are"
        loop.note()
    assert steps_at(run_dir)[-1] == 2 * STEPS
    stored = of_stored(run_dir, 2 * STEPS)
    assert stored == loop.seen[2 * STEPS]


def test_a_write_that_nothing_sees_is_found_by_the_comparison(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An array that was made before the step; `proof` compares all bytes, a sample only some."""
    loop = streaming_loop()
    array = next(loop.model.parameters()).detach().numpy()
    with attach(run_dir, loop, proof=True):
        for _ in range(STEPS):
            loop.run(1)
            array[0, 0] += 1.0
        loop.note()
    assert "changed_unseen" in caplog.text
    loop.check(run_dir, list(range(1, STEPS + 1)))


def test_after_an_evaluation_everything_is_compared(run_dir: Path) -> None:
    """The watch ends where an evaluation begins, which it would slow down."""
    loop = streaming_loop()
    with attach(run_dir, loop) as handle:
        for step in range(2 * STEPS):
            loop.run(1)
            with torch.no_grad():
                loop.model.train(step % 4 == 0)(torch.ones(2, 64))
                loop.model.train()
            if step % 2:
                next(loop.model.parameters()).data[5, 5] += 1.0
        assert 0 < handle.stats().streamed <= STEPS
        loop.note()
    there = steps_at(run_dir)
    assert there[-1] == 2 * STEPS
    for step in there:
        assert of_stored(run_dir, step) == loop.seen[step]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return operation(*args, **(kwargs or {}))


def test_modes_of_others_stay_where_they_are(run_dir: Path) -> None:
    depth = torch._C._len_torch_dispatch_stack
    loop = streaming_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        before = handle.stats().streamed
        with Passing() as other:  # above the watch of the last step, which stays below
            loop.run(2)
            assert torch._C._get_dispatch_stack_at(depth() - 1) is other
        assert handle.stats().streamed <= before + 1
        loop.run(1)
        assert depth() == 1, "the watch alone"
        with Passing():
            loop.forward().backward()
        loop.update()
        loop.run(2)
        loop.note()
    assert depth() == 0
    there = steps_at(run_dir)
    assert there[-1] == loop.step
    for step in there:
        assert of_stored(run_dir, step) == loop.seen[step]


def test_an_update_that_fails_leaves_no_snapshot_of_a_mixture(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = streaming_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        handle.wait()

        def refused(*_: Any, **__: Any) -> None:
            raise RuntimeError("injected")

        with monkeypatch.context() as patched:
            patched.setattr(native_update, "update", refused)
            loop.forward().backward()
            with pytest.raises(RuntimeError, match="injected"):
                loop.optimizers[0].step()
        loop.optimizers[0].step()
        loop.step += 1
        loop.model.zero_grad()
        loop.run(1)
        loop.note()
    there = steps_at(run_dir)
    assert there[-1] == loop.step
    for step in there:
        assert of_stored(run_dir, step) == loop.seen[step]


def test_what_no_update_writes_is_copied_beside(run_dir: Path) -> None:
    """Buffers, frozen parameters, parameters without a gradient."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(7)))
    loop = streaming_loop(model=model)
    with attach(run_dir, loop, proof=True) as handle:
        loop.run(STEPS)
        loop.note()
        assert handle.stats().streamed > 0
    loop.check(run_dir, steps_at(run_dir))


def test_a_closure_and_a_scaler_leave_the_step_to_torch(run_dir: Path) -> None:
    loop = streaming_loop()
    optimizer = loop.optimizers[0]
    assert isinstance(optimizer, optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attach(run_dir, loop) as handle:
        loop.run(3)
        streamed = handle.stats().streamed
        scaler.scale(loop.forward()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert "GradScaler" in optimizer.why_not
        loop.step += 1
        loop.model.zero_grad()
        optimizer.step(lambda: loop.forward().backward())
        assert optimizer.why_not == "a closure"
        loop.step += 1
        loop.model.zero_grad()
        loop.note()
        assert handle.stats().streamed <= streamed + 1
    there = steps_at(run_dir)
    for step in there:
        assert of_stored(run_dir, step) == loop.seen[step]


def test_a_save_just_in_time_takes_what_the_update_wrote(run_dir: Path) -> None:
    loop = streaming_loop()
    with attach(run_dir, loop, proof=True) as handle:
        loop.run(4)
        assert handle.snapshot_now("test").step == 4
        loop.note()
        assert internals.checkpointer(handle).pipeline.begun is None
    assert of_stored(run_dir, 4) == loop.seen[4]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_whoever_could_stream_is_told_once(
    run_dir: Path, kind: type[torch.optim.AdamW], caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp(1500)
    loop = Loop(model, kind(model.parameters(), lr=0.1), width=1500)
    with caplog.at_level("INFO", "lightck"), attach(run_dir, loop, policy=10**6):
        loop.run(3)
    assert caplog.text.count("could_stream") == (kind is torch.optim.AdamW)


def test_a_policy_that_raises_costs_no_update(run_dir: Path) -> None:
    class Once:
        asked = 0

        def due(self, moment: lightck.Moment) -> bool:
            self.asked += 1
            if self.asked == 4:
                raise ValueError("injected")
            return True

    whole, loop = streaming_loop(), streaming_loop()
    whole.run(STEPS)
    with attach(run_dir, loop, policy=Once()):
        loop.run(3)
        with pytest.raises(ValueError, match="injected"):
            loop.run(1)
        loop.step += 1
        loop.model.zero_grad()
        loop.run(STEPS - 4)
    assert of_live(loop.model, loop.optimizers) == of_live(whole.model, whole.optimizers)


def test_a_region_that_is_lost_costs_snapshots_and_no_update(run_dir: Path) -> None:
    whole, loop = streaming_loop(), streaming_loop()
    whole.run(2 * STEPS)
    handle = attach(run_dir, loop, on_error=lambda error: None)
    loop.run(STEPS)
    (file,) = run_dir.glob("region-*.lck")
    os.truncate(file, 4096)
    loop.run(STEPS)
    with pytest.raises(lightck.LightckError):
        handle.close()
    assert of_live(loop.model, loop.optimizers) == of_live(whole.model, whole.optimizers)


@pytest.mark.parametrize("length", [16, 4000])
def test_tensors_that_change_their_size_are_updated_whole_and_nothing_beside_them(
    length: int,
) -> None:
    """Pruned, or grown, in place: the objects stay the same."""
    p = torch.nn.Parameter(torch.ones(64))
    optimizer = optim.AdamW([p], lr=0.1)
    memory = [torch.full((8192,), 7.0) for _ in range(4)]
    for step in range(4):
        if step == 2:
            state = optimizer.state[p]
            p.data = memory[0][:length].fill_(1.0)
            p.grad = None
            state["exp_avg"].data = memory[1][:length].fill_(0.0)
            state["exp_avg_sq"].data = memory[2][:length].fill_(0.0)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert step < 1 or not optimizer.why_not, optimizer.why_not
    assert (p != 1.0).all()
    assert all((each[length:] == 7.0).all() for each in memory)


@pytest.mark.parametrize("how", ["the module", "the module itself", "a function"])
def test_compiled_models_stream_and_stay_compiled(run_dir: Path, how: str) -> None:
    loop = streaming_loop()
    plain = loop.model
    runs: Any = plain
    if how == "the module":
        runs = torch.compile(plain, backend="eager")
    elif how == "the module itself":
        plain.compile(backend="eager")
    else:
        runs = torch.compile(lambda x: plain(x), backend="eager")
    with attach(run_dir, loop) as handle:
        for _ in range(STEPS):
            loop.note()
            runs(torch.ones(2, 64)).square().mean().backward()
            loop.update()
        loop.note()
        assert handle.stats().streamed > 0
    assert torch.ones(2).sum() == 2.0 and torch._C._len_torch_dispatch_stack() == 0
    for step in steps_at(run_dir):
        assert of_stored(run_dir, step) == loop.seen[step]


def test_where_denormals_are_flushed_torch_steps() -> None:
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = optim.AdamW([p], lr=0.1)
    try:
        torch.set_flush_denormal(True)
        for _ in range(2):
            p.grad = torch.ones(8)
            optimizer.step()
    finally:
        torch.set_flush_denormal(False)
    assert "denormals" in optimizer.why_not and (p < 1.0).all()
