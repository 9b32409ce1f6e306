"""What a snapshot costs training: steps with one against steps without, in the same process.

Records:
    extra: seconds per snapshot that training took longer.
    cost_ratio: extra / sync_copy; 1 is a plain blocking copy.
    overhead: extra per step, relative to a step without.
    step: seconds of a step without a snapshot.
    sync_copy: seconds of the yardstick, measured between steps all through the run.
    stall.<cause>: training-thread seconds per snapshot, as the engine itself counts them.
    state, snapshots: bytes of one, number of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.statistics import Enough, trimmed_mean
from bench.work import Training, tensors
from bench.yardstick import SyncCopy

_YARDSTICK_EVERY = 8  # samples


@dataclass
class Series:
    """What is collected on the way: one entry per pair or block."""

    extra: list[float] = field(default_factory=list)  # s per snapshot
    without: list[float] = field(default_factory=list)  # s per step
    overhead_scale: float = 1.0  # snapshots per step of a block with them


def measure(job: Job) -> list[Record]:
    """See the module and `bench.measures.run`."""
    training = Training(job.work)
    training.steps(job.method.warmup)
    loop = Loop.of(job, training)
    loop.attach(job.folder)
    if loop.engine.spills and job.method.policy == "pairs":
        raise BenchError(
            f"policy pairs with {job.contender.label}: its work on a snapshot goes on in later"
            ' steps and would count for the wrong side; policy = "blocks" compares fairly'
        )
    yardstick = SyncCopy(job.folder, tensors(training.state()))
    one = _pair if job.method.policy == "pairs" else _block
    series, copies, capped = _collect(job, loop, yardstick, one)
    state_bytes, kernel = sum(t.nbytes for t in tensors(training.state())), yardstick.kernel
    yardstick.close()
    stalls = {cause: s / len(loop.plan.due) for cause, s in loop.engine.stalls().items()}
    verified = loop.finish(Training(job.work, seed=1))
    scale = trimmed_mean(copies)
    without = trimmed_mean(series.without)
    return [
        sampled("extra", "s", series.extra, capped=capped, note=verified),
        sampled("cost_ratio", "", series.extra, scale=scale, capped=capped),
        sampled("overhead", "", series.extra, scale=without / series.overhead_scale, capped=capped),
        sampled("step", "s", series.without),
        sampled("sync_copy", "s", copies, note=f"{kernel}, one thread"),
        *(single(f"stall.{cause}", "s", value) for cause, value in sorted(stalls.items())),
        single("state", "B", state_bytes),
        single("snapshots", "", len(loop.plan.due)),
    ]


def _collect(
    job: Job, loop: Loop, yardstick: SyncCopy, one: Callable[[Job, Loop, Series], None]
) -> tuple[Series, list[float], bool]:
    """Pairs or blocks until the interval is narrow enough; whether that was cut short, last."""
    unmeasured = Series()
    loop.run(then=True)
    for _ in range(job.method.settle):
        one(job, loop, unmeasured)
    series = Series()
    copies = [_rest_and_copy(loop, yardstick)]
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
    carrying, without = loop.run(then=False), loop.run(then=True)
    series.extra.append(carrying - without)
    series.without.append(without)


def _block(job: Job, loop: Loop, series: Series) -> None:
    """Steps with a snapshot every `interval`, until the last one is complete; as many without."""
    interval = loop.engine.interval
    steps = -(-job.method.block // interval) * interval
    flags = [i % interval == 0 for i in range(steps)] + [False]
    begin = time.perf_counter()
    for following in flags[1:]:
        loop.run(then=following)
    loop.engine.drain()
    middle = time.perf_counter()
    for i in range(steps):
        loop.run(then=i == steps - 1)
    end = time.perf_counter()
    snapshots = sum(flags)
    series.extra.append(((middle - begin) - (end - middle)) / snapshots)
    series.without.append((end - middle) / steps)
    series.overhead_scale = snapshots / steps


def wanted_precision(job: Job, series: Series, copies: list[float]) -> Enough:
    """The wanted precision, as seconds per snapshot."""
    widths = []
    if "cost_ratio" in job.precision:
        widths.append(job.precision["cost_ratio"] * trimmed_mean(copies))
    if "overhead" in job.precision:
        step = trimmed_mean(series.without)
        widths.append(job.precision["overhead"] * step / series.overhead_scale)
    method = job.method
    return Enough(
        half_width=min(widths, default=0.0),
        relative=job.precision.get("relative", 0.0),
        least=method.least,
        most=method.most,
        seconds=method.seconds,
    )
