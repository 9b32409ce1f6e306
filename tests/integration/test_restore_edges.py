"""Restoring beside a trainer that writes, and into models that differ from what was saved."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import lightck
from lightck.distributed.restore import survey as holdings
from lightck.errors import StateError
from lightck.region.region import Region
from support import processes
from support.loops import adam_loop, attach, of_live, of_stored


def _read_while_overtaken(path: Path, reader: str, patch: pytest.MonkeyPatch, more: int) -> None:
    """Read while a trainer replaces, once, what the reader has found, or has opened if it grows."""

    def job(parent: processes.Parent) -> None:
        loop, extra = adam_loop(), {"t": torch.zeros(1)}
        with attach(path, loop, extras={"extra": extra}) as handle:
            for _ in range(2):
                for _ in range(3):
                    loop.run(1)
                    handle.wait()
                parent.send(loop.seen)
                parent.pause()
                extra["t"] = torch.zeros(1 + more)

    child = processes.start(job)
    child.receive()
    seen: list[Any] = []

    def overtake() -> None:
        if not seen:
            child.let_go()
            seen.append(child.receive())

    if more:
        recover = Region.recover
        patch.setattr(Region, "recover", lambda region: (overtake(), recover(region))[1])
    else:
        survey = holdings.open_and_recover
        patch.setattr(holdings, "open_and_recover", lambda where: (survey(where), overtake())[0])
    if reader == "restore":
        loop = adam_loop()
        info = lightck.restore(loop.model, list(loop.optimizers), path)
        assert info is not None and info.step == 5 and info.fell_back == ()
        held = of_live(loop.model, loop.optimizers)
    else:
        assert lightck.load(path)["step"] == 5
        held = of_stored(path, 5)
    assert held == seen[0][5]
    child.let_go()
    child.receive()
    assert child.join() == 0


@pytest.mark.parametrize("reader", ["restore", "load"])
@pytest.mark.parametrize("more", [0, 1 << 20])
def test_a_reader_that_a_trainer_overtakes_looks_again(
    run_dir: Path, reader: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer overwrites every slot that was found; with `more` it grows the region as well."""
    _read_while_overtaken(run_dir, reader, monkeypatch, more)


