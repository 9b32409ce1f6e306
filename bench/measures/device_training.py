"""Measure what snapshots cost a training on a device, and how often they may come for 2 %.

The device runs behind the training thread, so that single steps have no times of their own: blocks
of steps with snapshots are compared with as many without, and the compute stream is waited for at
the ends. One snapshot is under way at the beginning of a block, another at its end.

Records:
    overhead: extra time per step, relative to a step without, with a snapshot every step.
    interval: the smallest number of steps between snapshots at which that is at most 2 %.
    extra: seconds per snapshot that training took longer, every step.
    cost_ratio: extra / plain.
    alone: seconds that one snapshot costs that has time to be complete before the next.
    step: seconds of a step without a snapshot.
    plain: seconds of a plain copy of the state to pinned memory, nothing else running.
    state, snapshots: bytes of one, number of them.
    stall.<cause>: training-thread seconds per snapshot, as the engine itself counts them.

`interval` is measured where there is time for it; else calculated from `alone`: what a snapshot
costs, spread over as many steps as make it 2 %, and at least as many as it takes to be complete.
Its note says which. An engine that slips when every step is due has no `overhead`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from bench.device import Mark, PlainCopy, synchronize
from bench.engines.lightck import Lightck
from bench.measures import Job
from bench.measures.loop import Loop
from bench.record import Record, sampled, single
from bench.statistics import estimate, trimmed_mean
from bench.work import Training, tensors

BUDGET = 0.02  # of a step's time
_PROBES = 3
_TRIES = 4


@dataclass
class Block:
    """A measurement of steps with snapshots against as many without."""

    snapshots: int
    steps: int
    carrying_s: float
    without_s: float

    @property
    def extra(self) -> float:
        """Return the extra seconds per snapshot."""
        return (self.carrying_s - self.without_s) / self.snapshots

    @property
    def overhead(self) -> float:
        """Return the extra time as a share of the time without snapshots."""
        return (self.carrying_s - self.without_s) / self.without_s


@dataclass
class Session:
    """One kind of engine on one training, and the time that is left for it."""

    job: Job
    training: Training
    until: float
    blocks: list[Block] = field(default_factory=list)
    _attached: int = 0

    def __post_init__(self) -> None:
        self._attach()

    def _attach(self) -> None:
        """Attach a new engine, in a folder of its own."""
        self._attached += 1
        self.loop = Loop.of(self.job, self.training)
        folder = self.job.folder / f"attached-{self._attached}"
        folder.mkdir()
        self.loop.attach(folder)

    def renew(self) -> None:
        """Attach a new engine if the present one has let snapshots slip."""
        if self.slipped():
            self.loop.engine.finish()
            self._attach()

    def stalls(self) -> dict[str, float]:
        """Return the training-thread seconds per snapshot by cause, since the engine's attach."""
        due = max(1, len(self.loop.plan.due))
        return {cause: s / due for cause, s in self.loop.engine.stalls().items()}

    def finish(self) -> tuple[int, str]:
        """Take one more snapshot, restore and compare it.

        Return the number of snapshots, and a text on what was verified.
        """
        self.loop.engine.drain()
        self.loop.run(then=True)
        return len(self.loop.plan.due), self.loop.finish(Training(self.job.work, seed=1))

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def waits(self) -> bool:
        """Return whether training waits until a snapshot is complete.

        lightck's on a GPU may go on later.
        """
        engine = self.loop.engine
        return not engine.spills and not isinstance(engine, Lightck)

    def slipped(self) -> int:
        """Return how many due snapshots have slipped so far."""
        engine = self.loop.engine
        return engine.handle.stats().slipped if isinstance(engine, Lightck) else 0

    def alone(self, steps: int) -> Block:
        """Measure one snapshot until it is complete, and so many steps meanwhile."""
        self._rest()
        self.loop.run(then=True)
        begin = self._now()
        for _ in range(steps):
            self.loop.run(then=False)
        self.loop.engine.drain()
        synchronize(self.training.work.device)
        return self._block(1, steps, time.perf_counter() - begin)

    def block(self, steps: int, every: int) -> Block:
        """Measure so many steps, a multiple of `every`, in the middle of many such steps.

        One snapshot is under way when the time begins, as one is when it ends.
        """
        self._rest()
        self.loop.run(then=True)
        self.loop.run(then=every == 1)
        begin = self._now()
        for i in range(1, steps + 1):
            self.loop.run(then=i < steps and (i + 1) % every == 0)
        carrying = self._now() - begin
        return self._block(steps // every, steps, carrying)

    def _block(self, snapshots: int, steps: int, carrying: float) -> Block:
        """Add as many steps without snapshots, once none is under way; return the block."""
        self._rest()
        begin = self._now()
        for _ in range(steps):
            self.loop.run(then=False)
        found = Block(snapshots, steps, carrying, self._now() - begin)
        self.blocks.append(found)
        self.job.tell(f"{steps} steps, {snapshots} snapshots: {found.overhead:.2%}")
        return found

    def _rest(self) -> None:
        self.loop.engine.drain()
        synchronize(self.training.work.device)

    def _now(self) -> float:
        """Return the time when the stream has reached this point; copies beside it go on."""
        Mark(self.training.work.device).wait()
        return time.perf_counter()


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    training = Training(job.work)
    training.steps(job.method.warmup)
    plain = PlainCopy(job.work.device, tensors(training.state()))
    copies = [plain.to_host() for _ in range(_PROBES)]
    session = Session(job, training, time.monotonic() + job.method.seconds)
    session.block(job.method.settle, 1)
    probe = session.alone(2)
    every, slipped = _every_step(session, probe)
    session.renew()
    alone, interval, how = _interval(session, probe, every, slipped)
    session.renew()
    stalls = session.stalls()
    taken, verified = session.finish()
    steps = [b.without_s / b.steps for b in session.blocks[1:]]
    capped = len(every) < job.method.least
    found: list[Record] = []
    if every and not slipped:
        extra = [b.extra for b in every]
        found = [
            sampled("overhead", "", [b.overhead for b in every], capped=capped, note=verified),
            sampled("extra", "s", extra, capped=capped),
            sampled("cost_ratio", "", extra, scale=trimmed_mean(copies), capped=capped),
        ]
    return [
        *found,
        single("interval", "", interval, f"{verified}; {how}"),
        *([sampled("alone", "s", alone)] if alone else []),
        sampled("step", "s", steps),
        sampled("plain", "s", copies),
        single("state", "B", plain.bytes),
        single("snapshots", "", taken),
        *(single(f"stall.{cause}", "s", value) for cause, value in sorted(stalls.items())),
    ]


def _every_step(session: Session, probe: Block) -> tuple[list[Block], int]:
    """Measure blocks with a snapshot every step, in at most half of the time, and the slips.

    There are no blocks where a snapshot takes so long that two would not fit.
    """
    method = session.job.method
    half = session.left_s() / 2
    steps = min(method.block, int(half / method.least / (2 * probe.carrying_s)))
    if steps < 1:
        return [], 0
    steps = max(2, steps)
    found: list[Block] = []
    before = session.slipped()
    while len(found) < method.most:
        if len(found) >= 2 and session.left_s() < half:
            break
        if len(found) >= method.least and _narrow([b.overhead for b in found]):
            break
        found.append(session.block(steps, 1))
    return found, session.slipped() - before


def _narrow(overheads: list[float]) -> bool:
    """Return whether the interval is within a quarter of the budget, or a tenth of the value."""
    found = estimate(overheads)
    return found.half_width <= max(BUDGET / 4, abs(found.value) / 10)


def _interval(
    session: Session, probe: Block, every: list[Block], slipped: int
) -> tuple[list[float], int, str]:
    """Return the seconds that one snapshot costs, the smallest interval, and how that is known."""
    if every and not slipped and estimate([b.overhead for b in every]).high <= BUDGET:
        return [], 1, "measured"
    step = probe.without_s / probe.steps
    complete = max(2, math.ceil(1.25 * probe.carrying_s / step))
    alone: list[float] = []
    if session.waits():  # its cost does not depend on the block's length
        complete = 2
        alone.append(probe.extra)
    while len(alone) < _PROBES and (not alone or session.left_s() > 0):
        alone.append(session.alone(complete).extra)
    exact = trimmed_mean(alone) / (BUDGET * step)
    cost = max(2, math.ceil(exact * (1 - 1e-9)))  # sums of floats may exceed a whole number
    interval = cost
    for _ in range(_TRIES):
        steps = interval * max(2, session.job.method.block // interval)
        if session.left_s() < 2 * _PROBES * steps * step:
            break
        before = session.slipped()
        found = [session.block(steps, interval).overhead for _ in range(_PROBES)]
        if session.slipped() == before and trimmed_mean(found) <= BUDGET:
            return alone, interval, "measured"
        interval = max(interval + 1, interval * 3 // 2)
    slips = f", {slipped} slipped when every step was due" if slipped else ""
    return alone, max(cost, complete), f"calculated from {len(alone)} alone{slips}"
