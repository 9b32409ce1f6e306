"""Policies played against given failures: against closed forms, and step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from lightck.policy import AtSteps, EverySeconds, EverySteps, parse, simulation
from lightck.policy.failure_record import FailureRecord
from lightck.policy.formulas import Waste
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


def _failures(mtbf_s: float, seed: int, unsaved: float = 1.0) -> Iterator[PlayedFailure]:
    chance, time_s = random.Random(seed), 0.0
    while True:
        time_s += chance.expovariate(1 / mtbf_s)
        yield PlayedFailure(time_s, chance.random() >= unsaved)


def _asked_always(policy: Policy, *given: Any, **more: Any) -> PlayedRun:
    """Play with every step asked about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_REGULAR", ())
        return simulate(policy, *given, **more)


def _step_by_step(
    policy: Policy, costs: Costs, failures: Iterable[PlayedFailure], horizon_s: float
) -> tuple[list[int], list[float]]:
    """Play a policy that needs nothing learned; return opened steps, and the time each loses."""
    opened: list[int] = []
    lost: list[float] = []
    coming = iter(failures)
    failure = next(coming)
    time_s, step, pending_s = 0.0, 0, 0.0
    saved = newest = (0, 0.0)
    last: tuple[int, float] | None = None
    overdue, known, age = False, False, 0
    while True:
        end_s = time_s + costs.step_s + pending_s
        if min(failure.time_s, end_s) > horizon_s:
            return opened, lost
        if failure.time_s < end_s:
            if newest[1] + costs.persist_s <= failure.time_s:
                saved = newest
            back = (step, time_s) if failure.saved else saved
            lost.append(failure.time_s - back[1])
            time_s = failure.time_s + costs.restart_s
            if failure.saved and costs.jit:
                time_s += costs.jit.detect_s + costs.jit.save_s
            step, pending_s, last, overdue, age = back[0], 0.0, None, False, 0
            saved = newest = (step, time_s)
            known = known and step > 0
            while failure.time_s <= time_s:  # down
                failure = next(coming)
            continue
        age = age + 1 if time_s < newest[1] + costs.persist_s else 0
        time_s, step, pending_s = end_s, step + 1, 0.0
        if newest[1] + costs.persist_s <= time_s and saved != newest:
            saved, known = newest, True
        moment = Moment(
            step=step,
            time_s=time_s,
            last_step=last[0] if last else None,
            last_time_s=last[1] if last else None,
            cost_s=costs.cost_s if known else None,
            persist_s=costs.persist_s if known else None,
            step_s=costs.step_s,
            quiet_s=costs.step_s,
            quiet_age=age,
            saved_step=saved[0] or None,
            in_flight=saved != newest,
        )
        if policy.due(moment) or overdue:
            last, overdue = (step, time_s), saved != newest
            if not overdue:
                opened.append(step)
                newest, pending_s = (step, time_s), costs.cost_s


@pytest.mark.parametrize("jit", [None, Jit(2.0, 1.0)], ids=["off", "jit"])
@pytest.mark.parametrize("words", ["1 step", "7 steps", "30 s", "3.5 %", "9 steps or 64 s"])
def test_what_is_played_in_leaps_is_what_comes_of_single_steps(
    words: str, jit: Jit | None, rng: np.random.Generator
) -> None:
    policy = parse(words)
    for persist_s in (0.0, 0.25, 3.5):
        # Binary fractions, so that sums of times are exact.
        costs = Costs(0.25, 0.125, persist_s, restart_s=16.0, jit=jit)
        at = sorted(int(each) / 1024 for each in rng.integers(1 << 22, size=20))
        failures = [PlayedFailure(t, jit is not None and bool(rng.random() < 0.5)) for t in at]
        endless = [*failures, PlayedFailure(1e9)]
        opened, lost = _step_by_step(policy, costs, endless, 4096.0)
        played = simulate(policy, costs, failures, 4096.0)
        assert (played.snapshots, list(played.lost_s)) == (len(opened), lost)
        assert played == _asked_always(policy, costs, failures, 4096.0)


