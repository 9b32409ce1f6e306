"""Simulated and computed cases of when to save: papers' claims, and lightck's policies beside them.

Nothing is trained here. Each case gives numbers by the same names; `ratio` is what lightck's way
wastes over what the other does, less than 1 is better.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from lightck.policy import Auto, Budget, EverySeconds, Quality
from lightck.policy.failure_record import FailureRecord
from lightck.policy.failure_times import failure_times
from lightck.policy.formulas import Waste, checkfreq, coci, young
from lightck.policy.simulation import (
    Costs,
    Jit,
    PlayedFailure,
    PlayedRun,
    PlayedSymptom,
    simulate,
)
from lightck.types import Moment, Policy

_DAY_S = 86400.0
Numbers = dict[str, float]

# ---- COCI: work priced by what the loss fell in it -----------------------------------------------

_SLOPE, _OFFSET = -0.078 / 60, 0.787
"""The loss exp(slope t + offset) that COCI's authors fitted to their ResNet-101, t in seconds."""
_STALL_S, _RATE = 0.0015 * 60, 0.0042 / 60
"""Their stall, and their failures per second."""
_STEP_S = 0.1
_NOISE = 0.1


def priced(times: Sequence[float], duration_s: float) -> tuple[float, float]:
    """Return the expected waste of snapshots at given times, in seconds of training.

    First with lost work priced by its time, then by what the loss fell in it against the mean.
    """
    ends = [0.0, *times, duration_s]
    lost_s = lost = 0.0
    for begin, end in itertools.pairwise(ends):
        span_s = end - begin
        lost_s += span_s**2 / 2
        lost += _loss(begin) * span_s - (_loss(end) - _loss(begin)) / _SLOPE
    mean_rate = (_loss(0.0) - _loss(duration_s)) / duration_s
    stall_s = _STALL_S * len(times)
    return stall_s + _RATE * lost_s, stall_s + _RATE * lost / mean_rate


def _loss(time_s: float) -> float:
    return math.exp(_SLOPE * time_s + _OFFSET)


@dataclass
class _Watched:
    """A policy that is asked at every step, and when it was due."""

    policy: Quality
    due_s: list[float] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[str]:
        return self.policy.needs

    def due(self, moment: Moment) -> bool:
        due = self.policy.due(moment)
        if due:
            self.due_s.append(moment.step * _STEP_S)
        return due


def quality_times(duration_s: float, seed: int) -> list[float]:
    """Return when `Quality` saves, its rate of failures learned and its loss with noise."""
    chance = random.Random(seed)
    record = FailureRecord()
    for _ in range(20):
        record = record.ran(1 / _RATE, 1).failed(recovered=False)

    def noisy(trained_s: float) -> float:
        return _loss(trained_s) * (1 + _NOISE * chance.gauss(0, 1))

    watched = _Watched(Quality(budget=1.0, watch=False))
    costs = Costs(_STEP_S, _STALL_S, loss=noisy)
    simulate(watched, costs, [], duration_s, record=record)
    return watched.due_s


def coci_case(x: float, seeds: int) -> Numbers:
    """Compare Young, COCI's formula as its authors coded it, and `Quality`.

    Args:
        x: by how much the loss's logarithm falls in the run.
        seeds: of the noise of the loss.
    """
    duration_s = -x / _SLOPE
    every_s = young(_STALL_S, 1 / _RATE)
    steady = [every_s * i for i in range(1, math.ceil(duration_s / every_s))]
    # Minutes, as their code has them: the formula adds a time to a loss, and changes with the unit.
    slots = coci(_SLOPE * 60, _OFFSET, _STALL_S / 60, _RATE * 60).slots
    theirs = priced([60 * t for t in slots if 60 * t < duration_s], duration_s)
    ours = [priced(quality_times(duration_s, seed), duration_s) for seed in range(seeds)]
    by_young = priced(steady, duration_s)
    rule = priced(_known_end(duration_s), duration_s)
    quality = (mean(each[0] for each in ours), mean(each[1] for each in ours))
    return {
        "ratio": quality[1] / by_young[1],
        "time_ratio": quality[0] / by_young[0],
        "coci_ratio": theirs[1] / by_young[1],
        "coci_time_ratio": theirs[0] / by_young[0],
        "known_end_ratio": rule[1] / by_young[1],
        "young_s": by_young[0],
        "coci_time_s": theirs[0],
        "coci_progress_s": theirs[1],
        "quality_time_s": quality[0],
        "quality_progress_s": quality[1],
    }


