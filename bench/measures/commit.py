"""Measure how long a commit takes beyond the copies, by the number of tensors.

Copies are eager and done before the clock starts, so that what is left is comparing, building the
manifest, and the commit record.

Records:
    commit: seconds from asking for the fence to the durable commit record.
    seal: the part of it that lightck counts itself, from sealing to the record.
    boundary: seconds at the start of a forward that opens a snapshot.
    tensors: number of them, parameters, buffers and optimizer state.
"""

from __future__ import annotations

import time

from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.work import Training, tensors

_COPIES_S = 0.05  # ample for the few megabytes of the model `bag`


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck tells how long a commit takes")
    training = Training(job.work)
    training.steps(job.method.warmup)
    engine = _Prompt({"schedule": "eager", **job.contender.settings})
    loop = Loop.of(job, training, engine)
    loop.attach(job.folder)
    loop.run(then=True)
    for _ in range(job.method.settle):
        loop.run(then=True)
    engine.commits.clear()
    seals, boundaries = [], []
    for i in range(job.method.least):
        before, boundary = _sealed(engine), engine.stalls()["boundary"]
        loop.run(then=True)
        seals.append(_sealed(engine) - before)
        boundaries.append(engine.stalls()["boundary"] - boundary)
        job.tell(f"{i + 1} of {job.method.least} commits")
    commits = list(engine.commits)
    count = len(tensors(training.state()))
    verified = loop.finish(Training(job.work, seed=1))
    return [
        sampled("commit", "s", commits, note=verified),
        sampled("seal", "s", seals),
        sampled("boundary", "s", boundaries),
        single("tensors", "", count),
    ]


def _sealed(engine: Lightck) -> float:
    stats = engine.handle.stats()
    return stats.commit_s * stats.committed


class _Prompt(Lightck):
    """The lightck engine that commits before the update, so that nothing else is in the time."""

    def __init__(self, settings: dict[str, object]) -> None:
        super().__init__(settings)
        self.commits: list[float] = []

    def before_update(self) -> None:
        """Fence and commit, on the clock."""
        time.sleep(_COPIES_S)
        begin = time.perf_counter()
        self.handle.fence()
        self.handle.wait()
        self.commits.append(time.perf_counter() - begin)
