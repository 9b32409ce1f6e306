"""Policies that follow the steps, the clock (the moment's time) or epochs, and combinations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
        good = isinstance(self.t, int | float) and not isinstance(self.t, bool)
        if not (good and 0 < self.t < math.inf):
            raise ConfigError(f"every_seconds = {self.t!r}: must be a finite number above 0")

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
