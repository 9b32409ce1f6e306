"""Measure what a trace costs: steps with a snapshot each, traced and not, in one process.

Steps of the work itself vary by more than what is looked for. The cost is that of calls, not of
bytes, so it is measured where little else is: on a work with as many layers and tensors but thin
ones, copied in as many pieces. A handle traces all its life or never, so rounds alternate,
each with a handle of its own; in every other pair the traced round comes second: drifts cancel.

Records:
    trace_overhead: CPU time of all threads that a trace adds to a thin step, relative to the time
        of a step of the work itself: as if none of it ran beside the training.
    trace_cpu: the same in seconds.
    trace_wall: seconds that a thin step is longer.
    step: seconds of a step of the work itself, with a snapshot and no trace.
    copies: number of copies in the trace of the work itself, per snapshot.
    thin_copies: of the thin work; not fewer.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace

from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop, require_all
from bench.record import Record, sampled, single
from bench.statistics import Enough, trimmed_mean
from bench.work import Training

_THIN = {"gpt2": "gpt2-thin"}  # models that are not small themselves
_THIN_CHUNK = 4096  # bytes of a piece


@dataclass(frozen=True)
class _Round:
    """The medians of a round's steps, in seconds.

    They leave out rare disturbances of a shared machine.
    """

    wall: float
    cpu: float


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck has a trace to measure")
    training = Training(job.work)
    training.steps(job.method.warmup)
    steps = [_round(job, training, False).wall for _ in range(job.method.settle)]
    verified, copies = _checked(job, training)
    thin = _thin(job)
    added = _added(thin, trimmed_mean(steps))
    thin_copies = _checked(thin, Training(thin.work))[1]
    if thin_copies < copies:
        raise BenchError(f"{thin_copies:g} copies of the thin work, {copies:g} of the other: more")
    steps += [_round(job, training, False).wall for _ in range(job.method.settle)]
    cpus = [one.cpu for one in added]
    return [
        sampled("trace_overhead", "", cpus, scale=trimmed_mean(steps), note=verified),
        sampled("trace_cpu", "s", cpus),
        sampled("trace_wall", "s", [one.wall for one in added]),
        sampled("step", "s", steps),
        single("copies", "", copies),
        single("thin_copies", "", thin_copies),
    ]


def _thin(job: Job) -> Job:
    work = replace(job.work, model=_THIN.get(job.work.model, job.work.model))
    settings = {**job.contender.settings, "chunk_bytes": _THIN_CHUNK}
    return replace(
        job,
        work=work,
        contender=replace(job.contender, settings=settings),
        method=replace(job.method, patient=True),  # steps may be shorter than a commit
    )


def _added(job: Job, step: float) -> list[_Round]:
    """Return what a trace adds to a step, over and over."""
    training = Training(job.work)
    training.steps(job.method.warmup)
    for traced in (False, True):
        _round(job, training, traced)
    enough = Enough(
        half_width=job.precision.get("trace_overhead", 0.0) * step,
        relative=job.precision.get("relative", 0.0),
        least=job.method.least,
        most=job.method.most,
        seconds=job.method.seconds,
    )
    added: list[_Round] = []
    begin = time.monotonic()
    while not enough.done([one.cpu for one in added], spent := time.monotonic() - begin):
        traced_first = len(added) % 2 == 0
        one = _round(job, training, traced_first)
        other = _round(job, training, not traced_first)
        on, off = (one, other) if traced_first else (other, one)
        added.append(_Round(on.wall - off.wall, on.cpu - off.cpu))
        job.tell(f"{len(added)} pairs of rounds, {spent:.0f} s")
    return added


def _round(job: Job, training: Training, traced: bool) -> _Round:
    """Run some steps under a handle of their own; every one carries a snapshot."""
    loop = _attached(job, training, traced)
    walls, cpus = [], []
    for _ in range(job.method.block):
        before = time.process_time()
        walls.append(loop.run(then=True))
        cpus.append(time.process_time() - before)
    loop.run(then=False)
    require_all(loop.engine.finish(), len(loop.plan.due))
    return _Round(statistics.median(walls), statistics.median(cpus))


def _checked(job: Job, training: Training) -> tuple[str, float]:
    """Run a traced round, restore and compare it, and read its trace.

    Return a text on what was verified, and the copies in the trace per snapshot.
    """
    loop = _attached(job, training, True)
    for _ in range(job.method.block):
        loop.run(then=True)
    verified = loop.finish(Training(job.work, seed=1))
    assert isinstance(loop.engine, Lightck)
    file = loop.engine.handle.trace(job.folder / "trace.json")
    events = json.loads(file.read_bytes())["traceEvents"]
    copies = sum(event.get("cat") == "copy" for event in events)
    if not copies:
        raise BenchError(f"{len(loop.plan.due)} snapshots were traced, and no copy is in {file}")
    return verified, copies / len(loop.plan.due)


def _attached(job: Job, training: Training, traced: bool) -> Loop:
    engine = Lightck({**job.contender.settings, "trace": traced})
    loop = Loop.of(job, training, engine)
    loop.attach(job.folder)
    loop.step = engine.handle.step  # steps of one optimizer and region, through all its handles
    for _ in range(1 + job.method.settle):  # the first of them carries nothing
        loop.run(then=True)
    return loop