_LEARNING = ("auto", "quality", "auto or 600 steps", "hybrid mtbf 1 h", "quality mtbf 30 s")


@pytest.mark.parametrize("words", _LEARNING)
def test_what_is_learned_does_not_depend_on_leaps(words: str, rng: np.random.Generator) -> None:
    policy = parse(words)
    costs = Costs(0.25, 0.0625, 1.25, 64.0, jit=Jit(), loss=lambda t: 1 / (1 + t / 600))
    failures = [PlayedFailure(t * 1800.0, bool(rng.random() < 0.7)) for t in range(1, 9)]
    symptoms = [PlayedSymptom(5000.0, 6200.0, "link"), PlayedSymptom(5600.0, 9000.0, "memory")]
    leaps = simulate(policy, costs, failures, 16384.0, symptoms=symptoms)
    asked = _asked_always(policy, costs, failures, 16384.0, symptoms=symptoms)
    assert leaps == asked


def test_no_loss_is_missed_where_many_snapshots_are_alike() -> None:
    costs = Costs(0.25, 1 / 1024, 0.0, 64.0, jit=Jit(), loss=lambda t: math.exp(-t / 3000))
    failures = [PlayedFailure(1800.0 * t) for t in range(1, 12)]
    leaps = simulate(parse("quality"), costs, failures, 22000.0)
    assert leaps == _asked_always(parse("quality"), costs, failures, 22000.0)


def test_a_symptom_brings_snapshots_closer_until_it_is_over() -> None:
    costs = Costs(0.25, 0.0625, 0.25)

    def snapshots(*symptoms: PlayedSymptom) -> int:
        return simulate(parse("auto"), costs, [], 7200.0, symptoms=symptoms).snapshots

    quiet, short = snapshots(), snapshots(PlayedSymptom(3600.0, 4200.0, "memory"))
    twice = snapshots(*2 * [PlayedSymptom(3600.0, 4200.0, "memory")])
    assert quiet < short < twice
    assert short < snapshots(PlayedSymptom(3600.0, 7200.0, "memory"))


def _expected(every_s: float, first_s: float, costs: Costs, mtbf_s: float) -> float:
    """Return the exact share of useful time of a fixed interval, failures exponential.

    A life lasts `mtbf_s` on average and a restart follows it. Its snapshots open at `first_s` and
    then every `every_s` of training, and each counts if the life lasts `persist_s` longer.
    """
    cycle_s = every_s + costs.cost_s
    reached = math.exp(-(first_s + costs.persist_s) / mtbf_s)
    later = math.exp(-cycle_s / mtbf_s)
    gained_s = reached * (first_s + every_s * later / (1 - later))
    return gained_s / (mtbf_s + costs.restart_s)


@pytest.mark.parametrize("every", [20, 200, 2000])
def test_a_fixed_interval_loses_what_the_exact_formula_says(every: int) -> None:
    costs, mtbf_s = Costs(0.5, 0.5, 2.0, 60.0), 3600.0
    horizon_s = 250 * _DAY_S
    steps = simulate(EverySteps(every), costs, _failures(mtbf_s, 7), horizon_s)
    assert steps.failures > 5_000
    exact = _expected(every * 0.5, every * 0.5, costs, mtbf_s)
    assert steps.goodput == pytest.approx(exact, abs=0.004)
    seconds = EverySeconds(every * 0.5 + costs.cost_s)
    timed = simulate(seconds, costs, _failures(mtbf_s, 8), horizon_s)
    assert timed.goodput == pytest.approx(_expected(every * 0.5, 0.5, costs, mtbf_s), abs=0.004)


