"""A medium that goes bad: media errors under a snapshot, writes that fail under a writer."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.guest.kills import Bench, Case
from tests.guest.machine import GuestError, Machine
from tests.guest.verdict import Verdict, disagreement, kept, medium, recovered

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
            said = medium(machine)
            status = _status(machine, "lckguest:verify")
            number = recovered(machine) if status == 0 else None
        wrong = ""
        if not machine.all("POISONED"):
            wrong = "the guest could not make a bad block"
        elif status != 0:
            wrong = f"recovery ended with {status}" + (", a signal" if status > 128 else "")
        elif number != COMMITS - 1:
            wrong = f"recovered {number}, expected the older snapshot, {COMMITS - 1}"
        yield Verdict(
            case.job,
            said.name,
            said.unit,
            said.survives,
            f"nothing killed, bad blocks under the newest {part}",
            COMMITS,
            COMMITS,
            number,
            "the older snapshot",
            wrong,
            time.monotonic() - started,
        )


def failing_writes(case: Case, bench: Bench) -> Iterator[Verdict]:
    """A sync fails: the region is latched, and what was acknowledged before is on the medium."""
    started = time.monotonic()
    step = f"failing:{COMMITS}"
    with bench.boot(case.hardware, case.setup, "fresh", step, "stay") as machine:
        machine.says("STAYS")
        said, status = medium(machine), _status(machine, step)
        acknowledged, begun = machine.last(r"COMMITTED (\d+)"), machine.last(r"BEGUN (\d+)")
        refused = [match[1] for match in machine.all(r"REFUSED slot \d: (-\d+)")]
        failures = machine.all("UNCOMMITTED")
    with bench.boot(case.hardware, case.again, "again", "lckguest:verify") as machine:
        machine.wait_off()
        number = recovered(machine)
    lost = kept(acknowledged, begun, number)
    wrong = lost or disagreement(said, True, lost)
    if status != 0 or len(failures) != 1 or refused != [E_PREVIOUS, E_PREVIOUS]:
        wrong = f"exit {status}, {len(failures)} failures, then refused with {refused}"
    yield Verdict(
        case.job,
        said.name,
        said.unit,
        said.survives,
        "every write fails under the writer, then machine killed",
        acknowledged,
        begun,
        number,
        "the region is latched, nothing acknowledged is lost",
        wrong,
        time.monotonic() - started,
    )
