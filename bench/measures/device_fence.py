"""Measure what the fence costs the device, and what lightck's hooks cost while nothing is due.

The fence is before the update. There are marks on the compute stream around it: one before the call
of the optimizer's step, one in a hook of the optimizer's own, which runs after lightck's. Between
them the stream computes nothing: it waits for copies, or for a training thread that does.

Records:
    fence_idle: time between the marks, of steps that carry a snapshot, relative to a step's time.
    fence_bare: the same of steps that carry none: what the marks themselves show.
    fence: seconds of it.
    idle_hooks: training-thread time in the engine while nothing is due, relative to a step's time.
    step: seconds of a step without a snapshot.
"""

from __future__ import annotations

import time
from typing import Any

from bench.device import Mark, synchronize
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled
from bench.work import Training


class Around:
    """A checkpointer of marks before and after the fence of every update, from its creation on."""

    def __init__(self, training: Training) -> None:
        self._device = training.work.device
        self._before: Mark | None = None
        self.pairs: list[tuple[Mark, Mark]] = []
        self._update = training.optimizer.step
        self._hook = training.optimizer.register_step_pre_hook(self._passed)
        training.optimizer.step = self._step  # type: ignore[assignment]

    def _step(self, *arguments: Any) -> Any:
        self._before = Mark(self._device)
        return self._update(*arguments)

    def _passed(self, *_: Any) -> None:
        assert self._before is not None
        self.pairs.append((self._before, Mark(self._device)))

    def take(self) -> list[float]:
        """Return the seconds of the fences since the last call."""
        synchronize(self._device)
        found = [before.until(after) for before, after in self.pairs]
        self.pairs.clear()
        return found


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    training = Training(job.work)
    training.steps(job.method.warmup)
    loop = Loop.of(job, training)
    loop.attach(job.folder)
    around = Around(training)
    for _ in range(job.method.settle):
        _steps(loop, job.method.block, carrying=True)
    _steps(loop, job.method.block, carrying=False)
    around.take()
    hooks, steps, bare = _without(job, loop, around)
    fences: list[float] = []
    for i in range(job.method.least):
        _steps(loop, job.method.block, carrying=True)
        fences += around.take()[1::2]
        job.tell(f"{i + 1} of {job.method.least} blocks")
    loop.engine.drain()
    loop.run(then=True)
    verified = loop.finish(Training(job.work, seed=1))
    step = sum(steps) / len(steps)
    return [
        sampled("fence_idle", "", fences, scale=step, note=verified),
        sampled("fence_bare", "", bare, scale=step),
        sampled("fence", "s", fences),
        sampled("idle_hooks", "", hooks, scale=step),
        sampled("step", "s", steps),
    ]


def _without(job: Job, loop: Loop, around: Around) -> tuple[list[float], list[float], list[float]]:
    """Run blocks with nothing due.

    Return the seconds of hooks, those of a step, and of all fences.
    """
    hooks, steps = [], []
    if not loop.engine.stalls():
        raise BenchError(f"{job.contender.label} does not count the time of its hooks")
    for _ in range(job.method.least):
        before = sum(loop.engine.stalls().values())
        steps.append(_steps(loop, job.method.block, carrying=False))
        hooks.append((sum(loop.engine.stalls().values()) - before) / job.method.block)
    return hooks, steps, around.take()


def _steps(loop: Loop, count: int, *, carrying: bool) -> float:
    """Run steps of which every second one carries a snapshot, or none.

    Return the seconds of one.
    """
    loop.engine.drain()
    synchronize(loop.training.work.device)
    begin = time.perf_counter()
    for i in range(count):
        loop.run(then=carrying and i % 2 == 0 and i < count - 1)
    synchronize(loop.training.work.device)
    return (time.perf_counter() - begin) / count
