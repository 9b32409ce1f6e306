"""From the value of a setting to a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightck.errors import ConfigError
from lightck.policy.combined import AllOf, AnyOf
from lightck.policy.periodic import AtSteps, EveryEpochs, EverySeconds, EverySteps
from lightck.types import Policy


def parse(value: object) -> Policy:
    """Turn a setting into a policy.

    Args:
        value: a policy; an int (every that many steps); or a mapping with one key out of
            `every_steps`, `every_seconds`, `every_epochs`, `at_steps`, `any_of` and `all_of`, the
            last two with a list of such values.

    Returns:
        The policy; `value` itself when it is one.

    Raises:
        ConfigError: the value is none of these; names the key and the value.
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


_MAKERS: dict[str, Callable[[Any], Policy]] = {
    "every_steps": EverySteps,
    "every_seconds": EverySeconds,
    "every_epochs": EveryEpochs,
    "at_steps": AtSteps,
    "any_of": _combination("any_of", AnyOf),
    "all_of": _combination("all_of", AllOf),
}
_ALLOWED = ", ".join(_MAKERS)
