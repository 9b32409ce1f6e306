"""Decide whether targets are met: the interval's far end must be on the right side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.definition import Target
from bench.record import Result
from bench.statistics import Estimate, ratio

MISSED, OPEN, ABSENT, MET = "missed", "not shown", "not available", "met"
_ORDER = (MISSED, OPEN, ABSENT, MET)


@dataclass(frozen=True)
class Verdict:
    """A target with what was found.

    Attributes:
        target: the target as the definition had it when it was measured.
        definition: name of the definition.
        state: one of MISSED (the value; or snapshots have slipped), OPEN (only the interval's far
            end), ABSENT, MET.
        found: the value with its interval; None if it was not measured.
        unit: of the value.
        why: for ABSENT, the reason; for others, what the value was compared with.
        capped: the run stopped before the interval was as narrow as wanted.
    """

    target: Target
    definition: str
    state: str
    found: Estimate | None
    unit: str = ""
    why: str = ""
    capped: bool = False


def verdicts(results: Iterable[Result]) -> list[Verdict]:
    """Return the verdicts on all targets of all results.

    Misses come first, then the others in the definitions' order.
    """
    found = [
        judge(result, target)
        for result in results
        for target in targets_of(result.about["definition"])
    ]
    return sorted(found, key=lambda verdict: _ORDER.index(verdict.state))


def targets_of(definition: Mapping[str, Any]) -> list[Target]:
    """Return the targets of a definition as it was stored."""
    return [Target(**{**t, "against": tuple(t["against"])}) for t in definition["targets"]]


def judge(result: Result, target: Target) -> Verdict:
    """Compare one target with the records."""
    name = result.about["definition"]["name"]
    if target.unavailable:
        return Verdict(target, name, ABSENT, None, why=target.unavailable)
    record = result.of(target.engine, target.measure)
    if record is None:
        lost = result.about.get("slipped", {}).get(target.engine)
        why = lost or f"{target.engine} was not run"
        return Verdict(target, name, MISSED if lost else ABSENT, None, why=why)
    value = Estimate(record.value, record.low, record.high)
    unit, why = record.unit, ""
    if target.against:
        rivals = [r for label in target.against if (r := result.of(label, target.measure))]
        missing = [x for x in target.against if result.of(x, target.measure) is None]
        unable = [label for label in missing if label in result.about.get("absent", {})]
        if len(unable) < len(missing) or not rivals:
            return Verdict(target, name, ABSENT, None, why=f"{', '.join(missing)} was not run")
        best = min(rivals, key=lambda r: r.value)
        value = ratio(Estimate(best.value, best.low, best.high), value)
        unit, why = "", f"against {best.engine}"
        why += f" ({', '.join(unable)} cannot run here)" if unable else ""
    return Verdict(target, name, state(target, value), value, unit, why, record.capped)


def state(target: Target, found: Estimate) -> str:
    """Return the state of a target.

    It is MET only if the whole interval is on the right side and narrower than allowed.
    """
    if math.isnan(found.value):
        return OPEN
    if target.at_most is not None:
        met, value = found.high <= target.at_most, found.value <= target.at_most
        met = met and found.half_width <= target.at_most
    else:
        assert target.at_least is not None
        met, value = found.low >= target.at_least, found.value >= target.at_least
    return MET if met else OPEN if value else MISSED
