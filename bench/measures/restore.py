"""Measure how long a restore into live tensors takes, against a plain memcpy of them.

A restore may leave work to the training: tensors that are mapped from a file are copied page by
page when the first update writes to them. So the first update after it counts, by what it takes
longer than the second.

Records:
    restore: seconds; a repetition restores into a model and an optimizer that exist already. The
        call and what it leaves to the first update.
    call: seconds of the call alone.
    memcpy: seconds, one thread, of the same bytes into the same tensors, after both updates: by
        then the training has written to every page and owns it.
    restore_ratio: restore / memcpy, repetition by repetition.
    state: bytes.
"""

from __future__ import annotations

import time

import torch

from bench.measures import Job
from bench.measures.loop import Saved
from bench.record import Record, sampled, single
from bench.work import Training, tensors
from bench.yardstick import Kernels


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    saved = Saved.of(job)
    fresh = saved.fresh
    calls, restores, copies = [], [], []
    for i in range(job.method.least):
        begin = time.perf_counter()
        saved.engine.restore(fresh)
        calls.append(time.perf_counter() - begin)
        saved.check(i)
        first, second = _update(fresh), _update(fresh)
        restores.append(calls[-1] + first - second)
        copies.append(_memcpy(tensors(saved.state), tensors(fresh.state())))
        job.tell(f"{i + 1} of {job.method.least} repetitions")
    ratios = [r / c for r, c in zip(restores, copies, strict=True)]
    return [
        sampled("restore", "s", restores, note=saved.verified),
        sampled("call", "s", calls),
        sampled("memcpy", "s", copies),
        sampled("restore_ratio", "", ratios),
        single("state", "B", sum(t.nbytes for t in tensors(saved.state))),
    ]


def _update(training: Training) -> float:
    training.compute()
    begin = time.perf_counter()
    training.update()
    return time.perf_counter() - begin


def _memcpy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    kernels = Kernels()
    plain = next(which for which, name in kernels.names.items() if name == "memcpy")
    begin = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        kernels.copy(plain, target.data_ptr(), source.data_ptr(), source.nbytes)
    return time.perf_counter() - begin
