"""The policies that go by what was measured and learned, as pure functions of a moment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import ConfigError
from lightck.policy import (
    AllOf,
    AnyOf,
    AtSteps,
    Auto,
    Budget,
    EverySeconds,
    EverySteps,
    Hybrid,
    OnBest,
    Quality,
    parse,
)
from lightck.policy.combination import interval_of, needs_of, single_policies, why_of
from lightck.types import Hazard, Moment, Policy

_AFTER = Moment(step=100, time_s=1e4, last_step=90, last_time_s=0.0, saved_step=90, quiet_s=0.2)
"""A long time after a snapshot that is saved."""


def _moment(cost: float, persist: float, unrecoverable: float, **more: Any) -> Moment:
    hazard = Hazard(2 * unrecoverable, unrecoverable)
    return dataclasses.replace(_AFTER, cost_s=cost, persist_s=persist, hazard=hazard, **more)


# ---- Auto ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "persist", "unrecoverable", "every_s"),
    [
        (0.05, 0.5, 0.3 / 43_200, 125.86),
        (0.5, 20, 0.3 / 43_200, 448.999),
        (0.05, 0.5, 0.3 / 3_600, 36.332),
        (0.05, 0.5, 1 / 600, 8.124),
        (0.002, 0.1, 0.3 / 86_400, 41.569),
        (0.05, 0, 0.3 / 43_200 + 1 / 21_600, 43.3),
        (0.05, 0, 0.3 / 43_200 + 1 / 900, 9.46),
        (0.05, 0, 0.3 / 43_200 + 1 / 60, 5.0),  # the budget
        (0.05, 0.5, 1e-10, 1800.0),  # no rarer than that
        (30, 0.5, 1e-10, 3000.0),  # but the budget wins
        (0.0, 7.5, 1.0, 7.5),  # one at a time
        (0.0, 0.0, 1.0, 0.0),
    ],
)
def test_auto_wastes_least_within_its_bounds(
    cost: float, persist: float, unrecoverable: float, every_s: float
) -> None:
    assert Auto().interval_s(_moment(cost, persist, unrecoverable)) == pytest.approx(
        every_s, rel=1e-3
    )


def test_auto_without_a_budget_in_the_way() -> None:
    moment = _moment(0.05, 0, 0.3 / 43_200 + 1 / 60)
    assert Auto(budget=1).interval_s(moment) == pytest.approx(2.45, abs=5e-3)


def test_auto_is_due_at_its_interval_and_waits_for_the_first_cost() -> None:
    moment = _moment(0.05, 0.5, 0.3 / 43_200)
    at = dataclasses.replace
    assert Auto().due(at(moment, time_s=125.77))
    assert not Auto().due(at(moment, time_s=125.75))
    assert Auto().due(Moment(step=1, time_s=0.0))
    assert not Auto().due(at(moment, cost_s=None))


def test_auto_without_a_hazard_is_as_rare_as_it_may_be() -> None:
    moment = dataclasses.replace(_moment(0.05, 0.5, 1.0), hazard=None)
    assert Auto(most_s=600).interval_s(moment) == 600


@pytest.mark.parametrize(
    ("moment", "why"),
    [
        (_moment(0.05, 0.5, 0.3 / 43_200), "every 2.1 min: one costs 50 ms; a failure that leaves"),
        (_moment(0.05, 0.5, 0.3 / 43_200), "is expected every 1.67 d"),
        (_moment(0.05, 0, 1.0), "every 5 s: one costs 50 ms; at most 1 % of the time"),
        (_moment(0.05, 0.5, 1e-10), "every 30 min: one costs 50 ms; no rarer than that"),
        (_moment(0.05, 90, 1.0), "every 1.5 min: one costs 50 ms; that is how long one takes"),
        (Moment(step=1, time_s=0.0), "what a snapshot costs is not known yet"),
    ],
)
def test_auto_says_which_bound_holds(moment: Moment, why: str) -> None:
    assert why in Auto().why(moment)


class _Probe:
    name, period_s = "mine", 1.0

    def read(self) -> Mapping[str, float]:
        return {}


@pytest.mark.parametrize("kind", [Auto, Quality])
def test_auto_says_what_it_needs(kind: type[Auto]) -> None:
    assert kind().needs == {"hazard", "loss", "health"}
    assert kind(watch=False).needs == {"hazard", "loss"}
    probe = _Probe()
    assert kind(watch=[probe]).watch == (probe,)  # type: ignore[arg-type]
    assert kind(watch=(probe,)).needs == {"hazard", "loss", "health"}
    # Ranks compare their policies; probes are each rank's own.
    assert kind(watch=(probe,)) == kind()
    assert repr(kind(watch=(probe,))) == repr(kind())


@pytest.mark.parametrize("kind", [Auto, Quality])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"budget": 0}, "budget = 0"),
        ({"budget": 1.5}, "budget = 1.5: is a share"),
        ({"budget": "1 %"}, "budget = '1 %'"),
        ({"mtbf_s": -1}, "mtbf_s = -1"),
        ({"mtbf_s": math.inf}, "mtbf_s = inf"),
        ({"most_s": math.nan}, "most_s = nan"),
        ({"watch": "gpu"}, "watch = 'gpu': must be true, false or a list of probes"),
        ({"watch": [3]}, "watch = [3]"),
        ({"watch": [_Probe]}, "watch = [<class"),
    ],
)
def test_bad_arguments_are_refused(kind: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**arguments)
    assert named in str(caught.value)


# ---- Quality -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(None, 1), (1, 0.667), (0.25, 1.333), (0.04, 3.333), (0.01, 4), (0.0, 4), (9.0, 0.667)],
)
def test_quality_stretches_by_the_inverse_root_of_progress(
    progress: float | None, factor: float
) -> None:
    moment = _moment(0.05, 0.5, 0.3 / 43_200, progress=progress)
    found = Quality().interval_s(moment)
    assert found == pytest.approx(factor * 125.86, rel=1e-3)


def test_quality_keeps_the_bounds_of_auto() -> None:
    moment = _moment(0.05, 0.5, 0.3 / 43_200, progress=0.01)
    assert Quality(most_s=300).interval_s(moment) == 300
    assert Quality(budget=0.00005).interval_s(moment) == 1000
    early = _moment(0.05, 0.5, 1 / 600, progress=5.0)
    assert Quality(budget=0.008).interval_s(early) == 6.25


def _first_order_waste(x: float, steps: int = 4_000) -> tuple[float, float]:
    """Waste in progress and in time over that of Young's interval, for a loss of exp(-x t)."""
    policy, in_time, in_progress = Quality(budget=1, most_s=1e9), 0.0, 0.0
    even = policy.interval_s(_moment(0.05, 0, 1e-6))
    mean = 1 - math.exp(-x)
    for t in ((i + 0.5) / steps for i in range(steps)):
        rate = x * math.exp(-x * t)
        progress = rate / ((1 - math.exp(-x * t)) / t)
        found = policy.interval_s(_moment(0.05, 0, 1e-6, progress=progress))
        assert even is not None and found is not None
        stretch = found / even
        in_time += (1 / stretch + stretch) / 2 / steps
        in_progress += (1 / stretch + stretch * rate / mean) / 2 / steps
    return in_progress, in_time


