"""Policies of a history: what each keeps, the laws that all of them obey, and their words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.config import Config
from lightck.errors import ConfigError
from lightck.policy import Best, Every, Keep, Kept, Newest, Steps, Within
from lightck.policy.keep import (
    keeps_for_metrics,
    metrics_of,
    parse_keep,
    steps_to_keep,
    would_keep,
)


def items(*steps: int, **metrics: list[float]) -> list[Kept]:
    """Items of these steps, one second and a tenth of an epoch per step; metrics in their order."""
    return [
        Kept(step, float(step), step // 10, {name: values[i] for name, values in metrics.items()})
        for i, step in enumerate(steps)
    ]


def test_newest_keeps_the_last_ones() -> None:
    assert Newest(2).keep(items(1, 5, 9)) == {5, 9}
    assert Newest(4).keep(items(1, 5)) == {1, 5}


def test_best_keeps_the_least_or_the_greatest_and_of_equal_ones_the_older() -> None:
    there = items(1, 2, 3, 4, loss=[0.5, 0.2, 0.2, 0.9])
    assert Best(1, "loss").keep(there) == {2}
    assert Best(2, "loss").keep(there) == {2, 3}
    assert Best(1, "loss", "max").keep(there) == {4}


def test_what_has_no_metric_or_nan_is_never_best() -> None:
    assert Best(3, "loss").keep(items(1, 2, loss=[math.nan, math.inf])) == {2}
    assert Best(3, "other").keep(items(1, 2, loss=[1.0, 2.0])) == frozenset()


def test_every_keeps_the_first_of_each_span_counted_from_zero() -> None:
    assert Every(steps=10).keep(items(3, 7, 12, 20, 25)) == {3, 12, 20}
    assert Every(seconds=10).keep(items(3, 7, 12, 20, 25)) == {3, 12, 20}
    assert Every(epochs=2).keep(items(3, 12, 20, 25, 41)) == {3, 20, 41}


def test_within_counts_back_from_the_newest_item() -> None:
    assert Within(5).keep(items(1, 10, 15, 20)) == {15, 20}


def test_a_clock_that_was_ahead_keeps_nothing_out() -> None:
    ahead = [Kept(1, 100.0), Kept(2, 9e9), Kept(3, 200.0), Kept(4, 210.0)]
    assert Within(60).keep(ahead) == {2, 3, 4}


def test_steps_keeps_those_and_no_other() -> None:
    assert Steps(5, 9).keep(items(1, 5)) == {5}


def test_policies_combine() -> None:
    there = items(1, 10, 11, 20, loss=[0.1, 0.9, 0.9, 0.9])
    assert (Newest(1) | Best(1, "loss")).keep(there) == {1, 20}
    assert (Every(steps=10) & Within(12)).keep(there) == {10, 20}


def test_the_newest_and_the_pinned_are_kept_whatever_the_policy_says() -> None:
    there = [Kept(1, 1.0, pinned=True), Kept(2, 2.0), Kept(3, 3.0)]
    assert steps_to_keep(Steps(7), there) == {1, 3}
    assert steps_to_keep(Best(1, "loss"), []) == frozenset()


def test_a_report_asks_for_a_snapshot_only_where_the_metric_decides() -> None:
    there, policy = items(1, 2, loss=[0.3, 0.5]), Newest(3) | Best(1, "loss")
    better, worse = Kept(3, 3.0, 0, {"loss": 0.2}), Kept(3, 3.0, 0, {"loss": 0.4})
    assert keeps_for_metrics(policy, there, better)
    assert not keeps_for_metrics(policy, there, worse)
    assert would_keep(policy, there, worse)
    assert metrics_of(policy) == {"loss"}


# ---- laws ----------------------------------------------------------------------------------------

_single = st.one_of(
    st.builds(Newest, st.integers(1, 4)),
    st.builds(
        Best, st.integers(1, 3), st.sampled_from(["a", "b"]), st.sampled_from(["min", "max"])
    ),
    st.builds(lambda n: Every(steps=n), st.integers(1, 20)),
    st.builds(lambda n: Every(seconds=n), st.integers(1, 20)),
    st.builds(lambda n: Every(epochs=n), st.integers(1, 4)),
    st.builds(Within, st.integers(1, 40)),
    st.builds(lambda steps: Steps(*steps), st.sets(st.integers(1, 60), min_size=1, max_size=3)),
)
_policies: Any = st.recursive(
    _single,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a, b: a & b, inner, inner)
    ),
    max_leaves=4,
)
_number = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, math.nan, math.inf])
_metrics = st.dictionaries(st.sampled_from(["a", "b"]), _number)


@st.composite
def _runs(draw: Any) -> list[Kept]:
    """A run's items: steps, times and epochs only grow."""
    step, time_s, epoch, found = 0, 0.0, 0, []
    for _ in range(draw(st.integers(1, 12))):
        step += draw(st.integers(1, 9))
        time_s += draw(st.integers(0, 30))
        epoch += draw(st.integers(0, 2))
        found.append(Kept(step, time_s, epoch, draw(_metrics), draw(st.booleans())))
    return found


