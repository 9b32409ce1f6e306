"""Layer-wise updates give the bits of the plain step, with every optimizer that is let in, and
what cannot be followed is refused with its reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lightck
from lightck.layerwise.updates import ALLOWED
from support.loops import digest

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 2.0, "lambd": 0.01}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adafactor": [{}],
    "Adagrad": [{"lr_decay": 0.1}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True}],
    "AdamW": [{"amsgrad": True, "maximize": True}],
    "Adamax": [{}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
STEPS = 6


def variants() -> Iterator[Any]:
    for name, every in OPTIONS.items():
        accepted = inspect.signature(getattr(torch.optim, name).__init__).parameters
        for options in every:
            ways: list[dict[str, Any]] = [{}]
            if "foreach" in accepted:
                ways = [{"foreach": False}, {"foreach": True}]
            if name in FUSED:
                ways.append({"fused": True})
            for way in ways:
                label = ",".join([*(k for k, v in way.items() if v), *options])
                yield pytest.param(name, {**options, **way}, id=f"{name}({label})")


class Net(nn.Module):
    """Linear layers, one whose weight is another's, one frozen and one that the forward omits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.late = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(torch.tanh(self.first(x))))
        return self.late(torch.tanh(self.tied(x))) * self.scale


class Training:
    """A loop whose parts a test replaces."""

    accumulation = 1

    def __init__(self, name: str = "AdamW", options: dict[str, Any] | None = None) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.kind: Callable[..., Optimizer] = getattr(torch.optim, name)
        self.optimizer = self.kind(self.groups(), lr=0.01, **(options or {}))
        self.losses: list[str] = []
        self.early: list[bool] = []
        """Per step, whether a layer was updated before `step()`."""
        self.t = 0
        self.prepare()

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.model.parameters())}]

    def prepare(self) -> None:
        """Make more than model and optimizer."""

    def before_step(self) -> None:
        """Do something between backward and step."""

    def after_step(self) -> None:
        """Do something between step and the next forward."""

    def backward(self) -> None:
        for _ in range(self.accumulation):
            loss = self.model(torch.randn(4, 6)).square().mean() / self.accumulation
            loss.backward()
        self.losses.append(float(loss.detach()).hex())

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        before = digest(self.model.late.weight)
        self.backward()
        self.early.append(digest(self.model.late.weight) != before)
        self.before_step()
        self.optimizer.step()
        self.after_step()
        self.t += 1

    def run(self, steps: int = STEPS) -> Training:
        for _ in range(steps):
            self.iterate()
        return self

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {n: digest(p) for n, p in self.model.named_parameters()}
        for position, held in self.optimizer.state_dict()["state"].items():
            for key, value in held.items():
                tensor = isinstance(value, torch.Tensor)
                found[f"{position}.{key}"] = digest(value) if tensor else value
        found["groups"] = repr(self.optimizer.state_dict()["param_groups"])
        return found


class OneCycle(Training):
    def prepare(self) -> None:
        cycled = "momentum" in self.optimizer.defaults or "betas" in self.optimizer.defaults
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.05, total_steps=STEPS + 1, cycle_momentum=cycled
        )

    def after_step(self) -> None:
        self.scheduler.step()


class DecayGroups(Training):
    """Weights and biases of one layer are in different groups."""

    def groups(self) -> list[dict[str, Any]]:
        flat = [p for p in self.model.parameters() if p.dim() < 2]
        deep = [p for p in self.model.parameters() if p.dim() == 2]
        return [{"params": flat}, {"params": deep, "lr": 0.02}]


class LateGroup(Training):
    """A layer joins the optimizer in the middle, another one thaws."""

    def groups(self) -> list[dict[str, Any]]:
        held = [p for n, p in self.model.named_parameters() if not n.startswith("late")]
        self.model.late.requires_grad_(False)
        return [{"params": held}]

    def after_step(self) -> None:
        if self.t == 3:
            self.model.late.requires_grad_(True)
            # torch's fused SGD fails where only some have a momentum yet, with or without lightck.
            known = self.optimizer.defaults
            self.model.frozen.requires_grad_(not (known.get("fused") and known.get("momentum")))
            self.optimizer.add_param_group({"params": list(self.model.late.parameters())})


class Accumulated(Training):
    accumulation = 2


SITUATIONS = [Training, OneCycle, DecayGroups, LateGroup, Accumulated]


def layerwise(path: Path, training: Training, **settings: Any) -> lightck.Handle:
    update = lightck.Layerwise(training.accumulation)
    return lightck.attach(training.model, training.optimizer, path, update=update, **settings)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("name", "options"), list(variants()))
