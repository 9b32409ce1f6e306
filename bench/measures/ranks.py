"""Measure what a snapshot costs a job of several ranks: steps with one against steps without.

A step of the job ends when its last rank has updated: that moment, less the one of the step before.
Allreduce makes each rank wait for the slowest, sooner or later; so time that any rank loses counts
once, in the step in which it is lost, and none is lost between steps.

Records:
    extra: seconds per snapshot that the job took longer.
    cost_ratio: extra / sync_copy; 1 is a plain blocking copy of each rank's share.
    cost_ratio_alone: extra / sync_alone, which is stricter.
    overhead: extra per step, relative to a step without.
    step: seconds of a step without a snapshot.
    compute: seconds of a forward and a backward in which nothing is reduced.
    sync_copy: seconds of the yardstick: every rank copies its share, all at the same time.
    sync_alone: seconds in which one rank copies its share while the others rest (the slowest's).
    written_share: bytes that a rank wrote for a snapshot (the busiest's) / those of the state.
    stall.<cause>: training-thread seconds per snapshot (the worst rank's), as the engine counts.
    state, snapshots: bytes of the state, number of snapshots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

from bench.engines.none import Nothing
from bench.errors import BenchError
from bench.group import Group
from bench.measures import Job
from bench.measures.loop import Loop, require_all
from bench.measures.training import Series, wanted_precision
from bench.record import Record, sampled, single
from bench.statistics import trimmed_mean
from bench.work import State, Training, difference, digests, part, share, tensors
from bench.yardstick import SyncCopy


@dataclass
class _Series(Series):
    """A series of samples that is the same on every rank."""

    together: list[float] = field(default_factory=list)  # s, the yardstick
    alone: list[float] = field(default_factory=list)


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    group = job.group
    training = Training(job.work, rank=group.rank if group.world > 1 else None)
    training.steps(job.method.warmup)
    compute = _compute(training, group)
    loop = Loop.of(job, training)
    if job.method.policy == "pairs":
        loop.plan.every = 2
    loop.attach(job.folder)
    _require_fair(job, loop)
    yardstick = _Yardstick(job, training)
    series, capped = _collect(job, loop, yardstick)
    kernel = yardstick.close()
    state = sum(t.nbytes for t in tensors(training.state()))
    due = len(loop.plan.due)
    taken = due - 1  # the last one, planned, is for the verification
    stalls = {f"stall.{cause}": s / taken for cause, s in loop.engine.stalls().items()}
    del training
    verified = verify(loop, job)
    written = group.worst({"": loop.engine.written()})[""]
    without = trimmed_mean(series.without)
    return [
        sampled("extra", "s", series.extra, capped=capped, note=verified),
        sampled("cost_ratio", "", series.extra, scale=trimmed_mean(series.together), capped=capped),
        sampled("cost_ratio_alone", "", series.extra, scale=trimmed_mean(series.alone)),
        sampled("overhead", "", series.extra, scale=without / series.overhead_scale, capped=capped),
        sampled("step", "s", series.without),
        sampled("compute", "s", compute),
        sampled("sync_copy", "s", series.together, note=f"{kernel}, one thread of each rank"),
        sampled("sync_alone", "s", series.alone, note=kernel),
        single("written_share", "", written / state),
        *(single(cause, "s", value) for cause, value in group.worst(stalls).items()),
        single("state", "B", state),
        single("snapshots", "", due),
    ]


def _require_fair(job: Job, loop: Loop) -> None:
    if job.method.policy == "blocks":
        return
    if loop.engine.spills:
        raise BenchError(
            f"policy pairs with {job.contender.label}: its work on a snapshot goes on in later"
            ' steps and would count for the wrong side; policy = "blocks" compares fairly'
        )
    if job.method.block < 2:
        raise BenchError(f"block = {job.method.block}: of the pairs in a row one does not count")


def _compute(training: Training, group: Group) -> list[float]:
    """Return the seconds of a few steps in which every rank computes and none communicates."""
    found = []
    for _ in range(3):
        group.together()
        found.append(group.latest([training.compute_alone()])[0])
    return found


class _Yardstick:
    """The yardstick `sync_copy` over ranks.

    Each copies its share of the state, with one thread, into its own file.
    """

    def __init__(self, job: Job, training: Training) -> None:
        self._group = job.group
        live = tensors(training.state())
        folder = job.folder / f"rank{job.group.rank}"
        folder.mkdir()
        mine = share(live, job.group.rank, job.group.world)
        self._copy = SyncCopy(folder, [part(live[i], begin, end) for i, begin, end in mine])

    def __call__(self, series: _Series) -> None:
        """Time the copies, all at once and one after the other, while nothing else runs."""
        self._group.together()
        series.together.append(self._group.latest([self._copy()])[0])
        mine = 0.0
        for rank in range(self._group.world):
            self._group.together()
            if rank == self._group.rank:
                mine = self._copy()
        series.alone.append(self._group.latest([mine])[0])

    def close(self) -> str:
        """Free the memory; return the kernel's name."""
        self._copy.close()
        return self._copy.kernel


