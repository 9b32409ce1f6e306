"""Measure what the integration with Lightning adds to a step of GPT-2 small; on a quiet machine.

    make integrations
    PYTHONPATH=. .venv-integrations/bin/python tests/integrations/step_time.py [STEPS] [SIZE]

Two trainings in turn, ROUNDS of each: the same script without lightck, and with a snapshot every
ten steps. Prints seconds per step of each round, and the ratio of medians. SIZE is "small" (GPT-2,
1.5 GB of state) or "toy".
"""

from __future__ import annotations

import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import lightck
from lightck.integrations.lightning import LightckCallback

ROUNDS = 3
EVERY = 10
SIZES: dict[str, dict[str, int]] = {
    "small": {},
    "toy": {
        **dict(n_embd=64, n_layer=2, n_head=2, vocab_size=1000),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    },
}


class Model(lightning.LightningModule):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(**SIZES[size]))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(lightning.Callback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def step_s(path: Path | None, steps: int, size: str) -> float:
    """Return the seconds of a step, the mean over whole cycles of snapshots, the first left out."""
    torch.manual_seed(0)
    tokens = TensorDataset(torch.randint(0, 1000, (steps, 128)))
    loader = DataLoader(tokens, 1, sampler=lightck.ResumableSampler(tokens))
    times = Times()
    own = [] if path is None else [LightckCallback(path, policy=EVERY)]
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=[times, *own],
        enable_checkpointing=path is not None, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(size), loader)
    return (times.ends[-1] - times.ends[EVERY - 1]) / (steps - EVERY)


def main() -> None:
    """Measure, and print."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    size = sys.argv[2] if len(sys.argv) > 2 else "small"
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    found: dict[str, list[float]] = {"without": [], "with": []}
    try:
        for i in range(ROUNDS):
            found["without"].append(step_s(None, steps, size))
            found["with"].append(step_s(folder / str(i), steps, size))
            shutil.rmtree(folder / str(i))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, seconds in found.items():
        print(name, *(f"{each:.4f} s" for each in seconds))
    ratio = statistics.median(found["with"]) / statistics.median(found["without"])
    print(f"ratio of the medians: {ratio:.3f} (wanted: at most 1.02)")


if __name__ == "__main__":
    main()