def test_layers_updated_alone_have_the_bits_of_the_plain_step(
    run_dir: Path, situation: type[Training], name: str, options: dict[str, Any]
) -> None:
    plain = situation(name, options).run()
    alone = situation(name, options)
    with layerwise(run_dir, alone, policy=2) as handle:
        alone.run()
        assert handle.step == STEPS
    assert alone.losses == plain.losses
    assert alone.state() == plain.state()
    expected = [False] * 4 + [False, True] if situation is LateGroup else [False] * 2 + [True] * 4
    assert alone.early == expected, "layers were not updated in the backward"


class Sparse(Training):
    """Sparse gradients, and a partner for the dense layers."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.table = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
        self.head = nn.Linear(6, 2)
        self.model = nn.Sequential(self.table, self.head)
        self.optimizers = [
            torch.optim.SparseAdam(list(self.table.parameters())),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9),
        ]

    def run(self, steps: int = STEPS) -> Training:
        for _ in range(steps):
            self.model.zero_grad()
            self.model(torch.randint(0, 20, (4, 3))).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    def digests(self) -> list[str]:
        held = [o.state_dict()["state"] for o in self.optimizers]
        tensors = [v for s in held for h in s.values() for v in h.values()]
        return [digest(t) for t in [*self.model.parameters(), *tensors] if torch.is_tensor(t)]


def test_two_optimizers_one_of_them_sparse_have_the_bits_of_the_plain_step(run_dir: Path) -> None:
    plain, alone = Sparse().run(), Sparse()
    with lightck.attach(alone.model, alone.optimizers, run_dir, update="layerwise") as handle:
        alone.run()
        assert handle.step == STEPS
    assert alone.digests() == plain.digests()


def test_every_optimizer_that_is_let_in_is_tried() -> None:
    assert {kind.__name__ for kind in ALLOWED} == {*OPTIONS, "SparseAdam"}


# ---- Refusals ------------------------------------------------------------------------------


class Custom(torch.optim.SGD):
    """Nobody knows what it does."""


def _differentiable(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, differentiable=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS .* evaluates the whole model several times"),
        (lambda p: torch.optim.Muon([x for x in p if x.dim() == 2]), "every trainable parameter"),
        (lambda p: Custom(p, lr=0.1), "Custom .* is not known to treat parameters one by one"),
        (_differentiable, "differentiable"),
    ],
)
def test_an_optimizer_that_cannot_be_split_is_refused_at_attach(
    run_dir: Path, make: Callable[[Any], Optimizer], reason: str
) -> None:
    model = Net()
    with pytest.raises(lightck.ConfigError, match=reason):
        lightck.attach(model, make(list(model.parameters())), run_dir, update="layerwise")
    assert not run_dir.exists(), "nothing was made"


def test_muon_is_refused_for_what_it_is(run_dir: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(lightck.ConfigError, match="Muon .* whole matrices"):
        lightck.attach(model, torch.optim.Muon(model.parameters()), run_dir, update="layerwise")


def test_optimizers_must_be_given_and_must_not_share(run_dir: Path) -> None:
    training = Training()
    with pytest.raises(lightck.ConfigError, match="needs all optimizers"):
        lightck.attach(training.model, None, run_dir, update="layerwise")
    two = [training.optimizer, torch.optim.SGD(training.model.late.parameters(), lr=0.1)]
    with pytest.raises(lightck.ConfigError, match="optimizers 0 and 1 share a parameter"):
        lightck.attach(training.model, two, run_dir, update="layerwise")
    with pytest.raises(lightck.ConfigError, match="boundary="):
        lightck.attach(
            training.model, training.optimizer, run_dir, update="layerwise",
            boundary=training.optimizer,
        )  # fmt: skip


def clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 1e9)  # changes no value, yet


def clip_silently(training: Training) -> None:
    for p in training.model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.5)


def clear(training: Training) -> None:
    training.optimizer.zero_grad()


def warm_up(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.01 * (training.t + 2)


def replace_gradients(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = None if p.grad is None else p.grad * 2


def weaken(training: Training) -> None:
    with torch.no_grad():
        for p in training.model.parameters():
            p.mul_(0.99)


def torn_by_weakening(error: BaseException) -> None:
    """Allow for this alone: what `weaken` changes may still be read for the last snapshot."""
    assert isinstance(error, lightck.TornSnapshotError)


BETWEEN = [
    (clip, "gradient was changed"),
    (clip_silently, "gradient was changed"),
    (clear, "gradient was cleared"),
    (replace_gradients, "gradient was replaced"),
    (warm_up, "lr of group 0 went from 0.01"),
    (weaken, "value was changed"),
]


@pytest.mark.parametrize(("between", "reason"), BETWEEN)
@pytest.mark.parametrize("t", [0, 1])
def test_what_comes_between_backward_and_step_is_found_in_the_plain_steps(
    run_dir: Path, between: Callable[[Training], None], reason: str, t: int
) -> None:
    training = Training()
    handle = layerwise(run_dir, training, on_error=torn_by_weakening)
    training.run(t)
    training.before_step = lambda: between(training)  # type: ignore[method-assign]
    with pytest.raises(lightck.ConfigError, match=reason) as caught:
        training.iterate()
    assert "No layer of this step is updated yet" in str(caught.value)
    assert handle.step == t
    handle.detach()


@pytest.mark.parametrize(("between", "reason"), BETWEEN)
def test_what_comes_between_backward_and_step_later_raises_and_is_never_committed(
    run_dir: Path, between: Callable[[Training], None], reason: str
) -> None:
    training = Training()
    handle = layerwise(run_dir, training, slots=3, on_error=torn_by_weakening)
    training.run(4)
    training.before_step = lambda: between(training)  # type: ignore[method-assign]
    with pytest.raises(lightck.ConfigError, match=reason) as caught:
        training.iterate()
    assert "updated already" in str(caught.value)
    with pytest.raises(lightck.ConfigError, match="state is mixed"):
        training.iterate()
    assert handle.step == 4
    handle.detach()
    last = 3 if between is weaken else 4  # it tears snapshot 4, which layers are still part of
    assert max(lightck.snapshots(run_dir)["step"].to_pylist()) == last


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_is_found_in_the_plain_steps(run_dir: Path, fused: bool) -> None:
    training = Training("SGD", {"fused": fused})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with layerwise(run_dir, training):
        scaler.scale(training.model(torch.randn(4, 6)).square().mean()).backward()
        with pytest.raises(lightck.ConfigError, match="GradScaler|unscaling"):
            scaler.step(training.optimizer)


@pytest.mark.parametrize(("stated", "real"), [(1, 2), (2, 1), (3, 2)])
def test_accumulation_that_is_not_what_was_stated_is_found(
    run_dir: Path, stated: int, real: int
) -> None:
    training = Training()
    training.accumulation = stated
    with layerwise(run_dir, training):
        training.accumulation = real
        with pytest.raises(lightck.ConfigError, match=f"got {real} gradients .*={stated} was"):
            training.iterate()


def test_a_further_backward_after_the_update_raises(run_dir: Path) -> None:
    training = Training()
    with layerwise(run_dir, training):
        training.run(3)
        training.accumulation = 2
        with pytest.raises(lightck.ConfigError, match="another gradient after its update"):
            training.iterate()


def test_a_closure_is_refused_when_it_runs(run_dir: Path) -> None:
    training = Training()

    def closure() -> torch.Tensor:
        loss = training.model(torch.randn(4, 6)).square().mean()
        loss.backward()
        return loss

    with layerwise(run_dir, training):
        with pytest.raises(lightck.ConfigError, match="inside an update"):
            training.optimizer.step(closure)


def test_a_weight_that_the_backward_still_needs_is_an_error_as_in_plain_torch(
    run_dir: Path,
) -> None:
    # Its gradient is final, but the gradient of an earlier layer is computed with it: no counter
    # of a fused kernel would tell.
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, 4)
    with lightck.attach(model, optimizer, run_dir, update="layerwise"):
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hidden = model[0](x)
        again = hidden @ model[1].weight.detach()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model[1](again).sum().backward()


def test_clipping_in_a_pre_hook_of_the_step_is_found_too(run_dir: Path) -> None:
    training = Training()
    training.optimizer.register_step_pre_hook(lambda *_: clip(training))
    with layerwise(run_dir, training):
        with pytest.raises(lightck.ConfigError, match="gradient was changed"):
            training.iterate()
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1


def test_hooks_of_the_user_find_the_optimizer_whole_and_run_once_per_step(run_dir: Path) -> None:
    training = Training()
    seen: list[int] = []

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(sum(len(group["params"]) for group in optimizer.param_groups))

    training.optimizer.register_step_pre_hook(note)
    training.optimizer.register_step_post_hook(note)
    with layerwise(run_dir, training):
        training.run()
    assert seen == [len(list(training.model.parameters()))] * 2 * STEPS
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert len(training.optimizer._optimizer_step_post_hooks) == 1


def test_after_close_the_optimizer_steps_by_itself_again(run_dir: Path) -> None:
    plain, training = Training().run(8), Training()
    with layerwise(run_dir, training):
        training.run(4)
    training.run(4)
    assert training.early[4:] == [False] * 4
    assert training.state() == plain.state()
