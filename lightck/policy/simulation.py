"""Play a policy against given failures: what its snapshots cost, and what the failures undo.

Pure: no clock is read and nothing is drawn; failures, symptoms and losses are given. The policy is
asked with the moments that the engine makes, so that what is simulated is the code that decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightck.policy.auto import Auto
from lightck.policy.budget import Budget
from lightck.policy.combination import interval_of, needs_of, single_policies
from lightck.policy.due import EverySeconds, EverySteps, Hybrid
from lightck.policy.failure_record import FailureRecord
from lightck.policy.loss_curve import LossCurve
from lightck.policy.quality import Quality
from lightck.types import Hazard, Moment, Policy

_GROWTH = 0.02
"""By how much of itself the exposure grows until the hazard is computed anew."""
_LOSS_STEPS = 16
"""Steps from one loss that is seen to the next, at least, as in the engine."""
_LOSS_SHARE = 1 / 512
"""The same as a share of the training so far, so that a month is played in a second."""
_REGULAR = (EverySteps, EverySeconds, Hybrid, Budget, Auto, Quality)
"""The policies of which it is known how many steps they are not due for."""
_LONG = 64
"""Steps without a quiet one, beyond which more of them change nothing in lightck's policies."""


@dataclass(frozen=True, slots=True)
class Jit:
    """The time that a failure costs which is saved just in time, but for the new start.

    Attributes:
        detect_s: from the failure to its detection, seconds.
        save_s: from there to the commit, seconds.
    """

    detect_s: float = 4.0
    save_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Costs:
    """The times that a job is made of, in seconds.

    Attributes:
        step_s: one step without a snapshot.
        cost_s: what one snapshot adds to the training.
        persist_s: from a snapshot's opening to its commit.
        restart_s: from a failure to training again, the lost work aside.
        world: number of ranks.
        jit: the just-in-time path; None: `failure="off"`.
        loss: the loss after so many seconds of training; None: it is not seen.
    """

    step_s: float
    cost_s: float
    persist_s: float = 0.0
    restart_s: float = 0.0
    world: int = 1
    jit: Jit | None = None
    loss: Callable[[float], float] | None = None


class PlayedFailure(NamedTuple):
    """A failure that is given: when it comes, and whether it leaves a just-in-time snapshot."""

    time_s: float
    saved: bool = False


class PlayedSymptom(NamedTuple):
    """A symptom that is given: from when to when it is active, and its name."""

    begin_s: float
    end_s: float
    name: str


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """A job that was played: its time in four parts, its snapshots, and what failures undid.

    Attributes:
        useful_s: training that is there at the end, the running step included.
        stall_s: what snapshots added to the training.
        rework_s: training that failures have undone.
        down_s: from failures to training again.
        snapshots: opened ones.
        slipped: due steps without one, because the one before was not committed yet.
        failures: those that came while the job was training.
        lost_s: for each of them the time since the end of the step that came back.
        undone: for each of them which training was lost, from and to, in seconds of training.
    """

    useful_s: float
    stall_s: float
    rework_s: float
    down_s: float
    snapshots: int
    slipped: int
    failures: int
    lost_s: tuple[float, ...]
    undone: tuple[tuple[float, float], ...]

    @property
    def horizon_s(self) -> float:
        """Return the whole time."""
        return self.useful_s + self.stall_s + self.rework_s + self.down_s

    @property
    def goodput(self) -> float:
        """Return the share of the time that is training which is there at the end."""
        return self.useful_s / self.horizon_s

    @property
    def waste(self) -> float:
        """Return the share of the time that is stall or rework: what a policy can change."""
        return (self.stall_s + self.rework_s) / self.horizon_s


