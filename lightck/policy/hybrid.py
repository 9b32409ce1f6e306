"""The policy that takes periodic snapshots only for what the failure path cannot recover.

Its interval is the one that wastes least work, by the expected costs of snapshots and failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lightck.errors import ConfigError
from lightck.policy.policies import Combinable
from lightck.types import Moment

# ---- expected wasted work: the cost of snapshots and of failures ---------------------------------
# Every figure is a share of each rank's time. With failures at a rate of L = 1 / `mtbf_s`:
#
#     periodic(T)  o/T + L (T/2 + r)
#     jit          s + L (d + j + rj + m)
#     hybrid       s + sqrt(2 o q L) + q L r + (1 - q) L (d + j + rj + m)
#
# The first is least, sqrt(2 o L) + L r, at Young's interval T* = sqrt(2 o / L). Just-in-time
# snapshots leave only a share q of the failures to periodic ones, hence the hybrid interval sqrt(2
# o / (q L)). These are first-order formulas: intervals are short against `mtbf_s`.


def interval(stall_s: float, mtbf_s: float, unrecoverable: float = 1.0) -> float:
    """Return the seconds between periodic snapshots that waste least work.

    It is `inf` if none is needed.

    Args:
        stall_s: training-thread seconds that one of them costs.
        mtbf_s: mean time between failures of the whole job.
        unrecoverable: share of the failures that only a periodic snapshot helps against.
    """
    return math.sqrt(2 * stall_s * mtbf_s / unrecoverable) if unrecoverable else math.inf


@dataclass(frozen=True, kw_only=True)
class Waste:
    """The costs of snapshots and failures in one job; seconds and shares, none of them negative.

    Args:
        mtbf_s: mean time between failures of the whole job, above 0: that of a worker divided by
            their number.
        stall_s: o, the training thread's loss for a periodic snapshot.
        restore_s: r, from the restart to training again, of a periodic snapshot.
        detect_s: d, from a failure to its detection.
        jit_s: j, the just-in-time snapshot itself.
        jit_restore_s: rj, from the restart to training again, of a just-in-time snapshot.
        step_s: m, the minibatch that is repeated.
        armed: s, share of the time that the armed path costs while nothing fails.
        unrecoverable: q, share of the failures that leave no just-in-time snapshot, 0 to 1.

    Raises:
        ConfigError: an argument is not such a number.
    """

    mtbf_s: float
    stall_s: float
    restore_s: float = 0.0
    detect_s: float = 0.0
    jit_s: float = 0.0
    jit_restore_s: float = 0.0
    step_s: float = 0.0
    armed: float = 0.0
    unrecoverable: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            required_number(each.name, getattr(self, each.name), above_zero=each.name == "mtbf_s")
        if self.unrecoverable > 1:
            raise ConfigError(f"unrecoverable = {self.unrecoverable!r}: is a share, 1 at most")

    @property
    def interval_s(self) -> float:
        """The best interval between periodic snapshots, in seconds, without just-in-time ones."""
        return interval(self.stall_s, self.mtbf_s)

    @property
    def hybrid_interval_s(self) -> float:
        """The best interval between periodic snapshots, in seconds, beside just-in-time ones.

        It is `inf` when those recover every failure.
        """
        return interval(self.stall_s, self.mtbf_s, self.unrecoverable)

    def periodic(self, every_s: float | None = None) -> float:
        """Return the waste of periodic snapshots only, `every_s` seconds apart.

        The default is the best interval.
        """
        every_s = self.interval_s if every_s is None else every_s
        taking = self.stall_s / every_s if self.stall_s else 0.0
        return taking + (every_s / 2 + self.restore_s) / self.mtbf_s

    def jit(self) -> float:
        """Return the waste of just-in-time snapshots only, as if they recovered every failure."""
        return self.armed + self._recovered_s / self.mtbf_s

    def hybrid(self) -> float:
        """Return the waste of just-in-time snapshots with periodic ones at the hybrid interval.

        The periodic ones are for the failures that no just-in-time snapshot recovers. At
        `unrecoverable=0` the result is that of `jit`, at 1 (and `armed=0`) that of `periodic`.
        """
        q, rate = self.unrecoverable, 1 / self.mtbf_s
        periodic = math.sqrt(2 * self.stall_s * q * rate) + q * rate * self.restore_s
        return self.armed + periodic + (1 - q) * rate * self._recovered_s

    @property
    def _recovered_s(self) -> float:
        """The seconds that a failure costs which the just-in-time path recovers."""
        return self.detect_s + self.jit_s + self.jit_restore_s + self.step_s


def required_number(name: str, value: object, *, above_zero: bool = False) -> None:
    """Refuse a value that is not a finite number of 0 or more, or above 0.

    Raises:
        ConfigError: the value is not such a number.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if not good or (above_zero and value == 0):
        least = "above 0" if above_zero else "of 0 or more"
        raise ConfigError(f"{name} = {value!r}: must be a finite number {least}")


# ---- the policy ----------------------------------------------------------------------------------


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
