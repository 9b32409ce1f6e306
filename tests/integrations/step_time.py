"""Measure what an integration adds to a step of GPT-2 small; on a quiet machine.

    make integrations
    PYTHONPATH=. .venv-integrations/bin/python tests/integrations/step_time.py FRAMEWORK SIZE TURNS

The same script without lightck, and with a snapshot every ten steps, in one process: two trainings
that take turns of ten steps, so that a machine that drifts does so under both. Prints each pair of
turns: the seconds per step by the clock, and of processor of all threads, lightck's own too, which
neighbours on the machine disturb less; then the median of either's ratios with its 95 % interval.
"snapshots" holds still where the machine does not: a mean step by a median one, in which there is
no snapshot, divided by the same without lightck; it leaves out what every step costs, for which
"toy" has steps that are short enough. FRAMEWORK is one of those below, SIZE is "small" (GPT-2,
1.5 GB of state; the default) or "toy", TURNS are 12; one more is made before them and not counted.
Freed memory is kept by the process, in one arena for both threads: else some steps fault their
gradients in anew and others do not, which makes 0.8 s or 1.25 s of one and the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
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
TURNS = int(sys.argv[3]) if len(sys.argv) > 3 else 12
STEPS = EVERY * (TURNS + 2)
"""Half a turn before the first, so that a snapshot is begun and written in the middle of one."""
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
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


class Turn:
    """The turns of one of two trainings, each on a thread of its own: who ends one wakes the other.

    Attributes:
        ends: for each turn when it has begun, then when each of its steps has ended: seconds of a
            monotonic clock, and of processor of the process.
    """

    def __init__(self) -> None:
        self.ends: list[list[tuple[float, float]]] = []
        self.other = self
        self._steps = 0
        self._may = threading.Semaphore(0)

    def begin(self) -> None:
        """Wait for the other to end its turn."""
        self._may.acquire()
        self.ends.append([now()])

    def give(self, turns: int = 1) -> None:
        """Let the other go on."""
        self.other._may.release(turns)

    def step_ended(self) -> None:
        """Note the end of a step; behind the last of a turn wait for the next one."""
        self._steps += 1
        self.ends[-1].append(now())
        if self._steps % EVERY == EVERY // 2:
            self.give()
            self.begin()


def now() -> tuple[float, float]:
    """Return the seconds of both clocks."""
    return time.perf_counter(), time.process_time()


def train_lightning(size: str, path: Path | None, turn: Turn) -> None:
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
            turn.step_ended()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = Tokens()
    own = [] if path is None else [LightckCallback(path, policy=EVERY)]
    lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, callbacks=[Times(), *own],
        enable_checkpointing=path is not None, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(rows, 1, sampler=lightck.ResumableSampler(rows)))  # fmt: skip


def train_transformers(size: str, path: Path | None, turn: Turn) -> None:
    """Train by Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lightck.integrations.transformers import LightckCallback

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turn.step_ended()

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


def train_accelerate(size: str, path: Path | None, turn: Turn) -> None:
    """Train by a loop with Accelerate."""
    from accelerate import Accelerator

    from lightck.integrations.accelerate import Lightck

    accelerator, model = Accelerator(cpu=True), model_of(size)
    loader: Any = DataLoader(Tokens(), 1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
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
                turn.step_ended()


def train_deepspeed(size: str, path: Path | None, turn: Turn) -> None:
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
    run: Any = contextlib.nullcontext()
    if path is not None:
        run = attach(engine, path, extras={"data": sampler}, policy=EVERY)
    with run:
        for batch in DataLoader(rows, 1, sampler=sampler):
            engine.backward(engine(**batch).loss)
            engine.step()
            turn.step_ended()


FRAMEWORKS: dict[str, Callable[[str, Path | None, Turn], None]] = {
    "lightning": train_lightning,
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "deepspeed": train_deepspeed,
}


def train_both(framework: str, size: str, folder: Path) -> tuple[Turn, Turn]:
    """Train without lightck and with it, in turns; return the turns of both."""
    without, beside = Turn(), Turn()
    without.other, beside.other = beside, without
    failed: list[BaseException] = []

    def train(path: Path | None, turn: Turn) -> None:
        try:
            turn.begin()
            torch.manual_seed(0)
            FRAMEWORKS[framework](size, path, turn)
        except BaseException as error:  # noqa: BLE001 - of a thread: raised below
            failed.append(error)
        turn.give(STEPS)  # the other one is left alone

    thread = threading.Thread(target=train, args=(None, without))
    thread.start()
    beside.give()
    train(folder, beside)  # lightck hears signals on the main thread
    thread.join()
    if failed:
        raise failed[0]
    return without, beside


def steps_of(turn: Turn, clock: int) -> list[list[float]]:
    """Return the seconds of each step of the turns that count."""
    whole = [each for each in turn.ends if len(each) == EVERY + 1][-TURNS:]
    return [[b[clock] - a[clock] for a, b in itertools.pairwise(each)] for each in whole]


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, by resampling."""
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def report(without: Turn, beside: Turn) -> None:
    """Print what lightck makes a step longer by, as ratios."""
    mean = statistics.mean
    for i, name in enumerate(("clock", "processor")):
        off, on = steps_of(without, i), steps_of(beside, i)
        ratios = [mean(b) / mean(a) for a, b in zip(off, on, strict=True)]
        for a, b, ratio in zip(off, on, ratios, strict=True):
            print(f"{name} {mean(a):.4f} s {mean(b):.4f} s {ratio:.3f}")
        low, high = interval(ratios)
        alone = 1.0
        for each, sign in ((on, 1), (off, -1)):
            shares = [mean(steps) / statistics.median(steps) for steps in each]
            alone *= mean(shares) ** sign
        print(f"{name}: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}],", end=" ")
        print(f"snapshots {alone:.3f}", flush=True)


def main() -> None:
    """Measure, and print."""
    warnings.simplefilter("ignore")
    libc = ctypes.CDLL(None)
    for option, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0), (M_ARENA_MAX, 1)):
        if not libc.mallopt(option, value):
            raise RuntimeError(f"mallopt({option}, {value}) was refused")
    framework = sys.argv[1]
    size = sys.argv[2] if len(sys.argv) > 2 else "small"
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    try:
        report(*train_both(framework, size, folder / "run"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