def simulate(
    policy: Policy,
    costs: Costs,
    failures: Iterable[PlayedFailure],
    horizon_s: float,
    *,
    symptoms: Sequence[PlayedSymptom] = (),
    record: FailureRecord | None = None,
) -> PlayedRun:
    """Play a policy against failures.

    A snapshot has the state of its opening and counts from `persist_s` later; one is on its way at
    a time, and a step that is due meanwhile slips to the next. A failure that is saved just in time
    costs the running step, any other all since the newest snapshot that counts. Every life begins
    as in the engine: the first step is due, what was measured and learned is still known. What
    comes while the job is down does nothing. lightck's own policies without epochs and given steps
    are played in leaps, others step by step.

    Args:
        policy: any policy; it is asked in the order of time.
        costs: what the job is made of.
        failures: in the order of time, seconds from the begin; may be endless.
        horizon_s: when the play ends.
        symptoms: what is seen of failures to come.
        record: what was learned before; None: nothing.

    Returns:
        What became of the time.

    Raises:
        ValueError: a number is not finite or negative, or a failure comes before the last one.
    """
    _check(costs, horizon_s)
    play = _Play(policy, costs, sorted(symptoms), record or FailureRecord())
    before = 0.0
    for failure in failures:
        if not before <= failure.time_s < math.inf:
            raise ValueError(f"a failure at {failure.time_s!r} s after one at {before!r} s")
        before = failure.time_s
        if before >= horizon_s:
            break
        if before > play.time_s:
            play.train_until(before)
            play.fail(before, saved=failure.saved and costs.jit is not None)
    play.train_until(horizon_s)
    return play.outcome(horizon_s)


def _check(costs: Costs, horizon_s: float) -> None:
    given = {
        "horizon_s": horizon_s,
        "step_s": costs.step_s,
        "cost_s": costs.cost_s,
        "persist_s": costs.persist_s,
        "restart_s": costs.restart_s,
        "world": costs.world,
    }
    for name, value in given.items():
        if not 0 <= value < math.inf or (value == 0 and name in ("horizon_s", "step_s", "world")):
            raise ValueError(f"{name} = {value!r}: must be a finite number, not below 0")


class _Point(NamedTuple):
    """A step that can be gone back to, and when it ended."""

    step: int
    time_s: float


class _Opening(NamedTuple):
    """How the job was when a snapshot opened; `alike` is all that a policy sees of it."""

    alike: object
    step: int
    time_s: float
    slipped: int


