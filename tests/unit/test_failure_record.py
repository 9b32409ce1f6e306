from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.policy.failure_record import FailureRecord

_HOUR_S = 3600.0
_DAY_S = 86_400.0


def _seen(failures: int, exposure: float, *, recovered: bool = True) -> FailureRecord:
    """Make a record of so many failures, evenly over so many rank-seconds of one rank."""
    record = FailureRecord()
    for _ in range(failures):
        record = record.ran(exposure / failures, 1).failed(recovered=recovered)
    return record if failures else record.ran(exposure, 1)


@pytest.mark.parametrize(
    ("failures", "exposure", "mtbf_s"),
    [
        (0, 60, 1_340),
        (0, _HOUR_S, 39_188),
        (0, _DAY_S, 666_109),
        (0, 30 * _DAY_S, 11_266_129),
        (1, 3_600, 3_600),
        (3, 36_000, 12_000),
        (20, 1e6, 50_000),
    ],
)
def test_what_is_expected_of_one_rank(failures: int, exposure: float, mtbf_s: float) -> None:
    rate = _seen(failures, exposure).hazard(1).rate
    assert 1 / rate == pytest.approx(mtbf_s, rel=1e-5, abs=0.5)


@pytest.mark.parametrize(
    ("after_s", "mtbf_s"),
    [(60, 774), (_HOUR_S, 31_705), (_DAY_S, 487_412), (30 * _DAY_S, 6.296e6)],
)
def test_what_is_expected_of_a_job_of_eight(after_s: float, mtbf_s: float) -> None:
    rate = FailureRecord().ran(after_s, 8).hazard(8).rate
    assert 1 / rate == pytest.approx(mtbf_s, rel=1e-4, abs=0.5)


def test_a_belief_counts_like_one_failure_seen() -> None:
    record = _seen(2, 10_000)
    assert 1 / record.hazard(1, mtbf_s=43_200).rate == pytest.approx(17_733, abs=0.5)
    # It is of the whole job, whatever its ranks.
    fresh = FailureRecord()
    assert 1 / fresh.hazard(8, mtbf_s=43_200).rate == pytest.approx(43_200, rel=2e-3)


@pytest.mark.parametrize(
    ("failures", "unrecovered", "share"), [(0, 0, 0.3), (5, 0, 0.0857), (5, 5, 0.8), (10, 3, 0.3)]
)
def test_the_share_that_leaves_no_snapshot(failures: int, unrecovered: int, share: float) -> None:
    record = FailureRecord()
    for i in range(failures):
        record = record.ran(1000, 1).failed(recovered=i >= unrecovered)
    assert record.unrecovered_share() == pytest.approx(share, abs=5e-5)
    hazard = record.hazard(4)
    assert hazard.unrecoverable == pytest.approx(hazard.rate * share, rel=1e-3)
    off = record.hazard(4, jit=False)
    assert off.unrecoverable == off.rate == hazard.rate


# A gpu_action is expected to be a failure after 600 s, one rebalance recommendation after 900 s.


@pytest.mark.parametrize(("hours", "after_s"), [(0, 900), (1, 2_700), (10, 18_900)])
def test_a_symptom_that_nothing_follows_fades(hours: float, after_s: float) -> None:
    active = {"rebalance": 1.0}
    record = FailureRecord().ran(hours * _HOUR_S, 1, active)
    more = record.hazard(1, active).rate - record.hazard(1).rate
    assert 1 / more == pytest.approx(after_s)


def test_a_symptom_that_explains_a_failure_is_believed_more() -> None:
    active = {"rebalance": 1.0}
    record = FailureRecord().ran(30 * _DAY_S, 1).ran(_HOUR_S, 1, active)
    record = record.failed(recovered=False, active=active)
    more = record.hazard(1, active).rate - record.hazard(1).rate
    assert 1 / more == pytest.approx(1_800, rel=1e-3)  # all but nothing of it is the machine's own
    # So it counts as none of a machine without symptoms, and not against the just-in-time path.
    assert record.hazard(1).rate < 1e-6
    assert record.unrecovered_share() == pytest.approx(0.3, abs=0.01)


