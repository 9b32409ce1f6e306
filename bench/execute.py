"""Run a definition: every engine in a process of its own, all results or none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from bench import engines, machine, measures
from bench.definition import Contender, Definition
from bench.errors import BenchError
from bench.group import Place
from bench.place import scratch
from bench.record import Record, Result

Tell = Callable[[str], None]
Launch = Callable[[dict[str, Any], Tell], dict[str, Any]]
"""A function that performs a job somewhere and returns the outcome of `bench.runner.perform`."""

_RELATIVE = 0.1  # wanted half-width where no target needs a smaller one


def run(definition: Definition, command: str, launch: Launch, tell: Tell) -> Result:
    """Measure all engines of a definition.

    Args:
        definition: the definition to measure.
        command: the command that asked for it, kept in the result.
        launch: `bench.launch.in_processes_of_their_own`, or a test's function.
        tell: called with progress: a line per change.

    Raises:
        BenchError: a package is missing, an engine failed, or what it restored is not what was
            saved. There is no result then, not even of the other engines. Only the absence of a
            third party's engine that cannot run here, and of one whose snapshots slip, is kept
            beside the others' numbers.
    """
    versions = machine.versions(_packages(definition))
    started = datetime.now(UTC)
    about: dict[str, Any] = {
        "definition": definition.as_json(),
        "command": command,
        "commit": machine.commit(),
        "machine": machine.machine(),
        "started": started.isoformat(timespec="seconds"),
        "load": machine.load(),
    }
    records: list[Record] = []
    absent: dict[str, str] = {}
    slipped: dict[str, str] = {}
    for contender in definition.contenders:
        outcome: dict[str, Any] = {"unavailable": engines.missing(contender.engine)}
        if not outcome["unavailable"]:
            outcome = _measured(definition, contender, launch, tell)
        if "unavailable" in outcome:
            absent[contender.label] = outcome["unavailable"]
            continue
        if "no_number" in outcome:
            slipped[contender.label] = outcome["no_number"]
            tell(f"{contender.label}: {outcome['no_number']}")
            continue
        if outcome["versions"] != versions:
            raise BenchError(
                f"{definition.name}: {contender.label} ran with {outcome['versions']}, expected"
                f" {versions}"
            )
        records += [Record(**record) for record in outcome["records"]]
    if not records:
        raise BenchError(f"{definition.name}: none of its engines can run here: {absent | slipped}")
    about["absent"] = absent
    about["slipped"] = slipped
    about["versions"] = versions
    about["seconds"] = round((datetime.now(UTC) - started).total_seconds())
    return Result(about, records)


def _measured(
    definition: Definition, contender: Contender, launch: Launch, tell: Tell
) -> dict[str, Any]:
    """Return the outcome of an engine's last phase; all phases share a folder."""
    with scratch(contender.medium) as folder:
        for phase in measures.phases(definition.kind):
            job = {**job_of(definition, contender), "kind": phase, "folder": str(folder)}
            if phase != definition.kind:  # a preparing phase, perhaps on other ranks
                job["work"]["world"] = job["work"]["saved_by"] or job["work"]["world"]
            outcome = launch(job, lambda text: tell(f"{contender.label}: {text}"))
            if "error" in outcome:
                raise BenchError(f"{definition.name}: {contender.label}: {outcome['error']}")
            if "records" not in outcome:
                break
    return outcome


def _packages(definition: Definition) -> list[str]:
    """Return the packages whose versions count.

    They are the required ones, and the engines' own if installed.
    """
    own = [package for c in definition.contenders for package in engines.KINDS[c.engine].peers]
    return list(dict.fromkeys([*definition.packages, *filter(machine.installed, own)]))


def job_of(definition: Definition, contender: Contender) -> dict[str, Any]:
    """Return the job for `bench.runner`."""
    whole = definition.as_json()
    return {
        "kind": definition.kind,
        "place": Place().as_json(),
        "contender": next(c for c in whole["contenders"] if c["label"] == contender.label),
        "work": {**whole["work"], **contender.work},
        "method": {**whole["method"], **contender.method},
        "precision": precision(definition, contender),
        "threads": contender.threads or definition.threads,
        "wait": definition.wait,
        "packages": _packages(definition),
    }


def precision(definition: Definition, contender: Contender) -> dict[str, float]:
    """Return the wanted half-widths.

    They are a quarter of each target of the engine, else a tenth of the value.
    """
    found = {
        target.measure: bound / 4
        for target in definition.targets
        if target.engine == contender.label
        and not target.against
        and (bound := target.bound) is not None
    }
    return found or {"relative": _RELATIVE}
