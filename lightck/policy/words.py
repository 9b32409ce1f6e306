"""Turn the value of a setting into a policy: words such as `10 min`, a table, or a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from lightck.errors import ConfigError
from lightck.policy import quantities
from lightck.policy.auto import Auto
from lightck.policy.best import OnBest
from lightck.policy.budget import Budget
from lightck.policy.combination import AllOf, AnyOf, is_policy
from lightck.policy.due import AtSteps, EveryEpochs, EverySeconds, EverySteps, Hybrid
from lightck.policy.quality import Quality
from lightck.types import Policy

_EXAMPLES = (
    "'auto', 'quality', '3.5 %', '500 steps', '30 s', '10 min', '1 epoch', 'at 1 10 100',"
    " 'best val_loss', 'best max val_acc', '500 steps or best val_loss'"
)


def parse(value: object) -> Policy:
    """Turn the value of a setting into a policy.

    Args:
        value: a policy; an int (every that many steps); words, such as `auto`, `3.5 %`, `500 steps`
            or `10 min or best val_loss`; or a mapping with one key out of `every_steps`,
            `every_seconds`, `every_epochs`, `at_steps`, `budget`, `on_best`; `auto`, `quality` or
            `hybrid` with a table of its arguments; `any_of` or `all_of` with a list of such values.

    Returns:
        The policy; `value` itself when it is one.

    Raises:
        ConfigError: the value is none of these; the message names the key and the value, and
            gives examples.
    """
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, str):
        return _from_words(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return EverySteps(value)
    if is_policy(value):
        return cast(Policy, value)
    raise ConfigError(
        f"policy = {value!r}: must be a number of steps, words such as {_EXAMPLES}, an object with"
        f" a method due(moment), or a table with one of the keys {_ALLOWED}"
    )


# ---- words ---------------------------------------------------------------------------------------

_WORD = re.compile(r"[()]|[^\s()]+")
_NUMBER = r"(\d{1,18}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?|\.\d{1,30})"
_AMOUNT = re.compile(rf"{_NUMBER}\s*(%|[a-z]*)", re.ASCII)
_INTEGER = re.compile(r"\d{1,18}", re.ASCII)


def _from_words(text: str) -> Policy:
    try:
        policy, left = _either(_WORD.findall(text))
        if left:
            raise _Unknown(" ".join(left))
    except (_Unknown, RecursionError) as found:
        part = str(found) if isinstance(found, _Unknown) else text
        what = f"{part!r} is no policy; " if part not in (text.strip(), _END) else ""
        if part == _END and text.strip():
            what = "something is missing at the end; "
        raise ConfigError(f"policy = {text!r}: {what}must be words such as {_EXAMPLES}") from None
    return policy


_END = ""


class _Unknown(Exception):
    """The part of a text that is no policy."""


def _either(words: Sequence[str]) -> tuple[Policy, Sequence[str]]:
    return _joined("or", AnyOf, lambda rest: _joined("and", AllOf, _single, rest), words)


def _joined(
    word: str,
    kind: Callable[..., Policy],
    part: Callable[[Sequence[str]], tuple[Policy, Sequence[str]]],
    words: Sequence[str],
) -> tuple[Policy, Sequence[str]]:
    policy, words = part(words)
    policies = [policy]
    while words and words[0] == word:
        policy, words = part(words[1:])
        policies.append(policy)
    return (policies[0] if len(policies) == 1 else kind(*policies)), words


def _single(words: Sequence[str]) -> tuple[Policy, Sequence[str]]:
    if words and words[0] == "(":
        before = words[1:]
        policy, words = _either(before)
        if not words or words[0] != ")":
            raise _Unknown(" ".join(["(", *before]))
        return policy, words[1:]
    ends = (i for i, word in enumerate(words) if word in ("or", "and", "(", ")"))
    end = next(ends, len(words))
    if not end:
        raise _Unknown(words[0] if words else _END)
    return _named(words[:end]), words[end:]


def _named(words: Sequence[str]) -> Policy:
    first, *rest = words
    if first in ("auto", "quality", "hybrid"):
        return _with_arguments({"auto": Auto, "quality": Quality, "hybrid": Hybrid}[first], rest)
    if first == "best" and rest:
        *mode, metric = rest
        if mode in ([], ["min"], ["max"]):
            return OnBest(metric, *mode)
    if first == "at" and rest and all(map(_INTEGER.fullmatch, rest)):
        return AtSteps(map(int, rest))
    amount, kind = _amount(words)
    if kind == "%":
        return Budget(quantities.percent(amount))
    if kind in ("step", "steps", "") and _INTEGER.fullmatch(amount):
        return EverySteps(int(amount))
    if kind in ("epoch", "epochs") and _INTEGER.fullmatch(amount):
        return EveryEpochs(int(amount))
    return EverySeconds(_seconds(amount, kind, words))


def _amount(words: Sequence[str]) -> tuple[str, str]:
    text = " ".join(words)
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise _Unknown(text)
    return match[1], match[2]


def _seconds(amount: str, kind: str, words: Sequence[str]) -> float:
    unit = quantities.unit_of(kind)
    if unit is None:
        raise _Unknown(" ".join(words))
    return quantities.seconds(amount, unit)


_ARGUMENTS = {
    "budget": "budget",
    "unrecoverable": "unrecoverable",
    "mtbf": "mtbf_s",
    "most": "most_s",
}


def _with_arguments(kind: type[Any], words: Sequence[str]) -> Policy:
    """Make `auto budget 2 % mtbf 12 h`: each argument's name, and its amount."""
    names = {each.name for each in fields(kind)}
    given: dict[str, float] = {}
    while words:
        name = _ARGUMENTS.get(words[0])
        if name not in names or name in given:
            raise _Unknown(words[0])
        end = next((i for i, w in enumerate(words) if i and w in _ARGUMENTS), len(words))
        if end == 1:
            raise _Unknown(words[0])
        amount, unit = _amount(words[1:end])
        if name.endswith("_s"):
            given[name] = _seconds(amount, unit, words[1:end])
        elif unit == "%":
            given[name] = quantities.percent(amount)
        else:
            raise _Unknown(" ".join(words[:end]))
        words = words[end:]
    if kind is Hybrid and "mtbf_s" not in given:
        raise ConfigError("hybrid: mtbf, the job's mean time between failures, is missing")
    made: Policy = kind(**given)
    return made


