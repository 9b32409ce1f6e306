"""Measure how long a job's commit takes once the last rank's copies are done, on one machine.

Copies are eager and done before the clock starts. Then the ranks meet; each fences its snapshot and
waits until it knows the step as committed by all of them.

Records:
    commit: seconds from the meeting until the last rank knows.
    seal: the part of it from sealing to the durable record of one rank (the slowest's mean).
    tensors: number of them, parameters, buffers and optimizer state.
"""

from __future__ import annotations

import time

from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.group import Group
from bench.measures import Job
from bench.measures.loop import Loop
from bench.measures.ranks import verify
from bench.record import Record, sampled, single
from bench.work import Training, tensors

_COPIES_S = 0.05  # ample for the few megabytes of the model `bag`


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck tells when all ranks have committed")
    training = Training(job.work, rank=job.group.rank if job.group.world > 1 else None)
    training.steps(job.method.warmup)
    engine = _Prompt({"schedule": "eager", **job.contender.settings}, job.group)
    loop = Loop.of(job, training, engine)
    loop.plan.every = 2
    loop.attach(job.folder)
    loop.run(then=False)
    loop.run(then=True)
    for i in range(job.method.settle + job.method.least):
        if i == job.method.settle:
            engine.commits.clear()
        loop.run(then=False)
        loop.run(then=True)
        job.tell(f"{i + 1} of {job.method.settle + job.method.least} commits")
    commits = list(engine.commits)
    seal = job.group.worst({"": engine.handle.stats().commit_s})[""]
    count = len(tensors(training.state()))
    del training
    verified = verify(loop, job)
    return [
        sampled("commit", "s", commits, note=verified),
        single("seal", "s", seal),
        single("tensors", "", count),
    ]


class _Prompt(Lightck):
    """The lightck engine that commits before the update, on all ranks at once.

    Nothing else is then in the measured time.
    """

    def __init__(self, settings: dict[str, object], group: Group) -> None:
        super().__init__(settings)
        self.commits: list[float] = []
        self._group = group
        self._open = False

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self._open = True

    def before_update(self) -> None:
        """Fence and commit, on the clock, in a step that carries a snapshot."""
        if not self._open:
            return
        self._open = False
        time.sleep(_COPIES_S)
        self._group.together()
        begin = time.perf_counter()
        self.handle.fence()
        self.handle.wait()
        begin, end = self._group.latest([begin, time.perf_counter()])
        self.commits.append(end - begin)
