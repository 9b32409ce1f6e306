"""Kill a training job anywhere, resume it in a new process, compare with one that was never killed.

The pytest side of `trainer`: sends requests to a `fork_server`, judges what the runs wrote down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.e2e import trainer

JOBS = Path(__file__).parents[2] / "e2e"
KILLS = ("forward", "backward", "update", "after")
TIMEOUT_S = 200.0


@dataclass
class Outcome:
    """An outcome is all that one trainer process left behind."""

    name: str
    status: int | None
    log: str
    lines: list[dict[str, Any]]

    @property
    def killed(self) -> bool:
        """It died by SIGKILL, as it was told to."""
        return (
            self.status is not None
            and os.WIFSIGNALED(self.status)
            and (os.WTERMSIG(self.status) == signal.SIGKILL)
        )

    @property
    def steps(self) -> dict[int, tuple[str, str]]:
        """Return loss and state digest by step."""
        return {line["t"]: (line["loss"], line["state"]) for line in self.lines if "t" in line}

    def value(self, key: str) -> Any:
        """Return what the run wrote under a key, the last time."""
        found = [line[key] for line in self.lines if key in line]
        assert found, f"{self.name} wrote no {key!r}:\n{self.log}"
        return found[-1]

    def check_ended(self) -> Outcome:
        """It ran to its end."""
        assert self.status == 0, f"{self.name}: wait status {self.status}\n{self.log}"
        return self

    def check_killed(self) -> Outcome:
        """It died where it was told to."""
        assert self.killed, f"{self.name} was not killed: status {self.status}\n{self.log}"
        return self


@dataclass
class Server:
    """A running fork server."""

    folder: Path
    process: subprocess.Popen[str] = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for name in [n for n in environment if n.startswith("LIGHTCK_") and n != "LIGHTCK_NATIVE"]:
            del environment[name]
        environment["LIGHTCK_POLICY"] = "1"  # these count on a snapshot of every step
        # Jobs stand in test modules, too.
        environment["PYTHONPATH"] = os.pathsep.join([str(JOBS), environment["PYTHONPATH"]])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.e2e.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def run(self, *requests: dict[str, Any], parallel: int = 2) -> list[Outcome]:
        """Run trainers side by side and wait for all."""
        for request in requests:
            self.count += 1
            stem = self.folder / f"run-{self.count:05d}"
            request |= {"out": f"{stem}.jsonl", "log": f"{stem}.log"}
            request.setdefault("timeout_s", TIMEOUT_S)
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"requests": requests, "parallel": parallel}), file=self.process.stdin)
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "status" in answer, answer["error"]
        return [_outcome(r, s) for r, s in zip(requests, answer["status"], strict=True)]

    def close(self) -> None:
        """Stop the server."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(100)


def _outcome(request: dict[str, Any], status: int | None) -> Outcome:
    name = f"{request['job']}{request['params']} {request['mode']}"
    if request.get("kill_where"):
        name += f" killed {request['kill_where']} in step {request['kill_step']}"
    out, log = Path(request["out"]), Path(request["log"])
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return Outcome(name, status, log.read_text() if log.exists() else "", lines)


def request(job: type[trainer.Job], path: Path, mode: str, **fields: Any) -> dict[str, Any]:
    """One trainer process. `mode`: plain, attach or resume."""
    fields.setdefault("last", job.steps)
    fields.setdefault("params", {})
    return {
        "module": job.__module__, "job": job.__name__, "path": str(path), "mode": mode, **fields,
    }  # fmt: skip


@dataclass
class Bed:
    """Runs whole experiments for a test."""

    server: Server
    folder: Path

    def run(self, job: type[trainer.Job], mode: str, folder: str = "run", **fields: Any) -> Outcome:
        """Run one process."""
        return self.server.run(request(job, self.folder / folder, mode, **fields))[0]

    def plain(self, job: type[trainer.Job], **fields: Any) -> Outcome:
        """The uninterrupted run, without lightck."""
        return self.run(job, "plain", **fields).check_ended()

    def fresh(self, name: str) -> Bed:
        """The same with an empty folder of its own."""
        (self.folder / name).mkdir()
        return Bed(self.server, self.folder / name)

    def check(
        self,
        job: type[trainer.Job],
        *,
        kills: tuple[str, ...] = KILLS,
        kill_step: int = 5,
        restored: dict[str, set[int]] | None = None,
        **fields: Any,
    ) -> list[Outcome]:
        """Kill at each place in `kill_step`, resume, compare; also close there, and resume.

        Returns the resumed runs, in the order of `kills`, the closed one last.
        """
        uninterrupted = request(job, self.folder / "none", "plain", **dict(fields))
        first = [uninterrupted]
        for where in kills:
            death = {"kill_step": kill_step, "kill_where": where}
            first.append(request(job, self.folder / where, "attach", **fields, **death))
        closed = {**fields, "last": kill_step}
        first.append(request(job, self.folder / "closed", "attach", **closed))
        plain, *dead, ended = self.server.run(*first)
        plain.check_ended()
        ended.check_ended()
        for outcome in dead:
            outcome.check_killed()
            assert max(outcome.steps) >= kill_step - 1, f"{outcome.name}: {list(outcome.steps)}"
            same_steps(outcome, plain)
        same_steps(ended, plain)
        second = [request(job, self.folder / w, "resume", **fields) for w in (*kills, "closed")]
        resumed = self.server.run(*second)
        possible = expected_steps(kill_step) | (restored or {})
        for where, outcome in zip((*kills, "closed"), resumed, strict=True):
            outcome.name += f" after {where}"
            outcome.check_ended()
            assert outcome.value("restored") in possible[where], (
                f"{outcome.name}: restored step {outcome.value('restored')}\n{outcome.log}"
            )
            same_end(outcome, plain)
        return resumed


def expected_steps(k: int) -> dict[str, set[int]]:
    """Return which step may come back after death in each phase of step k.

    Snapshot k-1 opens at the forward of k, and is complete only once the fence before the update
    has passed.
    """
    return {
        "forward": {k - 2},
        "backward": {k - 2},
        "update": {k - 2, k - 1},
        "after": {k - 1},
        "closed": {k},
    }


def same_steps(run: Outcome, plain: Outcome) -> None:
    """Every step that a run took gave the loss and state of the uninterrupted run, bit by bit."""
    for t, (loss, state) in run.steps.items():
        loss0, state0 = plain.steps[t]
        assert loss == loss0, f"{run.name}: loss of step {t} is {loss}, expected {loss0}\n{run.log}"
        assert state == state0, f"{run.name}: state after step {t} differs\n{_first(run, plain)}"


def same_end(run: Outcome, plain: Outcome) -> None:
    """A resumed run ended where the uninterrupted one did, and took the same steps to get there."""
    restored = run.value("restored") or 0
    assert sorted(run.steps) == list(range(restored + 1, max(plain.steps) + 1)), run.name
    same_steps(run, plain)
    assert not _first(run, plain), f"{run.name}: {_first(run, plain)}"
    assert run.value("draws") == plain.value("draws"), f"{run.name}: the next random draws differ"


def _first(run: Outcome, plain: Outcome) -> str:
    """Say in words what differs at the end."""
    ours: dict[str, str] = run.value("final")
    theirs: dict[str, str] = plain.value("final")
    names = [n for n in {**theirs, **ours} if ours.get(n) != theirs.get(n)]
    rows = [f"  {n}: {ours.get(n)}, uninterrupted {theirs.get(n)}" for n in names[:20]]
    return "\n".join([f"{len(names)} differ:", *rows]) if names else ""
