"""A snapshot looks up again only what identity does not show to be the same as last time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightck.state.inventory import Inventory


def inventory() -> tuple[nn.Sequential, SGD, Inventory]:
    """Two layers, and an optimizer that holds a tensor and a number for the first weight."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_buffer("mean", torch.zeros(3))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model[0].weight] = {"moment": torch.zeros(3), "calls": 1}
    return model, optimizer, Inventory(model, [optimizer])


def seen(found: Inventory) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Return everything that a snapshot taken now would say, with the very tensors."""
    collected = found.collect()
    return [(live, id(live.tensor)) for live in collected.lives], collected.tree


def anew(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    """Return the same, by one who has never seen these objects."""
    return seen(Inventory(model, list(optimizers)))


Change = Callable[[nn.Sequential, SGD], object]


def state(optimizer: SGD) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]  # type: ignore[no-any-return]


def rename(held: dict[str, Any], old: str, new: str) -> None:
    """Give one entry of a dict another name, in its old place."""
    items = [(new if key == old else key, value) for key, value in held.items()]
    held.clear()
    held.update(items)


CHANGES: dict[str, Change] = {
    "a parameter replaced": lambda m, o: setattr(m[1], "weight", nn.Parameter(torch.ones(3, 3))),
    "a parameter more": lambda m, o: m[1].register_parameter("gain", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda m, o: setattr(m[1], "bias", None),
    "a parameter renamed": lambda m, o: rename(m[1]._parameters, "bias", "shift"),
    "a buffer replaced": lambda m, o: setattr(m[0], "mean", torch.ones(3)),
    "a buffer renamed": lambda m, o: rename(m[0]._buffers, "mean", "average"),
    "a module more": lambda m, o: m.append(nn.Linear(3, 3)),
    "a module renamed": lambda m, o: rename(m._modules, "1", "head"),
    "tied weights": lambda m, o: setattr(m[1], "weight", m[0].weight),
    "a parameter that left its group": lambda m, o: o.param_groups[0]["params"].pop(),
    "a group more": lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "an option of a group": lambda m, o: o.param_groups[0].update(lr=0.2),
    "a tensor of the state replaced": lambda m, o: state(o).update(moment=torch.ones(3)),
    "a tensor of the state more": lambda m, o: state(o).update(second=torch.ones(3)),
    "a tensor of the state renamed": lambda m, o: rename(state(o), "moment", "velocity"),
    "a number of the state": lambda m, o: state(o).update(calls=2),
    "a number of the state renamed": lambda m, o: rename(state(o), "calls", "turns"),
    "state of another parameter": lambda m, o: o.state.update({m[1].weight: {"calls": 1}}),
    "state that another parameter took": lambda m, o: o.state.update(
        {m[1].weight: o.state.pop(m[0].weight)}
    ),
    "state that is gone": lambda m, o: o.state.clear(),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changed_since_the_last_snapshot_is_found(case: str) -> None:
    model, optimizer, found = inventory()
    before = seen(found)
    CHANGES[case](model, optimizer)
    assert seen(found) == anew(model, optimizer) != before
    assert seen(found) == anew(model, optimizer)  # and what was just found is kept rightly


CONTAINERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "a list of numbers": ([1, 2], lambda held: held.append(3)),
    "a list's tensor": ([torch.zeros(3)], lambda held: held.__setitem__(0, torch.ones(3))),
    "a dict": ({"rate": 1}, lambda held: held.update(rate=2)),
    "a tuple with a list": (([1],), lambda held: held[0].append(2)),
    "a bytearray": (bytearray(b"ab"), lambda held: held.reverse()),
    "a set": ({1}, lambda held: held.add(2)),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_a_container_in_the_state_that_changed_in_place_is_captured_as_it_is_now(
    case: str,
) -> None:
    model, optimizer, found = inventory()
    held, change = CONTAINERS[case]
    state(optimizer)["history"] = held
    before = seen(found)
    change(held)
    assert seen(found) == anew(model, optimizer) != before


def test_while_nothing_changes_nothing_is_looked_up_again() -> None:
    model, optimizer, found = inventory()
    first = found.collect()
    with torch.no_grad():
        model[0].weight.add_(1)
        state(optimizer)["moment"].add_(1)
    second = found.collect()
    assert list(map(id, second.lives)) == list(map(id, first.lives))
    found.invalidate()
    assert list(map(id, found.collect().lives)) != list(map(id, first.lives))
