"""HF's Trainer as people use it: evaluation, accumulation, early stopping, best metric, a log."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from support.integrations import probe
from support.integrations.probe import ON, Data, Net, here, param, tell

transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module="transformers|torch|accelerate|peft")


class Rows(Data):
    """The dataset as dicts."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return {"x": x, "labels": y}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Tells(Trainer):
    """Tells each micro-batch and each row of the log, and dies where it is told to."""

    micro = 0

    def training_step(self, model: Any, inputs: Any, *given: Any) -> Any:
        step = self.state.global_step
        self.micro = self.micro + 1 if getattr(self, "at", None) == step else 0
        self.at = step
        name = f"{step}.{self.micro}"
        tell(f"batch {name}", {k: v for k, v in inputs.items()})
        here(f"forward {name}", handle())
        loss = super().training_step(model, inputs, *given)
        tell(f"loss {name}", loss)
        return loss

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        here(f"validation {self.state.global_step}", handle())
        found = super().prediction_step(*given, **named)
        torch.rand(1), np.random.random(), random.random()  # as sampling would
        return found

    def log(self, logs: dict[str, float], *given: Any) -> None:
        tell(f"log at {self.state.global_step}: {sorted(logs)}", untimed(logs))
        super().log(logs, *given)


def untimed(logs: dict[str, Any]) -> dict[str, Any]:
    """The row without what the clock says."""
    return {k: v for k, v in logs.items() if not any(t in k for t in ("runtime", "per_second"))}


def handle() -> Any:
    """The handle, while lightck is on."""
    return callback.handle if ON else None


def lora() -> Any:
    """A tiny GPT-2 with LoRA adapters; its rows are tokens."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    return get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1)
    )


class Tokens(Rows):
    def __getitem__(self, i: int) -> Any:
        tokens = (super().__getitem__(i)["x"].abs() * 20).long() % 32
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(3)
peft = param("peft", False)
arguments = TrainingArguments(
    "out",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=param("accumulate", 1),
    learning_rate=0.01,
    lr_scheduler_type="cosine",
    eval_strategy="steps",
    eval_steps=4,
    save_strategy=param("save", "no"),
    save_steps=4,
    metric_for_best_model="eval_loss",
    greater_is_better=False,
    load_best_model_at_end=param("save", "no") != "no",
    report_to=[],
    logging_steps=3,
    use_cpu=True,
    seed=3,
    disable_tqdm=True,
    dataloader_num_workers=param("workers", 0),
    remove_unused_columns=False,
    ddp_find_unused_parameters=False,
    **param("arguments", {}),
)
stopping = EarlyStoppingCallback(param("patience", 3), 0.05)
rows = Tokens if peft else Rows
trainer = Tells(
    lora() if peft else Model(),
    arguments,
    train_dataset=rows(augment=param("augment", False)),
    eval_dataset=rows(10),
    callbacks=[stopping],
)
resume = None
if ON:
    from lightck.integrations.transformers import LightckCallback

    callback = LightckCallback(probe.PATH, keep=param("keep", None))
    trainer.add_callback(callback) if param("unbound", False) else callback.bind(trainer)
    resume = None if param("forgets", False) else callback.checkpoint()
    begin = callback.on_train_begin
    callback.on_train_begin = lambda *a, **k: (  # type: ignore[method-assign]
        begin(*a, **k), probe.note("restored", callback.info and callback.info.step)
    )[0]  # fmt: skip
trainer.train(resume_from_checkpoint=resume)
state = trainer.state
probe.note("best step", state.best_global_step)
tell("end", [state.global_step, state.epoch, state.best_metric, state.best_global_step])
tell("history", [untimed(each) for each in state.log_history])
tell("stopping", stopping.early_stopping_patience_counter)
probe.end(trainer.model)
