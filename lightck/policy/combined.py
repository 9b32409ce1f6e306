"""Combine policies: due when any of several is, or when all are, with operators for both."""

from __future__ import annotations

from dataclasses import dataclass

from lightck.errors import ConfigError
from lightck.types import Moment, Policy


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
