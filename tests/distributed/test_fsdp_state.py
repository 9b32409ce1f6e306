"""FSDP2 gathers parameters and lets them go; what lightck names stays the sharded state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

import lightck
from lightck.cli.main import main
from lightck.distributed.restore.selection import Key
from lightck.distributed.restore.survey import RegionSurvey
from lightck.errors import NoSnapshotError, RestoreMismatchError, StateError
from lightck.loop import state_prediction
from lightck.loop.hooks import Watched
from lightck.reader.assembly import AssembledSnapshot
from lightck.region.layout import Entry
from lightck.region.layout import Shard as Part
from lightck.state.inventory import Inventory
from support import internals
from support.distributed.ranks import Me, started
from support.distributed.sharded import (
    OPTIMIZERS,
    Net,
    differing,
    full,
    held,
    loss_of,
    mesh_of,
    net,
    parts,
    settle,
    train,
)


def on_ranks(world: int, code: Callable[[Me], Any]) -> list[Any]:
    with started(world, code) as job:
        return job.results()


def adam(model: nn.Module) -> Optimizer:
    return OPTIMIZERS["adamw foreach"](model)


# ---- Which tensors are the state ---------------------------------------------------------------


@pytest.mark.parametrize(("world", "reshard"), [(2, True), (2, False), (4, 2)])
def test_the_sharded_parameters_are_named_at_every_moment_of_a_step(
    world: int, reshard: bool | int
) -> None:
    def named(me: Me) -> set[str]:
        model = net(mesh_of(me.world), reshard_after_forward=reshard)
        optimizer = adam(model)
        list(train(me, model, optimizer, range(1, 2)))
        inventory, watched = Inventory(model, [optimizer]), Watched(model)
        watched.refresh()
        expected = [(v, id(v.tensor)) for v in inventory.collect().lives]
        sharded = {id(p) for p in model.parameters()}
        gathered = set()

        def look(moment: str) -> None:
            assert [(v, id(v.tensor)) for v in inventory.collect().lives] == expected, moment
            assert inventory.covered() and watched.owns(optimizer)
            assert all(Watched(model).holds(m) is False for m in model.modules())
            watched.refresh()
            assert watched.holds(model) and watched.holds(model.first)
            if any(id(p) not in sharded for p in model.parameters()):
                gathered.add(moment)

        for part in (model, model.first):
            part.register_forward_pre_hook(lambda *_: look("forward"))
            part.register_forward_hook(lambda *_: look("end of the forward"))
        model.first.weight.register_post_accumulate_grad_hook(lambda _: look("backward"))
        loss = loss_of(model, me, 2)
        look("before the backward")
        loss.backward()
        look("after the backward")
        optimizer.step()
        look("after the step")
        model.eval()
        with torch.no_grad():
            model(torch.arange(4))
        look("after an evaluation")
        return gathered

    for gathered in on_ranks(world, named):
        assert "forward" in gathered, "nothing was gathered: the test shows nothing"
        assert ("after an evaluation" in gathered) is (reshard is not True)


def test_an_inventory_made_while_parameters_are_gathered_finds_the_sharded_ones() -> None:
    def found(me: Me) -> None:
        model = net(mesh_of(me.world), reshard_after_forward=False)
        names = {id(p): name for name, p in model.named_parameters()}
        with torch.no_grad():
            model(torch.arange(4))
        assert not any(id(p) in names for p in model.parameters())
        lives = Inventory(model).collect().lives
        assert {id(v.tensor) for v in lives if v.role == "parameter"} == names.keys()
        loss_of(model, me, 1).backward()  # and the model still works

    on_ranks(2, found)


def test_a_parameter_that_the_user_replaces_is_the_state_from_then_on() -> None:
    def replaced(me: Me) -> None:
        model = net(mesh_of(me.world))
        inventory = Inventory(model)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        lives = {v.name: v.tensor for v in inventory.collect().lives}
        assert lives["model/first.weight"] is model.first.weight
        assert lives["model/first.weight"].data_ptr() == state["first.weight"].data_ptr()

    on_ranks(2, replaced)


def test_the_size_of_state_that_does_not_exist_yet_is_predicted_per_rank() -> None:
    def same(me: Me) -> None:
        for kind in ("adamw foreach", "sgd momentum"):
            model = net(mesh_of(me.world))
            optimizer = OPTIMIZERS[kind](model)
            inventory = Inventory(model, [optimizer])
            before = {e.name: e for e in state_prediction.expected(inventory)[0]}
            list(train(me, model, optimizer, range(1, 2)))
            after = {e.name: e for e in state_prediction.expected(inventory)[0]}
            assert before.keys() == after.keys()
            for name, entry in after.items():
                guess = before[name]
                assert (guess.length, guess.shape, guess.shard) == (
                    entry.length, entry.shape, entry.shard,
                )  # fmt: skip

    on_ranks(3, same)


def test_every_layer_ticks_in_the_backward(region_dir: Path) -> None:
    def ticks(me: Me) -> int:
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        with lightck.attach(model, optimizer, region_dir, threads=1) as handle:
            loss_of(model, me, 1).backward()
            return internals.checkpointer(handle)._gradients

    # embed (tied with head), first, norm, last, gate; head once more: one hook per module
    assert on_ranks(2, ticks) == [6, 6]


# ---- Torn --------------------------------------------------------------------------------------


def by_dtensor(parameter: Any) -> None:
    parameter.add_(1)


def by_part(parameter: Any) -> None:
    parameter.to_local().add_(1)


@pytest.mark.parametrize("write", [by_dtensor, by_part])
def test_a_write_into_the_window_tears_the_snapshot(
    write: Callable[[Any], None], region_dir: Path
) -> None:
    def torn(me: Me) -> Any:
        model = net(mesh_of(me.world))
        optimizer, reports = adam(model), []
        sharded = dict(model.named_parameters())
        handle = lightck.attach(model, optimizer, region_dir, threads=1, on_error=reports.append)
        for _ in train(me, model, optimizer, range(1, 3)):
            settle(handle)
        loss = loss_of(model, me, 3)
        with torch.no_grad():
            write(sharded["gate.weight" if me.rank == 0 else "first.weight"])
        loss.backward()
        optimizer.step()
        handle.detach()
        return [str(r) for r in reports], handle.stats().torn

    for rank, (reports, count) in enumerate(on_ranks(2, torn)):
        assert count == 1 and len(reports) == 1
        assert ("gate.weight" if rank == 0 else "first.weight") in reports[0]


def test_a_write_that_no_counter_sees_is_found_by_the_comparison_of_bytes(region_dir: Path) -> None:
    def torn(me: Me) -> Any:
        model, reports = net(mesh_of(me.world)), []
        optimizer, weight = adam(model), model.first.weight
        settings = {"threads": 1, "proof": True, "schedule": "eager", "on_error": reports.append}
        handle = lightck.attach(model, optimizer, region_dir, **settings)
        for _ in train(me, model, optimizer, range(1, 3)):
            settle(handle)
        copied = handle.stats().bytes_copied
        size = sum(part.nbytes for part in parts(model, optimizer).values())
        loss = loss_of(model, me, 3)
        while handle.stats().bytes_copied < copied + size:
            time.sleep(0.001)
        versions = weight._version, weight._local_tensor._version
        torch._foreach_add_([weight.detach()], 1.0)
        assert versions == (weight._version, weight._local_tensor._version), "a counter saw it"
        loss.backward()
        optimizer.step()
        handle.detach()
        return [str(r) for r in reports], handle.stats().torn

    for reports, count in on_ranks(2, torn):
        assert count == 1 and len(reports) == 1 and "first.weight" in reports[0]


# ---- Restored ----------------------------------------------------------------------------------


def saved(me: Me, path: Path, mesh: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """One snapshot of step 1, and what it holds."""
    model = net(mesh_of(*(mesh or (me.world,))))
    optimizer = adam(model)
    with lightck.attach(model, optimizer, path, threads=1):
        list(train(me, model, optimizer, range(1, 2)))
    return parts(model, optimizer)


def test_missing_optimizer_state_comes_back_sharded_as_its_parameter(region_dir: Path) -> None:
    def back(me: Me) -> None:
        expected = saved(me, region_dir)
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        lightck.restore(model, optimizer, region_dir)
        assert differing(parts(model, optimizer), expected) == []
        for parameter in model.parameters():
            moment = optimizer.state[parameter]["exp_avg"]
            assert isinstance(moment, DTensor) and moment._spec == parameter._spec
            assert type(optimizer.state[parameter]["step"]) is torch.Tensor
        later = net(mesh_of(me.world))  # and for an optimizer that comes only after the restore
        lightck.restore(later, None, region_dir)
        optimizer = adam(later)
        lightck.attach(later, optimizer, region_dir, threads=1).detach()
        assert differing(parts(later, optimizer), expected) == []

    on_ranks(3, back)


def test_another_mesh_is_refused_with_both_named_and_nothing_changed(region_dir: Path) -> None:
    on_ranks(2, lambda me: saved(me, region_dir))

    def refused(me: Me, make: Callable[[], nn.Module]) -> str:
        model = make()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(RestoreMismatchError) as caught:
            lightck.restore(model, adam(model), region_dir)
        for name, tensor in model.state_dict().items():
            assert torch.equal(held(tensor), held(before[name]))
        return str(caught.value)

    saved_at = "not supported yet: saved mesh dp=2 at ({}): Shard(0); live {}"
    for rank, text in enumerate(on_ranks(3, lambda me: refused(me, lambda: net(mesh_of(3))))):
        assert saved_at.format(rank % 2, f"mesh dp=3 at ({rank}): Shard(0)") in text
    for rank, text in enumerate(on_ranks(2, lambda me: refused(me, lambda: net(mesh_of(2, 1))))):
        live = f"mesh dp=2 x tp=1 at ({rank}, 0): Replicate(), Shard(0)"
        assert saved_at.format(rank, live) in text
    for rank, text in enumerate(on_ranks(2, lambda me: refused(me, Net))):
        assert saved_at.format(rank, "whole, no DTensor") in text


def test_sharded_extras_come_back_sharded(region_dir: Path) -> None:
    def back(me: Me) -> None:
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        ema = {name: p.detach().clone() for name, p in model.named_parameters()}
        average: dict[str, Any] = {"ema": ema, "count": 3}
        path = region_dir
        with lightck.attach(model, optimizer, path, threads=1, extras={"ema": average}):
            list(train(me, model, optimizer, range(1, 2)))
        for empty in (False, True):
            again: dict[str, Any] = {"ema": {n: torch.zeros_like(t) for n, t in ema.items()}}
            again = {} if empty else again
            given = dict(again.get("ema", {}))
            model = net(mesh_of(me.world))
            lightck.restore(model, adam(model), path, extras={"ema": again})
            assert again["count"] == 3 and again["ema"].keys() == ema.keys()
            for name, tensor in ema.items():
                assert again["ema"][name]._spec == tensor._spec
                assert torch.equal(held(again["ema"][name]), held(tensor))
                assert empty or again["ema"][name] is given[name], "filled, not replaced"

    on_ranks(2, back)


def test_a_sharded_extra_taken_where_a_step_ends_is_refused_at_attach(region_dir: Path) -> None:
    def refused(me: Me) -> None:
        part = distribute_tensor(torch.ones(4), mesh_of(me.world), [Shard(0)])
        extras = {"x": lightck.at_step({"p": part})}
        with pytest.raises(StateError, match="extras/x/p is a DTensor, .* with lightck.at_forward"):
            lightck.attach(nn.Linear(2, 2), None, region_dir, extras=extras)

    on_ranks(1, refused)


def test_a_sharded_extra_without_a_live_mesh_is_refused_even_if_not_strict(
    region_dir: Path,
) -> None:
    def refused(me: Me) -> str:
        part = distribute_tensor(torch.ones(4), mesh_of(me.world), [Shard(0)])
        model = nn.Linear(2, 2)
        optimizer, extras = adam(model), {"x": {"p": part}}
        with lightck.attach(model, optimizer, region_dir, threads=1, extras=extras):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        given: dict[str, Any] = {}
        with pytest.raises(RestoreMismatchError) as caught:
            lightck.restore(model, adam(model), region_dir, extras={"x": given}, strict=False)
        assert given == {}
        return str(caught.value)

    for rank, text in enumerate(on_ranks(2, refused)):
        assert "extras/x/p: restoring sharded state on another mesh is not supported yet" in text
        assert f"saved mesh dp=2 at ({rank}): Shard(0); live no DTensor" in text


def test_inspect_says_what_each_part_is_a_part_of(
    region_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, lambda me: saved(me, region_dir))
    assert main(["inspect", "--tensors", str(region_dir)]) == 0
    (line,) = (x for x in capfd.readouterr().out.splitlines() if x.startswith("model/first.weight"))
    assert "float32[4,6]" in line
    assert line.endswith("[7, 6] at [0, 0], mesh dp=2 at (0): Shard(0)")


def test_what_load_gives_is_the_rank_s_own_part(region_dir: Path) -> None:
    def loaded(me: Me) -> None:
        expected = saved(me, region_dir)
        state = lightck.load(region_dir, rank=me.rank)["model"]
        assert torch.equal(state["first.weight"], expected["parameter first.weight"])
        assert (state["gate.weight"].numel() == 0) is (me.rank > 0)

    on_ranks(2, loaded)


def test_the_parts_of_all_ranks_are_put_together_and_exported(region_dir: Path) -> None:
    def trained(me: Me) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        with lightck.attach(model, optimizer, region_dir, threads=1):
            list(train(me, model, optimizer, range(1, 2)))
        moment = optimizer.state[model.gate.weight]["exp_avg"].full_tensor()
        return {n: full(t) for n, t in model.state_dict().items()}, moment

    expected, moment = on_ranks(3, trained)[0]
    state = lightck.load(region_dir, whole=True)
    assert differing(state["model"], expected) == []
    assert state["model"]["embed.weight"] is state["model"]["head.weight"]
    states = state["optimizers"][0]["state"].values()
    assert any(torch.equal(s["exp_avg"], moment) for s in states if s["exp_avg"].shape == (1, 6))
    assert main(["export", str(region_dir), str(region_dir / "model.pt")]) == 0
    Net().load_state_dict(torch.load(region_dir / "model.pt", weights_only=True)["model"])
    (region_dir / "region-00001.lck").unlink()
    with pytest.raises(NoSnapshotError, match="the parts of rank 1: nothing of it is there"):
        lightck.load(region_dir, whole=True)


FORGED: dict[str, tuple[set[int | None], Callable[[Entry, Part], Entry], str]] = {
    "another dtype": ({1}, lambda e, s: replace(e, dtype="int32"), "a part of int32"),
    "another whole": ({1}, lambda e, s: replace(e, shard=grown(s, 1)), "on another rank of"),
    "a tie": ({1}, lambda e, s: replace(e, alias_of="model/first.weight"), "tied to model/first"),
    "strides": ({1}, lambda e, s: replace(e, strides=(9,) * len(e.shape)), "with strides"),
    "too much": ({None, 0, 1}, lambda e, s: replace(e, shard=grown(s, 1 << 50)), "do not tile"),
}  # fmt: skip


def grown(shard: Part, more: int) -> Part:
    return replace(shard, shape=(shard.shape[0] + more, *shard.shape[1:]))


@pytest.mark.parametrize("what", FORGED)
def test_parts_that_are_not_of_one_whole_are_not_put_together(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    on_ranks(2, lambda me: saved(me, region_dir) and None)
    ranks, edit, told = FORGED[what]
    honest = RegionSurvey.assembled

    def forged(
        self: RegionSurvey, key: Key, rank: int | None = None, **instant: Any
    ) -> AssembledSnapshot | str:
        found = honest(self, key, rank, **instant)
        if rank not in ranks or not isinstance(found, AssembledSnapshot):
            return found
        chosen = "model/embed.weight"
        return replace(
            found,
            entries=tuple(
                edit(e, e.shard) if e.shard and e.name == chosen else e for e in found.entries
            ),
        )

    monkeypatch.setattr(RegionSurvey, "assembled", forged)
    with pytest.raises((NoSnapshotError, StateError), match=told):
        lightck.load(region_dir, whole=True)


def test_parts_with_rows_between_those_of_others_are_restored_and_not_put_together(
    region_dir: Path,
) -> None:
    def strided(me: Me) -> None:
        own = torch.arange(4.0) + 10 * me.rank  # rows 0, 1, 4, 5 on one rank, 2, 3, 6, 7
        part = DTensor.from_local(own, mesh_of(me.world), [_StridedShard(0, split_factor=2)])
        model = nn.Linear(2, 2)
        optimizer, extras = adam(model), {"x": {"p": part}}
        with lightck.attach(model, optimizer, region_dir, threads=1, extras=extras):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        given: dict[str, Any] = {"p": part.clone().zero_()}
        lightck.restore(model, adam(model), region_dir, extras={"x": given})
        assert torch.equal(held(given["p"]), own) and given["p"]._spec == part._spec

    on_ranks(2, strided)
    with pytest.raises(StateError, match=r"extras/x/p: 2 parts do not tile \[8\]"):
        lightck.load(region_dir, whole=True)


# ---- Ways to train -----------------------------------------------------------------------------


def test_accumulated_gradients_that_are_reduced_at_the_end_change_nothing(region_dir: Path) -> None:
    def run(me: Me, model: Any, optimizer: Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model.set_reshard_after_backward(micro == 2)
                loss = loss_of(model, me, 10 * step + micro)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def compare(me: Me) -> None:
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        expected = run(me, model, optimizer, range(1, 4)), parts(model, optimizer)
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        with lightck.attach(model, optimizer, region_dir, threads=1, proof=True) as handle:
            losses = run(me, model, optimizer, range(1, 3))
        assert handle.stats().torn == handle.stats().failed == 0
        model = net(mesh_of(me.world))
        optimizer = adam(model)
        lightck.restore(model, optimizer, region_dir)
        losses += run(me, model, optimizer, range(3, 4))
        assert losses == expected[0]
        assert differing(parts(model, optimizer), expected[1]) == []

    on_ranks(2, compare)
