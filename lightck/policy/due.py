"""Decide when a snapshot is due, by pure functions of step, time, epoch and measured cost.

Any object with a method `due(moment: Moment) -> bool` is a policy. Those here combine with `|` and
`&`: `EverySteps(100) | EveryEpochs()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightck.errors import ConfigError
from lightck.types import Moment, Policy

# ---- combinations: due when any of several is, or when all are -----------------------------------


class Combinable:
    """The operators of a policy: `|` (due when either is) and `&` (due when both are)."""

    def due(self, moment: Moment) -> bool:
        """Say whether the step that has just ended gets a snapshot; see `Policy.due`."""
        raise NotImplementedError

    def __or__(self, other: Policy) -> AnyOf:
        return AnyOf(self, other) if _is_policy(other) else NotImplemented

    def __and__(self, other: Policy) -> AllOf:
        return AllOf(self, other) if _is_policy(other) else NotImplemented


@dataclass(frozen=True, init=False)
class AnyOf(Combinable):
    """A policy that is due when at least one of the policies is.

    Args:
        *policies: one policy or more.

    Raises:
        ConfigError: none given, or one of them is not a policy.
    """

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", _checked("any_of", policies))

    def due(self, moment: Moment) -> bool:
        """Return whether one of the policies says so; see `Policy.due`."""
        return any(policy.due(moment) for policy in self.policies)


@dataclass(frozen=True, init=False)
class AllOf(Combinable):
    """A policy that is due when every one of the policies is.

    Args:
        *policies: one policy or more.

    Raises:
        ConfigError: none given, or one of them is not a policy.
    """

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", _checked("all_of", policies))

    def due(self, moment: Moment) -> bool:
        """Return whether all of the policies say so; see `Policy.due`."""
        return all(policy.due(moment) for policy in self.policies)


def _is_policy(value: object) -> bool:
    # A policy class has the method, too, but cannot be asked: only an instance can.
    return isinstance(value, Policy) and not isinstance(value, type)


def _checked(key: str, policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    if not policies:
        raise ConfigError(f"{key} = []: needs at least one policy")
    for policy in policies:
        if not _is_policy(policy):
            raise ConfigError(f"{key}: {policy!r} is not a policy (no method due(moment))")
    return policies


# ---- single policies -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EverySteps(Combinable):
    """A policy that is due at every step that is a multiple of `n`.

    Args:
        n: steps, 1 or more.

    Raises:
        ConfigError: `n` is not such a number.
    """

    n: int

    def __post_init__(self) -> None:
        _positive_int("every_steps", self.n)

    def due(self, moment: Moment) -> bool:
        """Return whether the step is a multiple of `n`; see `Policy.due`."""
        return moment.step % self.n == 0


@dataclass(frozen=True)
class EverySeconds(Combinable):
    """A policy due at the first step, and at the first that ends `t` seconds after a due one.

    Args:
        t: seconds, more than 0.

    Raises:
        ConfigError: `t` is not such a number.
    """

    t: float

    def __post_init__(self) -> None:
        _positive_number("every_seconds", self.t)

    def due(self, moment: Moment) -> bool:
        """Return whether `t` seconds have passed since the last due step; see `Policy.due`."""
        return moment.last_time_s is None or moment.time_s - moment.last_time_s >= self.t


@dataclass(frozen=True)
class EveryEpochs(Combinable):
    """A policy due at the first step that ends after every `n`-th call of `handle.epoch()`.

    Args:
        n: epochs, 1 or more.

    Raises:
        ConfigError: `n` is not such a number.
    """

    n: int = 1

    def __post_init__(self) -> None:
        _positive_int("every_epochs", self.n)

    def due(self, moment: Moment) -> bool:
        """Return whether a multiple of `n` epochs was passed since the last due step.

        See `Policy.due`.
        """
        # Count in multiples of n, not from the last due snapshot: in a combination of policies that
        # one may have been due for another reason.
        return moment.epoch // self.n > (moment.last_epoch or 0) // self.n


@dataclass(frozen=True, init=False)
class AtSteps(Combinable):
    """A policy that is due at the given steps and at no other.

    Args:
        steps: step numbers, each 1 or more; at least one.

    Raises:
        ConfigError: the steps are not such numbers.
    """

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        if not isinstance(steps, Iterable) or isinstance(steps, str | bytes):
            raise ConfigError(f"at_steps = {steps!r}: must be a list of steps")
        listed = list(steps)
        if not listed:
            raise ConfigError("at_steps = []: needs at least one step")
        for step in listed:
            _positive_int("at_steps", step)
        object.__setattr__(self, "steps", frozenset(listed))

    def due(self, moment: Moment) -> bool:
        """Return whether the step is one of the given; see `Policy.due`."""
        return moment.step in self.steps


def _positive_int(key: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} = {value!r}: must be an integer of 1 or more")


def _positive_number(key: str, value: object) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return
    raise ConfigError(f"{key} = {value!r}: must be a finite number above 0")


# ---- the policy that follows the measured cost ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hybrid(Combinable):
    """A policy that is due as often as wastes least work, by the measured cost of snapshots.

    The interval is sqrt(2 o M / q), with the stall o of a snapshot as measured in this run: cheap
    snapshots come often; they are the rarer, the rarer a failure is that leaves no just-in-time
    snapshot. The interval is rounded to whole steps, and never shorter than a snapshot takes to be
    committed. The first step that ends is due; until a cost is known, it is the only one.

    Args:
        mtbf_s: M, mean time between failures of the whole job in seconds, above 0.
        unrecoverable: q, share of the failures that the just-in-time path cannot recover, above 0
            and 1 at most: a host that is lost with its memory, power, a bug that damages state.
            With `failure="off"` that is 1, which gives Young's interval.

    Raises:
        ConfigError: an argument is not such a number.
    """

    mtbf_s: float
    unrecoverable: float = 0.3
    """The default share: open-jitc's authors recover about 70 % of what stopped the training of
    OPT-175B."""

    def __post_init__(self) -> None:
        _positive_number("mtbf_s", self.mtbf_s)
        _positive_number("unrecoverable", self.unrecoverable)
        if self.unrecoverable > 1:
            raise ConfigError(f"unrecoverable = {self.unrecoverable!r}: is a share, 1 at most")

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next; None while no cost is known."""
        if moment.cost_s is None:
            return None
        least = math.sqrt(2 * moment.cost_s * self.mtbf_s / self.unrecoverable)
        return max(least, moment.persist_s or 0.0)

    def due(self, moment: Moment) -> bool:
        """Return whether the interval has passed, to the nearest step; see `Policy.due`."""
        if moment.last_time_s is None:
            return True
        every = self.interval_s(moment)
        if every is None:
            return False  # the first snapshot is not committed yet
        return moment.time_s - moment.last_time_s >= every - (moment.step_s or 0.0) / 2


# ---- the value of a setting ----------------------------------------------------------------------


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
