"""Train the demo's job, a process of its own: `python -m lightck.cli.demo.train`.

It writes one JSON line per event to its log: the step it starts at, each finished step with its
exact loss, and at the end a digest of every tensor with what was measured. `lightck chaos` starts
it, too, on several ranks if torchrun does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.cli.demo.model import GPT, Shape, corpus, sample

_BATCH = 8
_SAVES = 9  # how often torch.save is timed; the median counts
_SLOWEST_LR = 1e-4


class Job:
    """The model, optimizer, scheduler and counters of one training run."""

    def __init__(self, steps: int, seed: int, hold_in: int | None = None) -> None:
        """Build the run; the same seed gives the same start.

        In step `hold_in` it waits to be killed.
        """
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        torch.use_deterministic_algorithms(True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.steps, self.hold_in = steps, hold_in
        self.shape = Shape()
        self.text, self.files = corpus()
        self.model = GPT(self.shape)
        # With a search for unused parameters DDP keeps its buckets as they are, and with them the
        # order of summation over restarts.
        self.whole: nn.Module = (
            DistributedDataParallel(self.model, find_unused_parameters=True)
            if dist.is_initialized()
            else self.model
        )
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=_SLOWEST_LR)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=3e-3, total_steps=steps + 1
        )
        self.progress: dict[str, Any] = {"step": 0, "bytes_seen": 0}
        after = lightck.at_forward(self.progress)  # the counters change after the step's end
        self.extras = {"scheduler": self.scheduler, "progress": after}
        if rank:
            torch.manual_seed(seed + rank)  # data of its own

    def step(self) -> float:
        """Train one step; return the loss."""
        x, target = sample(self.text, _BATCH, self.shape.block)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.whole(x, target)
        loss.backward()
        if self.progress["step"] + 1 == self.hold_in:
            starter = os.getppid()
            while os.getppid() == starter:  # until the demo's own end
                time.sleep(0.01)
        self.optimizer.step()
        self.catch_up(self.progress["step"] + 1)
        return float(loss.detach())

    def catch_up(self, step: int) -> None:
        """Do what the loop does between the end of a step and the next forward.

        A just-in-time snapshot may come before this: then it is done after the restore.
        """
        while self.progress["step"] < step:
            self.scheduler.step()
            self.progress["step"] += 1
            self.progress["bytes_seen"] += _BATCH * self.shape.block

    def state(self) -> dict[str, Any]:
        """Return what torch.save would have to write for the same resume."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "progress": self.progress,
            "generator": torch.get_rng_state(),
        }

    def digests(self) -> dict[str, str]:
        """Return a digest per tensor of the model and the optimizer, and of all other state."""
        state = self.state()
        found = {f"model/{name}": _digest(value) for name, value in state["model"].items()}
        for position, entries in state["optimizer"]["state"].items():
            for name, value in entries.items():
                found[f"optimizer/{position}/{name}"] = _digest(value)
        found["generator"] = _digest(state["generator"])
        for name in ("scheduler", "progress"):
            found[name] = _hash(json.dumps(state[name], sort_keys=True, default=str).encode())
        groups = json.dumps(state["optimizer"]["param_groups"], sort_keys=True)
        found["optimizer groups"] = _hash(groups.encode())
        return found


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1)
    return _hash(f"{tensor.dtype}{list(tensor.shape)}".encode(), flat.view(torch.uint8).numpy())


def _hash(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class Log:
    """A log of one JSON line per event, flushed at once.

    Losses also go to the file of `lightck chaos`.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file.open("w", encoding="ascii") if file is not None else None
        chaos = os.environ.get("LIGHTCK_CHAOS_LOSSES")
        self._losses = open(chaos, "ab", buffering=0) if chaos else None  # noqa: SIM115
        self._rank = os.environ.get("RANK", "0")

    def __call__(self, **event: Any) -> None:
        """Write an event."""
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()
        if self._losses is not None and event["event"] == "step":
            # A single write, so that a kill leaves no half line.
            self._losses.write(f"{self._rank} {event['step']} {event['loss']}\n".encode())


def train(job: Job, log: Log) -> list[float]:
    """Train to the end; return the seconds of each step."""
    seconds = []
    while job.progress["step"] < job.steps:
        begin = time.perf_counter()
        loss = job.step()
        seconds.append(time.perf_counter() - begin)
        log(event="step", step=job.progress["step"], loss=loss.hex())
    return seconds


def torch_save_seconds(job: Job, file: Path) -> list[float]:
    """Return the seconds of each torch.save of the same state to the same medium, unsynced."""
    seconds = []
    for _ in range(_SAVES):
        begin = time.perf_counter()
        torch.save(job.state(), file)
        seconds.append(time.perf_counter() - begin)
    os.unlink(file)
    return seconds


def run(options: argparse.Namespace) -> None:
    """Train with or without lightck."""
    torch.set_num_threads(options.threads)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    job, log = Job(options.steps, options.seed, options.hold_in), Log(options.log)
    stats: dict[str, Any] | None = None
    saves: list[float] = []
    if options.region is None:
        log(event="start", step=0)
        seconds = train(job, log)
    else:
        at = (job.whole, job.optimizer, options.region)
        info = lightck.restore(*at, extras=job.extras)
        if info is not None:
            job.catch_up(info.step)
        log(event="start", step=info.step if info else 0, fell_back=info.fell_back if info else ())
        with lightck.attach(*at, policy=1, extras=job.extras) as handle:
            seconds = train(job, log)
            stats = {**asdict(handle.stats()), "survives": handle.survives}
        if options.log is not None:
            saves = torch_save_seconds(job, options.region.with_name("torch-save.pt"))
    parameters = sum(p.numel() for p in job.model.parameters())
    log(
        event="end",
        digests=job.digests(),
        step_s=seconds,
        stats=stats,
        torch_save_s=saves,
        parameters=parameters,
        shape=asdict(job.shape),
        text_files=job.files,
        text_bytes=len(job.text),
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments and train."""
    parser = argparse.ArgumentParser(description="One process of `lightck demo`.")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--region", type=Path, help="snapshots go here; without it, none are made")
    parser.add_argument(
        "--hold-in",
        type=int,
        metavar="N",
        help="wait in the middle of step N: a killer who comes late does not come too late",
    )
    run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
