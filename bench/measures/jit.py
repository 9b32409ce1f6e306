"""Measure how long a just-in-time snapshot takes, inside a step; nothing else is ever due.

Records:
    jit: seconds from asking for it, after a backward, to the durable commit record.
    jit_ratio: jit / sync_copy.
    sync_copy: seconds of the yardstick.
"""

from __future__ import annotations

import time

import lightck
from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled
from bench.statistics import trimmed_mean
from bench.work import Training, copied, difference, tensors
from bench.yardstick import SyncCopy


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck saves just in time")
    training = Training(job.work)
    engine = Lightck({"failure": "jit", **job.contender.settings})
    loop = Loop.of(job, training, engine)
    training.steps(job.method.warmup)
    loop.attach(job.folder)
    yardstick = SyncCopy(job.folder, tensors(training.state()))
    for _ in range(job.method.settle):
        _saved(loop, engine.handle)
    taken, copies = [], []
    for i in range(job.method.least):
        copies.append(yardstick())
        taken.append(_saved(loop, engine.handle))
        job.tell(f"{i + 1} of {job.method.least} snapshots")
    yardstick.close()
    return [
        sampled("jit", "s", taken, note=_verified(job, loop, engine)),
        sampled("jit_ratio", "", taken, scale=trimmed_mean(copies)),
        sampled("sync_copy", "s", copies, note=f"{yardstick.kernel}, one thread"),
    ]


def _saved(loop: Loop, handle: lightck.Handle) -> float:
    """Run a step without a snapshot, and one that is saved before its update.

    Return the save's seconds.
    """
    loop.run(then=False)
    loop.training.compute()
    begin = time.perf_counter()
    saved = handle.snapshot_now("bench")
    spent = time.perf_counter() - begin
    if not saved.fresh or saved.step != loop.step:
        raise BenchError(f"step {loop.step} was asked for, this was saved: {saved}")
    loop.training.update()
    loop.step += 1
    return spent


def _verified(job: Job, loop: Loop, engine: Lightck) -> str:
    """Save once more, restore that and compare every bit; return what was verified."""
    loop.run(then=False)
    loop.training.compute()
    kept, step = copied(loop.training.state()), loop.step
    engine.handle.snapshot_now("bench")
    engine.handle.detach()
    fresh = Training(job.work, seed=1)
    found = engine.restore(fresh)
    problem = difference(kept, fresh.state())
    if found != step or problem is not None:
        raise BenchError(f"restored step {found}, saved was step {step}: {problem}")
    return f"step {step} saved just in time, restored and equal bit for bit"
