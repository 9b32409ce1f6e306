"""Several optimizers, updates that no optimizer makes, and optimizers found late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightck
from support.e2e.jobs import Plain, batch, small_model
from support.e2e.resume import Bed
from support.e2e.trainer import Job, Run


class Gan(Job):
    """A generator and a discriminator with an optimizer each, in either order."""

    def setup(self) -> None:
        self.make = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.models = [self.make, self.judge]
        self.g = torch.optim.Adam(self.make.parameters(), lr=0.01)
        self.d = torch.optim.RMSprop(self.judge.parameters(), lr=0.01)
        self.optimizers = [self.g, self.d]

    def train_make(self) -> torch.Tensor:
        loss = -self.judge(self.make(torch.randn(8, 4))).mean()
        self.g.zero_grad()
        loss.backward()
        self.g.step()
        return loss.detach()

    def train_judge(self) -> torch.Tensor:
        with torch.no_grad():
            false = self.make(torch.randn(8, 4))
        loss = self.judge(false).mean() - self.judge(torch.randn(8, 6)).mean()
        self.d.zero_grad()
        loss.backward()
        self.d.step()
        return loss.detach()

    def step(self, t: int, run: Run) -> Any:
        if self.params["first"] == "make":
            return self.train_make() + self.train_judge()
        return self.train_judge() + self.train_make()


@pytest.mark.parametrize("first", ["make", "judge"])
def test_gan_with_disjoint_models_resumes_in_both_orders(bed: Bed, first: str) -> None:
    bed.check(Gan, params={"first": first})


class SwappedGan(Gan):
    """After a restart the optimizers are given in the other order."""

    def restore(self, run: Run) -> Any:
        return lightck.restore(self.models, [self.d, self.g], run.path)

    def attach(self, run: Run) -> Any:
        given = [self.d, self.g] if run.mode == "resume" else [self.g, self.d]
        return lightck.attach(self.models, given, run.path)


def test_order_in_which_optimizers_are_given_does_not_matter(bed: Bed) -> None:
    bed.check(SwappedGan, params={"first": "make"})


class FoundGan(Gan):
    """Both optimizers are found by themselves."""

    def restore(self, run: Run) -> Any:
        return lightck.restore(self.models, path=run.path)

    def attach(self, run: Run) -> Any:
        return lightck.attach(self.models, path=run.path)


@pytest.mark.parametrize("first", ["make", "judge"])
def test_gan_whose_optimizers_are_found_resumes(bed: Bed, first: str) -> None:
    bed.check(FoundGan, params={"first": first})


class SharedGan(Gan):
    """Both optimizers hold one trunk; each changes it."""

    def setup(self) -> None:
        super().setup()
        self.trunk = nn.Linear(6, 6)
        self.models = [self.make, self.judge, self.trunk]
        self.g = torch.optim.Adam([*self.make.parameters(), *self.trunk.parameters()], lr=0.01)
        self.d = torch.optim.Adam([*self.trunk.parameters(), *self.judge.parameters()], lr=0.02)
        self.optimizers = [self.g, self.d]
        plain = self.judge.forward
        self.judge.forward = lambda x: plain(self.trunk(x))


@pytest.mark.parametrize("first", ["make", "judge"])
def test_gan_with_a_shared_trunk_resumes_in_both_orders(bed: Bed, first: str) -> None:
    bed.check(SharedGan, params={"first": first})


class UnevenGan(Gan):
    """Two updates of the discriminator for one of the generator, which ends a step."""

    def step(self, t: int, run: Run) -> Any:
        return self.train_judge() + self.train_judge() + self.train_make()

    def attach(self, run: Run) -> Any:
        boundary = self.g if self.params["boundary"] else None
        return lightck.attach(self.models, self.optimizers, run.path, boundary=boundary)


def test_uneven_cadence_with_a_boundary_resumes(bed: Bed) -> None:
    # The first judge.step() of a step is the fence of all that it changes, the last one's of all.
    bed.check(UnevenGan, params={"boundary": True})


def test_uneven_cadence_without_a_boundary_is_refused_with_what_to_do(bed: Bed) -> None:
    run = bed.run(UnevenGan, "attach", params={"boundary": False})
    assert run.status not in (0, None)
    assert "ConfigError" in run.log
    assert "boundary=" in run.log


class Groups(Plain):
    """Another layer is trained, too, from step 4 on: `add_param_group`."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.model[4].requires_grad_(False)
        self.optimizers = [torch.optim.AdamW(self.model[:2].parameters(), lr=0.01)]

    def thaw(self) -> None:
        self.model[4].requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[4].parameters()), "lr": 0.03})

    def restore(self, run: Run) -> Any:
        """The optimizer gets its second group, if the step that was restored had it."""
        info = lightck.restore(self.model, path=run.path)
        if info is not None and info.step >= self.thawed_at - self.early:
            self.thaw()
        return info

    thawed_at = 4
    early = 0  # a change after step 3's update would belong to snapshot 3

    def step(self, t: int, run: Run) -> Any:
        loss = super().step(t, run)
        if t == self.thawed_at:
            self.thaw()
        return loss


@pytest.mark.parametrize("k", [4, 5, 6, 7])
def test_group_that_is_added_while_training_resumes(bed: Bed, k: int) -> None:
    bed.check(Groups, kill_step=k)


