"""Turn the value of a setting into a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from lightck.errors import ConfigError
from lightck.policy.hybrid import Hybrid
from lightck.policy.policies import AllOf, AnyOf, AtSteps, EveryEpochs, EverySeconds, EverySteps
from lightck.types import Policy


def parse(value: object) -> Policy:
    """Turn the value of a setting into a policy.

    Args:
        value: a policy; an int (every that many steps); or a mapping with one key out of
            `every_steps`, `every_seconds`, `every_epochs`, `at_steps`, `hybrid` with a table of
            its arguments, `any_of` and `all_of` with a list of such values.

    Returns:
        The policy; `value` itself when it is one.

    Raises:
        ConfigError: the value is none of these; the message names the key and the value.
    """
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return EverySteps(value)
    if isinstance(value, Policy) and not isinstance(value, type):
        return value
    raise ConfigError(
        f"policy = {value!r}: must be a number of steps, an object with a method due(moment), "
        f"or a table with one of the keys {_ALLOWED}"
    )


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


def _hybrid(value: Any) -> Policy:
    names = [each.name for each in fields(Hybrid)]
    if not isinstance(value, Mapping):
        raise ConfigError(f"hybrid = {value!r}: must be a table with {' and '.join(names)}")
    if "mtbf_s" not in value:
        raise ConfigError("hybrid: mtbf_s, the job's mean time between failures, is missing")
    for key in value:
        if key not in names:
            raise ConfigError(
                f"hybrid: unknown key {key!r} = {value[key]!r}; must be one of {', '.join(names)}"
            )
    return Hybrid(**value)


_MAKERS: dict[str, Callable[[Any], Policy]] = {
    "every_steps": EverySteps,
    "every_seconds": EverySeconds,
    "every_epochs": EveryEpochs,
    "at_steps": AtSteps,
    "hybrid": _hybrid,
    "any_of": _combination("any_of", AnyOf),
    "all_of": _combination("all_of", AllOf),
}
_ALLOWED = ", ".join(_MAKERS)
