"""Accelerate's loops, as people write them. The fork server imports it once."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from test_data import Augmented
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightck
from support.e2e.jobs import CLASSES, small_model
from support.e2e.trainer import Job, Run


class Counted:
    """`register_for_checkpointing` takes objects like this."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Accelerated(Job):
    """The loop prepares, accumulates, clips and schedules.

    `where` says what knows the position in the data.
    """

    steps = 17
    expected_warnings = ("'set_vital' is deprecated",)

    def setup(self) -> None:
        where, accumulate = self.params["where"], self.params.get("accumulate", 1)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            step_scheduler_with_optimizer=False,
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=where == "stateful", use_seedable_sampler=True, data_seed=3
            ),
        )
        data = Augmented()
        sampler = lightck.ResumableSampler(data, seed=7) if where == "sampler" else None
        loader = DataLoader(
            data, batch_size=12, sampler=sampler, shuffle=sampler is None,
            num_workers=self.params["workers"],
        )  # fmt: skip
        model = small_model()
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        validation = DataLoader(Augmented(7), batch_size=4, shuffle=True)
        model, self.prepared, self.loader, self.scheduler, self.validation = (
            self.accelerator.prepare(model, self.optimizer, loader, scheduler, validation)
        )
        self.models = [model]
        self.place, self.counted = {"epoch": 0, "batch": 0}, Counted()
        self.accelerator.register_for_checkpointing(self.counted)
        counted = lightck.at_forward(self.counted)
        self.extras = {"scheduler": self.scheduler, "counted": counted}
        self.data: dict[str, Any] = {
            "skip": {"place": lightck.at_step(self.place)},
            "sampler": {"data": sampler},
            "stateful": {"data": self.loader, "validation": self.validation},
        }[where]

    def restore(self, run: Run) -> lightck.RestoreInfo | None:
        return lightck.restore(self.model, self.optimizer, run.path, extras=self.extras | self.data)

    def attach(self, run: Run) -> lightck.Handle:
        return lightck.attach(
            self.model, self.optimizer, run.path, extras=self.extras | self.data, **self.settings
        )

    def batches(self) -> Any:
        """The rest of the epoch."""
        if self.params["where"] != "skip":
            return self.loader
        self.loader.set_epoch(self.place["epoch"])
        return self.accelerator.skip_first_batches(self.loader, self.place["batch"])

    def validate(self) -> None:
        """Draws: in the loader and in its samples."""
        self.model.eval()
        with torch.no_grad():
            for _, x in self.validation:
                self.model(x)
        self.model.train()

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        t = run.begin()
        run.now = t + 1
        while t < run.last:
            for index, x in self.batches():
                self.place["batch"] += 1
                if t % 3 == 1:
                    self.validate()
                with self.accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(x), index % CLASSES)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.prepared.step()
                    self.prepared.zero_grad()
                if not self.accelerator.sync_gradients:
                    continue
                self.scheduler.step()
                self.counted.count += 1
                t += 1
                run.done(t, loss.detach())
                run.now = t + 1
                if t % 2:
                    self.validate()
                if t == run.last:
                    break
            else:
                self.place |= {"epoch": self.place["epoch"] + 1, "batch": 0}
        run.finish()