def _collect(job: Job, loop: Loop, yardstick: _Yardstick) -> tuple[_Series, bool]:
    """Collect pairs or blocks until the interval is narrow enough; say if that was cut short.

    Every rank decides by the same numbers, so that all of them stop at the same step; its snapshot
    is due, and the next step would carry it.
    """
    pairs, count = job.method.policy == "pairs", job.method.block
    one = _pairs if pairs else _block
    loop.run(then=False)
    loop.run(then=True)
    one(loop, job.group, _Series(), job.method.settle if pairs else count)
    series = _Series()
    begin = job.group.latest([time.perf_counter()])[0]
    while True:
        yardstick(series)
        one(loop, job.group, series, count)
        now = job.group.latest([time.perf_counter()])[0]
        job.tell(f"{len(series.extra)} {job.method.policy}, {now - begin:.0f} s")
        enough = wanted_precision(job, series, series.together)
        if enough.done(series.extra, now - begin):
            yardstick(series)
            return series, not enough.narrow(series.extra)


def _pairs(loop: Loop, group: Group, series: _Series, count: int) -> None:
    """Run so many pairs in a row; the first does not count, since a pause came before it."""
    ends = [time.perf_counter()]
    for _ in range(count):
        for then in (False, True):
            loop.run(then=then)
            ends.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(group.latest(ends))][2:]
    carrying, bare = steps[::2], steps[1::2]
    series.extra += [longer - step for longer, step in zip(carrying, bare, strict=True)]
    series.without += bare


def _block(loop: Loop, group: Group, series: _Series, count: int) -> None:
    """Run steps with a snapshot every `interval` until the last is complete; as many without."""
    interval = int(group.worst({"": loop.engine.interval})[""])
    steps = -(-count // interval) * interval
    flags = [i % interval == 0 for i in range(steps)] + [False]
    begin = time.perf_counter()
    for following in flags[1:]:
        loop.run(then=following)
    loop.engine.drain()
    middle = time.perf_counter()
    for i in range(steps):
        loop.run(then=i == steps - 1)
    begin, middle, end = group.latest([begin, middle, time.perf_counter()])
    snapshots = sum(flags)
    series.extra.append(((middle - begin) - (end - middle)) / snapshots)
    series.without.append((end - middle) / steps)
    series.overhead_scale = snapshots / steps


def verify(loop: Loop, job: Job) -> str:
    """Let the last snapshot be taken during a running step, restore it, compare every bit.

    Each rank compares with digests of its own state at that step: a second copy of every rank's
    state would not fit beside the rest. The training is dropped, and its restored copy made
    instead.

    Returns:
        A text on what was verified.

    Raises:
        BenchError: snapshots were lost, or the restored state differs from what was saved.
    """
    kept, step = digests(loop.training.state()), loop.step
    loop.run(then=False)
    counts = loop.engine.finish()
    require_all(counts, len(loop.plan.due))
    del loop.training
    if isinstance(loop.engine, Nothing):
        return "nothing to verify"
    job.group.together()  # wait until every rank's part is there
    fresh = Training(job.work, seed=1)
    found = loop.engine.restore(fresh)
    if found != step:
        raise BenchError(f"restored step {found}, the last snapshot is of step {step}")
    require_equal(kept, fresh)
    told = f"{counts.complete} snapshots complete, step {step} restored and equal bit for bit"
    return told + (f" on {job.group.world} ranks" if job.group.world > 1 else "")


def require_equal(kept: State, training: Training) -> None:
    """Compare a training's state with digests.

    Raises:
        BenchError: it differs; the message names the first tensor that does.
    """
    problem = difference(kept, digests(training.state()))
    if problem is not None:
        raise BenchError(f"the restored state is not what was saved: {problem}")