@given(_policies, _runs())
def test_to_prune_twice_is_to_prune_once_and_the_newest_stays(
    policy: Keep, there: list[Kept]
) -> None:
    chosen = steps_to_keep(policy, there)
    assert there[-1].step in chosen <= {each.step for each in there}
    assert {each.step for each in there if each.pinned} <= chosen
    left = [each for each in there if each.step in chosen]
    assert steps_to_keep(policy, left) == chosen


@given(_policies, _runs(), st.integers(1, 12))
def test_what_was_dropped_is_not_wanted_back_when_more_has_come(
    policy: Keep, there: list[Kept], first: int
) -> None:
    before = there[:first]
    dropped = {each.step for each in before} - steps_to_keep(policy, before)
    assert not dropped & steps_to_keep(policy, there)


@given(_policies, _runs())
def test_a_policy_answers_alike_when_asked_again(policy: Keep, there: list[Kept]) -> None:
    assert policy.keep(there) == policy.keep([*there])


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("newest", Newest(1)),
        ("newest 3 or best val_loss", Newest(3) | Best(1, "val_loss")),
        ("best 2 max acc", Best(2, "acc", "max")),
        ("every 100 steps", Every(steps=100)),
        ("every 2 hours and within 1 day", Every(seconds=7200) & Within(86400)),
        ("every 1 epoch", Every(epochs=1)),
        ("within 30 min", Within(1800)),
        ("steps 5, 10 20", Steps(5, 10, 20)),
    ],
)
def test_words_say_what_objects_say(words: str, policy: Keep) -> None:
    assert parse_keep(words) == policy
    assert parse_keep(str(policy)) == policy


def test_and_binds_closer_than_or() -> None:
    found = parse_keep("newest or every 10 steps and within 5 s")
    assert found == Newest(1) | (Every(steps=10) & Within(5))


def test_numbers_and_none_are_taken() -> None:
    assert parse_keep(3) == Newest(3)
    assert parse_keep(0) is None
    assert Config(keep=None).keep is None


def test_the_setting_comes_from_every_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('keep = "newest 3 or best val_loss"\n')
    assert Config.resolve(file).keep == Newest(3) | Best(1, "val_loss")
    monkeypatch.setenv("LIGHTCK_KEEP", "newest 2")
    assert Config.resolve(file).keep == Newest(2)
    monkeypatch.setenv("LIGHTCK_KEEP", "4")
    assert Config.resolve(file).keep == Newest(4)
    assert Config.resolve(file, keep=0).keep is None


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("newst 3", "newst"),
        ("newest x", "newest"),
        ("newest 1 2", "newest"),
        ("best", "best"),
        ("best 2", "best"),
        ("best max", "best"),
        ("best 3 min", "best"),
        ("every 3", "every"),
        ("every 3 weeks", "every"),
        ("or newest", "missing"),
        ("", "missing"),
        ("steps", "steps"),
        (True, "words"),
        (-1, "newest"),
        (2.5, "words"),
    ],
)
def test_an_error_names_the_word_and_says_what_is_allowed(value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        Config(keep=value)
    assert "keep = " in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Newest(0),
        lambda: Best(1, ""),
        lambda: Best(1, "a", "least"),
        lambda: Every(),
        lambda: Every(steps=1, epochs=1),
        lambda: Within(math.inf),
        lambda: Steps(),
    ],
)
def test_impossible_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
