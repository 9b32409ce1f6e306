"""Training loops of every shape come back bit by bit, killed anywhere."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # seconds to import: before the server forks
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from support.e2e.jobs import CLASSES, Plain, batch, small_model
from support.e2e.resume import Bed
from support.e2e.trainer import Run

HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"
"""torch's own warning, whoever has a global hook."""


class Accumulating(Plain):
    """Three micro-batches per update; snapshots of the last step run during all of them."""

    def step(self, t: int, run: Run) -> Any:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(3):
            x, y = batch(6)
            loss = F.cross_entropy(self.model(x), y) / 3
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total


def test_gradient_accumulation_resumes(bed: Bed) -> None:
    bed.check(Accumulating)


class Scaled(Plain):
    """A gradient scaler that leaves out every third step, and counts them all the same."""

    def setup(self) -> None:
        super().setup()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.extras = {"scaler": self.scaler}

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if t % 3 == 0:
            next(p for p in self.model.parameters()).grad.fill_(float("inf"))
        self.scaler.unscale_(self.optimizer)
        before = copy.deepcopy(self.model.state_dict())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        same = torch.equal(before["4.weight"], self.model.state_dict()["4.weight"])
        assert same == (t % 3 == 0), "the scaler skips the steps that this test is about"
        if run.handle is not None:
            assert run.handle.step == t
        return loss.detach()


@pytest.mark.parametrize("k", [4, 5, 6, 7])
def test_step_that_the_gradient_scaler_leaves_out_counts_and_resumes(bed: Bed, k: int) -> None:
    # In a skipped step no update runs, so that nobody can be killed in it.
    kills = ("forward", "backward", "after") if k == 6 else ("forward", "update", "after")
    bed.check(Scaled, kill_step=k, kills=kills)


class AfterStep(Plain):
    """Scheduler, EMA, clipping, a target network and validation after the step, in any order."""

    def setup(self) -> None:
        super().setup()
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.05, total_steps=20
        )
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.target = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.seen = {"best": float("inf"), "history": [], "steps": 0}
        self.extras = {
            "scheduler": self.scheduler, "ema": self.ema, "target": self.target, "seen": self.seen,
        }  # fmt: skip

    def step(self, t: int, run: Run) -> Any:
        loss = super().step(t, run)
        for name in self.params["order"].split():
            getattr(self, name)(t)
        return loss

    def schedule(self, t: int) -> None:
        self.scheduler.step()

    def average(self, t: int) -> None:
        self.ema.update_parameters(self.model)

    def clip(self, t: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.4, 0.4)

    def aim(self, t: int) -> None:
        if t % 2 == 0:
            self.target.load_state_dict(self.model.state_dict())

    def swap(self, t: int) -> None:
        """Every fourth step training goes on from the average."""
        if t % 4 == 0:
            self.model.load_state_dict(self.ema.module.state_dict())

    def validate(self, t: int) -> None:
        """Its data must not come from the global generators: they stand at the step's end."""
        self.model.eval()
        with torch.no_grad():
            source = torch.Generator().manual_seed(t)
            x, y = torch.randn(9, 6, generator=source), torch.arange(9) % CLASSES
            score = float(F.cross_entropy(self.model(x), y)) + float(self.target(x).mean())
        self.model.train()
        self.seen["best"] = min(self.seen["best"], score)
        self.seen["history"].append(score)
        self.seen["steps"] = t


@pytest.mark.parametrize(
    "order",
    [
        "schedule average validate clip aim swap",
        "validate clip schedule average aim",
        "average swap clip validate aim schedule",
        "aim validate average schedule",
    ],
)
def test_what_follows_a_step_belongs_to_its_snapshot_in_any_order(bed: Bed, order: str) -> None:
    # Closing after step k comes before nothing else: what follows the step has run by then.
    bed.check(AfterStep, params={"order": order})


class Recalibrating(Plain):
    """A training forward without gradients before the one with: buffers change, dropout draws."""

    def step(self, t: int, run: Run) -> Any:
        with torch.no_grad():
            self.model(torch.ones(12, 6) * t)
        return super().step(t, run)


class Peeking(Plain):
    """The same after the step; that it belongs to the step is said by `snapshot()`."""

    def step(self, t: int, run: Run) -> Any:
        loss = super().step(t, run)
        if t % 2:
            with torch.no_grad():
                self.model(torch.randn(12, 6))
            if run.handle is not None:
                run.handle.snapshot()
        return loss


class ValidatingFirst(Plain):
    """Validation at the top of an iteration, with data from the global generator."""

    def step(self, t: int, run: Run) -> Any:
        self.model.eval()
        with torch.no_grad():
            score = self.model(torch.randn(7, 6)).sum()
        self.model.train()
        return super().step(t, run) + score


class ValidatingLast(Plain):
    """Validation after the step draws at random; the data do not, dropout and noise do."""

    def setup(self) -> None:
        super().setup()
        self.noise = torch.Generator().manual_seed(torch.initial_seed())
        self.numpy = np.random.default_rng(torch.initial_seed())
        self.extras = {"noise": self.noise, "numpy": self.numpy}

    def step(self, t: int, run: Run) -> Any:
        source = torch.Generator().manual_seed(t)
        x, y = torch.randn(12, 6, generator=source), torch.arange(12) % CLASSES
        out = self.model(x)
        out = out + torch.randn(12, CLASSES, generator=self.noise) * self.numpy.random()
        loss = F.cross_entropy(out, y) * (1 + np.random.random() + random.random())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.eval()
        with torch.no_grad():
            for _ in range(t % 3):
                self.model(torch.randn(7, 6) + torch.rand(6, generator=self.noise))
                self.numpy.random(3), np.random.random(), random.random()
        self.model.train()
        return loss.detach()


