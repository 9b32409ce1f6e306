"""Measure the native writer alone: one worker, everything copied at once, no training.

Records:
    write: bytes per second of the writer, checksum included.
    nt_copy: bytes per second of the best non-temporal copy, over the same bytes to the same medium.
    memcpy: bytes per second of memcpy, the same way.
    write_ratio: write / nt_copy, repetition by repetition.
"""

from __future__ import annotations

import time

from bench.library import Writer, kernel
from bench.measures import Job
from bench.record import Record, sampled
from bench.work import Training, tensors
from bench.yardstick import SyncCopy


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    training = Training(job.work)
    training.steps(1)
    state = tensors(training.state())
    state_bytes = sum(t.nbytes for t in state)
    yardstick = SyncCopy(job.folder, state)
    writes: list[float] = []
    copies: list[float] = []
    plain: list[float] = []
    with Writer(job.folder, [(t.data_ptr(), t.nbytes) for t in state]) as writer:
        for i in range(job.method.settle + job.method.least):
            seconds = _written(writer), yardstick(), yardstick.memcpy()
            if i >= job.method.settle:
                for kept, spent in zip((writes, copies, plain), seconds, strict=True):
                    kept.append(spent)
            job.tell(f"{i + 1} repetitions")
    yardstick.close()
    return [
        sampled("write", "B/s", _rates(state_bytes, writes), note=f"{kernel()}, with CRC32C"),
        sampled("nt_copy", "B/s", _rates(state_bytes, copies), note=yardstick.kernel),
        sampled("memcpy", "B/s", _rates(state_bytes, plain)),
        sampled("write_ratio", "", [c / w for c, w in zip(copies, writes, strict=True)]),
    ]


def _written(writer: Writer) -> float:
    writer.begin()
    begin = time.perf_counter()
    writer.copy()
    spent = time.perf_counter() - begin
    writer.verify()
    writer.drop()
    return spent


def _rates(count: int, seconds: list[float]) -> list[float]:
    return [count / each for each in seconds]