@pytest.mark.parametrize(
    ("x", "in_progress", "in_time"),
    [
        (1, 1.032, 1.041),
        (2.34, 0.967, 1.023),
        (5, 0.847, 1.208),
        (8, 0.759, 1.549),
        (11, 0.715, 1.706),
    ],
)
def test_quality_gains_in_progress_what_it_pays_for_in_time(
    x: float, in_progress: float, in_time: float
) -> None:
    assert _first_order_waste(x) == pytest.approx((in_progress, in_time), abs=2e-3)


# ---- Budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "share", "quiet", "persist", "steps"),
    [
        (0.05, 0.035, 0.2, 0.1, 8),
        (0.1, 0.035, 0.2, 0.1, 15),
        (0.0, 0.035, 0.2, 0.1, 1),
        (0.05, 0.05, 0.2, 2.45, 13),  # Tc + Ts - To of CheckFreq's vector
        (0.05, 1.0, 0.2, 0.1, 1),
        (0.05, 1.0, 0.2, 0.9, 5),
        (0.01, 0.05, 0.2, 0.0, 1),
        (0.03, 0.1, 0.1, 0.0, 3),  # 0.03 / 0.1 / 0.1 is a bit above 3 in floats
    ],
)
def test_budget_is_due_at_the_least_number_of_steps_that_fits(
    cost: float, share: float, quiet: float, persist: float, steps: int
) -> None:
    moment = dataclasses.replace(_AFTER, cost_s=cost, quiet_s=quiet, persist_s=persist)
    policy = Budget(share)
    assert policy.steps(moment) == steps
    assert policy.interval_s(moment) == pytest.approx(steps * quiet)
    assert policy.due(dataclasses.replace(moment, step=90 + steps))
    assert not policy.due(dataclasses.replace(moment, step=90 + steps - 1))


