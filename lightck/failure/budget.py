"""The time that a just-in-time snapshot needs, compared with the time left to the process. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_KEPT = 0.1
_KEPT_MOST_S = 1.0
"""This part of the grace period, at most so many seconds, is kept for ending the process."""


@dataclass(frozen=True, slots=True)
class Measured:
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
    return grace_s - min(_KEPT * grace_s, _KEPT_MOST_S)


def shortfall(measured: Measured, grace_s: float) -> str | None:
    """Return a warning, with advice, if a snapshot does not fit into the grace period, or None."""
    needed_s = measured.needed_s
    if needed_s <= usable_s(grace_s):
        return None
    advice = "shorten the policy's interval to what you can afford to lose"
    if measured.step_s:
        # As often as the medium allows: one snapshot is committed when the next is due.
        steps = max(1, math.ceil(needed_s / measured.step_s))
        advice = (
            f"a policy of {steps} steps ({_said(steps * measured.step_s)}) is as short as it can"
            " keep up with, and bounds what is lost"
        )
    return (
        f"a just-in-time snapshot of {measured.state_bytes / 1e9:.3g} GB takes about"
        f" {_said(needed_s)} here, and grace_s = {grace_s:g} leaves {_said(usable_s(grace_s))}:"
        f" after SIGTERM or a notice it will not be finished, and the newest periodic snapshot is"
        f" what is left; {advice}; or make grace_s what your launcher really gives"
    )


def _over(size: int, rate: float) -> float:
    return size / rate if rate > 0 else 0.0


def _said(seconds: float) -> str:
    return f"{seconds:.3g} s"
