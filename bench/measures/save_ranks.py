"""Save a snapshot of a few ranks, and digests of it, for `restore_ranks` in other processes."""

from __future__ import annotations

import json

from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop, require_all
from bench.record import Record
from bench.work import Training, digests

KEPT = "digests.json"


def measure(job: Job) -> list[Record]:
    """Save the snapshot; there are no records. See the module."""
    engine = Lightck(dict(job.contender.settings))
    training = Training(job.work, rank=job.group.rank if job.group.world > 1 else None)
    training.steps(job.method.warmup)
    loop = Loop.of(job, training, engine)
    loop.plan.every = 2
    loop.attach(job.folder)
    loop.run(then=False)
    loop.run(then=True)
    kept = {"step": loop.step, "state": digests(training.state())}
    loop.run(then=False)
    require_all(engine.finish(), len(loop.plan.due))
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck is restored on other ranks here")
    if job.group.rank == 0:
        (job.folder / KEPT).write_text(json.dumps(kept))
    return []
