"""A medium that goes bad: media errors under a snapshot, writes that fail under a writer."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.guest.kills import Bench, Case
from tests.guest.machine import GuestError, Machine
from tests.guest.verdict import Verdict, disagreement, judge, kept, misread, recovered, see

COMMITS = 20
PARTS = ("payload", "manifest", "record")
E_PREVIOUS = "-3"


def _status(machine: Machine, step: str) -> int:
    ended = machine.all(rf"EXIT (\d+) {step}")
    if not ended:
        raise GuestError(f"{step} was never run:\n" + machine.console())
    return int(ended[-1][1])


def poison(case: Case, bench: Bench) -> Iterator[Verdict]:
    """Loads of a part of the newest snapshot fault: the older one is used, and nothing dies."""
    for part in PARTS:
        started = time.monotonic()
        folder = bench.folder / part
        folder.mkdir()
        steps = [f"lckguest:write:commits={COMMITS}", f"poisoned:{part}", "lckguest:verify"]
        with bench.within(folder).boot(case.hardware, case.setup, "fresh", *steps) as machine:
            machine.wait_off()
        seen = see(machine, f"nothing killed, bad blocks under the newest {part}", started)
        status = _status(machine, "lckguest:verify")
        number = recovered(machine) if status == 0 else None
        signal = ", a signal" if status > 128 else ""
        yield judge(
            case.job,
            seen,
            number,
            "the older snapshot",
            "" if machine.all("POISONED") else "the guest could not make a bad block",
            f"recovery ended with {status}{signal}" if status else "",
            "" if number == COMMITS - 1 else f"expected {COMMITS - 1}",
        )


def failing_writes(case: Case, bench: Bench) -> Iterator[Verdict]:
    """A sync fails: the region is latched, and what was acknowledged before is on the medium."""
    started = time.monotonic()
    step = f"failing:{COMMITS}"
    with bench.boot(case.hardware, case.setup, "fresh", step, "stay") as machine:
        machine.says("STAYS")
        seen = see(machine, "every write fails under the writer, then machine killed", started)
        status, failures = _status(machine, step), len(machine.all("UNCOMMITTED"))
        refused = [match[1] for match in machine.all(r"REFUSED slot \d: (-\d+)")]
    with bench.boot(case.hardware, case.setup, "again", "lckguest:verify") as machine:
        machine.wait_off()
        number = recovered(machine)
    lost = kept(seen.acknowledged, seen.begun, number)
    latched = status == 0 and failures == 1 and refused == [E_PREVIOUS, E_PREVIOUS]
    yield judge(
        case.job,
        seen,
        number,
        "the region is latched, nothing acknowledged is lost",
        misread(seen.said, case.medium),
        "" if latched else f"exit {status}, {failures} failures, then refused with {refused}",
        disagreement(seen.said, True, lost) or lost,
    )
