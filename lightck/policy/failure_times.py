"""Make times of failures from numbers that the caller draws: at random, or in bursts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lightck.policy.simulation import PlayedFailure

_BURST_SHARE = 0.35
_BURST_GAP = 1 / 9
"""The gaps of a burst, in parts of the mean, and how many are. With these the coefficient of
variation is 1.36, about what gaps between failures show in InfiniteHBD's public trace."""


def failure_times(
    mtbf_s: float, draw: Callable[[], float], *, bursts: bool = False, unsaved: float = 1.0
) -> Iterator[PlayedFailure]:
    """Yield failures without end, in the order of time.

    Args:
        mtbf_s: mean time between them, seconds.
        draw: gives numbers from 0 to 1, without 1, all as likely: `random.Random(7).random`.
        bursts: a part of the gaps is much shorter than the others; else they are exponential.
        unsaved: share of the failures that leave no just-in-time snapshot.
    """
    time_s = 0.0
    while True:
        mean_s = mtbf_s
        if bursts:
            short = draw() < _BURST_SHARE
            rest = (1 - _BURST_SHARE * _BURST_GAP) / (1 - _BURST_SHARE)
            mean_s *= _BURST_GAP if short else rest
        time_s -= mean_s * math.log1p(-draw())
        yield PlayedFailure(time_s, draw() >= unsaved)
