"""Policies that follow the step counter, the clock (the moment's time), or the epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightck.errors import ConfigError
from lightck.policy.combined import Combinable
from lightck.types import Moment


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