@dataclass(eq=False)
class _Play:
    """A job that is played: where it is, what its snapshots hold, what it has learned."""

    policy: Policy
    costs: Costs
    symptoms: list[PlayedSymptom]
    record: FailureRecord
    time_s: float = 0.0
    """When the running step began; while the job is down, when it will train again."""
    step: int = 0
    """Last complete step."""
    pending_s: float = 0.0
    """The seconds that the running step takes longer: a snapshot opened at its begin."""
    last: Moment | None = None
    overdue: bool = False
    opened: _Point = _Point(0, 0.0)
    """The newest snapshot; at a life's begin the one that came back."""
    saved: _Point = _Point(0, 0.0)
    """The newest one that counts."""
    known: bool = False
    """A snapshot was committed, so that its cost is known."""
    quiet_age: int = 0
    hazard: Hazard | None = None
    curve: LossCurve = field(default_factory=LossCurve)
    curves: list[tuple[int, LossCurve]] = field(default_factory=list)
    """The curves that newer snapshots hold, by their steps."""
    progress: float | None = None
    recorded_s: float = 0.0
    """Up to when the record knows the training."""
    began_step: int = 0
    """The step that came back at this life's begin."""
    refresh_s: float = 0.0
    """When hazard or loss are to be looked at again."""
    loss_step: int = 0
    """The step at which the next loss is seen."""
    opening: _Opening | None = None
    stall_s: float = 0.0
    down_s: float = 0.0
    snapshots: int = 0
    slipped: int = 0
    lost_s: list[float] = field(default_factory=list)
    undone: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        needs = needs_of(self.policy)
        self._hazards, self._losses = "hazard" in needs, "loss" in needs
        self._losses = self._losses and self.costs.loss is not None
        singles = list(single_policies(self.policy))
        believed = [p.mtbf_s for p in singles if isinstance(p, Auto) and p.mtbf_s is not None]
        self._mtbf_s = min(believed, default=None)
        own = all(type(p) in _REGULAR for p in singles)
        self._regular = singles if own else []
        self._period = math.lcm(*(p.n for p in singles if isinstance(p, EverySteps)))

    # ---- time ------------------------------------------------------------------------------------

    def train_until(self, end_s: float) -> None:
        """Complete every step that ends by then."""
        step_s = self.costs.step_s
        while True:
            self._look()
            steps = self._leap(end_s)
            while steps > 1 and self.time_s + self.pending_s + steps * step_s > end_s:
                steps -= 1  # rounding
            took_s = self.pending_s + steps * step_s
            if self.time_s + took_s > end_s:
                return
            begun_s = self.time_s + (took_s - step_s if steps > 1 else 0.0)
            self.quiet_age = self.quiet_age + steps if begun_s < self._counts_s else 0
            self.time_s += took_s
            self.step += steps
            self.pending_s = 0.0
            if self.overdue:
                self.slipped += steps - 1
            if self.time_s >= self._counts_s:
                self._count()
            self._ask(end_s)

    def _leap(self, end_s: float) -> int:
        """Return the steps until the policy is to be asked: before, nothing is due, or all slip."""
        if not self._regular:
            return 1
        moment = self._moment()
        until_s = min(self.refresh_s, end_s, self._counts_s if self.overdue else math.inf)
        room = (until_s - self.time_s - self.pending_s) / self.costs.step_s
        if self._losses:
            room = min(room, self.loss_step - self.step)
        for policy in self._regular if not self.overdue else ():
            room = min(room, self._to_due(policy, moment))
        return max(1, math.floor(room))

    def _to_due(self, policy: Policy, moment: Moment) -> float:
        """Return steps after which this policy may be due, too few rather than too many."""
        if isinstance(policy, EverySteps):
            return policy.n - self.step % policy.n
        if moment.last_step is None or moment.last_time_s is None:
            return 1.0
        every_s = interval_of(policy, moment)
        if isinstance(policy, Budget) and (steps := policy.steps(moment)) is not None:
            return moment.last_step + steps - self.step
        # Without an interval nothing is due until the first snapshot of all was committed.
        next_s = self._counts_s if every_s is None else moment.last_time_s + every_s
        return (next_s - self.time_s - self.pending_s) / self.costs.step_s - 1.5

    @property
    def _counts_s(self) -> float:
        """When the newest snapshot counts."""
        return self.opened.time_s + self.costs.persist_s

    def _count(self) -> None:
        self.saved, self.known = self.opened, self.known or self.opened.step > self.began_step

    def _moment(self) -> Moment:
        costs, last = self.costs, self.last
        return Moment(
            step=self.step,
            time_s=self.time_s,
            last_step=last.step if last else None,
            last_time_s=last.time_s if last else None,
            last_epoch=0 if last else None,
            cost_s=costs.cost_s if self.known else None,
            persist_s=costs.persist_s if self.known else None,
            step_s=costs.step_s,
            quiet_s=costs.step_s,
            quiet_age=self.quiet_age,
            saved_step=self.saved.step or None,
            in_flight=self.saved.step < self.opened.step,
            hazard=self.hazard,
            progress=self.progress,
            world=costs.world,
        )

    def _ask(self, end_s: float) -> None:
        """Ask the policy about the step that has just ended."""
        moment = self._moment()
        if not (self.policy.due(moment) or self.overdue):
            return
        self.last = moment
        self.overdue = moment.in_flight
        if moment.in_flight:
            self.slipped += 1
            return
        if self._regular:
            self._repeat(end_s)
        self.opened = _Point(self.step, self.time_s)
        self.pending_s = self.costs.cost_s
        self.stall_s += self.costs.cost_s
        self.snapshots += 1
        if self._losses:
            self.curves = [*self.curves[-1:], (self.step, self.curve)]

    def _repeat(self, end_s: float) -> None:
        """Repeat what was between the last two openings as often as nothing else comes.

        At both the job was the same, but for step and time; lightck's own policies go by
        differences of these alone, `EverySteps` by the step's multiples.
        """
        before, self.opening = self.opening, self._now()
        if before is None or before.alike != self.opening.alike:
            return
        steps, took_s = self.step - before.step, self.time_s - before.time_s
        times = math.floor((min(end_s, self.refresh_s) - self.time_s) / took_s) - 1
        if self._losses:
            times = min(times, (self.loss_step - self.step) // steps - 1)
        if times <= 0 or steps % self._period:
            return
        self.slipped += times * (self.slipped - before.slipped)
        self.stall_s += times * self.costs.cost_s
        self.snapshots += times
        self.step += times * steps
        self.time_s += times * took_s
        if self.quiet_age >= _LONG:
            self.quiet_age += times * steps
        self.last = self._moment()
        self.opening = self._now()

    def _now(self) -> _Opening:
        alike = (min(self.quiet_age, _LONG), self.known, self.hazard, self.progress, self.curve)
        return _Opening(alike, self.step, self.time_s, self.slipped)

    # ---- what is learned -------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what is to be known of failures and of the loss at the begin of this step."""
        if self._losses and self.step >= self.loss_step:
            assert self.costs.loss is not None
            trained_s = self.step * self.costs.step_s
            if trained_s:
                self.curve = self.curve.observed(trained_s, self.costs.loss(trained_s))
                self.progress = self.curve.progress
            self.loss_step = self.step + max(_LOSS_STEPS, int(self.step * _LOSS_SHARE))
        if not self._hazards:
            self.refresh_s = math.inf
        elif self.time_s >= self.refresh_s:
            self._remember(self.time_s)
            self._expect()

    def _expect(self) -> None:
        world, record = self.costs.world, self.record
        active = self._active(self.time_s)
        jit = self.costs.jit is not None
        self.hazard = record.hazard(world, active, mtbf_s=self._mtbf_s, jit=jit)
        seen_s = (record.exposure + sum(each.exposure for each in record.failures)) / world
        self.refresh_s = min(self.time_s + max(1.0, _GROWTH * seen_s), self._change(self.time_s))

    def _remember(self, until_s: float) -> None:
        """Tell the record of the training since it was told last."""
        while self.recorded_s < until_s:
            next_s = min(until_s, self._change(self.recorded_s))
            active = self._active(self.recorded_s)
            self.record = self.record.ran(next_s - self.recorded_s, self.costs.world, active)
            self.recorded_s = next_s

    def _active(self, time_s: float, *, at_end: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for begin_s, end_s, name in self.symptoms:
            if begin_s > time_s:
                break
            if time_s < end_s or at_end and time_s == end_s:
                found[name] = found.get(name, 0.0) + 1.0
        return found

    def _change(self, time_s: float) -> float:
        """Return when a symptom comes or goes next."""
        while self.symptoms and self.symptoms[0].end_s <= time_s:
            self.symptoms.pop(0)
        ends = (each.end_s for each in self.symptoms)
        begins = (each.begin_s for each in self.symptoms)
        return min((t for times in (begins, ends) for t in times if t > time_s), default=math.inf)

    # ---- failures --------------------------------------------------------------------------------

    def fail(self, at_s: float, *, saved: bool) -> None:
        """End this life and begin the next."""
        if self._counts_s <= at_s:
            self._count()
        back = _Point(self.step, self.time_s) if saved else self.saved
        step_s = self.costs.step_s
        self.undone.append((back.step * step_s, self.step * step_s + self._running_s(at_s)))
        self.lost_s.append(at_s - back.time_s)
        self._learn(at_s, saved)
        down_s = self.costs.restart_s
        if saved and self.costs.jit is not None:
            down_s += self.costs.jit.detect_s + self.costs.jit.save_s
        self.down_s += down_s
        self.time_s = self.recorded_s = self.refresh_s = at_s + down_s
        self.step = self.began_step = self.loss_step = back.step
        self.opened = self.saved = _Point(back.step, self.time_s)
        self.known = self.known and back.step > 0
        self.last, self.overdue, self.pending_s, self.quiet_age = None, False, 0.0, 0
        self.opening = None

    def _running_s(self, at_s: float) -> float:
        """Return the training in the running step; what is left of its stall is not spent."""
        spent_s = at_s - self.time_s
        self.stall_s -= max(0.0, self.pending_s - spent_s)
        return max(0.0, spent_s - self.pending_s)

    def _learn(self, at_s: float, saved: bool) -> None:
        if self._hazards:
            self._remember(at_s)
            # A life that ends in its first step says nothing of a rate.
            if self.step - self.began_step >= 2:
                active, world = self._active(at_s, at_end=True), self.costs.world
                self.record = self.record.failed(recovered=saved, world=world, active=active)
        if self._losses and not saved:
            held = [each for each in self.curves if each[0] <= self.saved.step]
            self.curve, self.curves = held[-1][1] if held else LossCurve(), held[-1:]
            self.progress = self.curve.progress

    def outcome(self, horizon_s: float) -> PlayedRun:
        """Return what became of the time."""
        down_s = self.down_s - max(0.0, self.time_s - horizon_s)
        useful_s = self.step * self.costs.step_s
        if self.time_s < horizon_s:
            useful_s += self._running_s(horizon_s)
        return PlayedRun(
            useful_s,
            self.stall_s,
            max(0.0, horizon_s - useful_s - self.stall_s - down_s),
            down_s,
            self.snapshots,
            self.slipped,
            len(self.lost_s),
            tuple(self.lost_s),
            tuple(self.undone),
        )
