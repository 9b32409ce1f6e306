"""The policy that takes periodic snapshots only for what the failure path cannot recover."""

from __future__ import annotations

from dataclasses import dataclass

from lightck.errors import ConfigError
from lightck.policy.combined import Combinable
from lightck.policy.waste import interval, required_number
from lightck.types import Moment


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
        required_number("mtbf_s", self.mtbf_s, above_zero=True)
        required_number("unrecoverable", self.unrecoverable, above_zero=True)
        if self.unrecoverable > 1:
            raise ConfigError(f"unrecoverable = {self.unrecoverable!r}: is a share, 1 at most")

    def interval_s(self, moment: Moment) -> float | None:
        """Return the seconds from one snapshot to the next; None while no cost is known."""
        if moment.cost_s is None:
            return None
        least = interval(moment.cost_s, self.mtbf_s, self.unrecoverable)
        return max(least, moment.persist_s or 0.0)

    def due(self, moment: Moment) -> bool:
        """Return whether the interval has passed, to the nearest step; see `Policy.due`."""
        if moment.last_time_s is None:
            return True
        every = self.interval_s(moment)
        if every is None:
            return False  # the first snapshot is not committed yet
        return moment.time_s - moment.last_time_s >= every - (moment.step_s or 0.0) / 2
