"""Measure one engine in this process: a job in JSON in, records in JSON out.

Nothing else runs here, so that threads, memory and OpenMP settings are the engine's own. With
several ranks each has such a process. Progress goes to stdout, a line at a time; the outcome to a
file. The process ends when its standard input does, because its parent is gone then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import measures
from bench.definition import Contender, Method
from bench.engines import KINDS
from bench.errors import BenchError, NoNumber, Unavailable
from bench.group import Place, joined
from bench.machine import versions
from bench.work import Work


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Measure what the job says; return `{"records": ..., "versions": ...}` or `{"error": text}`.

    `{"unavailable": text}` if the engine is a third party's and raised the error itself;
    `{"no_number": text}` if snapshots that were due have slipped.
    """
    try:
        return {"records": _measured(job), "versions": versions(job["packages"])}
    except Unavailable as why:
        return {"unavailable": str(why)}
    except NoNumber as why:
        return {"no_number": str(why)}
    except BenchError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the parent has nothing else to tell its user
        if KINDS[job["contender"]["engine"]].peers:
            traceback.print_exc()
            return {"unavailable": _brief(error)}
        return {"error": traceback.format_exc()}


def _brief(error: Exception) -> str:
    """Return type and message; of a message that is a traceback from elsewhere, its ends."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    shown = lines if len(lines) < 3 else [lines[0], "...", lines[-1]]
    return f"{type(error).__name__}: {' '.join(shown)}"


def _measured(job: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(job["threads"])
    contender = Contender(**job["contender"])
    with joined(Place(**job["place"])) as group:
        records = measures.run(
            measures.Job(
                kind=job["kind"],
                contender=contender,
                work=Work(**job["work"]),
                method=Method(**job["method"]),
                precision=job["precision"],
                folder=Path(job["folder"]),
                tell=lambda text: print(text, flush=True),
                group=group,
            )
        )
    return [{**asdict(record), "engine": contender.label} for record in records]


def main() -> None:
    """Run the job file and write the outcome file: `python -m bench.runner JOB OUTCOME`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job, outcome = map(Path, sys.argv[1:])
    done = perform(json.loads(job.read_text()))
    outcome.write_text(json.dumps(done))


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
