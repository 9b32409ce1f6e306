"""Decide when a snapshot is due by given steps, times, epochs or a given rate of failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightck.errors import ConfigError
from lightck.policy import checks
from lightck.policy.auto import unsaved_failures
from lightck.policy.combination import Combinable, single_policies
from lightck.policy.formulas import young
from lightck.policy.quantities import exact_percent, exact_time, in_units
from lightck.policy.spacing import interval_has_passed
from lightck.types import Moment, Policy


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
        checks.positive_int("every_steps", self.n)

    def due(self, moment: Moment) -> bool:
        """Return whether the step is a multiple of `n`; see `Policy.due`."""
        return moment.step % self.n == 0

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next; None while no step was measured."""
        step_s = moment.quiet_s or moment.step_s
        return self.n * step_s if step_s else None

    def __str__(self) -> str:
        return f"{self.n} step{'s' if self.n > 1 else ''}"


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
        checks.positive_number("every_seconds", self.t)

    def due(self, moment: Moment) -> bool:
        """Return whether `t` seconds have passed since the last due step; see `Policy.due`."""
        return moment.last_time_s is None or moment.time_s - moment.last_time_s >= self.t

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next."""
        return self.t

    def __str__(self) -> str:
        return exact_time(self.t)


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
        checks.positive_int("every_epochs", self.n)

    def due(self, moment: Moment) -> bool:
        """Return whether a multiple of `n` epochs was passed since the last due step.

        See `Policy.due`.
        """
        # Count in multiples of n, not from the last due snapshot: in a combination of policies that
        # one may have been due for another reason.
        return moment.epoch // self.n > (moment.last_epoch or 0) // self.n

    def __str__(self) -> str:
        return f"{self.n} epoch{'s' if self.n > 1 else ''}"


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
            checks.positive_int("at_steps", step)
        object.__setattr__(self, "steps", frozenset(listed))

    def due(self, moment: Moment) -> bool:
        """Return whether the step is one of the given; see `Policy.due`."""
        return moment.step in self.steps

    def __str__(self) -> str:
        return " ".join(["at", *map(str, sorted(self.steps))])


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
        checks.positive_number("mtbf_s", self.mtbf_s)
        checks.share("unrecoverable", self.unrecoverable)

    @property
    def needs(self) -> frozenset[str]:
        """Return what the moment must hold: the loss, for nothing is due while it is no number."""
        return frozenset({"loss"})

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next; None while no cost is known."""
        if moment.cost_s is None:
            return None
        least = young(moment.cost_s, self.mtbf_s / self.unrecoverable)
        return max(least, moment.persist_s or 0.0)

    def due(self, moment: Moment) -> bool:
        """Return whether the interval has passed, to the nearest step; see `Policy.due`."""
        return interval_has_passed(moment, self.interval_s(moment))

    def why(self, moment: Moment) -> str:
        """Return a sentence: how often, and what asks for it."""
        every_s, cost_s = self.interval_s(moment), moment.cost_s
        if every_s is None or cost_s is None:
            return "what a snapshot costs is not known yet"
        bound = unsaved_failures(self.mtbf_s / self.unrecoverable)
        if every_s == moment.persist_s:
            bound = "that is how long one takes to be committed"
        return f"every {in_units(every_s)}: one costs {in_units(cost_s)}; {bound}"

    def __str__(self) -> str:
        share = exact_percent(self.unrecoverable)
        return f"hybrid mtbf {exact_time(self.mtbf_s)} unrecoverable {share}"


def counts_epochs(policy: Policy) -> bool:
    """Tell whether a policy may decide by epochs; those of the user's own may."""
    ours = __name__.partition(".")[0]
    return any(
        isinstance(each, EveryEpochs) or type(each).__module__.partition(".")[0] != ours
        for each in single_policies(policy)
    )
