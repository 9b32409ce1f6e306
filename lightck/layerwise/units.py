"""Units of layer-wise update: which parameters step together, and how they step alone.

A unit is what one optimizer holds of one module. Its number takes the place of an optimizer's
index, as the holder of its tensors: so copies are grouped and fenced by unit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck.state.boundary import join
from lightck.state.inventory import Inventory, Live, held_parameters


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters of one layer that one optimizer updates."""

    number: int
    """The unit's number, from the number of optimizers up: never an optimizer's index."""
    optimizer: int
    layer: str
    parameters: tuple[torch.Tensor, ...]


@dataclass(eq=False)
class Units:
    """The job's units. Used by the training thread."""

    inventory: Inventory
    all: tuple[Unit, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    """The names of the parameters, by identity."""
    _found_in: list[Any] = field(default_factory=list)
    """The parameters and whether they are trained: while these are the same, so are the units."""
    _of_parameter: dict[int, Unit] = field(default_factory=dict)
    _of_path: dict[str, Unit] = field(default_factory=dict)
    """The units by the path of a parameter's state."""

    def find(self) -> bool:
        """Find the units anew, if the optimizers' parameters changed; returns whether they did.

        A parameter that is in no module, or not trained now, is in no unit: the optimizer's own
        step updates it.
        """
        held = [list(held_parameters(optimizer)) for optimizer in self.inventory.optimizers]
        now = [x for parameters in held for p in parameters for x in (p, p.requires_grad)]
        same = len(now) == len(self._found_in) and all(map(operator.is_, now, self._found_in))
        if same:
            return False
        self._found_in, self.names = now, self.inventory.names()
        members: dict[tuple[int, str], list[torch.Tensor]] = {}
        for i, parameters in enumerate(held):
            for p in parameters:
                if p.requires_grad and id(p) in self.names:
                    layer = self.names[id(p)].rpartition(".")[0]
                    members.setdefault((i, layer), []).append(p)
        self.all = tuple(
            Unit(number, i, layer, tuple(parameters))
            for number, ((i, layer), parameters) in enumerate(members.items(), start=len(held))
        )
        self._of_parameter = {id(p): unit for unit in self.all for p in unit.parameters}
        self._of_path = {
            f"optim/{unit.optimizer}/{join('', self.names[id(p)])}": unit
            for unit in self.all
            for p in unit.parameters
        }
        self.inventory.invalidate()
        return True

    def of(self, parameter: torch.Tensor) -> Unit | None:
        """Return the unit of a parameter, or None."""
        return self._of_parameter.get(id(parameter))

    def assign(self, lives: Iterable[Live]) -> list[Live]:
        """Return the same tensors, each held by the unit whose update changes it."""
        return [self._assign(live) for live in lives]

    def _assign(self, live: Live) -> Live:
        unit = None
        if live.role == "parameter":
            unit = self._of_parameter.get(id(live.tensor))
        elif live.role == "optimizer":
            unit = self._of_path.get("/".join(live.name.split("/", 3)[:3]))
        return live if unit is None else replace(live, holders=frozenset((unit.number,)))


def step_only(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Run the optimizer's own step for these of its parameters; no hook runs.

    Every optimizer that is let in here treats each parameter by itself, with a state and a step
    counter of its own: parts in any order give the bits of the whole.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    some = [[p for p in params if id(p) in wanted] for params in held]
    # The function below torch's profiling hooks: those, and the user's, belong to `step()`.
    step: Any = type(optimizer).step
    try:
        for group, chosen in zip(groups, some, strict=True):
            group["params"] = chosen
        optimizer.param_groups = [g for g, chosen in zip(groups, some, strict=True) if chosen]
        step.__wrapped__(optimizer)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, held, strict=True):
            group["params"] = params
    # Fused kernels leave the counters alone. A backward that still needs the old value must find
    # out, as it does with the others.
    torch.autograd.graph.increment_version(list(parameters))


@dataclass(eq=False)
class OwnSteps:
    """Inserts layer-wise update between an optimizer's own `step()` and the user's hooks on it."""

    _hooks: list[RemovableHandle] = field(default_factory=list)
    _taken: list[tuple[Optimizer, list[dict[str, Any]]]] = field(default_factory=list)

    def behind_hooks(self, optimizer: Optimizer, action: Callable[[], None]) -> None:
        """Run `action` after every other pre-hook of the step that begins now."""

        def last(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            action()

        self._hooks.append(optimizer.register_step_pre_hook(last))

    def take(self, optimizer: Optimizer) -> None:
        """Leave the optimizer's step nothing to do; the user's post-hooks find all as it was."""
        groups = optimizer.param_groups

        def first(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            optimizer.param_groups = groups

        handle = optimizer.register_step_post_hook(first)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        self._hooks.append(handle)
        self._taken.append((optimizer, groups))
        optimizer.param_groups = []

    def put_back(self) -> None:
        """Restore optimizers and hooks, also after an interrupt inside a step (Ctrl-C)."""
        while self._taken:
            optimizer, groups = self._taken.pop()
            optimizer.param_groups = groups
        while self._hooks:
            self._hooks.pop().remove()
