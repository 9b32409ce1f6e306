"""The policy that finds its interval from measured costs and learned failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from lightck.errors import ConfigError
from lightck.policy import checks
from lightck.policy.combination import Combinable
from lightck.policy.formulas import young
from lightck.policy.quantities import exact_percent, exact_time, in_percent, in_units
from lightck.policy.spacing import interval_has_passed
from lightck.types import Moment, Probe

_PERSIST_PRICE = 0.01
"""Seconds of stall that a second of writing in the background counts for."""


def unsaved_failures(mean_s: float) -> str:
    """Say how often a failure is expected that the just-in-time path does not save."""
    return f"a failure that leaves no just-in-time snapshot is expected every {in_units(mean_s)}"


@dataclass(frozen=True, kw_only=True)
class Auto(Combinable):
    """A policy that is due as often as wastes least work, by what is measured and was learned.

    The interval is Young's (CACM 17, 1974), sqrt(2 o / h). Here o is what a snapshot was measured
    to cost in this run, the stall and what its copy slows down, and a hundredth of the time that it
    takes to be committed: writing wears a medium and takes bandwidth. h is the rate of the failures
    that leave no just-in-time snapshot, learned from earlier lives of the run. The interval is at
    most `most_s`; but never so short that snapshots cost more than `budget`, or that one begins
    before the other is committed, whatever `most_s` says. The first step that ends is due; until a
    cost is known it is the only one. While the last loss that was seen is no number, nothing is.

    Args:
        budget: share of the training's time that snapshots may cost, above 0, 1 at most.
        mtbf_s: mean time between failures of the whole job in seconds, as you believe it; it counts
            like one failure seen. None: what was learned alone.
        most_s: seconds from one snapshot to the next at most.
        watch: whether symptoms of failures to come are looked for on this machine; or the probes
            that do so.

    Raises:
        ConfigError: an argument is not of that kind.
    """

    budget: float = 0.01
    mtbf_s: float | None = None
    most_s: float = 1800.0
    watch: bool | tuple[Probe, ...] = field(default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.share("budget", self.budget)
        checks.positive_number("most_s", self.most_s)
        if self.mtbf_s is not None:
            checks.positive_number("mtbf_s", self.mtbf_s)
        object.__setattr__(self, "watch", _watched(self.watch))

    @property
    def needs(self) -> frozenset[str]:
        """Return what the moment must hold: hazard and loss, and symptoms unless not watched."""
        return frozenset({"hazard", "loss", *(["health"] if self.watch else [])})

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next; None while no cost is known."""
        cost_s = moment.cost_s
        if cost_s is None:
            return None
        persist_s = moment.persist_s or 0.0
        wanted_s = self._least_waste_s(cost_s, persist_s, moment) * self._stretch(moment)
        return max(min(wanted_s, self.most_s), cost_s / self.budget, persist_s)

    def _least_waste_s(self, cost_s: float, persist_s: float, moment: Moment) -> float:
        hazard = moment.hazard
        if hazard is None or hazard.unrecoverable <= 0:
            return math.inf
        return young(cost_s + _PERSIST_PRICE * persist_s, 1 / hazard.unrecoverable)

    def _stretch(self, moment: Moment) -> float:
        """By what the interval of least waste is multiplied."""
        return 1.0

    def due(self, moment: Moment) -> bool:
        """Return whether the interval has passed, to the nearest step; see `Policy.due`."""
        return interval_has_passed(moment, self.interval_s(moment))

    def why(self, moment: Moment) -> str:
        """Return a sentence: how often, and what asks for it."""
        every_s, cost_s = self.interval_s(moment), moment.cost_s
        if every_s is None or cost_s is None:
            return "what a snapshot costs is not known yet"
        persist_s = moment.persist_s or 0.0
        bound = "no rarer than that"
        if every_s == persist_s:
            bound = "that is how long one takes to be committed"
        elif every_s == cost_s / self.budget:
            bound = f"at most {in_percent(self.budget)} of the time"
        elif every_s < self.most_s and moment.hazard is not None:
            bound = unsaved_failures(1 / moment.hazard.unrecoverable)
        return f"every {in_units(every_s)}: one costs {in_units(cost_s)}; {bound}"

    def __str__(self) -> str:
        words = [type(self).__name__.lower()]
        given = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        if "budget" in given:
            words += ["budget", exact_percent(self.budget)]
        words += [
            f"{name} {exact_time(getattr(self, f'{name}_s'))}"
            for name in ("mtbf", "most")
            if f"{name}_s" in given
        ]
        return " ".join(words)


def _watched(watch: object) -> bool | tuple[Probe, ...]:
    if isinstance(watch, bool):
        return watch
    if isinstance(watch, list | tuple) and all(
        isinstance(each, Probe) and not isinstance(each, type) for each in watch
    ):
        return tuple(watch)
    raise ConfigError(f"watch = {watch!r}: must be true, false or a list of probes")
