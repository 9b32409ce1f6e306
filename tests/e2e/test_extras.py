"""Extras of each kind, data positions and epochs come back bit by bit, killed anywhere."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightck
from support.e2e.jobs import CLASSES, Plain, batch, small_model
from support.e2e.resume import Bed
from support.e2e.trainer import Run


class Meter:
    """Any object with state_dict and load_state_dict, holding types of every kind."""

    def __init__(self) -> None:
        self.recent: collections.deque[float] = collections.deque(maxlen=3)
        self.names: set[str] = set()
        self.counts: collections.Counter[int] = collections.Counter()
        self.table = np.zeros((2, 3))
        self.peak = np.float32(0)
        self.big = torch.zeros(30_000)

    def add(self, loss: float, t: int) -> None:
        self.recent.append(loss)
        self.names = self.names | {f"step-{t}"}
        self.counts[t % 3] += 1
        self.table = self.table + loss
        self.peak = max(self.peak, np.float32(loss))
        self.big[t] = loss

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EachKind(Plain):
    """Generators feed the data, counters and objects follow the loss."""

    def setup(self) -> None:
        super().setup()
        self.torch = torch.Generator().manual_seed(torch.initial_seed())
        self.numpy = np.random.default_rng(torch.initial_seed())
        self.twister = np.random.Generator(np.random.MT19937(torch.initial_seed() % 1000))
        self.python = random.Random(torch.initial_seed())
        self.counters: dict[str, Any] = {"epoch": 0, "seen": [0, {"best": None}], "done": False}
        self.meter = Meter()
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.extras = {
            "torch": self.torch, "numpy": self.numpy, "twister": self.twister,
            "python": self.python, "counters": self.counters,
            "meter": lightck.at_forward(self.meter),
            "scheduler": self.scheduler,
        }  # fmt: skip

    def step(self, t: int, run: Run) -> Any:
        x = torch.randn(12, 6, generator=self.torch)
        x += torch.from_numpy(self.numpy.normal(size=6)).float() + self.python.random()
        x *= float(self.twister.normal())
        y = torch.randint(0, CLASSES, (12,))
        noise = torch.randn(12, 6, generator=self.torch) * len(self.meter.recent)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x + noise), y) + float(self.counters["seen"][0])
        # Draws after the forward: generators are needed as they were at its start, too.
        (loss * (1 + 0.1 * self.python.random())).backward()
        self.optimizer.step()
        loss = loss.detach()
        self.counters["epoch"] = t // 3
        self.counters["seen"][0] += 1
        self.counters["seen"][1]["best"] = float(loss)
        self.counters["done"] = t >= 7
        self.meter.add(float(loss), t)
        self.scheduler.step(float(loss))
        return loss


def test_extras_of_each_kind_resume(bed: Bed) -> None:
    bed.check(EachKind)


class Cursor:
    """A position that the loop advances before the next forward."""

    def __init__(self) -> None:
        self.at = 0

    def next(self) -> torch.Tensor:
        self.at += 1
        source = torch.Generator().manual_seed(self.at)
        return torch.randn(12, 6, generator=source)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Curriculum(Plain):
    """`at_step` for a position, `at_forward` for what follows the step."""

    def setup(self) -> None:
        super().setup()
        self.cursor, self.after, self.late = Cursor(), {"steps": 0}, Cursor()
        told = lightck.at_step if self.params["rightly"] else lightck.at_forward
        self.extras = {
            "cursor": told(self.cursor),
            "after": lightck.at_forward(self.after),
            "late": lightck.at_forward(self.late),
        }

    def step(self, t: int, run: Run) -> Any:
        x = self.cursor.next()
        _, y = batch()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.after["steps"] += 1
        self.late.next()
        return loss.detach()


def test_position_that_is_taken_at_the_step_resumes(bed: Bed) -> None:
    bed.check(Curriculum, params={"rightly": True})


def test_position_that_is_taken_at_the_forward_is_one_too_far(bed: Bed) -> None:
    with pytest.raises(AssertionError, match="loss of step 4"):
        bed.check(Curriculum, params={"rightly": False})


class Numbers(Dataset[torch.Tensor]):
    """Items with noise drawn where they are made: in a worker, or in the trainer."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((6,), float(i) / 48)
        return x + 0.1 * torch.rand(6) if self.noisy else x


