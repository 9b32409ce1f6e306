"""Compute trimmed means with their intervals, and decide when a run has seen enough.

Single steps on a shared machine vary by 20 % and have outliers in one direction only, so that plain
means and their standard errors would mislead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

TRIMMED = 0.2  # share cut off at each end: robust, yet 80 % as efficient as the mean if all is well
RESAMPLES = 2000  # the interval's ends then vary by about 2 % of its width
LEVEL = 0.95
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182}
"""Student's quantile for an interval of 95 %, by the number of samples."""
_SEED = 20231106  # fixed, so that one stored file gives one interval


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, in the samples' unit."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Return half the width of the interval."""
        return (self.high - self.low) / 2

    def over(self, scale: float) -> Estimate:
        """Return the estimate in units of a positive `scale`, whose own error is not counted."""
        return Estimate(self.value / scale, self.low / scale, self.high / scale)


def trimmed_mean(samples: ArrayLike, trimmed: float = TRIMMED) -> float:
    """Return the mean after the share `trimmed` (rounded down) is cut off at each end."""
    return float(_along_rows(np.atleast_2d(np.asarray(samples, float)), trimmed)[0])


def _along_rows(rows: NDArray[np.float64], trimmed: float) -> NDArray[np.float64]:
    count = rows.shape[1]
    if count == 0:
        raise ValueError("no samples")
    cut = int(count * trimmed)
    kept = np.sort(rows, axis=1)[:, cut : count - cut]
    means: NDArray[np.float64] = kept.mean(axis=1)
    return means


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the trimmed mean and its percentile bootstrap interval; of few samples Student's.

    Resamples of two to four samples hardly reach beyond them: a bootstrap interval of two covers
    50 % and not 95 %. A single sample has no bounds.
    """
    values = np.asarray(samples, float)
    if values.size < 2:
        return Estimate(trimmed_mean(values), -math.inf, math.inf)
    if (quantile := _STUDENT.get(values.size)) is not None:
        mean = trimmed_mean(values)  # nothing is cut off of so few
        half = quantile * float(values.std(ddof=1)) / math.sqrt(values.size)
        return Estimate(mean, mean - half, mean + half)
    draws = np.random.default_rng(_SEED).integers(values.size, size=(RESAMPLES, values.size))
    means = _along_rows(values[draws], TRIMMED)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(trimmed_mean(values), float(low), float(high))


def ratio(above: Estimate, below: Estimate) -> Estimate:
    """Return `above` / `below`; the bounds pair worst with worst, which is wider than 95 %.

    Where `below` may be zero or less, the ratio has no upper bound; where `above` may be, too,
    there is nothing to compare.
    """

    def divided(x: float, y: float) -> float:
        return x / y if y > 0 else math.inf if x > 0 else math.nan

    value = divided(above.value, below.value)
    return Estimate(value, divided(above.low, below.high), divided(above.high, below.low))


@dataclass(frozen=True)
class Enough:
    """The rule when to stop sampling: the interval is narrow, or a cap is reached.

    Attributes:
        half_width: wanted half-width, in the samples' unit; 0: not looked at.
        relative: wanted half-width as a share of the value's size; 0: not looked at. Either
            suffices.
        least: minimal number of samples.
        most: maximal number of samples.
        seconds: time after which `least` samples suffice.
    """

    half_width: float
    relative: float
    least: int
    most: int
    seconds: float

    def narrow(self, samples: Sequence[float]) -> bool:
        """Return whether the interval is as narrow as wanted."""
        found = estimate(samples)
        wanted = max(self.half_width, self.relative * abs(found.value))
        return found.half_width <= wanted

    def done(self, samples: Sequence[float], spent_s: float) -> bool:
        """Return whether to stop now."""
        if len(samples) < self.least:
            return False
        return len(samples) >= self.most or spent_s >= self.seconds or self.narrow(samples)
