"""The curve of a training's loss, in a few numbers: how fast it falls now, against its mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

_VERSION = 1
_FIRST = 16  # losses that set the first level, and what is usual between two
_LEAST = 64  # losses without which nothing is said
_BINS = 8  # per octave of time
_LAST = 6  # bins whose slope is how fast it falls now: more lag behind, fewer are noise
_STEP = 1 / 32  # by which level and deviation follow a loss
_CLIP = 8.0  # deviations from the level, beyond which a loss counts as that
_MOST = 1e150  # so that sums of squares are finite


class Bin(NamedTuple):
    """The losses seen in an eighth of an octave of time, added up."""

    eighth: int
    losses: int
    log_time: float
    loss: float


@dataclass(frozen=True)
class LossCurve:
    """The losses that were seen since the start of a run; each method gives a new curve.

    A loss far from the others is clipped. What counts is ratios of differences of losses: they may
    be of any scale, and negative.

    Attributes:
        first: time and loss of the first ones, until they are enough to set what follows.
        count: losses seen.
        first_level: mean of the first 16.
        level: a running mean.
        deviation: a running mean of the distance to it.
        bins: the last octave, oldest first.
    """

    first: tuple[tuple[float, float], ...] = ()
    count: int = 0
    first_level: float = 0.0
    level: float = 0.0
    deviation: float = 0.0
    bins: tuple[Bin, ...] = ()

    def observed(self, time_s: float, loss: float) -> LossCurve:
        """Return the curve with one loss more; itself if the loss is no number.

        Args:
            time_s: seconds of training since the run began, lives before this one included; not
                less than at the last call.
            loss: the loss of a step.
        """
        if not (0 < time_s < _MOST and -_MOST < loss < _MOST):
            return self
        if self.count >= _FIRST:
            return self._followed(time_s, loss)
        first = (*self.first, (time_s, loss))
        if len(first) < _FIRST:
            return replace(self, first=first, count=len(first))
        middle = median(each for _, each in first)
        deviation = 1.25 * median(abs(each - middle) for _, each in first)
        curve = LossCurve((), 0, 0.0, middle, deviation)
        clipped = [curve._clipped(each) for _, each in first]
        for (when, _), each in zip(first, clipped, strict=True):
            curve = replace(curve, bins=_added(curve.bins, when, each))
        return replace(curve, count=_FIRST, first_level=math.fsum(clipped) / _FIRST)

    def _clipped(self, loss: float) -> float:
        most = _CLIP * self.deviation
        if not most:  # all alike so far: that says nothing of what is usual
            return loss
        return min(max(loss, self.level - most), self.level + most)

    def _followed(self, time_s: float, loss: float) -> LossCurve:
        loss = self._clipped(loss)
        off = loss - self.level
        return LossCurve(
            (),
            self.count + 1,
            self.first_level,
            self.level + off * _STEP,
            self.deviation + (abs(off) - self.deviation) * _STEP,
            _added(self.bins, time_s, loss),
        )

    @property
    def progress(self) -> float | None:
        """How fast the loss falls now, over its mean since the start; None: it has not fallen.

        Also None while too few losses were seen. Takes some ten microseconds.
        """
        if self.count < _LEAST or len(self.bins) < 3:
            return None
        last = self.bins[-2:]
        now = sum(each.loss for each in last) / sum(each.losses for each in last)
        gained = self.first_level - now
        # The mean of the first 16 is itself off by half of that.
        if gained <= self.deviation / 2:
            return None
        points = [
            (each.log_time / each.losses, each.loss / each.losses) for each in self.bins[-_LAST:]
        ]
        slopes = [
            (y - points[j][1]) / (x - points[j][0])
            for i, (x, y) in enumerate(points)
            for j in range(i)
            if x > points[j][0]
        ]
        # Over ln t: both rates have a factor 1 / t, which goes out.
        return max(0.0, -median(slopes) / gained) if slopes else None

    def to_plain(self) -> dict[str, Any]:
        """Return the curve as values that JSON has."""
        return {
            "version": _VERSION,
            "first": [list(each) for each in self.first],
            "count": self.count,
            "levels": [self.first_level, self.level, self.deviation],
            "bins": [list(each) for each in self.bins],
        }

    @classmethod
    def from_plain(cls, value: object) -> LossCurve:
        """Return the curve that `to_plain` gave; a fresh one if it is damaged or newer."""
        try:
            return cls._parsed(value)
        except (TypeError, ValueError, KeyError, ArithmeticError):
            return cls()

    @classmethod
    def _parsed(cls, value: Any) -> LossCurve:
        if type(value) is not dict or value["version"] != _VERSION:
            raise ValueError("of another version")
        count, first, bins = value["count"], value["first"], value["bins"]
        first_level, level, deviation = map(_number, value["levels"])
        if type(first) is not list or type(bins) is not list or deviation < 0:
            raise ValueError("damaged")
        if len(first) != (count if count < _FIRST else 0) or len(bins) > _BINS + 1:
            raise ValueError("damaged")
        return cls(
            tuple((_number(time_s, 0), _number(loss)) for time_s, loss in first),
            _whole(count),
            *(first_level, level, deviation),
            tuple(
                Bin(_whole(index, -1024), _whole(n, 1), _number(log), _number(loss))
                for index, n, log, loss in bins
            ),
        )


def _added(bins: tuple[Bin, ...], time_s: float, loss: float) -> tuple[Bin, ...]:
    log = math.log(time_s)
    index = math.floor(log * (_BINS / math.log(2)))
    if bins and index <= bins[-1].eighth:
        index, count, logs, losses = bins[-1]
        return (*bins[:-1], Bin(index, count + 1, logs + log, losses + loss))
    kept = tuple(each for each in bins if each.eighth >= index - _BINS)
    return (*kept, Bin(index, 1, log, loss))


def _number(value: object, above: float = -1e200) -> float:
    if type(value) not in (int, float) or not above < float(value) < 1e200:  # type: ignore[arg-type]
        raise ValueError("damaged")
    return float(value)  # type: ignore[arg-type]


def _whole(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 53:
        raise ValueError("damaged")
    return value