def test_young_s_waste_is_met_to_first_order() -> None:
    costs, mtbf_s = Costs(0.5, 0.5, 0.0, 60.0), 3600.0
    best = Waste(mtbf_s=mtbf_s, stall_s=0.5, restore_s=60.0)
    played = simulate(EverySteps(120), costs, _failures(mtbf_s, 1), 250 * _DAY_S)
    assert best.interval_s == pytest.approx(60.0)
    assert 1 - played.goodput == pytest.approx(best.periodic(), rel=0.04)


def test_just_in_time_snapshots_waste_what_their_formula_says() -> None:
    costs, mtbf_s = Costs(0.5, 0.5, 0.0, 60.0, jit=Jit(4.0, 2.0)), 3600.0
    waste = Waste(
        mtbf_s=mtbf_s,
        stall_s=0.5,
        restore_s=60.0,
        detect_s=4.0,
        jit_s=2.0,
        jit_restore_s=60.0,
        step_s=0.25,  # a half of a minibatch, on average
        unrecoverable=0.3,
    )
    failures = _failures(mtbf_s, 3, unsaved=0.3)
    played = simulate(EverySteps(220), costs, failures, 250 * _DAY_S)
    assert 1 - played.goodput == pytest.approx(waste.hybrid(110.0), rel=0.04)


def test_the_parts_of_the_time_add_up_and_none_is_negative(rng: np.random.Generator) -> None:
    for _ in range(50):
        most = (3, 5, 9, 90)
        costs = Costs(*(float(rng.uniform(0.1, each)) for each in most), jit=Jit())
        horizon_s = float(rng.uniform(1, 4000))
        policy = parse(str(rng.choice(["1 step", "20 s", "auto", "3.5 %"])))
        played = simulate(policy, costs, _failures(300, int(rng.integers(99)), 0.5), horizon_s)
        parts = (played.useful_s, played.stall_s, played.rework_s, played.down_s)
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(horizon_s)
        assert len(played.lost_s) == len(played.undone) == played.failures


def test_a_failure_goes_back_to_the_newest_snapshot_that_counts() -> None:
    costs = Costs(1.0, 0.0, persist_s=3.0)
    for at_s, lost_s in ((12.5, 12.5), (13.0, 3.0), (22.9, 12.9), (23.5, 3.5)):
        played = simulate(EverySteps(10), costs, [PlayedFailure(at_s)], 100.0)
        assert played.lost_s == pytest.approx((lost_s,))
        assert played.rework_s == pytest.approx(lost_s)


def test_two_failures_in_a_row_leave_what_a_snapshot_holds_of_the_loss() -> None:
    costs = Costs(0.25, 0.0625, 60.0, 10.0, loss=lambda t: math.exp(-t / 3000))
    play = simulation._Play(parse("quality"), costs, [], FailureRecord())
    play.train_until(5000.0)
    while play.opened == play.saved:
        play.train_until(play.time_s + 1.0)
    held = [curve for step, curve in play.curves if step <= play.saved.step][-1]
    for _ in range(3):
        play.fail(play.time_s + 0.1, saved=False)
        assert play.curve is held
        play.train_until(play.time_s + 20.0)  # the first step's snapshot is on its way


def test_what_comes_while_the_job_is_down_does_nothing() -> None:
    costs = Costs(1.0, 0.0, restart_s=50.0)
    once = simulate(EverySteps(10), costs, [PlayedFailure(30.5)], 200.0)
    failures = [PlayedFailure(t) for t in (30.5, 31.0, 80.0)]
    assert simulate(EverySteps(10), costs, failures, 200.0) == once
    assert once.down_s == 50.0


def test_a_due_step_slips_while_a_snapshot_is_on_its_way() -> None:
    played = simulate(EverySteps(1), Costs(1.0, 0.0, persist_s=4.0), [], 100.5)
    assert (played.snapshots, played.slipped) == (25, 75)