def _head(width: int, loose: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that also holds a parameter of no module."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, width))
    scale = torch.nn.Parameter(torch.ones(loose))
    return model, torch.optim.AdamW([*model.parameters(), scale])


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scale = optimizer.param_groups[0]["params"][-1]
    (model(torch.ones(2, 4)).sum() + scale.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _saved(path: Path) -> None:
    model, optimizer = _head(3)
    with lightck.attach(model, optimizer, path):
        for _ in range(3):
            _step(model, optimizer)


@pytest.mark.parametrize(("width", "loose"), [(5, 4), (3, 6)])
def test_state_of_a_parameter_that_was_skipped_is_skipped_and_told(
    run_dir: Path, width: int, loose: int
) -> None:
    _saved(run_dir)
    model, optimizer = _head(width, loose)
    info = lightck.restore(model, optimizer, run_dir, strict=False)
    assert info is not None
    names = ["1.weight", "1.bias"] if width != 3 else ["@0.4"]
    for name in names:
        assert f"optim/0/{name}/exp_avg" in info.skipped
    held = len(optimizer.state)
    assert held == 5 - len(names)
    _step(model, optimizer)
    assert len(optimizer.state) == 5
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == parameter.shape
        assert state["step"] == (1 if parameter.shape[0] in (5, 6) else 4)


def test_state_of_a_skipped_parameter_is_skipped_whatever_its_name(run_dir: Path) -> None:
    def made(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ParameterDict({"a/b%": torch.ones(width), "c": torch.ones(2)})
        return model, torch.optim.AdamW(model.parameters())

    def stepped(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    model, optimizer = made(3)
    with lightck.attach(model, optimizer, run_dir) as handle:
        stepped(model, optimizer)
        assert handle.step == 1
    model, optimizer = made(4)
    info = lightck.restore(model, optimizer, run_dir, strict=False)
    assert info is not None and "optim/0/a%2Fb%25/exp_avg" in info.skipped, info
    assert [*optimizer.state] == [model["c"]]
    stepped(model, optimizer)


def test_a_parameter_of_no_module_with_another_shape_is_refused_before_anything_changes(
    run_dir: Path,
) -> None:
    _saved(run_dir)
    model, optimizer = _head(3, loose=6)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(lightck.RestoreMismatchError) as caught:
        lightck.restore(model, optimizer, run_dir)
    assert list(caught.value.different) == ["optim/0/@0.4"]
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state


@pytest.mark.parametrize("several", [False, True])
def test_a_restored_model_that_never_trains_is_let_go(run_dir: Path, several: bool) -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    loop = adam_loop()
    with lightck.attach([loop.model] if several else loop.model, None, run_dir) as handle:
        loop.run(2)
        handle.wait()  # step 1: it knows the generators at its forward
    gc.collect()  # models of other tests, and their hooks
    before = len(hooks)
    loop = adam_loop()
    given = [loop.model] if several else loop.model
    info = lightck.restore(given, list(loop.optimizers), run_dir, step=1)
    assert info is not None
    assert len(hooks) == before + 1
    gone = weakref.ref(loop.model)
    del loop, given
    gc.collect()
    assert gone() is None
    assert len(hooks) == before


def test_state_under_strings_and_integers_comes_back_under_them(run_dir: Path) -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.state[0].setdefault("total", torch.zeros(2)).add_(1)
            self.state["global"].setdefault("steps", torch.zeros(())).add_(1)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=0.1)

    model = torch.nn.Linear(2, 2)
    optimizer = Counting(model.parameters())
    with lightck.attach(model, optimizer, run_dir):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    model = torch.nn.Linear(2, 2)
    again = Counting(model.parameters())
    assert lightck.restore(model, again, run_dir) is not None
    assert torch.equal(again.state[0]["total"], torch.full((2,), 3.0))
    assert torch.equal(again.state["global"]["steps"], torch.tensor(3.0))


def _pair(tied: bool, narrow: bool = False) -> torch.nn.Sequential:
    first, second = torch.nn.Linear(4, 2 if narrow else 4), torch.nn.Linear(4, 4)
    if tied:
        second.weight = first.weight
    return torch.nn.Sequential(first, second)


def _save_pair(path: Path, tied: bool) -> torch.nn.Sequential:
    model = _pair(tied)
    optimizer = torch.optim.SGD(model.parameters())
    with lightck.attach(model, optimizer, path):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model


def test_tensors_that_were_not_tied_are_not_read_into_one(run_dir: Path) -> None:
    saved = _save_pair(run_dir, tied=False)
    model = _pair(tied=True)
    before = model[0].weight.clone()
    with pytest.raises(lightck.RestoreMismatchError) as caught:
        lightck.restore(model, None, run_dir)
    told = "tied to model/0.weight here, not in the snapshot"
    assert caught.value.different == {"model/1.weight": told}
    assert torch.equal(model[0].weight, before)
    info = lightck.restore(model, None, run_dir, strict=False)
    assert info is not None and info.skipped["model/1.weight"] == told
    assert torch.equal(model[0].weight, saved[0].weight)


def test_a_saved_alias_whose_tensor_is_skipped_is_told_to_be_skipped(run_dir: Path) -> None:
    _save_pair(run_dir, tied=True)
    model = _pair(tied=False, narrow=True)
    before = model[1].weight.clone()
    info = lightck.restore(model, None, run_dir, strict=False)
    assert info is not None
    assert "not restored" in info.skipped["model/1.weight"]
    assert torch.equal(model[1].weight, before)


def test_a_model_without_memory_is_refused_and_not_said_to_be_restored(run_dir: Path) -> None:
    _save_pair(run_dir, tied=False)
    with torch.device("meta"):
        model = _pair(tied=False)
    with pytest.raises(StateError, match=r"model/0.weight is on the meta device"):
        lightck.restore(model, None, run_dir)


def test_what_could_not_be_found_again_is_refused_at_attach(run_dir: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twins = {"d": {1: torch.ones(2), "1": torch.zeros(2)}}
    with pytest.raises(StateError, match=r"extras/d/1 is the name of two tensors"):
        lightck.attach(model, optimizer, run_dir, extras=twins)
    with pytest.raises(StateError, match="'model/ema' begins with 'model/'"):
        lightck.attach(model, optimizer, run_dir, extras={"model/ema": {"a": 1}})
    with pytest.raises(lightck.ConfigError, match="an optimizer is given twice"):
        lightck.attach(model, [optimizer, optimizer], run_dir)
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    with pytest.raises(StateError, match=r"model/weight is a TwoTensor, which wraps"):
        lightck.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir)


def test_an_extra_that_comes_to_hold_two_tensors_of_one_name_is_told(run_dir: Path) -> None:
    loop = adam_loop()
    more: dict[object, torch.Tensor] = {1: torch.ones(2)}
    extras = {"more": lightck.at_forward(more)}
    handle = lightck.attach(loop.model, list(loop.optimizers), run_dir, policy=1, extras=extras)
    loop.run(2)
    more["1"] = torch.zeros(2)
    with pytest.warns(RuntimeWarning, match=r"extras/more/1 is the name of two tensors"):
        loop.run(2)
    del more["1"]
    loop.run(2)
    handle.wait()
    assert handle.last_committed_step == 5
    with pytest.raises(StateError, match=r"extras/more/1 is the name of two tensors"):
        handle.close()  # the first error


@pytest.mark.parametrize("step", [True, "2", "exact", -1, 1.0])
def test_a_step_that_is_none_is_not_taken_for_one(run_dir: Path, step: object) -> None:
    with pytest.raises(lightck.ConfigError, match=r"load: step must be the number of a step"):
        lightck.load(run_dir, step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", ["0", -1, True, None])
def test_a_rank_that_is_none_is_not_taken_for_one(run_dir: Path, rank: object) -> None:
    with pytest.raises(lightck.ConfigError, match=r"load: rank must be the number of a rank"):
        lightck.load(run_dir, rank=rank)  # type: ignore[arg-type]
