"""Every optimizer of torch.optim, in every implementation it has on a CPU, comes back bit by bit.

The classes are found by introspection, so that one that torch adds fails a test until it is here.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lightck
from support.e2e.jobs import batch, small_model
from support.e2e.resume import Bed
from support.e2e.trainer import Job, Run

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 3.0, "lambd": 0.01}],
    "Adadelta": [{}, {"weight_decay": 0.1}],
    "Adafactor": [{}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}],
    "LBFGS": [
        {"max_iter": 4, "history_size": 3},
        {"max_iter": 3, "line_search_fn": "strong_wolfe"},
    ],
    "Muon": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "SparseAdam": [{}],
}  # fmt: skip
"""Each class is tried with these options."""
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
"""Those whose fused implementation runs on a CPU."""


def optimizers() -> dict[str, type[Optimizer]]:
    """Every optimizer class that torch.optim exports."""
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


def variants() -> list[tuple[str, str, dict[str, Any]]]:
    """(id, class, keyword arguments), with each implementation that the class has."""
    found = []
    for name, kind in sorted(optimizers().items()):
        accepted = inspect.signature(kind.__init__).parameters
        for options in OPTIONS.get(name, [{}]):
            implementations: list[dict[str, Any]] = [{}]
            if "foreach" in accepted:
                implementations = [{"foreach": False}, {"foreach": True}]
            if "fused" in accepted and name in FUSED:
                implementations.append({"fused": True})
            for how in implementations:
                label = [k for k, v in how.items() if v] + [f"{k}={v}" for k, v in options.items()]
                found.append((f"{name}({','.join(label)})", name, {**options, **how}))
    return found


class Sparse(nn.Module):
    """An embedding with sparse gradients under a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(40, 16, mode="sum", sparse=True)
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


class OptimizerJob(Job):
    """One class with its options; those that cannot take every parameter get a partner."""

    expected_warnings = ("lightck saw no forward",)  # LBFGS: forwards only inside its steps

    def setup(self) -> None:
        name, options = self.params["name"], self.params["options"]
        kind = getattr(torch.optim, name)
        model = Sparse() if name == "SparseAdam" else small_model()
        self.models = [model]
        if name == "SparseAdam":
            mine, others = list(model.table.parameters()), list(model.head.parameters())
        elif name == "Muon":
            mine = [p for p in model.parameters() if p.dim() == 2]
            others = [p for p in model.parameters() if p.dim() != 2]
        else:
            mine, others = list(model.parameters()), []
        groups: list[dict[str, Any]] = [{"params": mine}]
        if name != "LBFGS" and len(mine) > 2:
            groups = [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.007}]
        self.optimizers = [kind(groups, lr=0.01, **options)]
        if others:
            self.optimizers.append(torch.optim.AdamW(others))

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        if self.params["name"] == "SparseAdam":
            x = torch.randint(0, 40, (12, 3))

        def closure() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

        if self.params["name"] == "LBFGS":
            return self.optimizer.step(closure).detach()
        loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def test_every_optimizer_that_torch_exports_is_tried() -> None:
    assert set(optimizers()) == set(OPTIONS)


def test_fused_implementations_are_those_that_run_on_a_cpu() -> None:
    found = set()
    for name, kind in optimizers().items():
        if "fused" in inspect.signature(kind.__init__).parameters:
            parameter = torch.zeros(2, requires_grad=True)
            parameter.grad = torch.ones(2)
            kind([parameter], fused=True).step()
            found.add(name)
    assert found == FUSED


@pytest.mark.parametrize(
    ("name", "options"), [v[1:] for v in variants()], ids=[v[0] for v in variants()]
)
def test_optimizer_resumes_bit_for_bit(bed: Bed, name: str, options: dict[str, Any]) -> None:
    kills = ("forward", "backward", "update", "after")
    restored = None
    if name == "LBFGS":
        # Its forwards and backwards run inside its step, so that a snapshot opens, and is whole,
        # just before it: dying inside finds the step before, if its commit was fast enough.
        restored = {where: {3, 4} for where in kills[:3]}
    params = {"name": name, "options": options}
    bed.check(OptimizerJob, kills=kills, params=params, restored=restored)


