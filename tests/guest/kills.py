"""Kill the machine while it commits, boot it again, and see what the real recovery finds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.guest.image import Image
from tests.guest.machine import GuestError, Hardware, Machine
from tests.guest.verdict import Medium, Verdict, disagreement, kept, medium, recovered

LIMIT_S = 240.0
"""Per boot; dozens of times what most take on two idle cores."""


@dataclass(frozen=True)
class Bench:
    """What every job is given."""

    image: Image
    folder: Path
    """Of this job alone; backing files stay in it over boots."""
    random: random.Random
    kills: int
    """How often persistent media are killed."""
    snapshots: int
    """How many images are taken of a running machine."""

    def within(self, folder: Path) -> Bench:
        """The same for other memory."""
        return replace(self, folder=folder)

    def boot(self, hardware: Hardware, *words: str) -> Machine:
        """A machine that does this."""
        return Machine(self.image, hardware, self.folder, list(words), LIMIT_S)


@dataclass(frozen=True)
class Case:
    """One medium and what it must show."""

    job: str
    hardware: Hardware
    setup: str
    """Function of media.sh."""
    medium: Medium
    program: str = "lckguest"
    options: str = ""
    again: str = ""
    """Function of media.sh after a boot, where it is another."""
    lies: bool = False
    """A control: the region code says what is not so, and the job must notice."""
    kills_most: int = 1000
    """Fewer where another job on the same medium is killed often."""

    def step(self, command: str) -> str:
        """For the guest's init."""
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


def instants(count: int) -> list[Callable[[Machine, random.Random], str]]:
    """How to choose the moment, per kill."""
    kinds = [_any_instant, _acknowledged, _creation]
    return [kinds[i % 3] if i < 3 else kinds[i % 2] for i in range(count)]


def persistent(case: Case, bench: Bench) -> Iterator[Verdict]:
    """Kill after kill on the same medium: each boot verifies what the last one left, and goes on.

    The kill while the region is made comes first, when there is nothing yet to be lost.
    """
    count = min(bench.kills, case.kills_most)
    moments = sorted(instants(count), key=lambda moment: moment is not _creation)
    words = [case.setup, "fresh", case.step("write")]
    before: tuple[str, Medium, int, int, float] | None = None
    for moment in [*moments, None]:
        if moment is None:
            words = [case.again or case.setup, "again", case.step("verify")]
        with bench.boot(case.hardware, *words) as machine:
            if before is not None:
                machine.says(f"EXIT .*{case.program}:verify")
                yield _judge(case, before, recovered(machine))
            if moment is None:
                machine.wait_off()
                return
            started = time.monotonic()
            killed = moment(machine, bench.random)
            machine.kill()
        if machine.all("FAILED"):
            raise GuestError("the writer failed:\n" + machine.console())
        said = medium(machine) if machine.all("IS ") else case.medium
        acknowledged, begun = machine.last(r"COMMITTED (\d+)"), machine.last(r"BEGUN (\d+)")
        if before is not None and not begun:  # killed before it went on: all is as it was
            acknowledged, begun = before[2], before[3]
        before = (killed, said, acknowledged, begun, started)
        words = [case.setup, "again", case.step("verify"), case.step("write")]


def _judge(case: Case, before: tuple[str, Medium, int, int, float], number: int | None) -> Verdict:
    killed, said, acknowledged, begun, started = before
    lost = kept(acknowledged, begun, number)
    wrong = lost or disagreement(said, True, lost)
    if said != case.medium:
        wrong = f"taken for {said}, expected {case.medium}"
    return Verdict(
        case.job,
        said.name,
        said.unit,
        said.survives,
        f"machine killed {killed}",
        acknowledged,
        begun,
        number,
        "nothing acknowledged is lost",
        wrong,
        time.monotonic() - started,
    )


def forgetful(case: Case, bench: Bench) -> Iterator[Verdict]:
    """A control: after a power failure the medium must have lost what was acknowledged."""
    started = time.monotonic()
    with bench.boot(case.hardware, case.setup, "fresh", case.step("write"), "stay") as machine:
        machine.says("STAYS")
        said, acknowledged = medium(machine), machine.last(r"COMMITTED (\d+)")
    with bench.boot(case.hardware, case.again, "again", "lckguest:verify") as machine:
        machine.wait_off()
        number = recovered(machine)
    lost = kept(acknowledged, acknowledged, number)
    differs = disagreement(said, True, lost)
    wrong = "" if lost else f"nothing was lost of {acknowledged}: this control controls nothing"
    if case.lies and not differs:
        wrong = f"{said}: that the region code lied went unnoticed"
    if not case.lies and differs:
        wrong = differs
    if said != case.medium:
        wrong = f"taken for {said}, expected {case.medium}"
    yield Verdict(
        case.job,
        said.name,
        said.unit,
        said.survives,
        "machine killed after the last acknowledgement",
        acknowledged,
        acknowledged,
        number,
        "data is lost, and the lie is noticed" if case.lies else "data is lost",
        wrong,
        time.monotonic() - started,
    )


def node(case: Case, bench: Bench) -> Iterator[Verdict]:
    """Memory of a NUMA node: outlives the process, not the machine."""
    started = time.monotonic()
    steps = [f"interrupted:25{case.options}", f"lckguest:verify{case.options}"]
    with bench.boot(case.hardware, case.setup, "fresh", *steps, "stay") as machine:
        machine.says("STAYS")
        said, number = medium(machine), recovered(machine)
        acknowledged, begun = machine.last(r"COMMITTED (\d+)"), machine.last(r"BEGUN (\d+)")
        nodes = {match[1] for match in machine.all(r"IS .* node=(-?\d+)")}
    lost = kept(acknowledged, begun, number)
    wrong = lost or disagreement(said, False, lost)
    if said != case.medium or nodes != {"1"}:
        wrong = f"taken for {said} on node {nodes}, expected {case.medium} on node 1"
    row = (case.job, said.name, said.unit, said.survives)
    yield Verdict(
        *row,
        "process killed after an acknowledgement",
        acknowledged,
        begun,
        number,
        "nothing acknowledged is lost",
        wrong,
        time.monotonic() - started,
    )
    with bench.boot(case.hardware, case.setup, "again", "lckguest:verify") as machine:
        machine.wait_off()
        after = recovered(machine)
    lost = kept(number or 0, begun, after)
    wrong = disagreement(said, True, lost)
    yield Verdict(
        *row,
        "machine killed while idle",
        number or 0,
        begun,
        after,
        "data is lost",
        wrong,
        time.monotonic() - started,
    )
