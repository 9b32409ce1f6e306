from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.config import Config
from lightck.errors import ConfigError
from lightck.policy import (
    AllOf,
    AnyOf,
    AtSteps,
    Auto,
    Budget,
    EveryEpochs,
    EverySeconds,
    EverySteps,
    Hybrid,
    OnBest,
    Quality,
    parse,
)
from lightck.policy.quantities import to_three_digits
from lightck.types import Policy


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("auto", Auto()),
        ("auto budget 2 % mtbf 12 h most 1 h", Auto(budget=0.02, mtbf_s=43_200, most_s=3600)),
        ("quality", Quality()),
        ("quality mtbf 2 days", Quality(mtbf_s=172_800)),
        ("hybrid mtbf 3 h unrecoverable 10 %", Hybrid(mtbf_s=10_800, unrecoverable=0.1)),
        ("3.5 %", Budget(0.035)),
        ("3.5%", Budget(0.035)),
        ("100 %", Budget(1.0)),
        ("500 steps", EverySteps(500)),
        ("1 step", EverySteps(1)),
        ("7", EverySteps(7)),
        ("30 s", EverySeconds(30)),
        ("0.5s", EverySeconds(0.5)),
        (".5 sec", EverySeconds(0.5)),
        ("2e1 seconds", EverySeconds(20)),
        ("500 ms", EverySeconds(0.5)),
        ("10 min", EverySeconds(600)),
        ("10minutes", EverySeconds(600)),
        ("2 h", EverySeconds(7200)),
        ("1 epoch", EveryEpochs(1)),
        ("3 epochs", EveryEpochs(3)),
        ("at 1 10 100", AtSteps([1, 10, 100])),
        ("best val_loss", OnBest("val_loss")),
        ("best min val/loss@1", OnBest("val/loss@1")),
        ("best max val_acc", OnBest("val_acc", "max")),
        ("best max", OnBest("max")),
        ("best 3d", OnBest("3d")),
        ("500 steps or best val_loss", EverySteps(500) | OnBest("val_loss")),
        ("  10 min  or 1 epoch or auto ", AnyOf(EverySeconds(600), EveryEpochs(1), Auto())),
        ("50 steps and 10 s", AllOf(EverySteps(50), EverySeconds(10))),
        ("1 epoch or 5 steps and 1 s", EveryEpochs(1) | (EverySteps(5) & EverySeconds(1))),
        ("(1 epoch or 5 steps) and 1 s", (EveryEpochs(1) | EverySteps(5)) & EverySeconds(1)),
    ],
)
def test_words_become_policies(words: str, policy: Policy) -> None:
    assert parse(words) == policy


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("often", "policy = 'often': must be words such as 'auto'"),
        ("", "policy = '': must be words"),
        ("1.5", "policy = '1.5': must be words"),
        ("10 parsec", "policy = '10 parsec': must be words"),
        ("5 steps or often", "policy = '5 steps or often': 'often' is no policy; must be words"),
        ("5 steps or", "something is missing at the end"),
        ("or 5 steps", "'or' is no policy"),
        ("(5 steps", "'( 5 steps' is no policy"),
        ("5 steps)", "')' is no policy"),
        ("5 steps 3 s", "policy = '5 steps 3 s': must be words"),
        ("1.5 steps", "policy = '1.5 steps': must be words"),
        ("-3 %", "policy = '-3 %': must be words"),
        ("best", "policy = 'best': must be words"),
        ("best of val_loss", "must be words"),
        ("at", "must be words"),
        ("at 1 two", "must be words"),
        ("auto 2 %", "'2' is no policy"),
        ("auto budget 2", "'budget 2' is no policy"),
        ("auto budget", "'budget' is no policy"),
        ("auto mtbf 3 %", "'3 %' is no policy"),
        ("auto most 1 h most 2 h", "'most' is no policy"),
        ("auto unrecoverable 3 %", "'unrecoverable' is no policy"),
        ("(" * 100_000, "must be words"),
        ("9" * 5_000, "must be words"),
        ("1e999999999 s", "must be words"),
        ("0 steps", "every_steps = 0"),
        ("0 %", "budget = 0.0"),
        ("150 %", "budget = 1.5: is a share"),
        ("1e999 s", "every_seconds = inf"),
        ("at 0", "at_steps = 0"),
        ("hybrid", "hybrid: mtbf, the job's mean time between failures, is missing"),
    ],
)
def test_bad_words_are_refused_with_examples(words: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert named in str(caught.value)


def test_every_example_of_the_error_is_a_policy() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("often")
    examples = re.findall(r"'([^']+)'", str(caught.value).partition("such as")[2])
    assert len(examples) > 9
    for each in examples:
        parse(each)


@given(st.text(alphabet="auto best 10min%s().or and3", max_size=30))
@settings(max_examples=200)
def test_any_text_is_a_policy_or_the_clear_error(text: str) -> None:
    try:
        policy = parse(text)
    except ConfigError:
        return
    assert parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("table", "policy"),
    [
        ({"auto": {}}, Auto()),
        ({"auto": {"budget": 0.02, "watch": False}}, Auto(budget=0.02, watch=False)),
        ({"quality": {"most_s": 60}}, Quality(most_s=60)),
        ({"budget": 0.035}, Budget(0.035)),
        ({"on_best": "val_loss"}, OnBest("val_loss")),
        ({"on_best": {"metric": "acc", "mode": "max"}}, OnBest("acc", "max")),
        ({"any_of": ["500 steps", {"on_best": "loss"}]}, EverySteps(500) | OnBest("loss")),
    ],
)
def test_tables_become_policies(table: dict[str, Any], policy: Policy) -> None:
    assert parse(table) == policy


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"auto": True}, "auto = True: must be a table with budget and mtbf_s and most_s"),
        ({"auto": {"bugdet": 1}}, "auto: unknown key 'bugdet' = 1; must be one of budget"),
        ({"auto": {"budget": 3}}, "budget = 3"),
        ({"on_best": 3}, "on_best = 3"),
        ({"on_best": {}}, "on_best: metric, the name of a metric, is missing"),
        ({"on_best": ""}, "on_best: metric = ''"),
        ({"budget": "3 %"}, "budget = '3 %'"),
        ({"any_of": ["often"]}, "policy = 'often'"),
    ],
)
def test_bad_tables_are_refused_with_key_and_value(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(table)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", Auto()),
        ("3.5 %", Budget(0.035)),
        ("500 steps or best val_loss", EverySteps(500) | OnBest("val_loss")),
        ("10 min", EverySeconds(600)),
        ("25", EverySteps(25)),
        ('"10 min"', EverySeconds(600)),
        ("{ auto = { budget = 0.02 } }", Auto(budget=0.02)),
    ],
)
def test_the_environment_and_a_file_take_words(
    text: str, policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTCK_POLICY", text)
    assert Config.resolve().policy == policy
    monkeypatch.delenv("LIGHTCK_POLICY")
    file = tmp_path / "my.toml"
    quoted = text if text[0] in '"{' else f'"{text}"'
    file.write_text(f"policy = {quoted}\n")
    assert Config.resolve(file).policy == policy
    assert Config.resolve(policy=str(policy)).policy == policy


def test_a_bad_word_names_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTCK_POLICY", "now and then")
    with pytest.raises(ConfigError, match=r"variable LIGHTCK_POLICY.*'now' is no policy.*'auto'"):
        Config.resolve()


_POSITIVE = st.floats(1e-300, 1e300) | st.sampled_from([0.1, 90.0, 600.0, 86_400.0, 5400.5])
_SHARES = st.floats(1e-300, 1.0)
_METRICS = st.text("abcminx_/3", min_size=1, max_size=9)
_SINGLE = st.one_of(
    st.builds(EverySteps, st.integers(1, 10**17)),
    st.builds(EverySeconds, _POSITIVE),
    st.builds(EveryEpochs, st.integers(1, 99)),
    st.builds(AtSteps, st.lists(st.integers(1, 10**17), min_size=1)),
    st.builds(Budget, _SHARES),
    st.builds(OnBest, _METRICS, st.sampled_from(["min", "max"])),
    st.builds(Auto, budget=_SHARES, mtbf_s=st.none() | _POSITIVE, most_s=_POSITIVE),
    st.builds(Quality, budget=_SHARES, mtbf_s=st.none() | _POSITIVE),
    st.builds(Hybrid, mtbf_s=_POSITIVE, unrecoverable=_SHARES),
)
_ANY = st.recursive(
    _SINGLE,
    lambda inner: st.builds(
        lambda kind, each: kind(*each),
        st.sampled_from([AnyOf, AllOf]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=5,
)


@given(_ANY)
@settings(max_examples=200)
def test_every_policy_says_itself_in_words_that_mean_it_exactly(policy: Policy) -> None:
    assert parse(str(policy)) == policy


def test_a_number_of_numpy_s_is_said_as_python_s() -> None:
    means = np.mean([600.0, 600.0]), np.float64(0.035)
    assert str(EverySeconds(means[0]) | Budget(means[1])) == "10 min or 3.5 %"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("10 min or", "something is missing at the end"),
        ("(10 min or 5 steps", "'( 10 min or 5 steps' is no policy"),
        ("auto mtbf", "'mtbf' is no policy"),
        ("auto mtbf budget 2 %", "'mtbf' is no policy"),
        ("10 min 5 steps or auto", "'10 min 5 steps' is no policy"),
    ],
)
def test_an_error_shows_the_words_that_are_wrong(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse(words)


@pytest.mark.parametrize(
    ("value", "words"),
    [(20.0, "20"), (999.4, "999"), (999.6, "1,000"), (2321.4, "2,321"), (1e12, "1e+12")],
)
def test_numbers_for_people_have_no_needless_exponent(value: float, words: str) -> None:
    assert to_three_digits(value) == words