def test_budget_goes_down_again() -> None:
    costs = (0.05, 0.1, 0.05)
    moments = [dataclasses.replace(_AFTER, cost_s=each, persist_s=0.1) for each in costs]
    assert [Budget().steps(moment) for moment in moments] == [8, 15, 8]


def test_budget_takes_any_step_for_a_quiet_one_until_one_was_seen() -> None:
    moment = dataclasses.replace(_AFTER, cost_s=0.05, quiet_s=None, step_s=0.1)
    assert Budget().steps(moment) == 15
    assert Budget().steps(dataclasses.replace(moment, step_s=None)) is None
    assert Budget().due(Moment(step=1, time_s=0.0))


@pytest.mark.parametrize(
    ("persist", "why"),
    [
        (0.1, "every 8 steps: one costs 50 ms, at most 3.5 % of the time"),
        (9.0, "every 45 steps: one costs 50 ms, one takes 9 s to be committed"),
    ],
)
def test_budget_says_which_bound_holds(persist: float, why: str) -> None:
    assert Budget().why(dataclasses.replace(_AFTER, cost_s=0.05, persist_s=persist)) == why


@pytest.mark.parametrize("share", [0, -1, 1.1, math.nan, "3.5 %", True])
def test_budget_refuses_what_is_no_share(share: Any) -> None:
    with pytest.raises(ConfigError, match="budget = "):
        Budget(share)


@pytest.mark.parametrize(
    "policy", [Auto(), Quality(), Budget(), Hybrid(mtbf_s=60)], ids=lambda each: str(each)
)
def test_measured_policies_take_nothing_while_the_loss_is_no_number(policy: Policy) -> None:
    moment = _moment(0.05, 0.5, 0.1, time_s=1e6)
    assert policy.due(moment)
    assert not policy.due(dataclasses.replace(moment, finite=False))
    assert not policy.due(dataclasses.replace(moment, quiet_age=64))
    assert policy.due(dataclasses.replace(moment, quiet_age=63))
    assert EverySteps(1).due(dataclasses.replace(moment, finite=False))


# ---- OnBest --------------------------------------------------------------------------------------


def _best_steps(policy: Policy, values: list[float | None]) -> list[int]:
    """Report values (None: nothing) as the engine does; return the due steps."""
    due, metrics, extremes = [], {}, {}
    for step, value in enumerate(values, 1):
        if value is not None:
            metrics = {"m": value}
        moment = Moment(step=step, time_s=float(step), metrics=metrics, extremes=extremes)
        if policy.due(moment):
            due.append(step)
        if value is not None and value == value:
            least, most = extremes.get("m", (value, value))
            extremes = {"m": (min(least, value), max(most, value))}
    return due


def test_on_best_is_due_once_per_new_best() -> None:
    values = [None, 3.0, None, 2.0, 2.5, 2.0, math.nan, 1.0, None, math.inf, -math.inf]
    assert _best_steps(OnBest("m"), values) == [2, 4, 8, 11]
    assert _best_steps(OnBest("m", "max"), values) == [2, 10]
    assert _best_steps(OnBest("other"), values) == []
    assert _best_steps(OnBest("m"), [math.nan, 5.0, 6.0]) == [2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("",), "metric = ''"), ((3,), "metric = 3"), (("a", "best"), "mode = 'best'")],
)
def test_on_best_refuses_what_it_cannot_compare(arguments: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"on_best: {named}"):
        OnBest(*arguments)


