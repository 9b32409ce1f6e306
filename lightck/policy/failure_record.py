"""Keep what lives and symptoms of a run have shown of its failures; say what to expect next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, NamedTuple

from lightck.policy.symptoms import symptom
from lightck.types import Hazard

_VERSION = 1
_MEMORY = 20  # failures: what was before them is forgotten with the machines of that time
_MOST_SYMPTOMS = 16  # of which something is learned: the record stays below 3 KiB
_LONGEST_NAME = 64
_PRIOR_RECOVERED = 0.7  # open-jitc's authors recover about 70 % of what stopped OPT-175B's training
_PRIOR_FAILURES = 2.0  # the weight of what is believed of recovery and symptoms, in failures
_TEN_YEARS_S = 315_576_000.0
_RATES = tuple(
    math.exp(-math.log(_TEN_YEARS_S) + i / 95 * math.log(_TEN_YEARS_S / 60)) for i in range(96)
)
"""Failures per second of one rank, from one in ten years to one a minute; all as likely before."""
_LOGS = tuple(map(math.log, _RATES))


class SeenFailure(NamedTuple):
    """A failure: rank-seconds since the one before, and what it says of a healthy job.

    Attributes:
        exposure: rank-seconds since the failure before it.
        share: the part of it that no active symptom explains, 0 to 1.
        recovered: it left a just-in-time snapshot.
    """

    exposure: float
    share: float = 1.0
    recovered: bool = False


class SeenSymptom(NamedTuple):
    """A symptom: the failures that it explains, and the seconds for which it was active."""

    failures: float = 0.0
    active_s: float = 0.0


@dataclass(frozen=True)
class FailureRecord:
    """The failures and symptoms that a run has seen; each method gives a new record.

    Failures come at a rate per rank, which is unknown by orders of magnitude (any from one in ten
    years to one a minute is as likely, in logarithms), and symptoms that are active add theirs. The
    last 20 failures count, with the time since the first of them began to be waited for.

    Attributes:
        failures: the last failures, oldest first.
        exposure: rank-seconds since the last failure.
        symptoms: what each symptom that was ever active has shown, by name.
    """

    failures: tuple[SeenFailure, ...] = ()
    exposure: float = 0.0
    symptoms: tuple[tuple[str, SeenSymptom], ...] = ()

    def ran(
        self, seconds: float, world: int, active: Mapping[str, float] | None = None
    ) -> FailureRecord:
        """Return the record after so many seconds of training without a failure.

        Args:
            seconds: since the last call; what is no number above 0 counts as nothing.
            world: number of ranks.
            active: symptoms that were there, with how often: two bad GPUs are 2.
        """
        if not 0 < seconds < math.inf:
            return self
        seen = self._seen_with(active)
        for name, count in _counts(active):
            if name in seen:
                failures, active_s = seen[name]
                seen[name] = SeenSymptom(failures, active_s + count * seconds)
        return replace(
            self,
            exposure=self.exposure + seconds * world,
            symptoms=tuple(sorted(seen.items())) if active else self.symptoms,
        )

    def failed(
        self, *, recovered: bool, world: int = 1, active: Mapping[str, float] | None = None
    ) -> FailureRecord:
        """Return the record after a failure, shared out among what may have caused it.

        Args:
            recovered: it left a just-in-time snapshot.
            world: number of ranks.
            active: symptoms that were there, as in `ran`.
        """
        rates = {name: count * self._symptom_rate(name) for name, count in _counts(active)}
        base = world * self._base_rate() if rates else 1.0
        total = base + sum(rates.values())
        seen = self._seen_with(active)
        for name in rates.keys() & seen.keys():
            failures, active_s = seen[name]
            seen[name] = SeenSymptom(failures + rates[name] / total, active_s)
        failure = SeenFailure(self.exposure, base / total, recovered)
        return FailureRecord((*self.failures, failure)[-_MEMORY:], 0.0, tuple(sorted(seen.items())))

    def _seen_with(self, active: Mapping[str, float] | None) -> dict[str, SeenSymptom]:
        """Return what symptoms have shown, with those that are new, while there is room."""
        seen = dict(self.symptoms)
        for name, _ in _counts(active):
            if len(seen) < _MOST_SYMPTOMS and len(name) <= _LONGEST_NAME:
                seen.setdefault(name, SeenSymptom())
        return seen

    def hazard(
        self,
        world: int,
        active: Mapping[str, float] | None = None,
        *,
        mtbf_s: float | None = None,
        jit: bool = True,
    ) -> Hazard:
        """Return the failures to be expected now. Takes some tens of microseconds.

        Args:
            world: number of ranks.
            active: symptoms that are there, as in `ran`; each counts as one that leaves no
                just-in-time snapshot, since a host that goes takes its memory along.
            mtbf_s: mean time between the job's failures as the user believes it; counts like one
                failure seen after that time.
            jit: whether failures are saved just in time at all.
        """
        base = world * self._base_rate(0.0 if mtbf_s is None else mtbf_s * world)
        foreseen = sum(count * self._symptom_rate(name) for name, count in _counts(active))
        left = self.unrecovered_share() if jit else 1.0
        return Hazard(rate=base + foreseen, unrecoverable=left * base + foreseen)

    def unrecovered_share(self) -> float:
        """Return the share of failures that leaves no just-in-time snapshot."""
        seen = sum(each.share for each in self.failures)
        lost = sum(each.share for each in self.failures if not each.recovered)
        before = _PRIOR_FAILURES * (1 - _PRIOR_RECOVERED)
        return (before + lost) / (_PRIOR_FAILURES + seen)

    def _base_rate(self, believed: float = 0.0) -> float:
        """Return the expected rate of one rank; `believed`: rank-seconds to a failure, 0: none."""
        n = sum(each.share for each in self.failures) + (1 if believed else 0)
        exposure = self.exposure + believed + sum(each.exposure for each in self.failures)
        logs = [n * log - rate * exposure for log, rate in zip(_LOGS, _RATES, strict=True)]
        most = max(logs)
        weights = [math.exp(each - most) for each in logs]
        expected: float = sum(map(mul, weights, _RATES)) / sum(weights)
        return expected

    def _symptom_rate(self, name: str) -> float:
        seen = dict(self.symptoms).get(name, SeenSymptom())
        before_s = _PRIOR_FAILURES * symptom(name).after_s
        return (_PRIOR_FAILURES + seen.failures) / (before_s + seen.active_s)

    def to_plain(self) -> dict[str, Any]:
        """Return the record as values that JSON has."""
        return {
            "version": _VERSION,
            "failures": [list(each) for each in self.failures],
            "exposure": self.exposure,
            "symptoms": {name: list(seen) for name, seen in self.symptoms},
        }

    @classmethod
    def from_plain(cls, value: object) -> FailureRecord:
        """Return the record that `to_plain` gave; a fresh one if it is damaged or newer."""
        try:
            return cls._parsed(value)
        except (TypeError, ValueError, KeyError, ArithmeticError):
            return cls()

    @classmethod
    def _parsed(cls, value: Any) -> FailureRecord:
        if type(value) is not dict or value["version"] != _VERSION:
            raise ValueError("of another version")
        failures, symptoms = value["failures"], value["symptoms"]
        if type(failures) is not list or type(symptoms) is not dict:
            raise ValueError("damaged")
        if len(failures) > _MEMORY or len(symptoms) > _MOST_SYMPTOMS:
            raise ValueError("too long")
        return cls(
            tuple(_failure(*each) for each in failures),
            _amount(value["exposure"]),
            tuple(
                (_name(name), SeenSymptom(_amount(failures), _amount(active_s)))
                for name, (failures, active_s) in sorted(symptoms.items())
            ),
        )


def _counts(active: Mapping[str, float] | None) -> list[tuple[str, float]]:
    return [(name, n) for name, n in active.items() if 0 < n < math.inf] if active else []


def _failure(exposure: object, share: object, recovered: object) -> SeenFailure:
    if type(recovered) is not bool:
        raise ValueError("damaged")
    return SeenFailure(_amount(exposure), _amount(share, 1.0), recovered)


def _amount(value: object, most: float = 1e18) -> float:
    if type(value) not in (int, float) or not 0 <= float(value) <= most:  # type: ignore[arg-type]
        raise ValueError("damaged")
    return float(value)  # type: ignore[arg-type]


def _name(value: object) -> str:
    if type(value) is not str or len(value) > _LONGEST_NAME:
        raise ValueError("damaged")
    return value