class Mismatched(Groups):
    """A restart that forgets the group."""

    def restore(self, run: Run) -> Any:
        return lightck.restore(self.model, self.optimizer, run.path)


def test_optimizer_with_other_groups_is_refused_by_name(bed: Bed) -> None:
    bed.run(Mismatched, "attach", last=6).check_ended()
    run = bed.run(Mismatched, "resume")
    assert "RestoreMismatchError" in run.log
    assert "AdamW" in run.log


class Found(Plain):
    """`attach(model)` alone; restore without the optimizer, too."""

    def restore(self, run: Run) -> Any:
        return lightck.restore(self.model, path=run.path)

    def attach(self, run: Run) -> Any:
        return lightck.attach(self.model, path=run.path)


class FoundHalf(Found):
    """The optimizer is given to attach after it was not given to restore."""

    def attach(self, run: Run) -> Any:
        return lightck.attach(self.model, self.optimizer, run.path)


def test_attach_with_the_model_alone_finds_the_optimizer(bed: Bed) -> None:
    bed.check(Found)


def test_restore_without_the_optimizer_keeps_its_state_for_attach(bed: Bed) -> None:
    bed.check(FoundHalf)


class InBackward(Plain):
    """One optimizer per parameter, stepping as soon as its gradient is there."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = []
        for parameter in self.model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01)
            self.optimizers.append(optimizer)
            parameter.register_post_accumulate_grad_hook(self._update(optimizer))

    @staticmethod
    def _update(optimizer: torch.optim.Optimizer) -> Any:
        def update(parameter: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.detach()


class FoundInBackward(InBackward):
    """The optimizers are the same, and found by lightck itself."""

    restore = Found.restore
    attach = Found.attach


def test_optimizers_that_step_in_backward_resume(bed: Bed) -> None:
    # Killed in the backward, some layers are updated and others are not.
    bed.check(InBackward, restored={"backward": {3}, "update": {3}})


def test_optimizers_that_step_in_backward_are_found(bed: Bed) -> None:
    bed.check(FoundInBackward, restored={"backward": {3}, "update": {3}})


class Marked(Plain):
    """Plain SGD written out in the loop, between marks."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.velocity = {"tensors": [torch.zeros_like(p) for p in self.model.parameters()]}
        self.extras = {"velocity": self.velocity}

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        if run.handle is not None:
            run.handle.before_update()
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self.velocity["tensors"], strict=True)
            for parameter, velocity in pairs:
                velocity.mul_(0.9).add_(parameter.grad)
                parameter -= 0.05 * velocity
                parameter.grad = None
        if run.handle is not None:
            run.handle.after_update()
        return loss.detach()


class MarkedOptimizers(Gan):
    """Marks around several optimizers of uneven cadence, and around their forwards."""

    expected_warnings = ("lightck saw no forward",)

    def step(self, t: int, run: Run) -> Any:
        if run.handle is not None:
            run.handle.before_update()
        loss = self.train_judge() + self.train_judge() + self.train_make()
        if run.handle is not None:
            run.handle.after_update()
        return loss


def test_updates_between_marks_resume(bed: Bed) -> None:
    bed.check(Marked, kills=("forward", "backward", "after"))


def test_marks_may_enclose_optimizers_of_any_cadence(bed: Bed) -> None:
    # Everything happens inside the update: the snapshot opens, and is whole, just before it.
    bed.check(MarkedOptimizers, kills=("after",), params={"first": "make"})


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one: every step of the inner one belongs to the outer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"every": 2})
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                if self.count % 2 == 0:
                    state["slow"].lerp_(parameter, 0.5)
                    parameter.copy_(state["slow"])


class Around(Plain):
    def make_optimizer(self) -> torch.optim.Optimizer:
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        return Lookahead(self.inner)

    def restore(self, run: Run) -> Any:
        return lightck.restore(self.model, [self.inner, self.optimizer], run.path)

    def attach(self, run: Run) -> Any:
        return lightck.attach(self.model, [self.inner, self.optimizer], run.path)

    def more(self) -> dict[str, Any]:
        state = [dict(self.inner.state.get(p, {})) for p in self.model.parameters()]
        return {"inner": state, "count": self.optimizer.count}


class FoundAround(Around):
    restore = Found.restore
    attach = Found.attach


def test_optimizer_around_another_one_counts_once(bed: Bed) -> None:
    bed.check(Around)


def test_optimizer_around_another_one_is_found_with_it(bed: Bed) -> None:
    bed.check(FoundAround)


class Frozen(Plain):
    """A part of the model that another optimizer holds but never changes."""

    def setup(self) -> None:
        self.models = [small_model()]
        head = self.model[4]
        head.requires_grad_(False)
        self.optimizers = [
            torch.optim.AdamW(self.model[:2].parameters(), lr=0.01),
            torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
        ]

    def step(self, t: int, run: Run) -> Any:
        if t == 5:
            self.model[4].requires_grad_(True)
        return super().step(t, run)

    def resumed(self, t: int) -> None:
        self.model[4].requires_grad_(t >= 5)


@pytest.mark.parametrize("k", [4, 5, 6, 7])
def test_parameters_that_thaw_resume(bed: Bed, k: int) -> None:
    bed.check(Frozen, kill_step=k)
