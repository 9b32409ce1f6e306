"""The job and the failures that `lightck plan` plays: given, from a run, from a trace, or named."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from lightck.cli.arguments import location, rows_at
from lightck.cli.output import BAD_DATA, Refusal
from lightck.policy.failure_record import FailureRecord
from lightck.policy.failure_times import failure_times
from lightck.policy.quantities import seconds, unit_of
from lightck.policy.simulation import Costs, Jit, PlayedFailure

_DAY_S = 86400.0
_MOST_FAILURES = 20_000
"""Failures that one play takes at most, some seconds."""
_WANTED_FAILURES = 200
_LONGEST_S = 3650 * _DAY_S
_LATEST_S = 36525 * _DAY_S
_LEARNED_VERSION = 1
"""The version of `@policy` that is read here: that of `lightck.loop.policy_state`."""
UNSAVED = FailureRecord().unrecovered_share()
"""The share of failures that leave no just-in-time snapshot, where no run has shown any."""


@dataclass(frozen=True)
class Published:
    """A rate of failures that somebody has published.

    Attributes:
        rank_s: GPU-seconds to a failure.
        ranks: GPUs of that job.
        source: where it stands.
        bursts: failures came in bursts there.
    """

    rank_s: float
    ranks: int
    source: str
    bursts: bool = False


PUBLISHED = {
    "llama3": Published(
        16_384 * 54 * _DAY_S / 419,
        16_384,
        "419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783)",
    ),
    "opt-175b": Published(
        992 * 56 * _DAY_S / 90,
        992,
        "about 90 restarts of 992 GPUs in 56 days (arXiv 2205.01068 and its logbook)",
    ),
    "bloom": Published(
        384 * 7 * _DAY_S, 384, "about one GPU failure of 384 GPUs a week (arXiv 2211.05100)"
    ),
    "rsc-1": Published(
        8 * 1000 / 6.5 * _DAY_S,
        1024,
        "6.50 per 1,000 node-days of 8 GPUs (arXiv 2410.21680; jobs of 1,024 GPUs failed 3.7 times"
        " oftener than that)",
    ),
    "infinitehbd": Published(
        8 * 1000 / 4.2 * _DAY_S,
        3200,
        "4.2 per 1,000 node-days of 8 GPUs, in bursts (arXiv 2502.03885)",
        bursts=True,
    ),
}


@dataclass(frozen=True)
class Failures:
    """The failures of a plan.

    Attributes:
        told: what they are, in words.
        rank_s: rank-seconds to a failure; None: a trace, whose times are as they are.
        ranks: the number of ranks where none is asked for.
        make: gives the failures of a mean time between them.
    """

    told: str
    rank_s: float | None
    ranks: int
    make: Callable[[float], Iterable[PlayedFailure]]
    trace: tuple[float, ...] = ()

    def mtbf_s(self, ranks: int) -> float:
        """Return the mean time between failures of a job of so many ranks."""
        if self.rank_s is not None:
            return self.rank_s / ranks
        # At 0 s the job begins.
        return self.trace[-1] / sum(time_s > 0 for time_s in self.trace)

    def horizon_s(self, ranks: int, days: float | None) -> float:
        """Return for how long they are played."""
        mtbf_s = self.mtbf_s(ranks)
        if self.trace:
            wanted_s = self.trace[-1] + mtbf_s
        else:
            wanted_s = min(max(30 * _DAY_S, _WANTED_FAILURES * mtbf_s), _LONGEST_S)
        if days is not None:
            wanted_s = days * _DAY_S
        return min(wanted_s, _MOST_FAILURES * mtbf_s)


@dataclass(frozen=True)
class PlannedJob:
    """A job that is planned for: its costs, what was learned, and where each number is from."""

    costs: Costs
    record: FailureRecord
    sources: dict[str, str]
    state_bytes: int | None = None

    @property
    def unsaved(self) -> float:
        """Return the share of failures that leave no just-in-time snapshot."""
        return self.record.unrecovered_share() if self.costs.jit is not None else 1.0


# ---- the job -------------------------------------------------------------------------------------

_ASSUMED = {"step_s": 0.5, "cost_s": 0.05, "persist_s": 0.5, "restart_s": 60.0}


def job_of(arguments: argparse.Namespace) -> PlannedJob:
    """Return the job that the arguments describe; they win over what a run has measured."""
    found: dict[str, float] = {}
    record, world = FailureRecord(), 1
    state_bytes: int | None = None
    if arguments.path is not None:
        world, state_bytes = _sizes(arguments.path)
        found, record = _learned(arguments.path)
    numbers, sources = {}, {}
    for name, assumed in _ASSUMED.items():
        given = getattr(arguments, name)
        if given is not None:
            numbers[name], sources[name] = given, "given"
        elif name in found:
            numbers[name], sources[name] = found[name], f"measured, {location(arguments.path)}"
        else:
            numbers[name], sources[name] = assumed, "assumed"
    jit = Jit() if arguments.jit else None
    return PlannedJob(Costs(**numbers, world=world, jit=jit), record, sources, state_bytes)


def _learned(path: str) -> tuple[dict[str, float], FailureRecord]:
    """Return what a run's newest snapshot says: times, and failures."""
    from lightck.examine import contents  # needs torch

    text = contents(path, "latest").learned
    try:
        plain = json.loads(text) if text else {}
    except ValueError:
        plain = {}
    if not isinstance(plain, dict) or plain.get("version") != _LEARNED_VERSION:
        plain = {}  # damaged or newer: a fresh start, as in training
    names = {"cost_s": "cost_s", "persist_s": "persist_s", "quiet_s": "step_s"}
    found = {
        ours: float(plain[theirs])
        for theirs, ours in names.items()
        if isinstance(plain.get(theirs), int | float) and 0 <= plain[theirs] < math.inf
    }
    if not found.get("step_s", 1.0):
        del found["step_s"]
    return found, FailureRecord.from_plain(plain.get("failures"))


