"""Kill the machine while it commits, boot it again, and see what the real recovery finds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.guest.image import Image
from tests.guest.machine import GuestError, Hardware, Machine
from tests.guest.verdict import (
    Medium,
    Seen,
    Verdict,
    disagreement,
    judge,
    kept,
    misread,
    recovered,
    see,
)

LIMIT_S = 240.0
"""Per boot; dozens of times what most take on two idle cores."""


@dataclass(frozen=True)
class Bench:
    """Every job is given a bench."""

    image: Image
    folder: Path
    """The folder is this job's alone; backing files stay in it over boots."""
    random: random.Random
    kills: int
    """Persistent media are killed this many times."""
    images: int
    """This many images are taken of a running machine."""

    def within(self, folder: Path) -> Bench:
        """Return the same bench for other memory, whose files are in this folder."""
        return replace(self, folder=folder)

    def boot(self, hardware: Hardware, *words: str) -> Machine:
        """Return a machine that does this."""
        return Machine(self.image, hardware, self.folder, list(words), LIMIT_S)


@dataclass(frozen=True)
class Case:
    """One medium and what it must show."""

    job: str
    hardware: Hardware
    setup: str
    """This names a function of media.sh."""
    medium: Medium
    program: str = "lckguest"
    options: str = ""
    lies: bool = False
    """A control: the region code says what is not so, and the job must notice."""
    kills_most: int = 1000
    """The limit is lower where another job on the same medium is killed often."""

    def step(self, command: str) -> str:
        """Spell a step for the guest's init."""
        return f"{self.program}:{command}{self.options}"


def _creation(machine: Machine, rng: random.Random) -> str:
    machine.says("CREATING")
    time.sleep(rng.uniform(0, 0.3))
    return "while the region is made"


def _acknowledged(machine: Machine, rng: random.Random) -> str:
    wanted = len(machine.all("COMMITTED")) + rng.randint(3, 30)
    machine.until(f"{wanted} commits", lambda: len(machine.all("COMMITTED")) >= wanted)
    return "right after an acknowledgement"


def _any_instant(machine: Machine, rng: random.Random) -> str:
    _acknowledged(machine, rng)
    time.sleep(rng.uniform(0, 0.06))
    return "at any instant"


def boundary_state(count: int) -> list[Callable[[Machine, random.Random], str]]:
    """Return, per kill, how to choose the moment."""
    kinds = [_any_instant, _acknowledged, _creation]
    return [kinds[i % 3] if i < 3 else kinds[i % 2] for i in range(count)]


def persistent(case: Case, bench: Bench) -> Iterator[Verdict]:
    """Kill after kill on the same medium: each boot verifies what the last one left, and goes on.

    The kill while the region is made comes first, when there is nothing yet to be lost.
    """
    count = min(bench.kills, case.kills_most)
    moments = sorted(boundary_state(count), key=lambda moment: moment is not _creation)
    seen: Seen | None = None
    for moment in [*moments, None]:
        steps = ["fresh"] if seen is None else ["again", case.step("verify")]
        steps += [case.step("write")] if moment is not None else []
        with bench.boot(case.hardware, case.setup, *steps) as machine:
            if seen is not None:
                machine.says(f"EXIT .*{case.program}:verify")
                yield _kept_all(case, seen, recovered(machine))
            if moment is None:
                machine.wait_off()
                return
            started = time.monotonic()
            killed = moment(machine, bench.random)
            machine.kill()
        if machine.all("FAILED"):
            raise GuestError("the writer failed:\n" + machine.console())
        seen = _after(machine, case, seen, f"machine killed {killed}", started)


def _after(machine: Machine, case: Case, before: Seen | None, killed: str, started: float) -> Seen:
    """Return what must be there; killed before anything was begun, what was there before."""
    if machine.all("BEGUN"):
        return see(machine, killed, started)
    if before is not None:
        return replace(before, killed=killed, started=started)
    return Seen(case.medium, 0, 0, killed, started)


def _kept_all(case: Case, seen: Seen, number: int | None) -> Verdict:
    lost = kept(seen.acknowledged, seen.begun, number)
    reasons = (misread(seen.said, case.medium), disagreement(seen.said, True, lost) or lost)
    return judge(case.job, seen, number, "nothing acknowledged is lost", *reasons)


def forgetful(case: Case, bench: Bench) -> Iterator[Verdict]:
    """A control: after a power failure the medium must have lost what was acknowledged."""
    started = time.monotonic()
    with bench.boot(case.hardware, case.setup, "fresh", case.step("write"), "stay") as machine:
        machine.says("STAYS")
        seen = see(machine, "machine killed after the last acknowledgement", started)
    with bench.boot(case.hardware, case.setup, "again", "lckguest:verify") as machine:
        machine.wait_off()
        number = recovered(machine)
    lost = kept(seen.acknowledged, seen.begun, number)
    noticed = disagreement(seen.said, True, lost)
    yield judge(
        case.job,
        seen,
        number,
        "data is lost, and the lie is noticed" if case.lies else "data is lost",
        misread(seen.said, case.medium),
        "" if lost else "nothing was lost: this control controls nothing",
        noticed if not case.lies else "",
        "that the region code lied went unnoticed" if case.lies and not noticed else "",
    )


def node(case: Case, bench: Bench) -> Iterator[Verdict]:
    """Memory of a NUMA node: outlives the process, not the machine."""
    started = time.monotonic()
    steps = [f"interrupted:25{case.options}", case.step("verify")]
    with bench.boot(case.hardware, case.setup, "fresh", *steps, "stay") as machine:
        machine.says("STAYS")
        seen = see(machine, "process killed after an acknowledgement", started)
        number = recovered(machine)
        nodes = {match[1] for match in machine.all(r"IS .* node=(-?\d+)")}
    lost = kept(seen.acknowledged, seen.begun, number)
    yield judge(
        case.job,
        seen,
        number,
        "nothing acknowledged is lost",
        misread(seen.said, case.medium),
        "" if nodes == {"1"} else f"its memory is on nodes {sorted(nodes)}, expected 1",
        disagreement(seen.said, False, lost) or lost,
    )
    started = time.monotonic()
    with bench.boot(case.hardware, case.setup, "again", case.step("verify")) as machine:
        machine.wait_off()
        after = recovered(machine)
    seen = replace(seen, killed="machine killed while idle", started=started)
    lost = kept(seen.acknowledged, seen.begun, after)
    yield judge(case.job, seen, after, "data is lost", disagreement(seen.said, True, lost))
