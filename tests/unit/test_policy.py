from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from lightck.distributed.commit.distributed_barrier import policy_text
from lightck.errors import ConfigError
from lightck.policy import (
    AllOf,
    AnyOf,
    AtSteps,
    EveryEpochs,
    EverySeconds,
    EverySteps,
    Hybrid,
    parse,
)
from lightck.policy.formulas import Waste
from lightck.types import Moment, Policy


def _due_steps(policy: Policy, steps: int, *, steps_per_epoch: int = 1000) -> list[int]:
    """Run a policy over one-second steps as the engine does; return the due steps."""
    due: list[int] = []
    moment = Moment(step=0, time_s=100.0)
    for step in range(1, steps + 1):
        epoch = (step - 1) // steps_per_epoch
        moment = dataclasses.replace(moment, step=step, time_s=100.0 + step, epoch=epoch)
        if policy.due(moment):
            due.append(step)
            moment = dataclasses.replace(
                moment, last_step=step, last_time_s=moment.time_s, last_epoch=epoch
            )
    return due


def test_every_steps_is_due_at_multiples() -> None:
    assert _due_steps(EverySteps(1), 3) == [1, 2, 3]
    assert _due_steps(EverySteps(3), 10) == [3, 6, 9]


def test_every_seconds_counts_from_the_last_due_snapshot() -> None:
    assert _due_steps(EverySeconds(2.5), 10) == [1, 4, 7, 10]


def test_every_epochs_is_due_once_after_each_mark() -> None:
    assert _due_steps(EveryEpochs(), 12, steps_per_epoch=4) == [5, 9]
    assert _due_steps(EveryEpochs(2), 20, steps_per_epoch=4) == [9, 17]


def test_every_epochs_is_not_delayed_by_snapshots_due_for_other_reasons() -> None:
    either = EveryEpochs(2) | AtSteps([6])
    assert _due_steps(either, 20, steps_per_epoch=4) == [6, 9, 17]


def test_at_steps_is_due_at_no_other_step() -> None:
    assert _due_steps(AtSteps([7, 2, 2]), 10) == [2, 7]


def test_combinations_are_any_and_all() -> None:
    assert _due_steps(EverySteps(4) | EverySteps(6), 12) == [4, 6, 8, 12]
    assert _due_steps(EverySteps(4) & EverySteps(6), 24) == [12, 24]
    assert _due_steps(EverySteps(4) & (AtSteps([8]) | AtSteps([9])), 24) == [8]


def test_policies_are_pure() -> None:
    policy = (EverySteps(2) & EverySeconds(1)) | EveryEpochs()
    moment = Moment(step=2, time_s=5.0)
    assert [policy.due(moment) for _ in range(3)] == [True, True, True]