def _known_end(duration_s: float) -> list[float]:
    """Return the times of the rule by the square root, did it know the end."""
    rate = (1 - math.exp(_SLOPE * duration_s)) / (-_SLOPE * duration_s)
    times: list[float] = []
    time_s = 0.0
    while True:
        now = math.exp(_SLOPE * time_s) / rate
        time_s += young(_STALL_S, 1 / _RATE) / math.sqrt(now)
        if time_s >= duration_s:
            return times
        times.append(time_s)


def workers_case(x: float, seeds: int) -> Numbers:
    """Compare intervals for 8, 4, 2, 1 workers in 10, 20, 30, 40 % of the time, in GPU-time.

    The loss falls with the work done. Computed as an integral; nothing is drawn.
    """
    points, average = 20_000, 2.6
    one_s = young(_STALL_S, 1 / _RATE)
    work = 0.0
    totals = dict.fromkeys(("one", "mean", "workers", "progress"), 0.0)
    for i in range(points):
        at = (i + 0.5) / points
        workers = 8 if at < 0.1 else 4 if at < 0.3 else 2 if at < 0.6 else 1
        work += workers / points
        progress = workers / average * x * math.exp(-x * work / average) / (1 - math.exp(-x))
        dear = average * progress
        intervals = {
            "one": one_s,
            "mean": one_s / math.sqrt(average),
            "workers": one_s / math.sqrt(workers),
            "progress": one_s / math.sqrt(dear),
        }
        for name, every_s in intervals.items():
            totals[name] += workers * (_STALL_S / every_s + _RATE * every_s / 2 * dear) / points
    return {
        "ratio": totals["progress"] / totals["one"],
        "over_mean_ratio": totals["progress"] / totals["mean"],
        "workers_ratio": totals["workers"] / totals["one"],
    }


# ---- just in time against periodic ---------------------------------------------------------------

_RANK_S = 8000 / 6.5 * _DAY_S
"""GPU-seconds to a failure: RSC-1's 6.50 in 1,000 days of nodes with 8 (arXiv 2410.21680)."""


def jit_case(ranks: float, stall_s: float) -> Numbers:
    """Compare periodic snapshots, just-in-time ones alone, and both: shares of the time."""
    waste = Waste(
        mtbf_s=_RANK_S / ranks,
        stall_s=stall_s,
        restore_s=120.0,
        detect_s=4.0,
        jit_s=2.0,
        jit_restore_s=120.0,
        step_s=1.0,
        armed=0.001,
        unrecoverable=0.3,
    )
    return {
        "ratio": waste.jit() / waste.periodic(),
        "both_ratio": waste.hybrid() / waste.periodic(),
        "periodic": waste.periodic(),
        "just_in_time": waste.jit(),
        "both": waste.hybrid(),
    }


def jit_pays(stall_s: float) -> float:
    """Return the ranks from which just-in-time snapshots alone waste less than periodic ones."""
    return next(float(n) for n in itertools.count(1) if jit_case(n, stall_s)["ratio"] < 1)


# ---- CheckFreq's vector --------------------------------------------------------------------------


def checkfreq_case(seeds: int) -> Numbers:
    """Compare the steps of CheckFreq's Algorithm 1 with those of `Budget`, by the same inputs."""
    steps = checkfreq(0.2, 0.02, 0.5, 2.0, 0.05, gpu_copy=0.05)
    moment = Moment(1, 0.0, cost_s=0.05, persist_s=2.45, quiet_s=0.2)
    ours = Budget(0.05).steps(moment)
    return {"ratio": (ours or 0) / steps, "checkfreq_steps": steps, "budget_steps": ours or 0}


# ---- learned rates -------------------------------------------------------------------------------

_BURSTY_MTBF_S, _BURSTY_DAYS = 70_400.0, 348
"""A job on all 400 nodes of InfiniteHBD's trace fails about as often (arXiv 2502.03885)."""


def _played(policy: Policy, costs: Costs, failures: Sequence[PlayedFailure]) -> float:
    return simulate(policy, costs, failures, _BURSTY_DAYS * _DAY_S).waste


def auto_case(cost_s: float, persist_s: float, seed: int) -> Numbers:
    """Compare `Auto`, which learns, with the best fixed interval in hindsight, failures in bursts.

    The coefficient of variation of the gaps is 1.36.
    """
    costs = Costs(1.0, cost_s, persist_s, 600.0)
    coming = failure_times(_BURSTY_MTBF_S, random.Random(seed).random, bursts=True)
    failures = list(itertools.takewhile(lambda f: f.time_s < _BURSTY_DAYS * _DAY_S, coming))
    by_young = young(cost_s, _BURSTY_MTBF_S)
    intervals = [by_young * 1.1**i for i in range(-12, 13)]
    fixed = {every_s: _played(EverySeconds(every_s), costs, failures) for every_s in intervals}
    best_s = min(fixed, key=fixed.__getitem__)
    ours = _played(Auto(), costs, failures)
    return {
        "ratio": ours / fixed[best_s],
        "waste": ours,
        "best_waste": fixed[best_s],
        "best_s": best_s,
        "failures": len(failures),
    }


