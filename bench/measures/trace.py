"""What a trace costs: steps with a snapshot each, traced and not, in the same process.

A handle traces all its life or never, so that rounds alternate, each with a handle of its own. In
every other pair the traced round comes second: whatever drifts cancels.

Records:
    trace_overhead: how much longer a step is with the trace, relative to one without.
    trace_cpu: the same of the process's CPU time, all threads.
    step: seconds of a step without the trace.
    copies: number of copies in the trace, per snapshot.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

from bench.engines.lightck import Lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop, require_all
from bench.record import Record, sampled, single
from bench.statistics import Enough
from bench.work import Training


@dataclass(frozen=True)
class _Round:
    """Medians of its steps, in seconds: rare disturbances of a shared machine are left out."""

    wall: float
    cpu: float


def measure(job: Job) -> list[Record]:
    """See the module and `bench.measures.run`."""
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck has a trace to measure")
    training = Training(job.work)
    training.steps(job.method.warmup)
    for traced in (False, True):
        _round(job, training, traced)
    enough = Enough(
        half_width=job.precision.get("trace_overhead", 0.0),
        relative=job.precision.get("relative", 0.0),
        least=job.method.least,
        most=job.method.most,
        seconds=job.method.seconds,
    )
    walls: list[float] = []
    cpus: list[float] = []
    steps: list[float] = []
    begin = time.monotonic()
    while not enough.done(walls, spent := time.monotonic() - begin):
        traced_first = len(walls) % 2 == 0
        one = _round(job, training, traced_first)
        other = _round(job, training, not traced_first)
        on, off = (one, other) if traced_first else (other, one)
        walls.append(on.wall / off.wall - 1)
        cpus.append(on.cpu / off.cpu - 1)
        steps.append(off.wall)
        job.tell(f"{len(walls)} pairs of rounds, {spent:.0f} s")
    verified, copies = _checked(job, training)
    return [
        sampled("trace_overhead", "", walls, capped=not enough.narrow(walls), note=verified),
        sampled("trace_cpu", "", cpus),
        sampled("step", "s", steps),
        single("copies", "", copies),
    ]


def _round(job: Job, training: Training, traced: bool) -> _Round:
    """Some steps under a handle of their own; every one carries a snapshot."""
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
    """A traced round that is restored and compared, and whose trace is read back."""
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
    loop.step = engine.handle.step  # of one optimizer and region, through all its handles
    for _ in range(1 + job.method.settle):  # the first of them carries nothing
        loop.run(then=True)
    return loop