def test_any_object_with_the_method_is_a_policy_and_combines() -> None:
    class Costly:
        def due(self, moment: Moment) -> bool:
            return moment.cost_s is not None

    assert parse(foreign := Costly()) is foreign
    assert _due_steps(EverySteps(2) | foreign, 4) == [2, 4]
    with pytest.raises(TypeError):
        EverySteps(2) | 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (3, EverySteps(3)),
        ({"every_steps": 3}, EverySteps(3)),
        ({"every_seconds": 0.5}, EverySeconds(0.5)),
        ({"every_epochs": 2}, EveryEpochs(2)),
        ({"at_steps": [4, 5]}, AtSteps([5, 4])),
        ({"any_of": [{"every_steps": 3}, {"every_epochs": 1}]}, EverySteps(3) | EveryEpochs()),
        ({"hybrid": {"mtbf_s": 3600}}, Hybrid(mtbf_s=3600, unrecoverable=0.3)),
        ({"hybrid": {"mtbf_s": 9, "unrecoverable": 1}}, Hybrid(mtbf_s=9, unrecoverable=1)),
        ({"all_of": [2, {"any_of": [3]}]}, AllOf(EverySteps(2), AnyOf(EverySteps(3)))),
    ],
)
def test_settings_become_policies(value: Any, policy: Policy) -> None:
    assert parse(value) == policy


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (0, "every_steps = 0"),
        (True, "policy = True"),
        (1.5, "policy = 1.5"),
        ("often", "policy = 'often'"),
        (EverySteps, "policy = <class"),
        ({}, "policy = {}"),
        ({"every_steps": 1, "every_epochs": 1}, "exactly one"),
        ({"every_step": 1}, "unknown key 'every_step' = 1"),
        ({"every_steps": True}, "every_steps = True"),
        ({"every_seconds": 0}, "every_seconds = 0"),
        ({"every_seconds": math.inf}, "every_seconds = inf"),
        ({"every_seconds": math.nan}, "every_seconds = nan"),
        ({"every_seconds": "3"}, "every_seconds = '3'"),
        ({"every_epochs": -1}, "every_epochs = -1"),
        ({"at_steps": []}, "at_steps = []"),
        ({"at_steps": 3}, "at_steps = 3"),
        ({"at_steps": [3, 0]}, "at_steps = 0"),
        ({"any_of": []}, "any_of = []"),
        ({"all_of": 3}, "all_of = 3"),
        ({"any_of": [{"every_steps": 0}]}, "every_steps = 0"),
        ({"hybrid": 3600}, "hybrid = 3600: must be a table with mtbf_s and unrecoverable"),
        ({"hybrid": {}}, "mtbf_s, the job's mean time between failures, is missing"),
        ({"hybrid": {"mtbf_s": 9, "q": 0.1}}, "unknown key 'q' = 0.1"),
        ({"hybrid": {"mtbf_s": 0}}, "mtbf_s = 0"),
        ({"hybrid": {"mtbf_s": math.inf}}, "mtbf_s = inf"),
        ({"hybrid": {"mtbf_s": "1 day"}}, "mtbf_s = '1 day'"),
        ({"hybrid": {"mtbf_s": True}}, "mtbf_s = True"),
        ({"hybrid": {"mtbf_s": 9, "unrecoverable": 0}}, "unrecoverable = 0"),
        ({"hybrid": {"mtbf_s": 9, "unrecoverable": 1.5}}, "unrecoverable = 1.5"),
    ],
)
def test_bad_settings_are_refused_with_key_and_value(value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert named in str(caught.value)


def test_combining_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="any_of: 3 is not a policy"):
        AnyOf(EverySteps(1), 3)  # type: ignore[arg-type]


# ---- expected wasted work: the oracle of the hybrid policy's interval --------------------------


_JOB = Waste(
    mtbf_s=7200,
    stall_s=0.5,
    restore_s=120,
    detect_s=4,
    jit_s=2,
    jit_restore_s=20,
    step_s=1,
    armed=0.001,
    unrecoverable=0.25,
)
"""Made up so that every term counts: L = 1/7200."""


def _interval_s(mtbf_s: float, unrecoverable: float, cost_s: float) -> float:
    policy = Hybrid(mtbf_s=mtbf_s, unrecoverable=unrecoverable)
    found = policy.interval_s(Moment(step=1, time_s=0.0, cost_s=cost_s))
    assert found is not None
    return found


def test_intervals_are_those_of_the_formulas() -> None:
    assert _interval_s(7200, 1, 0.5) == pytest.approx(math.sqrt(7200))  # sqrt(2 * 0.5 / L)
    assert _interval_s(7200, 0.25, 0.5) == pytest.approx(math.sqrt(4 * 7200))
    # Young's, for the ResNet-101 on CIFAR-10 of COCI's models, in minutes.
    assert _interval_s(1 / 0.0042, 1, 0.0015) == pytest.approx(0.84515, abs=5e-6)


