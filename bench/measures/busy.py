"""Measure a training whose CPUs others keep busy: what a step waits, and if snapshots are lost.

Every step is due. Blocks of steps with the engine, with the same engine at `priority="normal"`, and
with a plain blocking copy of the state alternate in one process, in a random order.

Records:
    stall, stall_p99, stall_most: training-thread time in the engine per step, in seconds.
    stall_ratio, stall_p99_ratio: mean and p99 over those of `priority="normal"`; of the mean the
        interval is over pairs of neighbouring blocks.
    copy_p99_ratio: p99 over the p99 of the plain copies.
    lost: due snapshots that slipped.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import lightck
from bench.engines.lightck import restored
from bench.errors import BenchError
from bench.measures import Job
from bench.record import Record, sampled, single
from bench.work import Training, copied, difference, tensors

_SETTLE = 3
_ITEM_S = 0.004  # CPU time of a loader's worker for each item
_SEED = 20261124


class _Dear(Dataset[torch.Tensor]):
    """A dataset whose items take a worker's CPU."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + _ITEM_S
        while time.perf_counter() < end:
            pass
        return torch.zeros(64)


def _spin() -> None:
    while True:
        pass


@contextmanager
def _others(job: Job) -> Iterator[Callable[[], object]]:
    """Keep the CPUs busy; yield a function that draws a batch, for loops that draw one."""
    work = job.work
    with ExitStack() as undo:
        for _ in range(work.hogs):
            hog = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
            hog.start()
            undo.callback(hog.kill)
        if not work.loader_workers:
            yield lambda: None
            return
        workers = work.loader_workers
        batches = iter(DataLoader(_Dear(), 16, num_workers=workers, prefetch_factor=4))
        yield lambda: next(batches)


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    training = Training(job.work)
    order = random.Random(_SEED)
    stalls: dict[str, list[list[float]]] = {"idle": [], "normal": [], "plain": []}
    lost = 0
    with _others(job) as draw:
        training.steps(job.method.warmup)
        copies = [torch.empty_like(each) for each in tensors(training.state())]
        for number in range(job.method.least):
            for way in order.sample(sorted(stalls), 3):
                if way == "plain":
                    block = [_copied(training, copies, draw) for _ in range(job.method.block)]
                else:
                    block, slipped = _block(job, training, way, draw)
                    lost += slipped if way == "idle" else 0
                stalls[way].append(block)
            job.tell(f"{number + 1} of {job.method.least} blocks of {job.method.block} steps")
    return _records(job, stalls, lost)


def _records(job: Job, stalls: dict[str, list[list[float]]], lost: int) -> list[Record]:
    flat = {way: [s for block in blocks for s in block] for way, blocks in stalls.items()}
    p99 = {way: float(np.quantile(each, 0.99)) for way, each in flat.items()}
    pairs = zip(stalls["idle"], stalls["normal"], strict=True)
    due = len(flat["idle"])
    beside = f"{job.work.loader_workers} loader workers, {job.work.hogs} hogs beside it"
    return [
        single("lost", "", lost, note=f"of {due} due; {beside}"),
        sampled("stall", "s", flat["idle"], note="every block's last snapshot equal bit for bit"),
        single("stall_p99", "s", p99["idle"]),
        single("stall_most", "s", max(flat["idle"])),
        sampled("stall_ratio", "", [float(np.mean(a) / np.mean(b)) for a, b in pairs]),
        single("stall_p99_ratio", "", p99["idle"] / p99["normal"]),
        single("copy_p99_ratio", "", p99["idle"] / p99["plain"]),
    ]


def _copied(training: Training, copies: list[torch.Tensor], draw: Callable[[], object]) -> float:
    """Run a step with a plain copy of the state in it; return the seconds of the copy."""
    draw()
    training.compute()
    begin = time.perf_counter()
    with torch.no_grad():
        torch._foreach_copy_(copies, tensors(training.state()))
    spent = time.perf_counter() - begin
    training.update()
    return spent


def _block(
    job: Job, training: Training, priority: str, draw: Callable[[], object]
) -> tuple[list[float], int]:
    """Run steps with a snapshot each.

    Return what each waited in the engine, and how many slipped.
    """
    path = job.folder / f"run-{priority}"
    settings = {**job.contender.settings, "priority": priority, "overwrite": True, "policy": 1}
    handle = lightck.attach(training.model, training.optimizer, path, **settings)

    def waited() -> float:
        return sum(handle.stats().stall_s.values())

    spent: list[float] = []
    for number in range(_SETTLE + job.method.block):
        if number == _SETTLE:
            slipped = handle.stats().slipped
        draw()
        before = waited()
        training.steps(1)
        if number >= _SETTLE:
            spent.append(waited() - before)
    slipped = handle.stats().slipped - slipped
    _verify(job, training, handle, path)
    return spent, slipped


def _verify(job: Job, training: Training, handle: lightck.Handle, path: Path) -> None:
    """Compare a snapshot that a step has carried, and that no close has taken at rest.

    Raises:
        BenchError: it is not the state that was there.
    """
    step, state, slips = handle.step, copied(training.state()), handle.stats().slipped
    training.steps(1)  # behind which the next one is due
    handle.wait()
    late = handle.stats().slipped > slips
    handle.detach()
    again = Training(job.work, seed=1)
    again.need_optimizer_state()
    found = restored(again, path)
    wrong = None if late else difference(state, again.state())
    if wrong or (found != step and not late):
        raise BenchError(f"restored step {found} of {step}: {wrong or 'the wrong one'}")
