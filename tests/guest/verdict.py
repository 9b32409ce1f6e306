"""A verdict says what a job showed, and whether that is what lightck promises."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from tests.guest.machine import GuestError, Machine


def _load(path: Path) -> ModuleType:
    """Load one module of lightck without the package around it, which needs torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


survival = _load(Path(__file__).parents[2] / "lightck/region/medium.py")
"""The words of `handle.survives`."""


@dataclass(frozen=True)
class Medium:
    """lightck says that a region lies on this medium."""

    name: str
    unit: str
    granularity: int

    @property
    def survives(self) -> str:
        """Return the word that `handle.survives` has for this medium."""
        words: str = survival.survives(self.granularity)
        return words

    def __str__(self) -> str:
        """Name the medium for messages."""
        return f"{self.name}/{self.unit}"


@dataclass(frozen=True)
class Seen:
    """A writer had said this when it was stopped."""

    said: Medium
    acknowledged: int
    begun: int
    killed: str
    """This says what was stopped, how and when."""
    started: float
    """The clock showed this at the start; the verdict's seconds count from it."""


@dataclass(frozen=True)
class Verdict:
    """One row of the proof."""

    job: str
    medium: str
    granularity: str
    says_survives: str
    killed: str
    acknowledged: int
    begun: int
    recovered: int | None
    expected: str
    wrong: str
    """The job failed for this reason; empty: it passed."""
    seconds: float
    images: int = 0
    """This many images were taken of a running machine; the other numbers are the last one's."""
    bad_images: int = 0

    @property
    def passed(self) -> bool:
        """Everything was as expected."""
        return not self.wrong

    def row(self) -> dict[str, object]:
        """Return the row for build/proof/guest.json."""
        return {**asdict(self), "passed": self.passed}


def judge(job: str, seen: Seen, number: int | None, expected: str, *reasons: str) -> Verdict:
    """Make a verdict; those of `reasons` that are not empty say why the job failed."""
    said = seen.said
    return Verdict(
        job,
        said.name,
        said.unit,
        said.survives,
        seen.killed,
        seen.acknowledged,
        seen.begun,
        number,
        expected,
        "; ".join(reason for reason in reasons if reason),
        round(time.monotonic() - seen.started, 1),
    )


def see(machine: Machine, killed: str, started: float) -> Seen:
    """Read what the writer has said."""
    acknowledged, begun = machine.last(r"COMMITTED (\d+)"), machine.last(r"BEGUN (\d+)")
    return Seen(medium(machine), acknowledged, begun, killed, started)


def misread(said: Medium, expected: Medium) -> str:
    """Say that the region code takes a medium for another one; empty: it does not."""
    return "" if said == expected else f"taken for {said}, expected {expected}"


def medium(machine: Machine) -> Medium:
    """Return the medium that the region code said last."""
    said = machine.all(r"IS (\w+) (\w+) granularity=(\d)")
    if not said:
        raise GuestError("the region code never said what it is on:\n" + machine.console())
    return Medium(said[-1][1], said[-1][2], int(said[-1][3]))


def recovered(machine: Machine) -> int | None:
    """Return what recovery found; None: nothing.

    Raises:
        GuestError: it took something for whole that was never written, or did not say.
    """
    complaints = machine.all(r"WRONG|FAILED")
    found = machine.all(r"RECOVERED (\d+|none)")
    if complaints or not found:
        raise GuestError("recovery does not hold:\n" + machine.console())
    return None if found[-1][1] == "none" else int(found[-1][1])


def kept(acknowledged: int, begun: int, number: int | None) -> str:
    """Say why a recovery breaks the promise; empty: it keeps it."""
    if number is None:
        return f"{acknowledged} acknowledged, nothing recovered" if acknowledged else ""
    if number < acknowledged:
        return f"{acknowledged} acknowledged, {number} recovered"
    return f"{begun} begun, {number} recovered" if number > begun else ""


def disagreement(said: Medium, power_failed: bool, lost: str) -> str:
    """Say how what lightck says it survives differs from what was seen; empty: it agrees."""
    durable = said.survives == survival.POWER_LOSS or not power_failed
    if durable and lost:
        return f"{said} is said to survive {said.survives}, but {lost}"
    if not durable and not lost:
        return (
            f"{said} is said to survive {said.survives} only, but kept everything: a weak control"
        )
    return ""
