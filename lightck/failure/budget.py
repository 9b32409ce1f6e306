"""The time that a just-in-time snapshot needs, compared with the time left to the process.

Pure, except `measure`, which may copy once to find out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightck.loop.checkpointer import Checkpointer
from lightck.pipeline.placement import dram_rate

_RESERVED = 0.1
_RESERVED_MOST_S = 1.0
"""This part of the grace period, at most so many seconds, is kept for ending the process."""


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """The cost of a snapshot of this rank, as far as it is known.

    Attributes:
        state_bytes: bytes that this rank writes of one snapshot.
        copy_rate: bytes per second from the tensors, all copying threads together.
        medium_rate: bytes per second from DRAM to the medium; 0: copies go there directly.
        commit_s: seconds from the last copy to the commit, beyond those that the medium's rate
            explains.
        step_s: seconds of a step; None: not known yet.
    """

    state_bytes: int
    copy_rate: float
    medium_rate: float = 0.0
    commit_s: float = 0.0
    step_s: float | None = None

    @property
    def needed_s(self) -> float:
        """Return the seconds that a snapshot takes of which nothing has been copied yet."""
        copy_s = _over(self.state_bytes, self.copy_rate)
        return copy_s + _over(self.state_bytes, self.medium_rate) + self.commit_s


def usable_s(grace_s: float) -> float:
    """Return the part of a grace period, in seconds, in which a snapshot must be committed."""
    return grace_s - min(_RESERVED * grace_s, _RESERVED_MOST_S)


def shortfall(cost: SnapshotCost, grace_s: float) -> str | None:
    """Return a warning, with advice, if a snapshot does not fit into the grace period, or None."""
    needed_s = cost.needed_s
    if needed_s <= usable_s(grace_s):
        return None
    advice = "shorten the policy's interval to what you can afford to lose"
    if cost.step_s:
        # As often as the medium allows: one snapshot is committed when the next is due.
        steps = max(1, math.ceil(needed_s / cost.step_s))
        advice = (
            f"a policy of {steps} steps ({_seconds(steps * cost.step_s)}) is as short as it can"
            " keep up with, and bounds what is lost"
        )
    return (
        f"a just-in-time snapshot of {cost.state_bytes / 1e9:.3g} GB takes about"
        f" {_seconds(needed_s)} here, and grace_s = {grace_s:g} leaves"
        f" {_seconds(usable_s(grace_s))}: after SIGTERM or a notice it will not be finished, and"
        f" the newest periodic snapshot is what is left; {advice}; or make grace_s what your"
        " launcher really gives"
    )


def _over(size: int, rate: float) -> float:
    return size / rate if rate > 0 else 0.0


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


# ---- the measured cost of a snapshot of a handle, as far as it is known --------------------------

_SLOW_RATE = 1e9
"""A rate that any memory exceeds: if a snapshot fits at this rate, it need not be measured."""


def measure(checkpointer: Checkpointer, write_limit: int, usable_s: float) -> SnapshotCost | None:
    """Return the cost of a snapshot, from those so far, or from a plain copy before the first one.

    None if not even the size is known. Runs on the watchdog's thread. The plain copy takes
    milliseconds, and is made only if a slow memory would not do.

    Args:
        checkpointer: of the handle.
        write_limit: bytes per second that the user allows; 0 is no limit.
        usable_s: the time that the snapshot has to fit into.
    """
    pipeline = checkpointer.pipeline
    size = sum(entry.length for entry in pipeline.copy_plan.entries)
    if not size:
        return None
    pool, counters = pipeline.pool_stats(), pipeline.counters
    drained, limit = pool["bytes_drained"], float(write_limit)
    if not counters.durable or not pool["copy_ns"]:
        quick = size / _SLOW_RATE <= usable_s
        rate = _SLOW_RATE if quick else dram_rate()
        return SnapshotCost(size, rate, limit, step_s=checkpointer.due_check.step_s)
    medium = drained / (pool["drain_ns"] / 1e9) if drained and pool["drain_ns"] else limit
    return SnapshotCost(
        size,
        pool["bytes_copied"] / (pool["copy_ns"] / 1e9) * pipeline.pool.threads,
        medium,
        # After staged copies the commit is mostly the drain, whose rate is known already.
        0.0 if drained else counters.commit_s / counters.durable,
        checkpointer.due_check.step_s,
    )
