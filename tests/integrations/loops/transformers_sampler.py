"""HF's Trainer with a sampler of lightck's and a callback of the user's own: it counts from 0."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

import lightck
from support.integrations import probe
from support.integrations.probe import ON, Data, Net, here, tell

transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module="transformers|torch|accelerate")
done = 0
handle: Any = None


class Rows(Data):
    """The dataset as dicts."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return {"x": x, "labels": y}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(self.net(x), labels)}


class Checkpoints(TrainerCallback):
    """Restores and attaches; the optimizer is Accelerate's."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        global done, handle
        extras = {"data": sampler, "schedule": given["lr_scheduler"]}
        where = (given["model"], given["optimizer"], probe.PATH)
        info = lightck.restore(*where, extras=extras)
        probe.note("restored", info and info.step)
        state.global_step = done = info.step if info else 0
        handle = lightck.attach(*where, extras=extras)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        handle.close()


class Tells(Trainer):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return sampler

    def training_step(self, model: Any, inputs: Any, *given: Any) -> Any:
        here(f"forward {self.state.global_step}", handle)
        loss = super().training_step(model, inputs, *given)
        tell(f"loss {self.state.global_step}", [loss, inputs["x"]])
        return loss


torch.manual_seed(3)
rows = Rows(augment=True)
sampler = lightck.ResumableSampler(rows, seed=1)
arguments = TrainingArguments(
    "out", max_steps=30, per_device_train_batch_size=4, learning_rate=0.01, save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
)  # fmt: skip
trainer = Tells(Model(), arguments, train_dataset=rows, callbacks=[Checkpoints()] if ON else [])
trainer.train()
probe.end(trainer.model)
