"""Measure what an integration adds to a step of GPT-2 small; on a quiet machine.

    make integrations
    PYTHONPATH=. .venv-integrations/bin/python tests/integrations/step_time.py FRAMEWORK SIZE ROUNDS

The same script in turn without lightck, and with a snapshot every ten steps, in one process. Prints
the seconds per step of each pair by the clock, and of processor of all threads, lightck's own too,
which neighbours on the machine disturb less; then the median of either's ratios. Where a machine
drifts by more than is asked for, "snapshots" holds still: a mean step by a median one, in which
there is no snapshot, divided by the same without lightck. It leaves out what every step costs, for
which "toy" has steps that are short enough. FRAMEWORK is one
of those below, SIZE is "small" (GPT-2, 1.5 GB of state; the default) or "toy", ROUNDS are 6; one
more is made before them and not counted. Freed memory is kept by the process: else some steps
fault their gradients in anew and others do not, which makes 0.8 s or 1.25 s of one and the same.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# OpenMP's threads would spin while they wait, which counts as processor time of either side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import lightck

EVERY = 10
CYCLES = 4
"""Cycles of `EVERY` steps in a training, the first of which is not counted."""
STEPS = EVERY * CYCLES
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of options in malloc.h of glibc."""
SIZES: dict[str, dict[str, int]] = {
    "small": {},
    "toy": {
        **dict(n_embd=64, n_layer=2, n_head=2, vocab_size=1000),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    },
}


class Tokens(Dataset[Any]):
    """Random tokens, which are their own labels."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 1000, (STEPS, 128))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def model_of(size: str) -> GPT2LMHeadModel:
    """Make the model."""
    return GPT2LMHeadModel(GPT2Config(**SIZES[size]))


def adamw(model: Any) -> torch.optim.AdamW:
    """Make its optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


Ends = list[tuple[float, float]]
"""When each step has ended: seconds of a monotonic clock, and of processor of the process."""


def now() -> tuple[float, float]:
    """Return the seconds of both clocks."""
    return time.perf_counter(), time.process_time()


def train_lightning(size: str, path: Path | None) -> Ends:
    """Train by Lightning's Trainer."""
    import lightning

    from lightck.integrations.lightning import LightckCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(size)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    class Times(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(now())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ends: Ends = []
    rows = Tokens()
    own = [] if path is None else [LightckCallback(path, policy=EVERY)]
    lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, callbacks=[Times(), *own],
        enable_checkpointing=path is not None, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(rows, 1, sampler=lightck.ResumableSampler(rows)))  # fmt: skip
    return ends


def train_transformers(size: str, path: Path | None) -> Ends:
    """Train by Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lightck.integrations.transformers import LightckCallback

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    ends: Ends = []
    arguments = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=1, save_strategy="no", report_to=[],
        logging_steps=STEPS, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model_of(size), arguments, train_dataset=Tokens(), callbacks=[Times()])
    if path is None:
        trainer.train()
    else:
        checkpoints = LightckCallback(path, policy=EVERY).bind(trainer)
        trainer.train(resume_from_checkpoint=checkpoints.checkpoint())
    return ends


def train_accelerate(size: str, path: Path | None) -> Ends:
    """Train by a loop with Accelerate."""
    from accelerate import Accelerator

    from lightck.integrations.accelerate import Lightck

    accelerator, model = Accelerator(cpu=True), model_of(size)
    loader: Any = DataLoader(Tokens(), 1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    ends: Ends = []
    run: Any = contextlib.nullcontext()
    if path is not None:
        run = Lightck(accelerator, path, policy=EVERY)
    with run:
        for _ in range(1) if path is None else run.epochs(1):
            for batch in loader if path is None else run.batches(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                ends.append(now())
    return ends


def train_deepspeed(size: str, path: Path | None) -> Ends:
    """Train by DeepSpeed's engine, ZeRO 0, one rank."""
    import deepspeed
    import torch.distributed as dist

    from lightck.integrations.deepspeed import attach

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    if not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed("gloo", verbose=False)
    model = model_of(size)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    rows = Tokens()
    sampler = lightck.ResumableSampler(rows)
    ends: Ends = []
    run: Any = contextlib.nullcontext()
    if path is not None:
        run = attach(engine, path, extras={"data": sampler}, policy=EVERY)
    with run:
        for batch in DataLoader(rows, 1, sampler=sampler):
            engine.backward(engine(**batch).loss)
            engine.step()
            ends.append(now())
    return ends


FRAMEWORKS: dict[str, Callable[[str, Path | None], Ends]] = {
    "lightning": train_lightning,
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "deepspeed": train_deepspeed,
}


def steps_of(framework: str, size: str, path: Path | None) -> dict[str, list[float]]:
    """Return the seconds of each step by either clock, of whole cycles behind the first."""
    torch.manual_seed(0)
    ends = FRAMEWORKS[framework](size, path)
    if len(ends) != STEPS:
        raise RuntimeError(f"{framework} has made {len(ends)} steps instead of {STEPS}")
    counted = ends[EVERY - 1 :]
    return {
        name: [after[i] - before[i] for before, after in itertools.pairwise(counted)]
        for i, name in enumerate(("clock", "processor"))
    }


def compare(off: dict[str, list[float]], on: dict[str, list[float]]) -> dict[str, float]:
    """Print a pair of trainings; return what lightck makes a step longer by, as ratios."""
    mean, middle = statistics.mean, statistics.median
    ratios = {}
    for name in off:
        ratios[name] = mean(on[name]) / mean(off[name])
        alone = mean(on[name]) / middle(on[name]) / (mean(off[name]) / middle(off[name]))
        ratios[f"{name}, snapshots"] = alone
        print(
            f"{name} {mean(off[name]):.4f} s {mean(on[name]):.4f} s"
            f" {ratios[name]:.3f}, snapshots {alone:.3f}",
            flush=True,
        )
    return ratios


def main() -> None:
    """Measure, and print."""
    warnings.simplefilter("ignore")
    libc = ctypes.CDLL(None)
    for option, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0)):
        if not libc.mallopt(option, value):
            raise RuntimeError(f"mallopt({option}, {value}) was refused")
    framework = sys.argv[1]
    size = sys.argv[2] if len(sys.argv) > 2 else "small"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 6
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    try:
        for i in range(rounds + 1):
            found = {}
            for on in (False, True) if i % 2 else (True, False):
                found[on] = steps_of(framework, size, folder / str(i) if on else None)
            shutil.rmtree(folder / str(i))
            for name, ratio in compare(found[False], found[True]).items():
                if i:
                    ratios[name].append(ratio)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, each in ratios.items():
        middle = statistics.median(each)
        print(f"{framework} {size}, {name}: {middle:.3f} [{min(each):.3f}, {max(each):.3f}]")


if __name__ == "__main__":
    main()