class Nested(Optimizer):
    """State in every form: lists, dicts, counters, tensors in groups and in attributes."""

    def __init__(self, params: Any, lr: float) -> None:
        defaults = {
            "lr": torch.tensor(lr),
            "schedule": {"decay": torch.tensor(0.9), "warm": [3, 1]},
        }
        super().__init__(params, defaults)
        for group in self.param_groups:  # a group's own tensors, not one default that all share
            group["lr"] = group["lr"].clone()
            group["schedule"] = {"decay": torch.tensor(0.9), "warm": [3, 1]}
        self.total = torch.zeros(3)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["lr"].mul_(0.95)
            group["schedule"]["decay"].sub_(0.01)
            group["schedule"]["warm"][0] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moments"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
                    state["inner"] = {"count": 0, "deep": {"max": torch.zeros(()), "seen": (1, 2)}}
                    state["last"] = None
                    state["trace"] = []
                first, second = state["moments"]
                first.mul_(group["schedule"]["decay"]).add_(parameter.grad)
                second.lerp_(parameter.grad.square(), 0.1)
                state["inner"]["count"] += 1
                deep = state["inner"]["deep"]
                deep["max"].copy_(torch.maximum(deep["max"], parameter.grad.abs().max()))
                deep["seen"] = (state["inner"]["count"], deep["seen"][0])
                state["last"] = float(parameter.grad.sum())
                state["trace"] = [*state["trace"][-2:], parameter.grad.norm()]
                scale = 1 + sum(state["trace"]) + self.total[0] + self.calls
                step = first / (second.sqrt() + deep["max"]) * group["lr"] / scale
                parameter.sub_(step * (1 + 1e-3 * (state["last"] + deep["seen"][1])))
                self.total.add_(parameter.grad.sum())


class NestedJob(OptimizerJob):
    """A custom optimizer with nested state."""

    def setup(self) -> None:
        self.models = [small_model()]
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        self.optimizers = [Nested(groups, lr=0.05)]

    def more(self) -> dict[str, Any]:
        return {"total": self.optimizer.total, "calls": self.optimizer.calls}


def test_custom_optimizer_resumes_with_all_its_nested_state(bed: Bed) -> None:
    bed.check(NestedJob, params={"name": "Nested", "options": {}})


class OldStyle(Optimizer):
    """Writes through `.data`, which moves no version counter, as optimizers did years ago."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(parameter.data)
                state["velocity"].data.mul_(0.9).add_(parameter.grad.data)
                parameter.data.add_(state["velocity"], alpha=-group["lr"])


class OldStyleJob(OptimizerJob):
    """The same loop over it."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [OldStyle(self.model.parameters())]


def test_optimizer_that_moves_no_version_counter_resumes(bed: Bed) -> None:
    bed.check(OldStyleJob, params={"name": "OldStyle", "options": {}})


class Temperature(Job):
    """A loss with parameters of its own that no module holds."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.scale = torch.rand((), requires_grad=True)
        self.bias = torch.rand(5, requires_grad=True)
        own = {"params": [self.scale, self.bias], "lr": 0.1}
        self.optimizers = [torch.optim.AdamW([{"params": self.model.parameters()}, own])]

    def more(self) -> dict[str, Any]:
        return {"scale": self.scale, "bias": self.bias}

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.model(x) * self.scale.exp() + self.bias, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class FoundTemperature(Temperature):
    """An optimizer that lightck finds by itself; after a restart attach is told of it."""

    def restore(self, run: Run) -> Any:
        return lightck.restore(self.model, path=run.path)

    def attach(self, run: Run) -> Any:
        given = self.optimizer if run.mode == "resume" else None
        return lightck.attach(self.model, given, run.path)


class NeverTold(FoundTemperature):
    """Nobody tells lightck of the optimizer before its first step, which is too late."""

    def attach(self, run: Run) -> Any:
        return lightck.attach(self.model, path=run.path)


def test_parameter_that_no_module_holds_resumes(bed: Bed) -> None:
    bed.check(Temperature)


def test_parameter_that_no_module_holds_is_saved_with_an_optimizer_found_late(bed: Bed) -> None:
    bed.check(FoundTemperature)


def test_parameter_that_cannot_be_filled_before_the_first_forward_is_announced(bed: Bed) -> None:
    bed.run(NeverTold, "attach", last=3).check_ended()
    resumed = bed.run(NeverTold, "resume", last=4)
    assert "parameters that are in no module" in resumed.log
