"""Measure what a snapshot costs training: steps with one against steps without, in one process.

Records:
    extra: seconds per snapshot that training took longer.
    extra_run: the same by a second clock, which stands while the training thread is ready to run
        and others have its processor: neighbours on the machine are not in it, see
        `accounting.Queued`. Absent where the kernel does not count that.
    cost_ratio: extra / sync_copy; 1 is a plain blocking copy.
    overhead: extra per step, relative to a step without.
    step: seconds of a step without a snapshot.
    sync_copy: seconds of the yardstick, measured between steps all through the run.
    interval_1pct_steps, interval_5pct_steps: the smallest number of steps from one snapshot to the
        next at which they cost at most so much of the training. From extra and step: the bounds
        pair the worst with the worst. With policy `lone` not below `busy_steps`.
    spacing_steps: steps of a block per snapshot, at which extra was measured.
    busy_steps: steps that an engine needs, when idle, until it can begin the next snapshot.
    stall_s: training-thread seconds per snapshot inside the engine, and stall.<cause> by cause:
        as the engine itself counts them, else those of its calls.
    cpu_s: CPU seconds per snapshot of all threads and processes, beyond those of the training.
    extra_dram_bytes: memory at its peak beyond that before attaching; see `accounting.Peak`.
    written_bytes: of one snapshot, on its medium.
    state, tensors, snapshots: bytes of one, tensors in it, number of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.errors import BenchError
from bench.measures import Job
from bench.measures.accounting import Cpu, Peak, Queued
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.statistics import Enough, Estimate, estimate, trimmed_mean
from bench.work import Training, tensors
from bench.yardstick import SyncCopy

_YARDSTICK_EVERY = 8  # samples


@dataclass
class Series:
    """The samples of a run: one entry per pair or block."""

    extra: list[float] = field(default_factory=list)  # s per snapshot
    extra_run: list[float] = field(default_factory=list)  # s per snapshot
    without: list[float] = field(default_factory=list)  # s per step
    cpu: list[float] = field(default_factory=list)  # s per snapshot
    overhead_scale: float = 1.0  # snapshots per step of a block with them
    spacing: int = 1  # steps of a block with one snapshot
    busy: int = 1  # steps from one snapshot to the next that the engine can keep up with
    spent: Cpu = field(default_factory=Cpu)
    queued: Queued = field(default_factory=Queued)


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    training = Training(job.work)
    training.steps(job.method.warmup)
    with Peak(job.folder) as alone:
        training.steps(1)
    loop = Loop.of(job, training)
    loop.attach(job.folder)
    if loop.engine.spills and job.method.policy == "pairs":
        raise BenchError(
            f"policy pairs with {job.contender.label}: its work on a snapshot goes on in later"
            ' steps and would count for the wrong side; policy = "blocks" compares fairly'
        )
    yardstick = SyncCopy(job.folder, tensors(training.state()))
    series, copies, capped = _collect(job, loop, yardstick, _ONE[job.method.policy])
    state_bytes, count = training.bytes(), len(tensors(training.state()))
    kernel = yardstick.kernel
    yardstick.close()
    extra_dram = max(0, _peak(job, loop) - alone.bytes)
    stalls = {cause: s / len(loop.plan.due) for cause, s in loop.stalls().items()}
    verified = loop.finish(Training(job.work, seed=1))
    scale = trimmed_mean(copies)
    without = trimmed_mean(series.without)
    return [
        sampled("extra", "s", series.extra, capped=capped, note=verified),
        *_by_second_clock(series),
        sampled("cost_ratio", "", series.extra, scale=scale, capped=capped),
        sampled("overhead", "", series.extra, scale=without / series.overhead_scale, capped=capped),
        sampled("step", "s", series.without),
        sampled("sync_copy", "s", copies, note=f"{kernel}, one thread"),
        *_intervals(series),
        single("stall_s", "s", sum(stalls.values())),
        *(single(f"stall.{cause}", "s", value) for cause, value in sorted(stalls.items())),
        sampled("cpu_s", "s", series.cpu),
        single("extra_dram_bytes", "B", extra_dram),
        single("written_bytes", "B", loop.engine.written()),
        single("state", "B", state_bytes),
        single("tensors", "", count),
        single("snapshots", "", len(loop.plan.due)),
    ]


def _by_second_clock(series: Series) -> list[Record]:
    if any(map(math.isnan, series.extra_run)):
        return []
    return [sampled("extra_run", "s", series.extra_run)]


def _intervals(series: Series) -> list[Record]:
    """Return the smallest intervals at which snapshots cost no more than 1 % and 5 %."""
    extra, step = estimate(series.extra), estimate(series.without)
    found = [
        Record("", f"interval_{percent}pct_steps", "", value, low, high)
        for percent in (1, 5)
        for value, low, high in [_spaced(extra, step, percent, series.busy)]
    ]
    found.append(single("spacing_steps", "", round(1 / series.overhead_scale)))
    return [*found, single("busy_steps", "", series.busy)]


def _spaced(
    extra: Estimate, step: Estimate, percent: int, least: int
) -> tuple[float, float, float]:
    """Return the steps between snapshots of which each costs `extra`: value, low, high."""

    def steps(cost: float, each: float) -> float:
        needed = 100 * cost / (percent * max(each, 1e-9))
        return max(float(least), math.ceil(needed) if math.isfinite(needed) else needed)

    return (
        steps(extra.value, step.value),
        steps(extra.low, step.high),
        steps(extra.high, step.low),
    )


def _peak(job: Job, loop: Loop) -> int:
    """Return the peak memory in bytes while one snapshot is taken.

    The next step carries another.
    """
    with Peak(job.folder) as peak:
        loop.run(then=False)
        loop.engine.drain()
        loop.run(then=True)
    return peak.bytes


def _collect(
    job: Job, loop: Loop, yardstick: SyncCopy, one: Callable[[Job, Loop, Series], None]
) -> tuple[Series, list[float], bool]:
    """Collect pairs or blocks until the interval is narrow enough.

    The last result says whether that was cut short.
    """
    series = Series()
    loop.run(then=True)
    if job.method.policy == "lone" and loop.engine.spills:
        series.busy, series.spacing = _needed(loop)
    unmeasured = replace(series, extra=[], extra_run=[], without=[], cpu=[])
    for _ in range(job.method.settle):
        one(job, loop, unmeasured)
    copies = [_rest_and_copy(loop, yardstick)]
    series.spent.look()  # processes that began at the first snapshots count, too
    begin = time.monotonic()
    while True:
        one(job, loop, series)
        enough = wanted_precision(job, series, copies)
        spent = time.monotonic() - begin
        job.tell(f"{len(series.extra)} {job.method.policy}, {spent:.0f} s")
        if enough.done(series.extra, spent):
            copies.append(_rest_and_copy(loop, yardstick))
            return series, copies, not enough.narrow(series.extra)
        if len(series.extra) % _YARDSTICK_EVERY == 0:
            copies.append(_rest_and_copy(loop, yardstick))
            series.spent.look()


def _needed(loop: Loop) -> tuple[int, int]:
    """Return the steps that a snapshot takes if training waits for it, and beside training.

    Beside training it takes longer: half as long again, and a step.
    """
    for _ in range(2):
        begin = time.perf_counter()
        loop.run(then=False)
        loop.engine.drain()
        busy = time.perf_counter() - begin
        steps = busy / loop.run(then=True)
    return math.ceil(steps), math.ceil(1.5 * steps) + 1


def _rest_and_copy(loop: Loop, yardstick: SyncCopy) -> float:
    """Time the yardstick while nothing runs; the steps around it are not counted.

    The step that is due is taken first, so that no snapshot is under way.
    """
    loop.run(then=False)
    loop.engine.drain()
    spent = yardstick()
    loop.run(then=True)
    return spent


def _pair(job: Job, loop: Loop, series: Series) -> None:
    cpu, queued = [series.spent()], [series.queued()]
    carrying = loop.run(then=False)
    cpu.append(series.spent())
    queued.append(series.queued())
    without = loop.run(then=True)
    cpu.append(series.spent())
    queued.append(series.queued())
    series.extra.append(carrying - without)
    series.extra_run.append(carrying - without - _grown(queued))
    series.without.append(without)
    series.cpu.append(_grown(cpu))


def _grown(readings: Sequence[float]) -> float:
    """Return by how much more the first of two parts has grown, of readings around both."""
    before, middle, after = readings
    return (middle - before) - (after - middle)


def _lone(job: Job, loop: Loop, series: Series) -> None:
    """Measure one snapshot and the steps that the engine works on it.

    It measures a pair if that is one step.
    """
    if loop.engine.spills:
        _compare(loop, series, [i == 0 for i in range(series.spacing)])
    else:
        _pair(job, loop, series)


def _block(job: Job, loop: Loop, series: Series) -> None:
    """Run steps with a snapshot every `interval` until the last is complete; as many without."""
    interval = loop.engine.interval
    steps = -(-job.method.block // interval) * interval
    _compare(loop, series, [i % interval == 0 for i in range(steps)])


def _compare(loop: Loop, series: Series, carrying: Sequence[bool]) -> None:
    """Run steps of which some carry a snapshot until the last is complete, and as many without."""
    steps, snapshots = len(carrying), sum(carrying)
    cpu, queued = [series.spent()], [series.queued()]
    begin = time.perf_counter()
    for following in [*carrying[1:], False]:
        loop.run(then=following)
    loop.engine.drain()
    middle = time.perf_counter()
    cpu.append(series.spent())
    queued.append(series.queued())
    for i in range(steps):
        loop.run(then=i == steps - 1)
    end = time.perf_counter()
    cpu.append(series.spent())
    queued.append(series.queued())
    extra = _grown([begin, middle, end])
    series.extra.append(extra / snapshots)
    series.extra_run.append((extra - _grown(queued)) / snapshots)
    series.without.append((end - middle) / steps)
    series.cpu.append(_grown(cpu) / snapshots)
    series.overhead_scale = snapshots / steps


_ONE = {"pairs": _pair, "blocks": _block, "lone": _lone}


def wanted_precision(job: Job, series: Series, copies: list[float]) -> Enough:
    """Return the wanted precision, as seconds per snapshot."""
    widths = []
    if "cost_ratio" in job.precision:
        widths.append(job.precision["cost_ratio"] * trimmed_mean(copies))
    if "overhead" in job.precision:
        step = trimmed_mean(series.without)
        widths.append(job.precision["overhead"] * step / series.overhead_scale)
    for percent in (1, 5):
        if (steps := job.precision.get(f"interval_{percent}pct_steps")) is not None:
            widths.append(steps * percent / 100 * trimmed_mean(series.without))
    method = job.method
    return Enough(
        half_width=min(widths, default=0.0),
        relative=job.precision.get("relative", 0.0),
        least=method.least,
        most=method.most,
        seconds=method.seconds,
    )
