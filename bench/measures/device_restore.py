"""How long it takes to bring a snapshot back into tensors on a device, against a plain copy.

Records:
    restore: seconds; everything is on the device then, and was checked against its checksum.
    plain: seconds of a plain copy of the same bytes from pinned memory into the same tensors.
    restore_share: plain / restore, repetition by repetition: 1 is the speed of the bus.
    state: bytes.
"""

from __future__ import annotations

import time

from bench.device import PlainCopy, synchronize
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.work import Training, copied, difference, tensors


def measure(job: Job) -> list[Record]:
    """See the module and `bench.measures.run`."""
    device = job.work.device
    training = Training(job.work)
    training.steps(job.method.warmup)
    loop = Loop.of(job, training)
    loop.attach(job.folder)
    loop.run(then=True)
    kept = copied(training.state())
    verified = loop.finish(Training(job.work, seed=1))
    fresh = Training(job.work, seed=2)
    fresh.steps(1)
    restores, copies = [], []
    for i in range(job.method.settle + job.method.least):
        synchronize(device)
        begin = time.perf_counter()
        loop.engine.restore(fresh)
        synchronize(device)
        restored = time.perf_counter() - begin
        problem = difference(kept, fresh.state())
        if problem is not None:
            raise BenchError(f"repetition {i}: the restored state differs: {problem}")
        plain = PlainCopy(device, tensors(fresh.state())).to_device()
        fresh.steps(1)  # so that the next one has something to do
        if i >= job.method.settle:
            restores.append(restored)
            copies.append(plain)
        job.tell(f"{i + 1} repetitions")
    return [
        sampled("restore", "s", restores, note=verified),
        sampled("plain", "s", copies),
        sampled("restore_share", "", [c / r for c, r in zip(copies, restores, strict=True)]),
        single("state", "B", sum(t.nbytes for t in tensors(kept))),
    ]
