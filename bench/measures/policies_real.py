"""Measure a policy that decides by itself, on real training: does it keep its budget?

The settings of the engine go to `lightck.attach`, `policy` among them. Three ways, by `case`:

budget: the policy runs for a while, then blocks of three of its own intervals alternate with as
    many steps in which it may take none, in one process. For intervals of seconds.
rare: the policy runs undisturbed; the steps beside each snapshot are compared with as many right
    before it. For intervals of minutes.
taken: one CPU is taken away from all threads for `seconds`, and given back.

Records (budget, rare):
    overhead: what snapshots add, as a share of the training, at the policy's own interval.
    overhead_value: its value without the interval, for the target that is about it.
    used: the same over the budget; 1 where an interval of one step or the commit binds instead.
    spacing_steps, spacing_s: from one snapshot to the next, mean.
    formula_ratio: that spacing over what the policy says for the means of what it was given.
    step: seconds of a step without a snapshot.
Records (taken):
    late_s: by how much later the interval rose (by a tenth) than 30 s or 40 steps, the later.
    back_s: from the end until it is within 1.5 times what it was before.
    before_steps, most_steps: the interval before, and the longest then.
    overhead: 0; the name by which all ways are listed, with the verification.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightck
from bench.engines.lightck import restored
from bench.errors import BenchError, NoNumber
from bench.measures import Job
from bench.record import Record, sampled, single
from bench.work import Training, copied, difference
from lightck.policy import Auto, Budget, parse
from lightck.types import Moment, Policy

_INTERVALS = 3  # of a block
_SETTLE_S = 20.0  # until the policy has measured what it goes by
_RISEN = 1.1
_BACK = 1.5
_SEEN = 9
"""Readings whose median counts: an interval of three steps flickers by one."""
_RISE_S, _RISE_STEPS = 30.0, 40


@dataclass(eq=False)
class Watched:
    """A policy that can be held, with what it was asked and when it was due.

    It is not pure while it is held: the ranks are one, and no answer is asked for twice.
    """

    policy: Policy
    held: bool = False
    due_steps: list[int] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[str]:
        """Return what the policy needs."""
        return frozenset(getattr(self.policy, "needs", ()))

    def interval_s(self, moment: Moment) -> float | None:
        """Return the policy's interval."""
        found: float | None = self.policy.interval_s(moment)  # type: ignore[attr-defined]
        return found

    def due(self, moment: Moment) -> bool:
        """Ask the policy, unless it is held; see `Policy.due`."""
        self.moments.append(moment)
        if self.held or not self.policy.due(moment):
            return False
        self.due_steps.append(moment.step)
        return True


