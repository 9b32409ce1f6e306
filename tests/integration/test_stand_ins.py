"""Other weights that stand in for the model's, as an average does for validation, are not saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rescue import Broken, Counting, attach, check, counting_loop
from torch import nn

import lightck
from lightck.journal.entry import decode_entry
from lightck.region.native_region import STEP_END
from lightck.region.slot_writer import SlotWriter
from support.loops import Loop, with_peers

SOON_S = 60.0
Swap = Callable[[nn.Parameter, torch.Tensor], None]


def by_data(weight: nn.Parameter, average: torch.Tensor) -> None:
    """Copy around the version counter."""
    weight.data.copy_(average)


def by_copy(weight: nn.Parameter, average: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(average)


def in_inference(weight: nn.Parameter, average: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.copy_(average)


def by_foreach(weight: nn.Parameter, average: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([weight], [average])


def by_pointer(weight: nn.Parameter, average: torch.Tensor) -> None:
    weight.data = average.clone()


def to_nothing(weight: nn.Parameter, average: torch.Tensor) -> None:
    """Leave no memory to look at, as where weights are sent elsewhere."""
    weight.data = torch.empty(0)


def swap(model: nn.Module, how: Swap) -> None:
    """Let averages stand in for the trained weights."""
    for weight in model.parameters():
        how(weight, torch.full_like(weight, 0.25))


@pytest.mark.parametrize(
    "how", [by_data, by_copy, in_inference, by_foreach, by_pointer, to_nothing]
)
def test_a_save_while_others_stand_in_for_the_weights_is_not_made_and_names_one(
    run_dir: Path, how: Swap
) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.note()
        swap(loop.model, how)
        saved = handle.snapshot_now("validation")
        assert (saved.step, saved.fresh) == (None, False)
        assert "model/inner." in saved.why and "step 3 ended" in saved.why
        handle.detach()


@pytest.mark.parametrize("how", [by_data, by_pointer])
def test_once_the_weights_are_back_as_they_were_the_step_is_saved(run_dir: Path, how: Swap) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.note()
        kept = [weight.data if how is by_pointer else weight.clone() for weight in _weights(loop)]
        swap(loop.model, how)
        assert not handle.snapshot_now("validation").fresh
        for weight, own in zip(_weights(loop), kept, strict=True):
            weight.data = own if how is by_pointer else weight.data
            weight.data.copy_(own)
        assert handle.snapshot_now("after it").fresh
        check(run_dir, loop, 3)
        handle.detach()


def _weights(loop: Loop) -> list[nn.Parameter]:
    return list(loop.model.parameters())


def test_one_weight_that_is_another_object_is_named(run_dir: Path) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        own = loop.model.inner.bias
        loop.model.inner.bias = nn.Parameter(torch.ones(16))
        saved = handle.snapshot_now("validation")
        assert not saved.fresh and "model/inner.bias" in saved.why
        loop.model.inner.bias = own
        assert handle.snapshot_now("after it").fresh
        handle.detach()


def test_weights_that_the_loop_has_clipped_wait_for_the_forward(run_dir: Path) -> None:
    """Nobody knows what a restart would do again: the exact snapshot has it done."""
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        with torch.no_grad():
            loop.model.inner.weight.clamp_(-0.01, 0.01)
        early = handle.snapshot_now("before the forward")
        assert not early.fresh and "model/inner.weight" in early.why
        loop.forward()
        exact = handle.snapshot_now("behind it")
        assert (exact.step, exact.fresh, exact.early) == (3, True, False)
        check(run_dir, loop, 3)
        handle.detach()


def test_a_change_where_no_byte_is_looked_at_is_told_by_its_counter(run_dir: Path) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        with torch.no_grad():
            loop.model.inner.weight[-1, -1] += 1
        saved = handle.snapshot_now("now")
        assert not saved.fresh and "model/inner.weight" in saved.why
        handle.detach()


def test_memory_that_a_weight_has_no_more_is_not_looked_at(run_dir: Path) -> None:
    model = Counting()
    model.unused = nn.Parameter(torch.ones(1 << 12))
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)
    with attach(run_dir, loop) as handle:
        loop.run(3)
        model.unused.data = torch.empty(0)
        loop.forward()
        assert handle.snapshot_now("now").fresh
        handle.detach()


def test_a_weight_whose_storage_is_taken_away_is_not_looked_at(run_dir: Path) -> None:
    """A hook of the offloaded layer brings its weight back, behind the hook of forward start."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weight, size = model[1].weight, model[1].weight.nbytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].register_forward_pre_hook(lambda *_: weight.untyped_storage().resize_(size) and None)
    with lightck.attach(model, optimizer, run_dir, policy=1000) as handle:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(size)
        handle.detach()