def _sizes(path: str) -> tuple[int, int]:
    """Return the number of ranks and the bytes of a run's newest snapshot."""
    whole = [row for row in rows_at(path, whole=True) if row["state"] == "whole"]
    if not whole:
        raise Refusal(f"{location(path)}: no whole snapshot", BAD_DATA)
    newest = [row for row in whole if row["step"] == whole[0]["step"]]
    world: int = newest[0]["world"]
    # A just-in-time save may be there twice, or whole in a failure region and in parts beside it.
    parts = {
        row["rank"]: row["payload_bytes"]
        for row in newest
        if not Path(row["file"]).name.startswith("failure-")
    }
    if not parts:
        return world, max(row["payload_bytes"] for row in newest)
    return world, sum(parts.values()) * world // len(parts)


# ---- the failures --------------------------------------------------------------------------------


def failures_of(arguments: argparse.Namespace, job: PlannedJob) -> Failures:
    """Return the failures that the arguments ask for.

    Raises:
        Refusal: the name is unknown, or the trace cannot be used.
    """
    asked: str | None = arguments.failures
    unsaved = job.unsaved
    if asked is not None and asked not in PUBLISHED:
        file = Path(asked)
        if not file.exists():
            names = ", ".join(PUBLISHED)
            raise Refusal(f"--failures {asked}: no such file, and none of the names {names}")
        trace = read_trace(file)
        chance = random.Random(arguments.seed)
        played = tuple(PlayedFailure(t, chance.random() >= unsaved) for t in trace)
        told = f"{len(trace)} failures of {file}"
        return Failures(told, None, job.costs.world, lambda mtbf_s: played, trace)
    bursts = arguments.bursts

    def make(mtbf_s: float) -> Iterator[PlayedFailure]:
        return failure_times(
            mtbf_s, random.Random(arguments.seed).random, bursts=bursts, unsaved=unsaved
        )

    if asked is not None:
        known = PUBLISHED[asked]
        bursts = bursts or known.bursts
        ranks = known.ranks if arguments.path is None else job.costs.world
        return Failures(f"{asked}: {known.source}", known.rank_s, ranks, make)
    world = (arguments.ranks or [job.costs.world])[0]
    if arguments.mtbf is not None:
        return Failures("given", arguments.mtbf * world, world, make)
    if arguments.path is not None:
        mtbf_s = 1 / job.record.hazard(job.costs.world, jit=arguments.jit).rate
        seen = len(job.record.failures)
        told = f"learned from {seen} failure{'s' * (seen != 1)} of the run"
        if not seen and mtbf_s < _DAY_S:
            # A policy is careful where little is known; here it would look like a measurement.
            mtbf_s, told = _DAY_S, "assumed: one a day; the run has seen none"
        return Failures(told, mtbf_s * job.costs.world, job.costs.world, make)
    return Failures("assumed: one a day", _DAY_S * world, world, make)