@dataclass
class Run:
    """A training with a watched policy; each step is timed."""

    job: Job
    training: Training
    watched: Watched
    handle: lightck.Handle
    steps: dict[int, float] = field(default_factory=dict)

    def step(self) -> float:
        """Make one step and return its seconds."""
        if self.job.method.patient:
            self.handle.wait()
        begin = time.perf_counter()
        self.training.steps(1)
        spent = time.perf_counter() - begin
        self.steps[self.handle.step] = spent
        return spent

    def for_seconds(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Make steps for so long, or until something is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self.step()

    def settle(self) -> None:
        """Run until the policy knows its interval, and some seconds more."""
        seen = self.watched.moments

        def known() -> bool:
            return bool(seen) and self.watched.interval_s(seen[-1]) is not None

        self.for_seconds(600.0, known)
        if not known():
            raise BenchError(f"{self.job.contender.label}: no interval known in 10 minutes")
        self.for_seconds(0.5 if self.job.method.patient else _SETTLE_S)
        self.watched.due_steps.clear()
        seen.clear()


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    way = WAYS.get(job.method.case)
    if way is None:
        raise BenchError(f"{job.contender.label}: case: one of {', '.join(WAYS)}")
    settings: dict[str, Any] = dict(job.contender.settings)
    policy = parse(settings.pop("policy", "auto"))
    if job.method.patient and isinstance(policy, Auto):  # a trial
        policy = replace(policy, budget=1.0, most_s=0.3)
    watched = Watched(policy)
    training = Training(job.work)
    training.steps(job.method.warmup)
    path = job.folder / "run"
    handle = lightck.attach(
        training.model, training.optimizer, path, policy=watched, overwrite=True, **settings
    )
    run = Run(job, training, watched, handle)
    run.settle()
    records = way(run)
    note = _verified(job, training, handle, path)
    return [replace(r, note=f"{note}; {r.note}" if r.note else note) if r.measure == "overhead"
            else r for r in records]  # fmt: skip


def _verified(job: Job, training: Training, handle: lightck.Handle, path: Path) -> str:
    """Compare a snapshot that a step has carried, and that no close has taken at rest.

    Raises:
        NoNumber: some have slipped: the overhead is of fewer than the policy asked for.
        BenchError: it is not the state that was there.
    """
    if slipped := handle.stats().slipped:
        raise NoNumber(f"{job.contender.label}: {slipped} snapshots slipped")
    step, state, future = handle.step, copied(training.state()), handle.snapshot()
    training.steps(1)
    future.result(timeout=600)
    handle.detach()
    again = Training(job.work, seed=1)
    again.need_optimizer_state()
    found = restored(again, path)
    wrong = difference(state, again.state())
    if found != step or wrong:
        raise BenchError(f"restored step {found} of {step}: {wrong or 'the wrong one'}")
    return f"step {step} restored and equal bit for bit"


def _over(run: Run, spent: float, count: int) -> bool:
    method = run.job.method
    return count >= method.least and (count >= method.most or spent >= method.seconds)


# ---- budget --------------------------------------------------------------------------------------


def _budget(run: Run) -> list[Record]:
    overheads: list[float] = []
    without: list[float] = []
    gaps: list[int] = []
    begin = time.monotonic()
    while not _over(run, time.monotonic() - begin, len(overheads)):
        with_s, steps, each = _block(run)
        gaps += each
        run.watched.held = True
        run.handle.wait()
        spent = sum(run.step() for _ in range(steps))
        run.watched.held = False
        overheads.append(with_s / spent - 1)
        without.append(spent / steps)
        run.job.tell(f"{len(overheads)} blocks, every {mean(gaps):.1f} steps")
    spacing_s = mean(gaps) * median(without)
    return _records(run, overheads, without, gaps, spacing_s)


def _block(run: Run) -> tuple[float, int, list[int]]:
    """Run whole intervals, each from a due step on; return seconds, steps, and the intervals."""
    watched = run.watched
    due = watched.due_steps
    due.clear()
    while not due:
        run.step()
    spent = 0.0
    while len(due) < _INTERVALS:
        spent += run.step()
    gaps = [b - a for a, b in zip(due, due[1:], strict=False)]
    watched.held = True  # the last interval is as long as the one before; nothing opens at its end
    for _ in range(gaps[-1]):
        spent += run.step()
    run.handle.wait()
    return spent, sum(gaps) + gaps[-1], [*gaps, gaps[-1]]


# ---- rare ----------------------------------------------------------------------------------------


def _rare(run: Run) -> list[Record]:
    begin = time.monotonic()
    while not _over(run, time.monotonic() - begin, len(run.watched.due_steps) - 1):
        run.step()
        if run.watched.moments[-1].step in run.watched.due_steps[-1:]:
            run.job.tell(f"{len(run.watched.due_steps)} snapshots")
    due = run.watched.due_steps
    usual = median(run.steps.values())
    beside = math.ceil((_known(run, "persist_s") or 0.0) / usual) + 1
    gaps = [b - a for a, b in zip(due, due[1:], strict=False)]
    beside = min(beside, max(1, min(gaps) // 2))
    extra = [
        sum(run.steps[at + i] - run.steps[at - i + 1] for i in range(1, beside + 1))
        for at in due[:-1]
        if at - beside + 1 in run.steps and at + beside in run.steps
    ]
    if len(extra) < 2:
        raise BenchError(f"{run.job.contender.label}: only {len(due)} snapshots: more seconds")
    spacing_s = mean(gaps) * usual
    return _records(run, [each / spacing_s for each in extra], [usual], gaps, spacing_s)


def _known(run: Run, name: str) -> float | None:
    values = [v for m in run.watched.moments if (v := getattr(m, name)) is not None]
    return median(values) if values else None


def _records(
    run: Run, overheads: list[float], without: list[float], gaps: list[int], spacing_s: float
) -> list[Record]:
    policy = run.watched.policy
    budget = policy.share if isinstance(policy, Budget) else None
    budget = policy.budget if isinstance(policy, Auto) else budget
    overhead = sampled("overhead", "", overheads, note=f"{len(overheads)} pairs")
    found = [overhead, single("overhead_value", "", overhead.value)]
    if budget is not None:
        persist_s = _known(run, "persist_s") or 0.0
        bound = median(gaps) == 1 or spacing_s < 1.2 * persist_s
        used = overhead.value / budget
        note = f"an interval of one step or the commit binds; {used:.2f} by itself" if bound else ""
        found.append(single("used", "", max(used, 1.0) if bound else used, note))
    found.append(single("spacing_steps", "", mean(gaps)))
    found.append(single("spacing_s", "s", spacing_s))
    if (expected := run.watched.interval_s(_means(run.watched.moments))) is not None:
        found.append(single("formula_ratio", "", spacing_s / expected))
    return [*found, sampled("step", "s", without if len(without) > 1 else 2 * without)]


def _means(moments: list[Moment]) -> Moment:
    """Return a moment with the means of what the moments of a run said of cost and failures."""
    known = [m for m in moments if m.cost_s is not None]
    last = known[-1]
    values = {
        name: mean(v for m in known if (v := getattr(m, name)) is not None)
        for name in ("cost_s", "persist_s", "step_s", "quiet_s")
        if getattr(last, name) is not None
    }
    hazards = [m.hazard for m in known if m.hazard is not None]
    if hazards:
        names = [each.name for each in fields(hazards[0])]
        rates = {name: mean(getattr(h, name) for h in hazards) for name in names}
        return replace(last, **values, hazard=replace(hazards[0], **rates))
    return replace(last, **values)


# ---- taken ---------------------------------------------------------------------------------------


def _cpus(cpus: set[int]) -> None:
    """Give all threads of this process these CPUs."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # it has ended


def _taken(run: Run) -> list[Record]:
    all_cpus = os.sched_getaffinity(0)
    span_s = 1.0 if run.job.method.patient else run.job.method.seconds
    run.for_seconds(span_s / 2)
    before = median(map(_steps_apart(run), run.watched.moments[-20:]))
    apart = _steps_apart(run)
    begin, first = time.monotonic(), run.handle.step
    rose: tuple[float, int] | None = None
    most, recent = before, deque[float](maxlen=_SEEN)
    _cpus({min(all_cpus)})
    try:
        while time.monotonic() < begin + span_s:
            run.step()
            recent.append(apart(run.watched.moments[-1]))
            most = max(most, median(recent))
            if rose is None and len(recent) == _SEEN and median(recent) >= _RISEN * before:
                rose = time.monotonic() - begin, run.handle.step - first
                run.job.tell(f"rose after {rose[0]:.1f} s, {rose[1]} steps")
    finally:
        _cpus(all_cpus)
    given = time.monotonic()
    far = median(recent) > _BACK * before
    back_s = math.inf
    while time.monotonic() < given + 2 * span_s:
        run.step()
        if apart(run.watched.moments[-1]) <= _BACK * before:
            back_s = time.monotonic() - given
            break
    late_s = math.inf
    if rose is not None:
        late_s = 0.0 if rose[1] <= _RISE_STEPS else max(0.0, rose[0] - _RISE_S)
    told = "it never rose" if rose is None else f"rose after {rose[0]:.1f} s, {rose[1]} steps"
    if not far:
        told += f"; not above {_BACK} of before when the CPU was given back"
    return [
        single("overhead", "", 0.0, note=told),
        single("late_s", "s", late_s),
        *([single("back_s", "s", back_s)] if far else []),
        single("before_steps", "", before),
        single("most_steps", "", most),
    ]


def _steps_apart(run: Run) -> Callable[[Moment], float]:
    """Return a function that gives the policy's interval in steps, as of a moment."""

    def apart(moment: Moment) -> float:
        policy = run.watched.policy
        if isinstance(policy, Budget):
            return float(policy.steps(moment) or 1)
        step_s = moment.quiet_s or moment.step_s or 1.0
        return (run.watched.interval_s(moment) or step_s) / step_s

    return apart


WAYS: dict[str, Callable[[Run], list[Record]]] = {
    "budget": _budget,
    "rare": _rare,
    "taken": _taken,
}
