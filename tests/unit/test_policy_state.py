"""The policies' state goes on over lives, and no damage of it costs a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import lightck.loop.policy_state as module
from lightck.events import Subscriber
from lightck.loop.policy_state import PolicyState, SavedPolicyState, learns, parsed
from lightck.policy import AnyOf, Auto, Budget, EverySteps, OnBest, Quality
from lightck.policy.failure_record import FailureRecord
from lightck.region.stats_page import CLOSED, FAILED, GONE, LEFT, Process, Reading
from lightck.types import Policy

AUTO = Auto(watch=False)
OTHER = Process(12345, 678, b"b" * 16)


class Losses:
    """An observer whose losses the test gives."""

    def __init__(self) -> None:
        self.next: list[float] = []
        self.reported: list[float] = []

    def take(self) -> list[float]:
        found, self.next = self.next, []
        return found

    def report(self, value: float) -> None:
        self.reported.append(value)


def made(
    text: str | None = None,
    policy: Policy = AUTO,
    *,
    world: int = 1,
    losses: Losses | None = None,
) -> tuple[PolicyState, SavedPolicyState]:
    """A state that goes on from a text, and what it saves."""
    saved = SavedPolicyState(text)
    given: Any = losses
    return PolicyState(policy, saved, world=world, jit=True, losses=given), saved


def page(
    began_ns: int, ended: int, *, steps: int = 100, seconds: float = 3600.0, by: Process = OTHER
) -> Reading:
    """All that a life leaves on the statistics page."""
    numbers = {
        "began_ns": began_ns,
        "updated_ns": began_ns + int(seconds * 1e9),
        "began_step": 10,
        "step": 10 + steps,
        "ended": ended,
    }
    return Reading(owned=True, process=by, numbers=numbers)


def run(state: PolicyState, seconds: int, step_s: float = 0.5) -> None:
    """Train for so long."""
    for step in range(int(seconds / step_s)):
        state.step_ended(step, step_s, step_s)


def record_of(saved: SavedPolicyState) -> FailureRecord:
    """The failures that a snapshot has."""
    values = parsed(saved.text)
    assert values is not None
    return FailureRecord.from_plain(values["failures"])


def test_what_ran_is_in_the_next_life_s_record() -> None:
    state, saved = made()
    run(state, 100)
    assert record_of(saved).exposure == pytest.approx(100, abs=2)
    state, saved = made(saved.text)
    run(state, 50)
    assert record_of(saved).exposure == pytest.approx(150, abs=3)


def test_a_life_is_counted_once_whatever_part_of_it_the_snapshot_has() -> None:
    state, saved = made()
    run(state, 100)
    life = state.began_ns
    state, saved = made(saved.text)
    state.follows(page(life, CLOSED), 110, just_in_time=False, in_place=True)
    assert record_of(saved).exposure == pytest.approx(3600, abs=2)
    state, saved = made(saved.text)
    state.follows(page(life + 10**15, CLOSED), 110, just_in_time=False, in_place=True)
    assert record_of(saved).exposure == pytest.approx(7200, abs=2)


@pytest.mark.parametrize(
    ("ended", "steps", "restored", "just_in_time", "expected"),
    [
        (GONE, 100, 109, True, [True]),
        (GONE, 100, 110, True, [True]),
        (GONE, 100, 108, True, [False]),
        (GONE, 100, 110, False, [False]),
        (FAILED, 100, 109, False, [True]),
        (FAILED, 100, 50, False, [False]),
        (CLOSED, 100, 110, False, []),
        (LEFT, 100, 110, True, []),
        (GONE, 1, 10, False, []),
        (FAILED, 0, 10, False, []),
    ],
)
def test_how_a_life_ended_says_whether_it_was_a_failure_and_recovered(
    ended: int, steps: int, restored: int, just_in_time: bool, expected: list[bool]
) -> None:
    _, saved = made()
    state, saved = made(saved.text)
    state.follows(page(5, ended, steps=steps), restored, just_in_time=just_in_time, in_place=True)
    assert [each.recovered for each in record_of(saved).failures] == expected


def test_a_process_that_attaches_again_has_not_failed() -> None:
    for ended, in_place, expected in [(GONE, False, 0), (FAILED, False, 0), (FAILED, True, 1)]:
        state, saved = made(made()[1].text)
        said = page(5, ended, by=Process.this())
        state.follows(said, 110, just_in_time=False, in_place=in_place)
        assert len(record_of(saved).failures) == expected


def test_a_region_that_went_with_its_host_is_a_failure_that_nothing_recovered() -> None:
    blank = Reading(owned=True, process=None, numbers={})
    text = made()[1].text
    for before, in_place, expected in [(text, True, [False]), (text, False, []), (None, True, [])]:
        state, saved = made(before)
        state.follows(blank, 110, just_in_time=True, in_place=in_place)
        assert [each.recovered for each in record_of(saved).failures] == expected


def test_the_text_is_the_same_object_until_a_second_has_passed() -> None:
    state, saved = made()
    run(state, 2)
    kept, texts = saved.state, []
    for _ in range(100):
        state.step_ended(1, 0.1, 0.1)
        if not texts or texts[-1] is not saved.state["json"]:
            texts.append(saved.state["json"])
        assert saved.state is kept
    assert 8 <= len(texts) <= 12


def test_the_text_has_its_size_before_the_first_step_and_is_never_long() -> None:
    saved = SavedPolicyState(None)
    assert saved.text is None and saved.extra.name == "@policy"
    before = len(saved.state["json"])
    losses = Losses()
    state = made(policy=Quality(watch=False), losses=losses)[0]
    saved = state._saved
    draw = np.random.default_rng(29)
    for step in range(3000):
        losses.next = [float(draw.normal())]
        state.step_ended(step, 1.0, 1.0)
        state.report({f"metric{step % 200}": float(step), "long" * (step % 40): 1.0})
        state.metrics_asked()
        if step % 100 == 0:
            state._record = state._record.failed(recovered=bool(step % 3))
    assert saved.text is not None and parsed(saved.text) is not None
    assert before <= len(saved.text) <= 4096


def test_costs_and_best_values_are_known_in_the_next_life() -> None:
    state, saved = made()
    state.cost_known(0.25, 1.5, None)
    state.cost_known(None, None, None)
    state.report({"loss": 2.0})
    state.metrics_asked()
    state.report({"loss": math.nan, "acc": 1.0})
    state.metrics_asked()
    run(state, 3)
    state, _ = made(saved.text)
    assert (state.known_cost_s, state.known_persist_s) == (0.25, 1.5)
    assert state.extremes == {"loss": (2.0, 2.0), "acc": (1.0, 1.0)}


def test_a_best_value_that_the_policy_goes_by_is_kept_before_others() -> None:
    state, saved = made(policy=OnBest("loss"))
    for step in range(100):
        state.report({f"metric{step}": float(step)})
    state.report({"loss": 0.5})
    state.metrics_asked()
    run(state, 3)
    after, _ = made(saved.text)
    assert len(state.extremes) == 101 and len(after.extremes) == 16
    assert after.extremes["loss"] == (0.5, 0.5)


def _damaged(text: str, draw: np.random.Generator) -> str:
    at = int(draw.integers(len(text.rstrip())))
    way = int(draw.integers(4))
    if way == 0:
        return text[:at]
    if way == 1:
        return text[:at] + chr(int(draw.integers(32, 1000))) + text[at + 1 :]
    values = json.loads(text)
    strange = [None, -1, 1e308, "x", [], {}, True, math.inf, [[[]]], {"version": 1}]
    holder = values if way == 2 else values["failures"]
    holder[list(holder)[at % len(holder)]] = strange[int(draw.integers(len(strange)))]
    return json.dumps(values)


def test_no_damage_of_the_text_ever_raises(rng: np.random.Generator) -> None:
    state, saved = made(policy=Quality(watch=False), losses=Losses())
    for recovered in (True, False):
        state._record = state._record.failed(recovered=recovered, active={"link": 1.0})
        run(state, 5)
    assert saved.text is not None
    for _ in range(500):
        text = _damaged(saved.text, rng)
        after, kept = made(text, Quality(watch=False), losses=Losses())
        after.follows(page(5, GONE), 110, just_in_time=True, in_place=True)
        run(after, 3)
        assert after.hazard is not None and 0 < after.hazard.unrecoverable < math.inf
        assert parsed(kept.text) is not None


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": 2}', "nonsense", "{" * 9999])
def test_a_damaged_or_newer_text_is_told_once_and_learned_anew(text: str) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    subscriber = Subscriber(lambda name, fields: told.append((name, fields)), lambda *_: None)
    try:
        state, saved = made(text)
        run(state, 3)
    finally:
        subscriber.stop()
    assert [name for name, _ in told] == ["policy_state_lost"]
    assert record_of(saved) == FailureRecord(exposure=record_of(saved).exposure)
    assert made(saved.text)[0]


def test_a_clock_that_jumps_counts_as_a_few_steps() -> None:
    state, saved = made()
    run(state, 10)
    state.step_ended(99, 1e9, 0.5)
    run(state, 3)
    assert record_of(saved).exposure < 25


def test_a_loss_that_is_no_number_is_told_once_and_forgotten_with_the_next() -> None:
    told: list[str] = []
    subscriber = Subscriber(lambda name, fields: told.append(name), lambda *_: None)
    losses = Losses()
    state, _ = made(losses=losses)
    seen = []
    try:
        for loss in (1.0, math.nan, math.inf, 2.0, math.nan):
            losses.next = [loss]
            state.step_ended(1, 0.5, 0.5)
            seen.append(state.finite)
        state.step_ended(1, 0.5, 0.5)
        seen.append(state.finite)
    finally:
        subscriber.stop()
    assert seen == [True, False, False, True, False, False]
    assert told == ["loss_not_finite"]


def test_a_reported_loss_goes_to_the_observer() -> None:
    losses = Losses()
    state, _ = made(losses=losses)
    state.report({"loss": 1.5, "accuracy": 0.5})
    state.report({"accuracy": 0.6})
    assert losses.reported == [1.5]
    assert state.metrics == {"loss": 1.5, "accuracy": 0.6}


def test_symptoms_of_the_job_raise_the_hazard() -> None:
    class Symptoms:
        risk = "/dev/sda"
        there: Mapping[str, float] = {}

        def active(self) -> Mapping[str, float]:
            return self.there

    state, _ = made()
    symptoms = Symptoms()
    state.watch(symptoms)
    run(state, 600)
    assert state.hazard is not None
    before = state.hazard.unrecoverable
    symptoms.there = {"link": 2.0}
    run(state, 3)
    assert state.hazard.unrecoverable > 2 * before
    assert state.risk == "/dev/sda"


def test_only_policies_that_learn_have_a_state() -> None:
    assert not learns(EverySteps(3))
    assert learns(Auto()) and learns(Budget()) and learns(OnBest("loss"))
    assert learns(AnyOf(EverySteps(3), OnBest("loss")))


def test_the_clock_of_the_module_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is that of the steps: a test, and a suspended machine, can stop the clock."""
    state, saved = made()
    monkeypatch.setattr(module, "time", None)
    run(state, 10)
    assert record_of(saved).exposure > 5


