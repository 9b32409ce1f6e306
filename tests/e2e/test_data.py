"""Training goes on in the middle of an epoch: the same batches with the same augmentation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lightck
from support.e2e.jobs import CLASSES, small_model
from support.e2e.resume import Bed
from support.e2e.trainer import Job, Run

TORCHDATA = "torchdata.stateful_dataloader"
BATCHES = 5
"""An epoch has this many batches of 12 samples, the last one of 2."""
EPOCH_ENDS, EPOCH_BEGINS, MIDDLE = BATCHES, BATCHES + 1, BATCHES + 3
"""Steps to be killed in: the last of an epoch, the first and the third of the next."""


class Augmented(Dataset[Any]):
    """Samples with their index, and noise from every global generator, made where they are made."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(6) + float(np.random.random()) + random.random()
        return i, torch.full((6,), i / self.length) + 0.1 * noise


class Keeping(Augmented):
    """The same with a generator of its own, whose state it hands out: for torchdata's workers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(6, generator=self.generator)
        return i, torch.full((6,), i / self.length) + 0.1 * noise

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Sampled(Job):
    """The usual loop over a plain loader, with validations that draw after steps and before them.

    What each step has seen is part of the state that is compared.
    """

    steps = 13

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01)]
        self.seen: list[torch.Tensor] = []
        self.validation = DataLoader(Augmented(7), batch_size=4, shuffle=True)
        self.load()

    def load(self) -> None:
        data, workers = Augmented(), self.params["workers"]
        self.sampler = lightck.ResumableSampler(data, seed=7)
        self.loader: Any = DataLoader(
            data, batch_size=12, sampler=self.sampler, num_workers=workers,
            persistent_workers=self.params.get("persistent", False),
        )  # fmt: skip
        self.extras = {"data": self.sampler}

    def more(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t, micro, total = self.begin(run), 0, torch.zeros(())
        while t < run.last:
            for index, x in self.loader:
                if micro == 0:
                    self.optimizer.zero_grad()
                    self.seen, total = [], torch.zeros(())
                    if t % 3 == 1:
                        self.validate()
                total += self.learn(index, x)
                micro = (micro + 1) % self.params.get("accumulate", 1)
                if micro:
                    continue
                self.optimizer.step()
                t += 1
                run.done(t, total)
                run.now = t + 1
                if t % 2:
                    self.validate()
                if t == run.last:
                    break
        run.finish()

    def begin(self, run: Run) -> int:
        """Draws between attach and the first pass: nobody may draw before it in its place."""
        t = run.begin()
        if t == 0:
            with torch.no_grad():
                self.model[0].weight.add_(torch.rand(16, 6))
        run.now = t + 1
        return t

    def step(self, run: Run, t: int, index: torch.Tensor, x: torch.Tensor) -> int:
        """One step on one batch; its number."""
        self.optimizer.zero_grad()
        self.seen = []
        loss = self.learn(index, x)
        self.optimizer.step()
        run.done(t + 1, loss)
        run.now = t + 2
        return t + 1

    def learn(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """One micro-batch; mixed with noise by the loop itself."""
        self.seen += [index, x]
        out = self.model(x + 0.1 * torch.rand(6) * float(np.random.random()))
        loss = F.cross_entropy(out, index % CLASSES)
        loss.backward()
        return loss.detach()

    def validate(self) -> None:
        """Draws: in the loop, in the loader and in its samples."""
        self.model.eval()
        with torch.no_grad():
            for _, x in self.validation:
                self.model(x + torch.randn(6) * random.random())
        self.model.train()


LOADERS = [
    {"workers": 0},
    {"workers": 2},
    {"workers": 2, "persistent": True},
]


@pytest.mark.parametrize("k", [EPOCH_ENDS, EPOCH_BEGINS, MIDDLE])
@pytest.mark.parametrize("params", LOADERS, ids=["here", "workers", "persistent"])
def test_sampler_resumes_within_an_epoch_and_at_its_ends(
    bed: Bed, params: dict[str, Any], k: int
) -> None:
    bed.check(Sampled, params=params, kills=("forward", "after"), kill_step=k)


@pytest.mark.parametrize("k", [5, 6, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_accumulated_batches_resume_behind_the_last_of_the_step(
    bed: Bed, workers: int, k: int
) -> None:
    # Two of five batches per step: every other epoch ends in the middle of a step.
    params = {"workers": workers, "accumulate": 2}
    bed.check(Sampled, params=params, kills=("backward", "after"), kill_step=k, last=9)


class Whole(Sampled):
    """Whole epochs, with a scheduler that steps behind each: a close there has seen it step."""

    steps = 3 * BATCHES

    def setup(self) -> None:
        super().setup()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.extras["scheduler"] = self.scheduler

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t = self.begin(run)
        while t < run.last:
            for index, x in self.loader:
                t = self.step(run, t, index, x)
            self.scheduler.step()
            self.validate()
        run.finish()


@pytest.mark.parametrize("workers", [0, 2])
def test_close_behind_an_epoch_goes_on_with_the_next(bed: Bed, workers: int) -> None:
    params = {"workers": workers}
    bed.check(Whole, params=params, kills=("after",), kill_step=EPOCH_ENDS)


class Leaving(Sampled):
    """A loop that counts its epochs itself, leaves each one early and skips batches."""

    def setup(self) -> None:
        super().setup()
        self.skipped = {"count": 0}
        self.extras["skipped"] = lightck.at_step(self.skipped)

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t = self.begin(run)
        for epoch in range(self.sampler.epoch, 99):
            self.sampler.set_epoch(epoch)
            for index, x in self.loader:
                if int(index[0]) % 3 == 0:
                    self.skipped["count"] += 1
                    continue
                t = self.step(run, t, index, x)
                if t == run.last or self.sampler.consumed >= 36:
                    break
            if self.sampler.consumed >= 36:
                self.sampler.set_epoch(epoch + 1)
                self.validate()
            if t == run.last:
                break
        run.finish()


@pytest.mark.parametrize("k", [4, 5, 6])
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_that_are_left_early_and_batches_that_are_skipped_resume(
    bed: Bed, workers: int, k: int
) -> None:
    bed.check(Leaving, params={"workers": workers}, kills=("forward", "after"), kill_step=k)


class Stateful(Sampled):
    """torchdata's loader keeps its position itself."""

    expected_warnings = ("'set_vital' is deprecated",)

    def load(self) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers = self.params["workers"]
        # What workers draw from their global generators is not in torchdata's state.
        data = Keeping() if workers else Augmented()
        self.loader = StatefulDataLoader(
            data, batch_size=12, shuffle=True, num_workers=workers,
            persistent_workers=self.params.get("persistent", False),
        )  # fmt: skip
        self.extras = {"data": self.loader}


