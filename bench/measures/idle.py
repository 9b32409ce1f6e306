"""Measure an attached engine with nothing due, by the hooks' own time: step times hide it.

Records:
    idle_hooks: training-thread time in the engine, relative to a step's time.
    idle_seconds: the same per step, in seconds; with several ranks the largest at each step.
    step: seconds of a step; with several ranks the largest, too.
"""

from __future__ import annotations

from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.measures.ranks import verify
from bench.record import Record, sampled
from bench.work import Training


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    group = job.group
    training = Training(job.work, rank=group.rank if group.world > 1 else None)
    loop = Loop.of(job, training)
    if group.world > 1:  # ranks agree beforehand on the step that is verified
        loop.plan.every = job.method.warmup + job.method.least + 1
    loop.attach(job.folder)
    for _ in range(job.method.warmup):
        loop.run(then=False)
    if not loop.engine.stalls():
        raise BenchError(f"{job.contender.label} does not count the time of its hooks")
    hooks, steps = [], []
    for i in range(job.method.least):
        before = sum(loop.engine.stalls().values())
        steps.append(loop.run(then=False))
        hooks.append(sum(loop.engine.stalls().values()) - before)
        job.tell(f"{i + 1} of {job.method.least} steps")
    loop.run(then=True)
    del training
    verified = verify(loop, job)
    hooks, steps = group.latest(hooks), group.latest(steps)
    shares = [hook / step for hook, step in zip(hooks, steps, strict=True)]
    return [
        sampled("idle_hooks", "", shares, note=verified),
        sampled("idle_seconds", "s", hooks),
        sampled("step", "s", steps),
    ]