class _Shown:
    """Symptoms that are what a test says."""

    risk = ""

    def __init__(self, active: dict[str, float]) -> None:
        self._active = active

    def active(self) -> dict[str, float]:
        return self._active


def test_a_failure_while_a_symptom_was_there_makes_that_symptom_weigh_more() -> None:
    def next_hazard(active: dict[str, float]) -> float:
        before = SavedPolicyState(None)
        first = PolicyState(Auto(), before, world=1, jit=True, losses=None)
        first.watch(_Shown(active))
        for step in range(1, 40):
            first.step_ended(step, 1.0, 1.0)
        after = SavedPolicyState(before.text)
        second = PolicyState(Auto(), after, world=1, jit=True, losses=None)
        page = Reading(
            owned=False,
            process=OTHER,
            numbers={
                "began_ns": first.began_ns, "updated_ns": first.began_ns + 40 * 10**9,
                "began_step": 0, "step": 40, "ended": GONE,
            },
        )  # fmt: skip
        second.follows(page, 0, just_in_time=False, in_place=True)
        second.watch(_Shown({"link": 1.0}))
        second.step_ended(1, 1.0, 1.0)
        assert second.hazard is not None
        return second.hazard.unrecoverable

    base = next_hazard({"gpu_action": 1.0})
    assert next_hazard({"link": 1.0}) > base


