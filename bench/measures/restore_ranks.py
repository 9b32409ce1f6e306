"""Measure a restore into live tensors, on as many ranks as saved the snapshot or on others.

The snapshot is from processes that are gone (`save_ranks`); each rank restores all of the
replicated state, from the regions of all that saved it.

Records:
    restore: seconds of the call, until the last rank has returned; between repetitions training
        changes everything, and each is compared with digests of what was saved.
    state: bytes that each rank restores.
"""

from __future__ import annotations

import json
import time

from bench.engines.lightck import restored
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.ranks import require_equal
from bench.measures.save_ranks import KEPT
from bench.record import Record, sampled, single
from bench.work import Training, tensors


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    kept = json.loads((job.folder / KEPT).read_text())
    training = Training(job.work, seed=2)
    training.steps(1)
    spent = []
    for i in range(job.method.settle + job.method.least):
        job.group.together()
        begin = time.perf_counter()
        step = restored(training, job.folder / "run")
        begin, end = job.group.latest([begin, time.perf_counter()])
        if step != kept["step"]:
            raise BenchError(f"restored step {step}, saved was {kept['step']}")
        require_equal(kept["state"], training)
        training.steps(1)
        if i >= job.method.settle:
            spent.append(end - begin)
        job.tell(f"{i + 1} of {job.method.settle + job.method.least} repetitions")
    saved_by = job.work.saved_by or job.work.world
    note = f"equal bit for bit, each of {len(spent)} times; saved by {saved_by}"
    return [
        sampled("restore", "s", spent, note=note),
        single("state", "B", sum(t.nbytes for t in tensors(training.state()))),
    ]