# ---- all of them ---------------------------------------------------------------------------------


_TIMES = st.none() | st.floats(0, 1e4)
_MOMENTS = st.builds(
    Moment,
    step=st.integers(1, 10_000),
    time_s=st.floats(0, 1e6),
    epoch=st.integers(0, 5),
    last_step=st.none() | st.integers(1, 10_000),
    last_time_s=st.none() | st.floats(0, 1e6),
    cost_s=_TIMES,
    persist_s=_TIMES,
    step_s=_TIMES,
    quiet_s=_TIMES,
    quiet_age=st.integers(0, 100),
    saved_step=st.none() | st.integers(1, 10_000),
    in_flight=st.booleans(),
    hazard=st.none() | st.builds(Hazard, st.floats(1e-11, 1), st.floats(8e-11, 1)),
    progress=st.none() | st.floats(0, 10),
    finite=st.booleans(),
    metrics=st.dictionaries(st.sampled_from("ab"), st.floats()),
    extremes=st.dictionaries(st.sampled_from("ab"), st.tuples(st.floats(), st.floats())),
)
_POLICIES: list[Policy] = [
    *(Auto(), Auto(budget=0.5, mtbf_s=9.0, most_s=60.0), Quality(), Budget(), Budget(1.0)),
    *(OnBest("a"), OnBest("b", "max"), Hybrid(mtbf_s=60.0), EverySteps(3), EverySeconds(2.0)),
    (Auto() | OnBest("a")) & (Budget() | AtSteps([3, 4])),
]


@given(_MOMENTS)
@settings(max_examples=200)
def test_the_same_moment_gets_the_same_answer(moment: Moment) -> None:
    for policy in _POLICIES:
        again = parse(str(policy))
        answer = policy.due(moment)
        assert isinstance(answer, bool)
        assert [policy.due(moment), again.due(dataclasses.replace(moment))] == [answer] * 2
        every_s = interval_of(policy, moment)
        assert every_s is None or 0 <= every_s < math.inf
        assert why_of(policy, moment)


@pytest.mark.parametrize("policy", _POLICIES, ids=str)
def test_policies_are_hashable_and_alike_on_ranks_that_compare_their_text(policy: Policy) -> None:
    again = parse(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert repr(again) == repr(policy)


def test_combinations_need_what_their_parts_do_and_have_the_interval_that_decides() -> None:
    moment = dataclasses.replace(_AFTER, cost_s=0.05, persist_s=0.1)
    either = EverySeconds(60) | Budget() | AtSteps([3])
    both = EverySeconds(60) & Budget() & AtSteps([3])
    assert (either.interval_s(moment), both.interval_s(moment)) == (pytest.approx(1.6), 60)
    assert either.why(moment) == Budget().why(moment)
    assert both.why(moment) == "1 min"
    nothing = OnBest("a") | AtSteps([3])
    assert nothing.interval_s(moment) is None
    assert nothing.why(moment) == ""
    assert (nothing | Quality(watch=False)).needs == {"hazard", "loss"}
    assert (nothing | Budget()).needs == (nothing & Hybrid(mtbf_s=60)).needs == {"loss"}
    assert list(single_policies(AnyOf(EverySteps(3), both))) == [EverySteps(3), *both.policies]


def test_a_foreign_policy_needs_nothing_and_says_nothing() -> None:
    class Foreign:
        def due(self, moment: Moment) -> bool:
            return True

        def __str__(self) -> str:
            return "mine"

    policy = AllOf(Foreign(), EverySteps(2))
    assert needs_of(policy) == needs_of(Foreign()) == frozenset()
    assert policy.interval_s(_AFTER) == pytest.approx(0.4)
    assert why_of(Foreign(), _AFTER) == "mine"


@pytest.mark.parametrize("needs", ["hazard", ["hazard"], {"weather"}, {("hazard",)}, 7, None])
def test_needs_that_are_no_set_of_what_there_is_are_refused_in_words(needs: object) -> None:
    class Odd:
        def due(self, moment: Moment) -> bool:
            return False

    odd = Odd()
    odd.needs = needs  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"must be a frozenset out of 'hazard', 'health', 'loss'"):
        needs_of(odd)