def test_a_state_is_told_in_words() -> None:
    state, saved = made()
    run(state, 7200)
    state._record = state._record.failed(recovered=True).failed(recovered=False)
    state.cost_known(0.0214, 1.5, 0.5)
    run(state, 3)
    assert saved.text is not None
    assert module.described(saved.text) == (
        "2 failures in 2 h of all ranks, 1 of them not saved just in time, a step 500 ms,"
        " a snapshot 21.4 ms, its commit 1.5 s"
    )
    assert module.described("nonsense") == "damaged, or a newer version's"


def test_of_quick_steps_ten_losses_a_second_make_the_curve_behind_the_first_ones() -> None:
    losses = Losses()
    state, _ = made(policy=Quality(watch=False), losses=losses)
    counts = []
    for step in range(1000):
        losses.next = [1 / (step + 1)]
        state.step_ended(step, 0.01, 0.01)
        assert state._curve is not None
        counts.append(state._curve.count)
    assert counts[62] == 63
    assert 60 <= counts[-1] - 64 <= 100


@pytest.mark.parametrize(
    "change",
    [
        {"active": {"link": 10**400}}, {"active": {"link": math.nan}}, {"active": [1]},
        {"extremes": {"loss": [10**400, 1]}}, {"extremes": {"loss": [math.nan, 1]}},
        {"cost_s": 10**400}, {"persist_s": -(10**400)}, {"active_s": math.inf},
        {"ran_s": "x"}, {"life": [1]}, {"failures": 10**400}, {"quiet_s": True},
    ],
    ids=str,
)  # fmt: skip
def test_no_value_of_a_saved_state_costs_a_run(change: dict[str, Any]) -> None:
    good = SavedPolicyState(None)
    PolicyState(AUTO, good, world=1, jit=True, losses=None)
    values = parsed(good.text)
    assert values is not None
    text = json.dumps(values | change)
    state = PolicyState(
        AUTO | OnBest("loss"), SavedPolicyState(text), world=1, jit=True, losses=None
    )
    for step in range(1, 4):
        state.report({"loss": 1.0 / step})
        state.step_ended(step, 0.5, 0.5)
        state.metrics_asked()
    assert state.hazard is not None and state.hazard.rate > 0


def test_a_saved_state_that_is_nested_without_end_is_a_fresh_start() -> None:
    assert parsed("[" * 100_000) is None
    assert parsed('{"version": 1, "failures": ' + "[" * 100_000) is None