@pytest.mark.parametrize("words", ["1 step", "7 steps", "auto", "3.5 %", "quality or 9 s"])
def test_a_commit_that_takes_long_is_leapt_over(words: str) -> None:
    costs = Costs(0.25, 0.125, persist_s=700.0, jit=Jit(), loss=lambda t: math.exp(-t / 3000))
    failures = [PlayedFailure(600.0), PlayedFailure(2000.0, True), PlayedFailure(3000.0)]
    leaps = simulate(parse(words), costs, failures, 5000.0)
    assert leaps == _asked_always(parse(words), costs, failures, 5000.0)


@pytest.mark.parametrize("words", ["1 step", "auto", "quality", "10 min"])
def test_a_commit_that_never_comes_is_played_in_a_few_leaps(words: str) -> None:
    costs = Costs(0.25, 0.125, persist_s=1e12, jit=Jit(), loss=lambda t: math.exp(-t / 3e9))
    play, asked = _counted(parse(words), costs, 1e9)
    assert play.snapshots == 1
    assert asked < 20_000


@pytest.mark.parametrize("words", ["1 step", "auto", "quality", "10 min", "3.5 %"])
def test_short_steps_take_no_longer_to_play(words: str) -> None:
    costs = Costs(1e-4, 0.05, persist_s=0.5, jit=Jit(), loss=lambda t: math.exp(-t / 1e6))
    _, asked = _counted(parse(words), costs, 1e7)
    assert asked < 50_000


def _counted(policy: Policy, costs: Costs, end_s: float) -> tuple[simulation._Play, int]:
    """Play without failures; return the play, and how many steps it asked the policy about."""
    play = simulation._Play(policy, costs, [], FailureRecord())
    asked = 0
    ask = play._ask

    def counted(end_s: float) -> None:
        nonlocal asked
        asked += 1
        ask(end_s)

    play._ask = counted  # type: ignore[method-assign]
    play.train_until(end_s)
    return play, asked


def test_a_policy_s_own_steps_are_not_leapt_over() -> None:
    policy = AtSteps([3, 5, 90]) | EverySeconds(50.0)
    # 3, 5, 55, 90, 140, 190
    assert simulate(policy, Costs(1.0, 0.0), [], 200.5).snapshots == 7


def test_failures_that_were_learned_before_count() -> None:
    record = FailureRecord()
    for _ in range(20):
        record = record.ran(600.0, 1).failed(recovered=False)
    costs = Costs(0.5, 0.05, 0.5)
    fresh = simulate(parse("auto"), costs, [], _DAY_S)
    known = simulate(parse("auto"), costs, [], _DAY_S, record=record)
    assert known.snapshots > 2 * fresh.snapshots


def test_more_failures_make_auto_s_interval_shorter() -> None:
    counts = [
        simulate(parse("auto"), Costs(0.5, 0.05, 0.5, 30), _failures(m, 5), 10 * _DAY_S).snapshots
        for m in (86400.0, 7200.0, 600.0)
    ]
    assert counts == sorted(counts) and counts[2] > 3 * counts[0]


@pytest.mark.parametrize(
    "failures",
    [[PlayedFailure(-1.0)], [PlayedFailure(math.nan)], [PlayedFailure(5.0), PlayedFailure(4.0)]],
)
def test_failures_out_of_order_are_refused(failures: list[PlayedFailure]) -> None:
    with pytest.raises(ValueError, match="a failure at"):
        simulate(EverySteps(1), Costs(1.0, 0.1), failures, 100.0)


@pytest.mark.parametrize(
    "costs",
    [Costs(0.0, 0.1), Costs(1.0, -0.1), Costs(1.0, math.nan), Costs(1.0, 0.1, math.inf)],
)
def test_costs_that_are_no_times_are_refused(costs: Costs) -> None:
    with pytest.raises(ValueError, match="must be a finite number"):
        simulate(EverySteps(1), costs, [], 100.0)


def test_an_outcome_tells_shares() -> None:
    outcome = PlayedRun(50.0, 10.0, 20.0, 20.0, 3, 0, 1, (9.0,), ((1.0, 2.0),))
    assert (outcome.horizon_s, outcome.goodput, outcome.waste) == (100.0, 0.5, 0.3)
