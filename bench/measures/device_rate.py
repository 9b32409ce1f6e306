"""Measure how fast state leaves its device for the region, against a copy to pinned memory.

No training runs meanwhile. A repetition asks for a snapshot of the last step and waits for it.

Records:
    to_region: bytes per second, from asking for the snapshot to its commit.
    captured: bytes per second, from asking to the return: the live tensors may be changed then.
    plain: bytes per second of a plain copy of the same tensors to pinned memory.
    region_ratio, captured_ratio: the same two / plain, repetition by repetition.
    state: bytes.
"""

from __future__ import annotations

import time

from bench.device import PlainCopy, synchronize
from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.work import Training, tensors


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    training = Training(job.work)
    training.steps(job.method.warmup)
    loop = Loop.of(job, training)
    if not isinstance(loop.engine, Lightck):
        raise BenchError(f"device_rate measures lightck only, not {job.contender.engine}")
    loop.attach(job.folder)
    plain = PlainCopy(job.work.device, tensors(training.state()))
    regions: list[float] = []
    captures: list[float] = []
    copies: list[float] = []
    for i in range(job.method.settle + job.method.least):
        captured, committed = _taken(loop, loop.engine)
        copied = plain.to_host()
        if i >= job.method.settle:
            regions.append(committed)
            captures.append(captured)
            copies.append(copied)
        job.tell(f"{i + 1} repetitions")
    loop.run(then=True)
    verified = loop.finish(Training(job.work, seed=1))
    size = plain.bytes
    return [
        sampled("to_region", "B/s", [size / s for s in regions], note=verified),
        sampled("captured", "B/s", [size / s for s in captures]),
        sampled("plain", "B/s", [size / s for s in copies]),
        sampled("region_ratio", "", [c / r for c, r in zip(copies, regions, strict=True)]),
        sampled("captured_ratio", "", [c / r for c, r in zip(copies, captures, strict=True)]),
        single("state", "B", size),
    ]


def _taken(loop: Loop, engine: Lightck) -> tuple[float, float]:
    """Return the seconds from asking for a new step's snapshot to its last copy and its commit."""
    loop.run(then=False)
    loop.plan.due.add(loop.step)  # asked for by hand: it counts, although the policy is past it
    synchronize(loop.training.work.device)
    begin = time.perf_counter()
    engine.handle.snapshot()
    captured = time.perf_counter() - begin
    engine.handle.wait()
    return captured, time.perf_counter() - begin