def test_wasted_work_is_that_of_the_formulas() -> None:
    assert _JOB.periodic(100) == pytest.approx(0.5 / 100 + (50 + 120) / 7200)
    assert _JOB.periodic() == pytest.approx(math.sqrt(1 / 7200) + 120 / 7200)
    assert _JOB.jit() == pytest.approx(0.001 + 27 / 7200)
    assert _JOB.hybrid() == pytest.approx(
        0.001 + math.sqrt(0.25 / 7200) + 0.25 * 120 / 7200 + 0.75 * 27 / 7200
    )


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.99, 1.01, 1.1, 2.0])
def test_no_interval_wastes_less_than_the_policys(factor: float) -> None:
    periodic = _interval_s(_JOB.mtbf_s, 1, _JOB.stall_s)
    assert _JOB.periodic(factor * periodic) > _JOB.periodic(periodic)
    hybrid = _interval_s(_JOB.mtbf_s, _JOB.unrecoverable, _JOB.stall_s)
    assert _JOB.hybrid(factor * hybrid) > _JOB.hybrid(hybrid)


def test_hybrid_is_jit_when_almost_all_is_recovered_and_periodic_when_nothing_is() -> None:
    nearly_all = dataclasses.replace(_JOB, unrecoverable=1e-12)
    assert nearly_all.hybrid() == pytest.approx(nearly_all.jit(), rel=1e-3)
    nothing = dataclasses.replace(_JOB, unrecoverable=1, armed=0)
    assert nothing.hybrid() == pytest.approx(nothing.periodic())
    assert _interval_s(7200, 1, 0.5) == pytest.approx(nothing.interval_s)


def test_just_in_time_wins_where_it_loses_less_than_an_interval() -> None:
    even = math.sqrt(7200) - 2 - 1  # detection time at which d + oj + m = T*
    for detect_s, wins in [(even - 0.01, True), (even + 0.01, False)]:
        job = dataclasses.replace(_JOB, armed=0, jit_restore_s=120, detect_s=detect_s)
        assert (job.jit() < job.periodic()) is wins


def _hybrid_due_steps(policy: Hybrid, steps: int, **measured: float) -> list[int]:
    """List steps as `_due_steps` does; a cost is known from the step after the first due one."""
    due: list[int] = []
    last: Moment | None = None
    for step in range(1, steps + 1):
        moment = Moment(
            step=step,
            time_s=100.0 + step,
            last_step=last and last.step,
            last_time_s=last and last.time_s,
            saved_step=last and last.step,
            step_s=1.0,
            **(measured if last and step > last.step else {}),
        )
        if policy.due(moment):
            due.append(step)
            last = moment
    return due


def test_hybrid_is_due_at_its_interval_rounded_to_steps() -> None:
    # sqrt(2 * 0.5 * 36 / 0.25) = 12 s, that of 0.54 s is 12.47 s, that of 0.55 s 12.59 s.
    policy = Hybrid(mtbf_s=36, unrecoverable=0.25)
    assert _hybrid_due_steps(policy, 30, cost_s=0.5) == [1, 13, 25]
    assert _hybrid_due_steps(policy, 30, cost_s=0.54) == [1, 13, 25]
    assert _hybrid_due_steps(policy, 30, cost_s=0.55) == [1, 14, 27]


def test_hybrid_comes_more_often_the_cheaper_and_the_less_recoverable() -> None:
    policy = Hybrid(mtbf_s=36, unrecoverable=0.25)
    assert _hybrid_due_steps(policy, 30, cost_s=0.125) == [1, 7, 13, 19, 25]
    assert _hybrid_due_steps(Hybrid(mtbf_s=36, unrecoverable=1), 30, cost_s=0.5) == [
        1, 7, 13, 19, 25
    ]  # fmt: skip
    assert _hybrid_due_steps(policy, 4, cost_s=0.0) == [1, 2, 3, 4]


def test_hybrid_waits_for_the_first_cost_and_for_the_medium() -> None:
    policy = Hybrid(mtbf_s=36, unrecoverable=0.25)
    assert _hybrid_due_steps(policy, 30) == [1]
    assert _hybrid_due_steps(policy, 30, cost_s=0.0, persist_s=10.0) == [1, 11, 21]


def test_a_policy_of_the_user_s_has_the_same_text_in_every_process() -> None:
    """Ranks compare them, and an address would differ."""

    class Mine:
        def due(self, moment: Moment) -> bool:
            return False

    text = policy_text(EverySteps(500) | Mine())
    assert text == policy_text(EverySteps(500) | Mine())
    assert "Mine" in text and "0x" not in text
