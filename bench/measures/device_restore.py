"""Measure how long a restore into tensors on a device takes, against a plain copy.

Records:
    restore: seconds; everything is on the device then, and was checked against its checksum.
    plain: seconds of a plain copy of the same bytes from pinned memory into the same tensors.
    restore_share: plain / restore, repetition by repetition: 1 is the speed of the bus.
    state: bytes.
"""

from __future__ import annotations

import time

from bench.device import PlainCopy, synchronize
from bench.measures import Job
from bench.measures.loop import Saved
from bench.record import Record, sampled, single
from bench.work import tensors


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    saved, device = Saved.of(job), job.work.device
    fresh = saved.fresh
    restores, copies = [], []
    for i in range(job.method.settle + job.method.least):
        synchronize(device)
        begin = time.perf_counter()
        saved.engine.restore(fresh)
        synchronize(device)
        restored = time.perf_counter() - begin
        saved.check(i)
        plain = PlainCopy(device, tensors(fresh.state())).to_device()
        fresh.steps(1)  # so that the next one has something to do
        if i >= job.method.settle:
            restores.append(restored)
            copies.append(plain)
        job.tell(f"{i + 1} repetitions")
    return [
        sampled("restore", "s", restores, note=saved.verified),
        sampled("plain", "s", copies),
        sampled("restore_share", "", [c / r for c, r in zip(copies, restores, strict=True)]),
        single("state", "B", sum(t.nbytes for t in tensors(saved.state))),
    ]