# ---- symptoms ------------------------------------------------------------------------------------

_SYMPTOM_DAYS, _SYMPTOM_MTBF_S = 120, 43_200.0


def symptom_case(cost_s: float, persist_s: float, *, jit: bool, seed: int) -> Numbers:
    """Announce half of the failures an hour before, with a false alarm of ten minutes a day.

    `ratio` is what an announced failure that is not saved just in time loses, over what one does
    that is not announced; `stall_ratio` the stall with symptoms over that without.
    """
    chance, end_s = random.Random(seed), _SYMPTOM_DAYS * _DAY_S
    coming = failure_times(_SYMPTOM_MTBF_S, chance.random, unsaved=0.3 if jit else 1.0)
    failures = list(itertools.takewhile(lambda f: f.time_s < end_s, coming))
    announced = [chance.random() < 0.5 for _ in failures]
    symptoms = [
        PlayedSymptom(max(0.0, failure.time_s - 3600), failure.time_s, "link")
        for failure, known in zip(failures, announced, strict=True)
        if known
    ]
    for day in range(_SYMPTOM_DAYS):
        begin_s = (day + chance.random()) * _DAY_S
        symptoms.append(PlayedSymptom(begin_s, begin_s + 600, "link"))
    costs = Costs(0.5, cost_s, persist_s, 60.0, jit=Jit() if jit else None)
    seen = simulate(Auto(), costs, failures, end_s, symptoms=symptoms)
    blind = simulate(Auto(), costs, failures, end_s)
    lost = _lost_by_kind(seen, costs, failures, announced)
    return {
        "ratio": mean(lost[True]) / mean(lost[False]),
        "stall_ratio": seen.stall_s / blind.stall_s,
        "waste_ratio": seen.waste / blind.waste,
        "announced_s": mean(lost[True]),
        "unannounced_s": mean(lost[False]),
    }


def _lost_by_kind(
    outcome: PlayedRun, costs: Costs, failures: Sequence[PlayedFailure], announced: Sequence[bool]
) -> dict[bool, list[float]]:
    """Return what failures lost that were not saved, by whether they were announced."""
    found: dict[bool, list[float]] = {True: [], False: []}
    lost = iter(outcome.lost_s)
    trains_s = 0.0
    for failure, known in zip(failures, announced, strict=True):
        if failure.time_s <= trains_s:
            continue  # the job was down
        lost_s = next(lost)
        saved = failure.saved and costs.jit is not None
        if not saved:
            found[known].append(lost_s)
        trains_s = failure.time_s + costs.restart_s
        if saved and costs.jit is not None:
            trains_s += costs.jit.detect_s + costs.jit.save_s
    return found


# ---- the cases by name ---------------------------------------------------------------------------

_SEED = 7
_ROWS = ((0.02, 0.5), (0.5, 5.0), (5.0, 60.0), (40.0, 40.0))


def _cases() -> dict[str, Callable[[int], Numbers]]:
    found: dict[str, Callable[[int], Any]] = {"checkfreq": checkfreq_case}
    for x in (2.34, 4.68, 5.0, 7.8, 10.92, 11.0):
        found[f"coci {x:g}"] = lambda seeds, x=x: coci_case(x, seeds)  # type: ignore[misc]
    for x in (5.0, 8.0):
        found[f"workers {x:g}"] = lambda seeds, x=x: workers_case(x, seeds)  # type: ignore[misc]
    for stall_s, counts in ((5.0, (1, 8, 64, 1024, 16384)), (0.05, (1, 64, 1024, 4096, 16384))):
        for n in counts:
            found[f"jit {n} {stall_s:g}"] = (
                lambda seeds, n=n, stall_s=stall_s: jit_case(n, stall_s)  # type: ignore[misc]
            )
    for cost_s, persist_s in _ROWS:
        found[f"auto {cost_s:g} {persist_s:g}"] = (
            lambda seeds, c=cost_s, p=persist_s: auto_case(c, p, _SEED)  # type: ignore[misc]
        )
    for cost_s, persist_s in ((0.05, 0.5), (0.5, 5.0)):
        for jit in (False, True):
            way = "jit" if jit else "off"
            found[f"symptom {way} {cost_s:g}"] = lambda seeds, c=cost_s, p=persist_s, jit=jit: (
                symptom_case(  # type: ignore[misc]
                    c, p, jit=jit, seed=_SEED
                )
            )
    return found


CASES = _cases()
"""The cases by the names that definitions have for them; each takes a number of seeds."""
