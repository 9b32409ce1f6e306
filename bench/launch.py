"""Start the processes that measure a job, one per rank, and wait for their outcomes."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import link
from bench.group import Place
from bench.place import ROOT

Outcome = dict[str, Any]
"""The outcome that `bench.runner.perform` returns."""


def in_processes_of_their_own(job: dict[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Perform a job in new Python processes, with the threads and OpenMP wait policy it asks for.

    One process per rank, each behind its end of the link. When one fails the others are killed.
    """
    work = job["work"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightck-bench-")))
        doors = stack.enter_context(link.between(work["world"], work["link"]))
        ranks = [
            _Rank(folder, job, _place(rank, doors, folder), door) for rank, door in enumerate(doors)
        ]
        try:
            return _outcome(ranks, tell)
        finally:
            for rank in ranks:
                rank.end()  # on Ctrl-C or an error here: never leave it training on its own


def _place(rank: int, doors: Sequence[link.Door], folder: Path) -> Place:
    door = doors[rank]
    return Place(rank, len(doors), str(folder / "meeting"), door.interface, door.address)


class _Rank:
    """The process of one rank."""

    def __init__(self, folder: Path, job: dict[str, Any], place: Place, door: link.Door) -> None:
        self.rank = place.rank
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
        environment.pop("OMP_WAIT_POLICY", None)
        if job["wait"] != "default":
            environment["OMP_WAIT_POLICY"] = job["wait"]
        asked, self._told = folder / f"job-{self.rank}", folder / f"outcome-{self.rank}"
        asked.write_text(json.dumps({**job, "place": place.as_json()}))
        self._stderr = open(folder / f"stderr-{self.rank}", "w+")  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [*door.command, sys.executable, "-m", "bench.runner", asked, self._told],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,  # held open: the process ends with it
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self._process.stdout is not None
        self.stdout = self._process.stdout

    def outcome(self) -> Outcome:
        """Return what the process left; call when its output has ended."""
        status = self._process.wait()
        if not self._told.exists():
            self._stderr.seek(0)
            said = self._stderr.read()[-4000:]
            return {"error": f"its process ended with status {status} and no outcome\n{said}"}
        outcome: Outcome = json.loads(self._told.read_text())
        return outcome

    def end(self) -> None:
        """Kill the process if it is still there."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.stdout.close()
        self._stderr.close()


def _outcome(ranks: Sequence[_Rank], tell: Callable[[str], None]) -> Outcome:
    """Return rank 0's outcome once all ranks have theirs, or that of the first that failed."""
    found: dict[int, Outcome] = {}
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank.stdout, selectors.EVENT_READ, rank)
        while waiting.get_map():
            for key, _ in waiting.select():
                rank = key.data
                line = rank.stdout.readline()
                if line:
                    if rank.rank == 0:
                        tell(line.rstrip())
                    continue
                waiting.unregister(rank.stdout)
                found[rank.rank] = rank.outcome()
                if "records" not in found[rank.rank]:
                    return merged(found)
    return merged(found)


def merged(outcomes: dict[int, Outcome]) -> Outcome:
    """Merge several ranks' outcomes into one, given in the order in which they ended.

    The records are rank 0's. The first error stands for all: the others' mostly follow from it.
    """
    for rank, outcome in outcomes.items():
        if "unavailable" in outcome or "no_number" in outcome:
            return outcome
        if "error" in outcome:
            where = f"rank {rank}: " if rank or len(outcomes) > 1 else ""
            return {"error": f"{where}{outcome['error']}"}
    return outcomes[0]
