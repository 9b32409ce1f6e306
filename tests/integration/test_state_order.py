"""Dicts of an optimizer's state come back with their keys in the order that they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import lightck
from support.loops import mlp


class Untidy(Optimizer):
    """Keeps tensors, numbers and dicts in an order of its own, the last parameters first."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(reversed(self.param_groups[0]["params"])):
            held = self.state[p]
            if not held and number % 2:
                held.update(zeta=torch.zeros(3), count=0, alpha=torch.zeros_like(p))
            elif not held:
                held.update(count=0, alpha=torch.zeros_like(p))
                held[7] = "seven"
                inner = {"y": torch.ones(2), "x": {"q": 1, "b": torch.zeros(1), "a": 2}, "w": 3}
                held.update(nested=inner, beta=torch.ones_like(p), zeta=torch.zeros(3))
            held["count"] += 1
            held["alpha"].add_(p.grad)
            p.sub_(p.grad, alpha=0.1)
        self.state.setdefault("shared", {"n": 1, "m": torch.ones(1), "k": 2})


def order_of(tree: Any) -> Any:
    """Keys of all dicts, in their order."""
    return [(k, order_of(v)) for k, v in tree.items()] if isinstance(tree, dict) else None


def order(model: torch.nn.Module, optimizer: Optimizer) -> Any:
    """The same of an optimizer's state, by parameter name."""
    names = {p: name for name, p in model.named_parameters()}
    named = {names.get(k, k): v for k, v in optimizer.state.items()}  # type: ignore[call-overload]
    return order_of(named)


def make() -> tuple[torch.nn.Module, Optimizer]:
    model = mlp(4, 2)
    return model, Untidy(model.parameters())


def step(model: torch.nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.fixture
def written(run_dir: Path) -> tuple[Path, Any]:
    """A run, and the order that its state had."""
    model, optimizer = make()
    with lightck.attach(model, optimizer, run_dir):
        for _ in range(2):
            step(model, optimizer)
    return run_dir, order(model, optimizer)


def test_state_that_is_not_there_yet_is_made_in_its_order(written: Any) -> None:
    path, wanted = written
    model, optimizer = make()
    assert lightck.restore(model, optimizer, path) is not None
    assert order(model, optimizer) == wanted


def test_state_that_is_there_in_another_order_is_put_into_its_own(written: Any) -> None:
    path, wanted = written
    model, optimizer = make()
    step(model, optimizer)
    for key, held in reversed([*optimizer.state.items()]):
        del optimizer.state[key]
        optimizer.state[key] = dict(reversed(held.items()))
    assert order(model, optimizer) != wanted
    assert lightck.restore(model, optimizer, path) is not None
    assert order(model, optimizer) == wanted


def test_state_of_an_optimizer_that_is_found_later_has_its_order(written: Any) -> None:
    path, wanted = written
    model, optimizer = make()
    assert lightck.restore(model, path=path) is not None
    with lightck.attach(model, optimizer, path):
        assert order(model, optimizer) == wanted


def test_the_order_is_still_there_after_a_second_life(written: Any) -> None:
    path, wanted = written
    for _ in range(2):
        model, optimizer = make()
        assert lightck.restore(model, optimizer, path) is not None
        with lightck.attach(model, optimizer, path):
            step(model, optimizer)
    model, optimizer = make()
    assert lightck.restore(model, optimizer, path) is not None
    assert order(model, optimizer) == wanted


def test_a_state_dict_that_is_read_without_a_model_has_the_order(written: Any) -> None:
    path, wanted = written
    (state,) = lightck.load(path)["optimizers"]
    names = [name for name, _ in make()[0].named_parameters()]
    found = {names[k] if isinstance(k, int) else k: v for k, v in state["state"].items()}
    assert order_of(found) == wanted
