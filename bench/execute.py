"""Runs a definition: every engine in a process of its own, all results or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import machine
from bench.definition import Contender, Definition
from bench.errors import BenchError
from bench.place import ROOT
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
        launch: `in_process_of_its_own`, or a test's.
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
        job = job_of(definition, contender)
        outcome = launch(job, lambda text, label=contender.label: tell(f"{label}: {text}"))  # type: ignore[misc]
        if "error" in outcome:
            raise BenchError(f"{definition.name}: {contender.label}: {outcome['error']}")
        if outcome["versions"] != versions:
            raise BenchError(
                f"{definition.name}: {contender.label} ran with {outcome['versions']}, expected"
                f" {versions}"
            )
        records += [Record(**record) for record in outcome["records"]]
    about["versions"] = versions
    about["seconds"] = round((datetime.now(UTC) - started).total_seconds())
    return Result(about, records)


def job_of(definition: Definition, contender: Contender) -> dict[str, Any]:
    """What `bench.runner` needs to know."""
    whole = definition.as_json()
    return {
        "kind": definition.kind,
        "contender": next(c for c in whole["contenders"] if c["label"] == contender.label),
        "work": {**whole["work"], **contender.work},
        "method": {**whole["method"], **contender.method},
        "precision": precision(definition, contender),
        "threads": definition.threads,
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


def in_process_of_its_own(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Perform a job in a new Python, with the threads and the OpenMP wait policy it asks for."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
    environment.pop("OMP_WAIT_POLICY", None)
    if job["wait"] != "default":
        environment["OMP_WAIT_POLICY"] = job["wait"]
    with tempfile.TemporaryDirectory(prefix="lightck-bench-") as name:
        folder = Path(name)
        (folder / "job").write_text(json.dumps(job))
        with open(folder / "stderr", "w+") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.runner", folder / "job", folder / "outcome"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            try:
                return _outcome(child, folder, tell)
            finally:
                child.kill()  # Ctrl-C, or an error of ours: never leave it training on its own
                child.wait()


def _outcome(child: subprocess.Popen[str], folder: Path, tell: Tell) -> dict[str, Any]:
    assert child.stdout is not None
    for line in child.stdout:
        tell(line.rstrip())
    status = child.wait()
    if not (folder / "outcome").exists():
        said = (folder / "stderr").read_text()[-4000:]
        return {"error": f"its process ended with status {status} and no outcome\n{said}"}
    outcome: dict[str, Any] = json.loads((folder / "outcome").read_text())
    return outcome