def test_an_update_that_moves_no_counter_is_saved_before_the_forward(run_dir: Path) -> None:
    model = Counting()
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), width=16)
    with pytest.raises(Broken), attach(run_dir, loop):
        loop.run(3)
        loop.note()
        raise Broken
    check(run_dir, loop, 3)


def test_an_evaluation_changes_nothing_that_an_early_save_needs(run_dir: Path) -> None:
    loop = counting_loop()
    with pytest.raises(Broken), attach(run_dir, loop):
        loop.run(3)
        loop.note()
        loop.model.eval()
        with torch.inference_mode():
            loop.model(torch.ones(2, 16))
        raise Broken
    check(run_dir, loop, 3)


def test_another_thread_waits_until_the_weights_are_back_and_the_forward_comes(
    run_dir: Path,
) -> None:
    loop = counting_loop()
    found: list[Any] = []
    with attach(run_dir, loop, close_timeout_s=SOON_S) as handle:
        loop.run(3)
        loop.note()
        kept = [weight.clone() for weight in loop.model.parameters()]
        swap(loop.model, by_data)
        asked = threading.Thread(target=lambda: found.append(handle.snapshot_now("SIGTERM")))
        asked.start()
        asked.join(0.5)  # an early snapshot of these would be there by now
        assert not found and handle.stats().captured == 0
        for weight, own in zip(loop.model.parameters(), kept, strict=True):
            weight.data.copy_(own)
        loop.forward()
        asked.join(SOON_S)
        assert [(each.step, each.fresh) for each in found] == [(3, True)]
        check(run_dir, loop, 3)
        handle.detach()


def test_weights_that_are_swapped_while_they_are_copied_are_not_committed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, before the first copy has run: the copies are what is there, and of no step."""
    loop = counting_loop()
    original = SlotWriter.finish_copies

    def capture(*args: Any) -> Any:
        swap(loop.model, by_data)
        return original(*args)

    with attach(run_dir, loop, schedule="backward") as handle:
        loop.run(3)
        monkeypatch.setattr(SlotWriter, "finish_copies", capture)
        saved = handle.snapshot_now("now")
        assert not saved.fresh and "model/inner." in saved.why
        handle.detach()


@pytest.mark.parametrize("how", [by_data, by_copy])
def test_behind_the_forward_they_are_no_more_what_is_saved(run_dir: Path, how: Swap) -> None:
    loop = counting_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.forward()
        swap(loop.model, how)
        saved = handle.snapshot_now("an evaluation between micro-batches")
        assert not saved.fresh and "model/inner." in saved.why
        handle.detach()


def test_what_a_killed_process_leaves_is_not_taken_again_while_others_stand_in(
    run_dir: Path,
) -> None:
    """A loader that validation iterates takes position and generators again, at other times."""
    loop = counting_loop()
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    with with_peers(attach(run_dir, loop)) as handle:
        loop.run(3)
        native, seen = handle.region.native, loop.model.seen.clone()
        swap(loop.model, by_data)
        loop.model.seen.data.fill_(-1)
        list(loader)
        entry = native.read_journal()
        assert entry is not None and (entry.kind, entry.step) == (STEP_END, 3)
        held = {live.name: live.tensor for live in decode_entry(entry, context="test").lives}
        assert torch.equal(held["model/seen"], seen)
        handle.detach()