# ---- tables --------------------------------------------------------------------------------------


def _from_mapping(table: Mapping[Any, Any]) -> Policy:
    if len(table) != 1:
        raise ConfigError(f"policy = {dict(table)!r}: must have exactly one of the keys {_ALLOWED}")
    ((key, value),) = table.items()
    make = _MAKERS.get(key)
    if make is None:
        raise ConfigError(f"policy: unknown key {key!r} = {value!r}; must be one of {_ALLOWED}")
    return make(value)


def _combination(key: str, kind: Callable[..., Policy]) -> Callable[[Any], Policy]:
    def make(values: Any) -> Policy:
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{key} = {values!r}: must be a list of policies")
        return kind(*(parse(value) for value in values))

    return make


_REQUIRED: dict[type[Any], tuple[str, str]] = {
    Hybrid: ("mtbf_s", "the job's mean time between failures"),
    OnBest: ("metric", "the name of a metric"),
}


def _table(key: str, kind: type[Any]) -> Callable[[Any], Policy]:
    names = [each.name for each in fields(kind)]

    def make(value: Any) -> Policy:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} = {value!r}: must be a table with {' and '.join(names)}")
        required, meaning = _REQUIRED.get(kind, ("", ""))
        if required and required not in value:
            raise ConfigError(f"{key}: {required}, {meaning}, is missing")
        for name in value:
            if name not in names:
                raise ConfigError(
                    f"{key}: unknown key {name!r} = {value[name]!r}; must be one of"
                    f" {', '.join(names)}"
                )
        made: Policy = kind(**value)
        return made

    return make


def _on_best(value: Any) -> Policy:
    return _table("on_best", OnBest)({"metric": value} if isinstance(value, str) else value)


_MAKERS: dict[str, Callable[[Any], Policy]] = {
    "every_steps": EverySteps,
    "every_seconds": EverySeconds,
    "every_epochs": EveryEpochs,
    "at_steps": AtSteps,
    "auto": _table("auto", Auto),
    "quality": _table("quality", Quality),
    "budget": Budget,
    "on_best": _on_best,
    "hybrid": _table("hybrid", Hybrid),
    "any_of": _combination("any_of", AnyOf),
    "all_of": _combination("all_of", AllOf),
}
_ALLOWED = ", ".join(_MAKERS)
