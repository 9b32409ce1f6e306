"""Combine policies: due when any of several is, or when all are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from lightck.errors import ConfigError
from lightck.types import Moment, Policy

_NEEDS = frozenset({"hazard", "health", "loss"})


class Combinable:
    """The operators of a policy: `|` (due when either is) and `&` (due when both are)."""

    @property
    def needs(self) -> frozenset[str]:
        """Return what the moment must hold, out of "hazard", "health" and "loss": here nothing."""
        return frozenset()

    def due(self, moment: Moment) -> bool:
        """Say whether the step that has just ended gets a snapshot; see `Policy.due`."""
        raise NotImplementedError

    def __or__(self, other: Policy) -> AnyOf:
        return AnyOf(self, other) if is_policy(other) else NotImplemented

    def __and__(self, other: Policy) -> AllOf:
        return AllOf(self, other) if is_policy(other) else NotImplemented


@dataclass(frozen=True, init=False)
class _Combination(Combinable):
    """The policies of a combination, and what it says of itself."""

    policies: tuple[Policy, ...]

    @property
    def needs(self) -> frozenset[str]:
        """Return what any of the policies needs."""
        return frozenset().union(*map(needs_of, self.policies))

    def _intervals(self, moment: Moment) -> list[tuple[float, Policy]]:
        found = ((interval_of(each, moment), each) for each in self.policies)
        return [(every_s, each) for every_s, each in found if every_s is not None]

    def _governing(self, moment: Moment) -> tuple[float, Policy] | None:
        raise NotImplementedError

    def interval_s(self, moment: Moment) -> float | None:
        """Return the interval of the policy that decides; None while none of them knows one.

        Of policies without an interval, such as `AtSteps`, nothing is known: they make it shorter
        (`|`) or longer (`&`).
        """
        governing = self._governing(moment)
        return governing and governing[0]

    def why(self, moment: Moment) -> str:
        """Return what the policy that decides says of its interval, in a sentence."""
        governing = self._governing(moment)
        return why_of(governing[1], moment) if governing else ""


@dataclass(frozen=True, init=False)
class AnyOf(_Combination):
    """A policy that is due when at least one of the policies is.

    Args:
        *policies: one policy or more.

    Raises:
        ConfigError: none given, or one of them is not a policy.
    """

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", _flat(AnyOf, _checked("any_of", policies)))

    def due(self, moment: Moment) -> bool:
        """Return whether one of the policies says so; see `Policy.due`."""
        return any(policy.due(moment) for policy in self.policies)

    def _governing(self, moment: Moment) -> tuple[float, Policy] | None:
        return min(self._intervals(moment), key=_length, default=None)

    def __str__(self) -> str:
        return " or ".join(map(str, self.policies))


@dataclass(frozen=True, init=False)
class AllOf(_Combination):
    """A policy that is due when every one of the policies is.

    Args:
        *policies: one policy or more.

    Raises:
        ConfigError: none given, or one of them is not a policy.
    """

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", _flat(AllOf, _checked("all_of", policies)))

    def due(self, moment: Moment) -> bool:
        """Return whether all of the policies say so; see `Policy.due`."""
        return all(policy.due(moment) for policy in self.policies)

    def _governing(self, moment: Moment) -> tuple[float, Policy] | None:
        return max(self._intervals(moment), key=_length, default=None)

    def __str__(self) -> str:
        each = (f"({p})" if isinstance(p, AnyOf) else str(p) for p in self.policies)
        return " and ".join(each)


def _length(found: tuple[float, Policy]) -> float:
    return found[0]


def is_policy(value: object) -> bool:
    """Tell whether a value can be asked for due steps."""
    # A policy class has the method, too, but cannot be asked: only an instance can.
    return isinstance(value, Policy) and not isinstance(value, type)


def single_policies(policy: Policy) -> Iterator[Policy]:
    """Yield the policies of which a combination is made, of combinations in it, too."""
    if isinstance(policy, _Combination):
        for each in policy.policies:
            yield from single_policies(each)
    else:
        yield policy


def needs_of(policy: Policy) -> frozenset[str]:
    """Return what a policy needs; nothing if it does not say.

    Raises:
        ConfigError: its `needs` is no set out of "hazard", "health" and "loss".
    """
    needs: Any = getattr(policy, "needs", frozenset())
    if not (isinstance(needs, Set) and needs <= _NEEDS):
        expected = ", ".join(map(repr, sorted(_NEEDS)))
        raise ConfigError(f"{policy!r}: needs = {needs!r}: must be a frozenset out of {expected}")
    return frozenset(needs)


def interval_of(policy: Policy, moment: Moment) -> float | None:
    """Return a policy's seconds from one snapshot to the next; None if it does not say."""
    ask: Callable[[Moment], float | None] | None = getattr(policy, "interval_s", None)
    return ask(moment) if ask is not None else None


def why_of(policy: Policy, moment: Moment) -> str:
    """Return what a policy says of its interval, in a sentence; itself if it says nothing."""
    ask: Callable[[Moment], str] | None = getattr(policy, "why", None)
    return (ask(moment) if ask is not None else "") or str(policy)


def _checked(key: str, policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    if not policies:
        raise ConfigError(f"{key} = []: needs at least one policy")
    for policy in policies:
        if not is_policy(policy):
            raise ConfigError(f"{key}: {policy!r} is not a policy (no method due(moment))")
    return policies


def _flat(kind: type[_Combination], policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    """Return the policies with those of combinations of the same kind in their place."""
    parts = (each.policies if isinstance(each, kind) else (each,) for each in policies)
    return tuple(each for part in parts for each in part)