def test_a_failure_is_shared_out_among_what_may_have_caused_it() -> None:
    record = FailureRecord().ran(_HOUR_S, 1)
    own = record.hazard(2).rate
    active = {"gpu_action": 2.0, "link": 1.0}
    failed = record.failed(recovered=True, world=2, active=active)
    total = own + 2 / 600 + 1 / 21_600
    seen = {name: each.failures for name, each in failed.symptoms}
    assert seen == pytest.approx({"gpu_action": 2 / 600 / total, "link": 1 / 21_600 / total})
    assert failed.failures[0].share == pytest.approx(own / total)


def test_symptoms_leave_no_just_in_time_snapshot() -> None:
    record = FailureRecord().ran(_DAY_S, 1)
    with_symptom, without = record.hazard(1, {"rebalance": 1.0}), record.hazard(1)
    assert with_symptom.unrecoverable - without.unrecoverable == pytest.approx(1 / 900)


def test_failures_before_the_last_twenty_are_forgotten() -> None:
    old = _seen(30, 30 * 60.0)
    for _ in range(20):
        old = old.ran(50_000, 1).failed(recovered=True)
    assert old.hazard(1) == _seen(20, 1e6).hazard(1)


_LIVES = st.lists(
    st.tuples(st.floats(1, 1e7), st.integers(1, 1000), st.booleans()), min_size=1, max_size=20
)


@given(_LIVES, st.randoms(use_true_random=False))
def test_the_order_of_lives_does_not_matter(lives: list[Any], rng: random.Random) -> None:
    def hazard() -> tuple[float, float]:
        record = FailureRecord()
        for seconds, world, recovered in lives:
            record = record.ran(seconds, world).failed(recovered=recovered)
        found = record.hazard(4)
        return found.rate, found.unrecoverable

    before = hazard()
    rng.shuffle(lives)
    assert hazard() == pytest.approx(before, rel=1e-9)


@given(st.integers(0, 18), st.floats(1, 1e9), st.floats(1.01, 100))
def test_more_failures_are_more_hazard_and_more_time_without_is_less(
    failures: int, exposure: float, factor: float
) -> None:
    rate = _seen(failures, exposure).hazard(1).rate
    if failures:
        assert _seen(failures + 1, exposure).hazard(1).rate > rate
    assert _seen(failures, exposure * factor).hazard(1).rate < rate
    assert _seen(failures, exposure).ran(exposure, 1).hazard(1).rate < rate


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_count_as_nothing(seconds: float) -> None:
    record = FailureRecord().ran(5, 1)
    assert record.ran(seconds, 1) is record


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan"), float("inf")])
def test_a_probe_that_counts_nonsense_is_not_heard(count: float) -> None:
    record = FailureRecord()
    assert record.hazard(1, {"link": count}) == record.hazard(1)
    assert record.ran(5, 1, {"link": count}).symptoms == ()


def _long_life() -> FailureRecord:
    rng = random.Random(1)
    record = FailureRecord()
    for i in range(100):
        active = {f"symptom-{i % 30}" + "x" * 40: rng.random()}
        record = record.ran(rng.random() * 1e6, 1 + i, active)
        record = record.failed(recovered=i % 2 == 0, world=1 + i, active=active)
    return record


def test_a_record_survives_json_and_stays_small() -> None:
    record = _long_life()
    text = json.dumps(record.to_plain())
    assert FailureRecord.from_plain(json.loads(text)) == record
    assert len(text) <= 3_072
    assert hash(record)


def test_a_record_of_another_version_is_a_fresh_one() -> None:
    plain = _long_life().to_plain()
    assert FailureRecord.from_plain(plain | {"version": 2}) == FailureRecord()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


_LONG_LIFE = json.dumps(_long_life().to_plain())


@given(st.data())
@settings(max_examples=300)
def test_a_damaged_record_is_a_fresh_or_a_sane_one(data: st.DataObject) -> None:
    plain: Any = json.loads(_LONG_LIFE)
    where = plain
    while data.draw(st.booleans()) and isinstance(where, dict | list) and where:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()) or not isinstance(where[key], dict | list):
            where[key] = data.draw(_JSON)
            break
        where = where[key]
    record = FailureRecord.from_plain(plain)
    hazard = record.ran(1, 1, {"link": 1.0}).failed(recovered=True).hazard(1, {"link": 1.0})
    assert 0 < hazard.unrecoverable <= hazard.rate < 1e9


@given(_JSON)
def test_what_is_no_record_is_a_fresh_one(value: object) -> None:
    assert FailureRecord.from_plain(value) == FailureRecord()
    assert FailureRecord.from_plain({"version": 1, "failures": value}) == FailureRecord()
