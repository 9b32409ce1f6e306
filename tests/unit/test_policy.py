from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from lightck.errors import ConfigError
from lightck.policy import AllOf, AnyOf, AtSteps, EveryEpochs, EverySeconds, EverySteps, parse
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
    ],
)
def test_bad_settings_are_refused_with_key_and_value(value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert named in str(caught.value)


def test_combining_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="any_of: 3 is not a policy"):
        AnyOf(EverySteps(1), 3)  # type: ignore[arg-type]