@pytest.mark.parametrize("k", [EPOCH_ENDS, EPOCH_BEGINS, MIDDLE])
@pytest.mark.parametrize("params", LOADERS, ids=["here", "workers", "persistent"])
def test_stateful_loader_resumes_within_an_epoch_and_at_its_ends(
    bed: Bed, params: dict[str, Any], k: int
) -> None:
    pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")
    bed.check(Stateful, params=params, kills=("forward", "after"), kill_step=k)


class StatefulWhole(Stateful, Whole):
    """Whole epochs of torchdata's loader."""


@pytest.mark.parametrize("workers", [0, 2])
def test_close_behind_an_epoch_of_a_stateful_loader_goes_on_with_the_next(
    bed: Bed, workers: int
) -> None:
    pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")
    params = {"workers": workers}
    bed.check(StatefulWhole, params=params, kills=("after",), kill_step=EPOCH_ENDS)


class StatefulLeaving(Stateful):
    """A loop that leaves each epoch after three steps."""

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t = self.begin(run)
        while t < run.last:
            for index, x in self.loader:
                t = self.step(run, t, index, x)
                if t == run.last or t % 3 == 0:
                    break
        run.finish()


@pytest.mark.parametrize("k", [4, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_of_a_stateful_loader_that_was_left_early_is_over(
    bed: Bed, workers: int, k: int
) -> None:
    pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")
    bed.check(StatefulLeaving, params={"workers": workers}, kills=("after",), kill_step=k, last=9)


class StatefulBoth(Stateful):
    """The validation's loader is an extra, too: its passes begin when a batch to learn from is
    drawn, or behind a step."""

    def load(self) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        super().load()
        self.validation = StatefulDataLoader(Augmented(7), batch_size=4, shuffle=True)
        self.extras |= {"validation": self.validation}


@pytest.mark.parametrize("k", [EPOCH_ENDS, EPOCH_BEGINS, 7, 8])
def test_passes_of_another_loader_are_made_again_if_they_came_behind_the_draw(
    bed: Bed, k: int
) -> None:
    pytest.importorskip(TORCHDATA, reason="SKIPPED: torchdata is not installed")
    bed.check(StatefulBoth, params={"workers": 0}, kills=("update", "after"), kill_step=k)
