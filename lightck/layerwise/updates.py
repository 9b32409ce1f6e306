"""Layer-wise updates: which jobs may use them, when a layer is due, and what the loop must keep to.

Two plain steps first show what the loop does between a gradient and its update. Then each unit is
updated as soon as its gradients are final, and the user's `step()` becomes the check.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck.errors import ConfigError
from lightck.layerwise.gradients import (
    FinalGradients,
    GradientListener,
    GradientRecord,
    GroupOptions,
    option_changed,
    options_of,
    same_samples,
)
from lightck.state.boundary_codec import join
from lightck.state.inventory import (
    StateTensor,
    all_covered,
    held_parameters,
    names_of,
    torch_class,
)

# ---- units: which parameters step together, and how they step alone ------------------------------
# A unit is what one optimizer holds of one module. Its number takes the place of an optimizer's
# index, as the holder of its tensors: so copies are grouped and fenced by unit.


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

    model: nn.Module
    optimizers: list[Optimizer]
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
        held = [list(held_parameters(optimizer)) for optimizer in self.optimizers]
        now = [x for parameters in held for p in parameters for x in (p, p.requires_grad)]
        same = len(now) == len(self._found_in) and all(map(operator.is_, now, self._found_in))
        if same:
            return False
        self._found_in, self.names = now, names_of(self.model)
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
        return True

    def of(self, parameter: torch.Tensor) -> Unit | None:
        """Return the unit of a parameter, or None."""
        return self._of_parameter.get(id(parameter))

    def assign(self, lives: Iterable[StateTensor]) -> list[StateTensor]:
        """Return the same tensors, each held by the unit whose update changes it."""
        return [self._assign(live) for live in lives]

    def _assign(self, live: StateTensor) -> StateTensor:
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
    step: Any = torch_class(optimizer).step
    try:
        for group, chosen in zip(groups, some, strict=True):
            group["params"] = chosen
        optimizer.param_groups = [g for g, chosen in zip(groups, some, strict=True) if chosen]
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, held, strict=True):
            group["params"] = params
    # Fused kernels leave the counters alone. A backward that still needs the old value must find
    # out, as it does with the others.
    torch.autograd.graph.increment_version(list(parameters))


@dataclass(eq=False)
class StepHooks:
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


# ---- when a unit is due, and what the loop must keep to ------------------------------------------

PLAIN_STEPS = 2
"""The number of steps that are taken plainly first."""
ALLOWED = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
    *(torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.SparseAdam),
)
"""Optimizers that treat every parameter by itself, with state and counters of its own."""
REFUSED = {
    "LBFGS": "evaluates the whole model several times within a step",
    "Muon": "may need whole matrices that ranks hold parts of",
}
_ASKED = 'update="layerwise" was asked for, but '
_PLAINLY = 'use update="plain"'


@dataclass(eq=False)
class LayerUpdates:
    """Decides when each unit is updated, and checks that the loop agrees.

    The thread that runs the backward uses it, which is the training thread on a CPU.
    """

    units: Units
    accumulation: int
    final: FinalGradients
    step: int = 0
    """The number of complete steps since attach."""
    failed: str = ""
    """Why the state is mixed for good: some layers are updated, and the step cannot be
    completed."""
    _counts: dict[int, int] = field(default_factory=dict)
    """The number of gradients in this step, by the parameter's identity."""
    _records: dict[int, GradientRecord] = field(default_factory=dict)
    _options: dict[int, GroupOptions] = field(default_factory=dict)
    """The options of each optimizer when its first gradient was final, by the optimizer's index."""
    _updated: set[int] = field(default_factory=set)
    """The numbers of the units that were updated in this step."""
    step_hooks: StepHooks = field(default_factory=StepHooks)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def refuse(self, *, boundary: bool) -> None:
        """Refuse, at attach, a job that cannot have layer-wise update.

        Raises:
            ConfigError: the reason.
        """
        why = _refusal(self.units, boundary) or self.final.refusal()
        if why is not None:
            raise ConfigError(f"{_ASKED}{why}; {_PLAINLY}")

    def find_units(self, listener: GradientListener) -> bool:
        """Find the units and listen for their gradients; anew when the parameters have changed.

        Returns whether they have.
        """
        changed = self.units.find()
        if changed:
            self._remove_handles()
            every = (p for unit in self.units.all for p in unit.parameters)
            self._handles = self.final.listen(every, listener)
        return changed

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        self.step_hooks.put_back()
        self._remove_handles()
        self.final.stop()

    @property
    def active(self) -> bool:
        """Tell whether layers are updated by themselves: the plain steps are over."""
        return self.step >= PLAIN_STEPS

    def gradient_added(
        self, parameter: torch.Tensor, *, inside_update: bool, final: bool = True
    ) -> Unit | None:
        """Take note of a gradient that was added; return the unit to be updated now, if any.

        Raises:
            ConfigError: it comes too late, or inside an update.
        """
        unit = self.units.of(parameter)
        if unit is None:
            return None
        self._require_unmixed()
        name = self.units.names[id(parameter)]
        if inside_update:
            raise self.misuse(f"{name} gets a gradient inside an update (a closure?)")
        if unit.number in self._updated:
            raise self.misuse(
                f"{name} gets another gradient after its update: a backward of this step has"
                f" failed half-way, or there are more than accumulation={self.accumulation}"
                " backward passes per step"
            )
        if any(p.grad is None for p in unit.parameters if p is parameter or id(p) in self._counts):
            raise self.misuse(f"a gradient of {unit.layer or name} is cleared inside the backward")
        self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
        if not final:
            if self._counts[id(parameter)] >= self.accumulation:
                raise self.misuse(
                    f"gradient {self._counts[id(parameter)]} of {name} in this step, of"
                    f" accumulation={self.accumulation}, is this rank's alone: no_sync(), or DDP"
                    " still waits for parameters without a gradient"
                )
            return None
        if not self.active:
            self._record(unit, (parameter,))
            return None
        whole = all(self._counts.get(id(p), 0) == self.accumulation for p in unit.parameters)
        return unit if whole else None

    def update(self, unit: Unit) -> None:
        """Update one unit, whose copies have left its memory."""
        self._updated.add(unit.number)
        with self.final.in_place(unit.parameters):
            self._step(unit.optimizer, unit.parameters)
        self._record(unit, unit.parameters)

    def _step(self, i: int, parameters: Sequence[torch.Tensor]) -> None:
        optimizer = self.units.optimizers[i]
        try:
            step_only(optimizer, parameters)
        except BaseException as error:
            self.failed = f"the update of {self._label(parameters)} failed: {error!r}"
            raise

    def _label(self, parameters: Sequence[torch.Tensor]) -> str:
        names = [self.units.names.get(id(p), "a parameter") for p in parameters[:1]]
        return names[0] + (f" and {len(parameters) - 1} more" if len(parameters) > 1 else "")

    def _record(self, unit: Unit, parameters: Iterable[torch.Tensor]) -> None:
        if unit.optimizer not in self._options:
            optimizer = self.units.optimizers[unit.optimizer]
            self._options[unit.optimizer] = options_of(optimizer)
        self._records |= {id(p): GradientRecord.take(p) for p in parameters}

    def gradient_placed(self, parameter: torch.Tensor, final: torch.Tensor) -> None:
        """Take the gradient as the backward leaves it: from now on only the loop writes it.

        Raises:
            ConfigError: it is not the one that was used.
        """
        record = self._records.get(id(parameter))
        if record is None:
            return
        if parameter.grad is not record.gradient or not same_samples(record.gradient, final):
            name = self.units.names[id(parameter)]
            raise self.misuse(f"the gradient of {name} is not the one that was reduced")
        self._records[id(parameter)] = GradientRecord.take(parameter)

    def check(self, i: int) -> None:
        """Check, as the user's step begins, that what its update is made from has not changed.

        Raises:
            ConfigError: something has changed in between; with layers updated, for good.
        """
        self._require_unmixed()
        self.final.step_begins()
        optimizer = self.units.optimizers[i]
        why = self._difference(i, optimizer)
        if why is None and not self.active:
            why = self._wrong_count(i)
        if why is not None:
            raise self.misuse(why)

    def _difference(self, i: int, optimizer: Optimizer) -> str | None:
        if getattr(optimizer, "grad_scale", None) is not None:
            return "a GradScaler leaves the unscaling to the optimizer's step"
        for parameter in held_parameters(optimizer):
            record = self._records.get(id(parameter))
            changed = None if record is None else record.change(parameter)
            if changed is not None:
                name = self.units.names[id(parameter)]
                return (
                    f"{changed}, that of {name}, between the backward and step() (clipping,"
                    " unscaling, zero_grad, averaging?)"
                )
        if i in self._options:
            changed = option_changed(self._options[i], options_of(optimizer))
            if changed is not None:
                return (
                    f"{changed} of optimizer {i} between the backward and step(): set it"
                    " before the backward"
                )
        return None

    def _wrong_count(self, i: int) -> str | None:
        mine = [p for unit in self.units.all if unit.optimizer == i for p in unit.parameters]
        counts = {id(p): self._counts[id(p)] for p in mine if id(p) in self._counts}
        if not counts or max(counts.values()) == self.accumulation:
            return None
        most = max(counts, key=counts.__getitem__)
        return (
            f"{self.units.names[most]} got {counts[most]} gradients in one step, and"
            f" accumulation={self.accumulation} was stated:"
            " update=lightck.Layerwise(accumulation=<backward passes per step>)"
        )

    def update_rest(self, i: int) -> None:
        """Update what had no update of its own, and leave the user's step nothing to do."""
        optimizer = self.units.optimizers[i]
        rest = [p for p in held_parameters(optimizer) if not self._updated_alone(p)]
        if rest:
            self._step(i, rest)
        self.step_hooks.take(optimizer)

    def _updated_alone(self, parameter: torch.Tensor) -> bool:
        unit = self.units.of(parameter)
        return unit is not None and self.is_updated(unit)

    def is_updated(self, unit: Unit) -> bool:
        """Tell whether a unit was updated in this step."""
        return unit.number in self._updated

    def step_ended(self) -> None:
        """Take note that every optimizer has stepped: a step is complete."""
        self.step += 1
        for held in (self._counts, self._records, self._options, self._updated):
            held.clear()

    def _require_unmixed(self) -> None:
        if self.failed:
            raise ConfigError(f"the state is mixed: {self.failed}. Restore the last snapshot")

    def misuse(self, why: str) -> ConfigError:
        """Make the error for a loop that layer-wise update cannot follow; note a mixed state."""
        if not self._updated:
            return ConfigError(f"{_ASKED}{why}; {_PLAINLY}. No layer of this step is updated yet")
        self.failed = why
        return ConfigError(
            f"{_ASKED}{why}; {len(self._updated)} layers of this step are updated already:"
            f" {_PLAINLY} and restore the last snapshot"
        )


def _refusal(units: Units, boundary: bool) -> str | None:
    """Return why no layer of these units can be updated alone; None if each can."""
    optimizers = units.optimizers
    if not optimizers or not all_covered(units.model, optimizers):
        return "it needs all optimizers: give attach every one, for every trainable parameter"
    if boundary:
        return "boundary= means that optimizers step at different rates"
    holders: dict[int, int] = {}
    for i, optimizer in enumerate(optimizers):
        why = _kind(optimizer)
        if why is not None:
            return f"{type(optimizer).__name__} (optimizer {i}) {why}"
        for p in held_parameters(optimizer):
            if holders.setdefault(id(p), i) != i:
                return f"optimizers {holders[id(p)]} and {i} share a parameter"
            if type(p) not in (nn.Parameter, torch.Tensor) or p.device.type != "cpu":
                return f"a parameter is a {type(p).__name__} on {p.device}: not supported yet"
    return None


def _kind(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if torch_class(optimizer) not in ALLOWED:
        known = ", ".join(kind.__name__ for kind in ALLOWED)
        return REFUSED.get(name, f"is not known to treat parameters one by one, as {known} do")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is differentiable: its step belongs to a graph"
    return None