def read_trace(file: Path) -> tuple[float, ...]:
    """Return the times of failures in a file, in seconds, in order.

    Raises:
        Refusal: it cannot be read, is empty, or has what is no time; with file and line.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refusal(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{file}: cannot be read: {error}", BAD_DATA) from error
    times = _events(file, text) if text.lstrip()[:1] in ("[", "{") else _lines(file, text)
    if not times:
        raise Refusal(f"{file}: no failures in it", BAD_DATA)
    for where, time_s in times:
        if not 0 <= time_s <= _LATEST_S:
            raise Refusal(
                f"{file}: {where}: {time_s} is no time from 0 s to {_LATEST_S:g} s (100 years)",
                BAD_DATA,
            )
    found = tuple(sorted(time_s for _, time_s in times))
    if not found[-1]:
        raise Refusal(
            f"{file}: all failures at 0 s, where the job begins (dates count from the earliest)",
            BAD_DATA,
        )
    return found


def _lines(file: Path, text: str) -> list[tuple[str, float]]:
    """Read one time per line: seconds, or dates and times, which count from the earliest."""
    found: list[tuple[str, float]] = []
    dates: list[tuple[str, datetime]] = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            found.append((f"line {number}", float(word)))
            continue
        except ValueError:
            pass
        try:
            when = datetime.fromisoformat(word)
        except ValueError:
            raise Refusal(
                f"{file}: line {number}: {word!r} is neither seconds nor a date and time", BAD_DATA
            ) from None
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        dates.append((f"line {number}", when))
    if found and dates:
        where = f"{found[0][0]} has seconds, {dates[0][0]} a date"
        raise Refusal(f"{file}: {where}: give one kind", BAD_DATA)
    first = min((when for _, when in dates), default=None)
    return found or [(where, (when - first).total_seconds()) for where, when in dates if first]


_NO_FAILURE = ("end", "recover", "repair", "test")


def _events(file: Path, text: str) -> list[tuple[str, float]]:
    """Read JSON events with `event_time` in days and `event_type`, a list or one per line."""
    try:
        events = json.loads(text)
    except (ValueError, RecursionError):
        try:
            events = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{file}: is no JSON: {error}", BAD_DATA) from error
    if isinstance(events, dict):
        events = next((each for each in events.values() if isinstance(each, list)), [events])
    found = []
    for number, event in enumerate(events, 1):
        when = event.get("event_time") if isinstance(event, dict) else None
        if not isinstance(when, int | float) or isinstance(when, bool):
            raise Refusal(f"{file}: event {number}: no number event_time, in days", BAD_DATA)
        kind = str(event.get("event_type", "")).lower()
        if not any(word in kind for word in _NO_FAILURE):
            try:
                found.append((f"event {number}", when * _DAY_S))
            except OverflowError:  # an integer may have any number of digits
                found.append((f"event {number}", math.inf))
    return found


# ---- arguments -----------------------------------------------------------------------------------


def time_of(text: str) -> float:
    """Return a time in seconds: `0.2`, `200 ms`, `12h`.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above 0.
    """
    number, unit = text.strip(), "s"
    for at in range(len(number), 0, -1):
        if number[at - 1].isdigit() or number[at - 1] == ".":
            number, unit = number[:at], unit_of(number[at:].strip() or "s") or ""
            break
    try:
        found = seconds(number, unit)
    except (ArithmeticError, KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 0.2, 200 ms, 10 min") from None
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a finite time, 0 or more")
    return found


def positive_time(text: str) -> float:
    """Return a time above 0 in seconds."""
    found = time_of(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0")
    return found


def step_time(text: str) -> float:
    """Return the time of a step in seconds, a microsecond or more."""
    found = time_of(text)
    if found < 1e-6:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a microsecond or more")
    return found


def ranks_of(text: str) -> list[int]:
    """Return numbers of ranks, separated by commas."""
    try:
        found = [int(each.replace("_", "")) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be like 8 or 8,64,1024") from None
    if not all(1 <= each <= 100_000 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: each from 1 to 100000")
    return list(dict.fromkeys(found))


def of_world(job: PlannedJob, ranks: int) -> Costs:
    """Return the costs of a job of so many ranks; they are taken to be the same for all."""
    return replace(job.costs, world=ranks)


def until(failures: Iterable[PlayedFailure], horizon_s: float) -> list[PlayedFailure]:
    """Return the failures up to a time, so that every policy meets the same."""
    return list(itertools.takewhile(lambda each: each.time_s < horizon_s, failures))
