"""The table of symptoms: what each says of failures to come. A policy learns how far it is true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Symptom:
    """A sign of failures to come, which a probe sees.

    Attributes:
        name: what probes call it.
        after_s: expected seconds from the symptom to a failure, before anything has been learned;
            its inverse is a rate of failures, which adds to that of a healthy job.
        holds_s: seconds for which it counts after a probe last saw it; 0: while probes see it.
        medium: what fails is the medium that the region lies on.
        evidence: where `after_s` comes from.
    """

    name: str
    after_s: float
    holds_s: float = 0.0
    medium: bool = False
    evidence: str = ""


_GUESS = "a guess"
_TABLE = (
    Symptom("gpu_action", 600.0, evidence=f"the driver asks for a reset or a reboot; {_GUESS}"),
    Symptom("gpu_error", 1800.0, _HOUR_S, evidence=f"NVIDIA's Xid catalog says reset; {_GUESS}"),
    Symptom("memory", 1800.0, evidence=_GUESS),
    Symptom("oom_kill", 1800.0, _HOUR_S, evidence=_GUESS),
    Symptom("link", 6 * _HOUR_S, _HOUR_S, evidence=_GUESS),
    Symptom("dram", _HOUR_S, 24 * _HOUR_S, evidence=_GUESS),
    Symptom(
        "dram_corrected",
        2.6e6,
        24 * _HOUR_S,
        evidence="some 1 % of machines with corrected errors have one that is not, within a month"
        " (from memory of Schroeder, Pinheiro, Weber: DRAM Errors in the Wild, 2009)",
    ),
    Symptom(
        "rebalance",
        900.0,
        evidence=f"EC2 says so where an interruption is likely, sooner than its notice; {_GUESS}",
    ),
    Symptom(
        "drive",
        1.43e7,
        float("inf"),
        medium=True,
        evidence="drives with SMART 5 and 197 above 0 fail at 220 % a year (Backblaze's logs of"
        " 2013: 22,892 drives, 120 failures)",
    ),
)
SYMPTOMS: Mapping[str, Symptom] = {each.name: each for each in _TABLE}
"""The symptoms that lightck's own probes see, by name."""


def symptom(name: str) -> Symptom:
    """Return the symptom of that name; for another name a guess of an hour, for an hour."""
    return SYMPTOMS.get(name) or Symptom(name, _HOUR_S, _HOUR_S, evidence="a probe of the user's")
