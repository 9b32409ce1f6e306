"""How long it takes to bring a snapshot back into live tensors, against a plain memcpy of it.

Records:
    restore: seconds; a repetition restores into a model and an optimizer that exist already.
    memcpy: seconds, one thread, of the same bytes into the same tensors.
    restore_ratio: restore / memcpy, repetition by repetition.
    state: bytes.
"""

from __future__ import annotations

import time

import torch

from bench import engines
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.work import Training, copied, difference, tensors
from bench.yardstick import Kernels


def measure(job: Job) -> list[Record]:
    """See the module and `bench.measures.run`."""
    training = Training(job.work)
    for _ in range(job.method.warmup):
        training.compute()
        training.update()
    loop = Loop(
        training,
        engines.make(job.contender.engine, job.contender.settings),
        patient=job.method.patient,
    )
    loop.attach(job.folder)
    loop.run(then=True)
    kept = copied(training.state())
    verified = loop.finish(Training(job.work, seed=1))
    fresh = Training(job.work, seed=2)
    fresh.compute()
    fresh.update()
    restores, copies = [], []
    for i in range(job.method.least):
        begin = time.perf_counter()
        loop.engine.restore(fresh)
        restores.append(time.perf_counter() - begin)
        problem = difference(kept, fresh.state())
        if problem is not None:
            raise BenchError(f"repetition {i}: the restored state differs: {problem}")
        copies.append(_memcpy(tensors(kept), tensors(fresh.state())))
        fresh.compute()
        fresh.update()
        job.tell(f"{i + 1} of {job.method.least} repetitions")
    ratios = [r / c for r, c in zip(restores, copies, strict=True)]
    return [
        sampled("restore", "s", restores, note=verified),
        sampled("memcpy", "s", copies),
        sampled("restore_ratio", "", ratios),
        single("state", "B", sum(t.nbytes for t in tensors(kept))),
    ]


def _memcpy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    kernels = Kernels()
    plain = next(which for which, name in kernels.names.items() if name == "memcpy")
    begin = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        kernels.copy(plain, target.data_ptr(), source.data_ptr(), source.nbytes)
    return time.perf_counter() - begin
