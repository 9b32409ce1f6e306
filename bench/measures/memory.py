"""Measure the DRAM that an engine takes beyond its region: see `accounting.Peak`.

Records:
    extra_dram: bytes of peak memory with the engine, beyond the peak without.
    state: bytes.
"""

from __future__ import annotations

from bench import engines
from bench.measures import Job
from bench.measures.accounting import Peak
from bench.measures.loop import Loop
from bench.record import Record, single
from bench.work import Training, tensors


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    engine = engines.make(job.contender.engine, job.contender.settings)  # its imports do not count
    training = Training(job.work)
    training.steps(job.method.warmup)
    with Peak(job.folder) as without:
        training.steps(job.method.least)
    loop = Loop.of(job, training, engine)
    with Peak(job.folder) as attached:
        loop.attach(job.folder)
        for i in range(job.method.least):
            loop.run(then=True)
            job.tell(f"{i + 1} of {job.method.least} steps")
        loop.engine.drain()
    state_bytes = sum(t.nbytes for t in tensors(training.state()))
    verified = loop.finish(Training(job.work, seed=1))
    extra = max(0, attached.bytes - without.bytes)
    return [
        single("extra_dram", "B", extra, note=verified),
        single("state", "B", state_bytes),
    ]