class Epochs(Plain):
    """The usual loop over a plain shuffling loader; a restart begins at an epoch's start."""

    steps = 12
    batches = 4

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [self.make_optimizer()]
        data = Numbers(noisy=self.params["noisy"])
        self.loader = DataLoader(
            data, batch_size=12, shuffle=True, num_workers=self.params["workers"]
        )

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t = run.begin()
        while t < run.last:
            for x in self.loader:
                t += 1
                run.now = t
                run.done(t, self.learn(x))
                if t == run.last:
                    break
            self.model.eval()
            with torch.no_grad():
                self.model(torch.randn(9, 6))  # draws; the next epoch's shuffle comes after it
            self.model.train()
        run.finish()

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.randint(0, CLASSES, (len(x),))
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_after_an_epoch_boundary_is_shuffled_as_before(bed: Bed, workers: int) -> None:
    # Step 8 ends the second epoch; the third is shuffled between it and the forward of step 9.
    params = {"workers": workers, "noisy": True}
    plain = bed.run(Epochs, "plain", params=params).check_ended()
    for where, k in (("forward", 10), ("update", 10), ("after", 9)):
        death = {"kill_step": k, "kill_where": where}
        bed.run(Epochs, "attach", where, params=params, **death).check_killed()
        again = bed.run(Epochs, "resume", where, params=params).check_ended()
        restored = again.value("restored")
        assert restored in ({8, 9} if where == "update" else {8})
        if restored == 8:
            steps = {t: v for t, v in again.steps.items()}
            assert steps == {t: v for t, v in plain.steps.items() if t > 8}


class Positioned:
    """A loader that can go on in the middle of an epoch: it saves the epoch's seed and position."""

    def __init__(self, workers: int) -> None:
        self.generator = torch.Generator()
        self.loader = DataLoader(
            Numbers(noisy=workers > 0), batch_size=12, shuffle=True, num_workers=workers,
            generator=self.generator,
        )  # fmt: skip
        self.begin = self.generator.manual_seed(torch.initial_seed()).get_state()
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.at == 0:
            self.begin = self.generator.get_state()
        self.generator.set_state(self.begin)
        for i, x in enumerate(iter(self.loader)):
            if i >= self.at:
                self.at = i + 1
                yield x
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"begin": self.begin, "at": self.at, "now": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.at = state["begin"], state["at"]
        self.generator.set_state(state["now"])


class MidEpoch(Epochs):
    """The position is an extra; it is taken at the step because the object can be iterated."""

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [self.make_optimizer()]
        self.loader = Positioned(self.params["workers"])
        self.extras = {"data": self.loader}

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t = run.begin()
        while t < run.last:
            for x in self.loader:
                t += 1
                run.now = t
                run.done(t, self.learn(x))
                if t == run.last:
                    break
        run.finish()


@pytest.mark.parametrize("k", [6, 8, 9])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_with_a_position_resumes_in_the_middle_of_an_epoch(
    bed: Bed, workers: int, k: int
) -> None:
    bed.check(MidEpoch, params={"workers": workers}, kills=("forward", "after"), kill_step=k)


class Strange(Plain):
    """State that no restricted loader could bring back."""

    def setup(self) -> None:
        super().setup()
        self.extras = {"odd": {"fine": 1, "deep": [{"bad": self.params["kind"]}]}}
        values = {"object": object(), "function": batch, "exception": ValueError("x")}
        self.extras["odd"]["deep"][0]["bad"] = values[self.params["kind"]]


@pytest.mark.parametrize("kind", ["object", "function", "exception"])
def test_extra_that_could_not_come_back_is_refused_at_attach_by_its_path(
    bed: Bed, kind: str
) -> None:
    run = bed.run(Strange, "attach", params={"kind": kind})
    assert "StateError" in run.log
    assert "extras/odd/deep/0/bad" in run.log
    assert not run.steps


class Lite:
    """A loader as in build-nanogpt: no iterator, its position moves when a batch is asked for."""

    def __init__(self) -> None:
        self.data = torch.randn(97, 6, generator=torch.Generator().manual_seed(3))
        self.labels = torch.randint(0, CLASSES, (97,), generator=torch.Generator().manual_seed(4))
        self.position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(self.position, self.position + 12) % len(self.data)
        self.position = (self.position + 12) % len(self.data)
        return self.data[at], self.labels[at]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Average:
    """Users write an average of the weights like this."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.2)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.shadow[name].copy_(value)


class BuildNanoGpt(Plain):
    """Its loop, with what else a loop has: a scaler, a schedule, an average, a count of batches."""

    def setup(self) -> None:
        super().setup()
        self.loader, self.average, self.drawn = Lite(), Average(self.model), {"batches": 0}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=20)
        self.extras = {
            "loader": lightck.at_step(self.loader),
            "drawn": lightck.at_step(self.drawn),
            "average": lightck.at_forward(self.average),
            "scaler": self.scaler,
            "schedule": self.schedule,
        }

    def step(self, t: int, run: Run) -> Any:
        total = torch.zeros(())
        self.optimizer.zero_grad()
        for _ in range(2):
            x, y = self.loader.next_batch()
            self.drawn["batches"] += 1
            loss = F.cross_entropy(self.model(x), y) / 2
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update(self.model)
        return total

    def more(self) -> dict[str, Any]:
        return {"average": self.average.shadow, "drawn": self.drawn}


def test_the_loop_of_build_nanogpt_resumes(bed: Bed) -> None:
    bed.check(BuildNanoGpt)
