"""The policy that spaces snapshots by how much progress they protect."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightck.policy.auto import Auto
from lightck.types import Moment

_START = 1.5
_MOST = 4.0


@dataclass(frozen=True, kw_only=True)
class Quality(Auto):
    """A policy like `Auto`, with lost work priced by how far the loss fell in it.

    Snapshots are closer together while the loss falls fast, and wider apart later: the interval is
    that of `Auto` by the inverse square root of how fast the loss falls now, against the mean since
    the start. With work priced so, that spacing wastes least: waste per second is o n + h r / (2 n)
    for n snapshots a second and progress at a rate r, least at n ~ sqrt(r). It has COCI's purpose
    (FGCS 2025, doi 10.1016/j.future.2024.107597) by another rule; see `formulas.coci`.

    Its price: in hours it wastes more than `Auto`, up to 70 % more where the loss has long been
    flat, for up to 29 % less waste in progress. While the loss has not fallen, or cannot be seen,
    the interval is that of `Auto`; `budget`, `most_s` and the time of a commit bound it likewise.

    Args:
        budget: as in `Auto`; so are the others.
        mtbf_s: see `Auto`.
        most_s: see `Auto`.
        watch: see `Auto`.

    Raises:
        ConfigError: an argument is not of the kind that `Auto` takes.
    """

    def _stretch(self, moment: Moment) -> float:
        if moment.progress is None:
            return 1.0
        # The end is not known: as if the mean were taken over a time half as long again.
        least = 1 / (_START * _MOST) ** 2
        return max(math.sqrt(1 / max(moment.progress, least)), 1.0) / _START