def test_generators_stand_at_the_forward_as_they_did_then(bed: Bed) -> None:
    bed.check(ValidatingLast)


def test_training_forward_without_gradients_before_a_step_is_run_again(bed: Bed) -> None:
    bed.check(Recalibrating)


def test_training_forward_without_gradients_before_a_snapshot_call_is_not(bed: Bed) -> None:
    bed.check(Peeking, restored={"after": {5}})


def test_validation_at_the_top_of_an_iteration_is_run_again(bed: Bed) -> None:
    bed.check(ValidatingFirst)


class Flipping(Plain):
    """Part of the model, or all of it, trains in eval mode from time to time."""

    def step(self, t: int, run: Run) -> Any:
        self.model.train()
        if t % 3 == 1:
            self.model[1].eval()
        if t % 3 == 2:
            self.model.eval()
        return super().step(t, run)


class WholeEval(Flipping):
    expected_warnings = ("lightck saw no forward",)


@pytest.mark.parametrize("k", [4, 5, 6])
def test_train_and_eval_flips_resume(bed: Bed, k: int) -> None:
    bed.check(WholeEval, kill_step=k, kills=("backward", "update", "after"))


class Checkpointed(Plain):
    """Activation checkpointing runs forwards, and draws dropout again, inside the backward."""

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        reentrant = self.params["reentrant"]
        if reentrant:
            x.requires_grad_()
        hidden = checkpoint(self.model[:2], x, use_reentrant=reentrant)
        out = checkpoint(self.model[2:], hidden, use_reentrant=reentrant)
        loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_resumes(bed: Bed, reentrant: bool) -> None:
    bed.check(Checkpointed, params={"reentrant": reentrant})


class CompiledModel(Plain):
    """torch.compile of the model; what is saved has the plain model's names."""

    expected_warnings = (HOOKS,)

    def setup(self) -> None:
        super().setup()
        self.compiled = torch.compile(self.model, backend=self.params["backend"])
        if self.params["attached"] == "compiled":
            self.models = [self.compiled]

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.compiled(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("attached", ["plain", "compiled"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_resumes(bed: Bed, backend: str, attached: str) -> None:
    params = {"backend": backend, "attached": attached}
    bed.check(CompiledModel, kills=("backward", "update", "after"), params=params)


class CompiledStep(Plain):
    """torch.compile of the whole step, or of the optimizer's."""

    expected_warnings = ("lightck saw no forward", HOOKS, "The .grad attribute")

    def setup(self) -> None:
        super().setup()
        compiled = torch.compile(backend=self.params["backend"])
        if self.params["what"] == "update":
            self.update = compiled(self.optimizer.step)
            self.whole = self.body
        else:
            self.update = self.optimizer.step
            self.whole = compiled(self.body)

    def body(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, t: int, run: Run) -> Any:
        return self.whole(*batch())


@pytest.mark.parametrize("what", ["update", "step"])
def test_compiled_step_resumes(bed: Bed, what: str) -> None:
    params = {"backend": "eager", "what": what}
    bed.check(CompiledStep, kills=("after",), params=params)


class InnerForwards(Plain):
    """The model's own forward is never called: the loop calls its parts."""

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        hidden = x
        for layer in self.model:
            hidden = layer(hidden)
        loss = F.cross_entropy(hidden, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_loop_that_calls_the_parts_of_a_model_resumes(bed: Bed) -> None:
    bed.check(InnerForwards)


class StandIns(Plain):
    """The forward runs with others in the place of some parameters, or of all."""

    expected_warnings = ("lightck saw no forward",)

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        if self.params["how"] == "all, warm" and t == 1:
            self.model(x)  # an ordinary forward, once
        noisy = {
            name: p + 0.1 * torch.randn_like(p)
            for name, p in self.model.named_parameters()
            if self.params["how"] != "one" or name.startswith("4.")
        }
        self.optimizer.zero_grad()
        loss = F.cross_entropy(functional_call(self.model, noisy, (x,)), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("how", ["one", "all", "all, warm"])
def test_what_stands_in_for_parameters_in_a_forward_is_not_saved(bed: Bed, how: str) -> None:
    bed.check(StandIns, params={"how": how})


class Derivatives(Plain):
    """The iteration's first forward runs inside of torch.func's transforms."""

    def setup(self) -> None:
        self.models = [nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))]
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.02)]

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        self.optimizer.zero_grad()
        slopes = vmap(grad(lambda each: self.model(each).square().sum()))(x)
        loss = F.cross_entropy(self.model(x), y) + slopes.square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_a_forward_inside_of_a_transform_is_an_ordinary_one(bed: Bed) -> None:
    bed.check(Derivatives)


class NoForward(Plain):
    """Parameters used without any module's forward: snapshots open at the first gradient."""

    expected_warnings = ("lightck saw no forward",)

    def setup(self) -> None:
        self.models = [nn.Linear(6, CLASSES)]
        self.optimizers = [self.make_optimizer()]

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(F.linear(x, self.model.weight, self.model.bias), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_loop_without_a_forward_that_can_be_seen_resumes(bed: Bed) -> None:
    bed.check(NoForward, kills=("backward", "update", "after"))


class SecondModel(Plain):
    """A model that is not attached shares the loop; its forwards mean nothing."""

    def setup(self) -> None:
        super().setup()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.judge = small_model().eval()

    def step(self, t: int, run: Run) -> Any:
        self.judge(torch.ones(2, 6))
        return super().step(t, run)


def test_forwards_of_other_models_open_nothing(bed: Bed) -> None:
    bed.check(SecondModel)
