"""Compute or simulate a case of when to save: see `bench.simulated`. Nothing is trained or timed.

Records:
    ratio: what lightck's way wastes over what it is compared with; of `checkfreq` steps over steps.
    the others: the case's own numbers, by the names in `bench.simulated`.
"""

from __future__ import annotations

from bench.errors import BenchError
from bench.measures import Job
from bench.record import Record, single
from bench.simulated import CASES

_NOTE = "simulated or computed: nothing to verify"


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    case = job.method.case
    if case not in CASES:
        raise BenchError(f"{job.contender.label}: case = {case!r}: one of {', '.join(CASES)}")
    numbers = CASES[case](job.method.least)
    note = dict.fromkeys(numbers, "") | {"ratio": _NOTE}
    return [
        single(name, "s" if name.endswith("_s") else "", value, note[name])
        for name, value in numbers.items()
    ]
