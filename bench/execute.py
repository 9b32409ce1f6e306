"""Runs a definition: every engine in a process of its own, all results or none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from bench import machine, measures
from bench.definition import Contender, Definition
from bench.errors import BenchError
from bench.group import Place
from bench.place import scratch
from bench.record import Record, Result

Tell = Callable[[str], None]
Launch = Callable[[dict[str, Any], Tell], dict[str, Any]]
"""Performs a job somewhere and gives `bench.runner.perform`'s outcome."""

_RELATIVE = 0.1  # wanted half-width where no target asks for more


def run(definition: Definition, command: str, launch: Launch, tell: Tell) -> Result:
    """Measure all engines of a definition.

    Args:
        definition: what.
        command: how it was asked for, kept in the result.
        launch: `bench.launch.in_processes_of_their_own`, or a test's.
        tell: takes progress: a line per change.

    Raises:
        BenchError: a package is missing, an engine failed or what it restored is not what was
            saved. There is no result then, not even of the other engines.
    """
    versions = machine.versions(definition.packages)
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
    for contender in definition.contenders:
        outcome = _measured(definition, contender, launch, tell)
        if outcome["versions"] != versions:
            raise BenchError(
                f"{definition.name}: {contender.label} ran with {outcome['versions']}, expected"
                f" {versions}"
            )
        records += [Record(**record) for record in outcome["records"]]
    about["versions"] = versions
    about["seconds"] = round((datetime.now(UTC) - started).total_seconds())
    return Result(about, records)


def _measured(
    definition: Definition, contender: Contender, launch: Launch, tell: Tell
) -> dict[str, Any]:
    """The outcome of an engine's last phase; all of them share a folder."""
    with scratch(contender.medium) as folder:
        for phase in measures.phases(definition.kind):
            job = {**job_of(definition, contender), "kind": phase, "folder": str(folder)}
            if phase != definition.kind:  # it prepares, perhaps with other ranks
                job["work"]["world"] = job["work"]["saved_by"] or job["work"]["world"]
            outcome = launch(job, lambda text: tell(f"{contender.label}: {text}"))
            if "error" in outcome:
                raise BenchError(f"{definition.name}: {contender.label}: {outcome['error']}")
    return outcome


def job_of(definition: Definition, contender: Contender) -> dict[str, Any]:
    """What `bench.runner` needs to know."""
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
        "packages": definition.packages,
    }


def precision(definition: Definition, contender: Contender) -> dict[str, float]:
    """Half-widths to reach: a quarter of each target of the engine, else a tenth of the value."""
    found = {
        target.measure: bound / 4
        for target in definition.targets
        if target.engine == contender.label
        and not target.against
        and (bound := target.bound) is not None
    }
    return found or {"relative": _RELATIVE}
