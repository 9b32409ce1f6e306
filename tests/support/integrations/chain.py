"""Kill a script again and again, resume it each time, and compare it with a run without lightck.

A chain is one run: its lives die where `kills` says, in this order, and the last one goes to the
end. Every value that a life tells is compared, bit for bit, with the reference's of that name, and
in the end all weights and buffers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

LOOPS = Path(__file__).parents[2] / "integrations" / "loops"
TIMEOUT_S = 240.0
WRONG = {"batch_ahead", "not_redrawn", "loader_not_kept", "extra_moved", "extras_left_out"}
"""Warnings of lightck that would say that a run is not resumed exactly."""


_SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "LIGHTCK_POLICY": "1"}


class Server:
    """A running server that has imported frameworks; see `support.integrations.server`."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        """Start it; it answers once the imports are done."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LIGHTCK_", "PROBE_"))}
        self._log = open(folder / "server.log", "a")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.integrations.server", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**kept, **_SETTINGS}, cwd=folder,
        )  # fmt: skip

    def run(self, request: dict[str, Any]) -> list[int | None]:
        """Run a script on all its ranks, and return their wait statuses."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the server has died: {Path(self._log.name).read_text()[-4000:]}"
        answer = json.loads(line)
        assert "status" in answer, answer["error"]
        status: list[int | None] = answer["status"]
        return status

    def close(self) -> None:
        """Stop it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(100)
        self._log.close()


@dataclass(eq=False)
class Chain:
    """A script of `tests/integrations/loops`, its reference, and the lives of its run.

    `seeded`: lightck seeds the loader's workers, so that the reference is an uninterrupted run with
    it, and not one without.
    """

    server: Server
    folder: Path
    script: str
    params: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    seeded: bool = False
    fork: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    lives: int = 0
    log: str = ""
    """The text that the last life has printed."""

    def life(self, *, on: bool, kill: str = "", run: str = "run") -> list[int | None]:
        """Run the script once, and return the wait status of each rank."""
        self.lives += 1
        out = self.folder / run
        out.mkdir(exist_ok=True)
        logs = [str(self.folder / f"{self.lives}-{run}-{rank}.log") for rank in range(self.ranks)]
        own = {
            "PROBE_ON": "1" if on else "0", "PROBE_KILL": kill, "PROBE_OUT": str(out),
            "PROBE_PATH": str(out / "snapshots"), "PROBE_PARAMS": json.dumps(self.params),
            **(self.environment if on else {}),
        }  # fmt: skip
        status = self.server.run(
            {
                "script": str(LOOPS / self.script), "folder": str(out), "logs": logs,
                "ranks": self.ranks, "environment": own, "fork": self.fork, "port": _free_port(),
                "timeout_s": self.timeout_s,
            }
        )  # fmt: skip
        self.log = "\n".join(
            f"---- life {self.lives} ({run}, {kill or 'to the end'}), rank {rank}: {each}\n"
            + Path(log).read_text()[-6000:]
            for rank, (each, log) in enumerate(zip(status, logs, strict=True))
        )
        return status

    def reference(self) -> None:
        """Run the script to its end without lightck, or if `seeded` with it."""
        self._to_the_end(on=self.seeded, run="reference")

    def killed(self, place: str) -> None:
        """Run it until it dies at `place`."""
        status = self.life(on=True, kill=place)
        dead = [each for each in status if each is not None and os.WIFSIGNALED(each)]
        assert dead and all(os.WTERMSIG(each) == signal.SIGKILL for each in dead), self.log
        assert all(each is not None for each in status), self.log

    def check(self, *kills: str) -> None:
        """Run reference and chain, and compare; each life after the first goes on from a step."""
        self.reference()
        for place in kills:
            self.killed(place)
        self._to_the_end(on=True, run="run")
        self.compare(len(kills))

    def compare(self, kills: int) -> None:
        """Compare all that the run's lives told, and its weights, with the reference's."""
        for rank in range(self.ranks):
            expected, told = self._values("reference", rank), self._values("run", rank)
            for key, value in told:
                assert (key, value) in expected, (
                    f"rank {rank}: {key} is {value}, the reference has"
                    f" {[v for k, v in expected if k == key]}\n{self.log}"
                )
            lacking = {key for key, _ in expected} - {key for key, _ in told}
            assert not lacking, f"rank {rank}: never told: {sorted(lacking)}\n{self.log}"
            restored = self.notes("restored", rank)
            assert len(restored) == kills + 1, (restored, self.log)
            assert all(b is not None for b in restored[2:]), f"{restored}: trained anew\n{self.log}"
            told_of = [each for each in self.notes("warning", rank) if each[0] in WRONG]
            assert not told_of, told_of
            _same_weights(self._weights("reference", rank), self._weights("run", rank))

    def refused(self, text: str) -> None:
        """Run the script under lightck, which must end at once with an error that says `text`."""
        status = self.life(on=True)
        assert any(status) and text in self.log, self.log
        assert not self._values("run", 0), "it trained before it was refused"

    def notes(self, key: str, rank: int = 0) -> list[Any]:
        """Return what the run's lives noted under a name, in order."""
        lines = [json.loads(line) for line in self._told("run", rank)[0]]
        return [each["value"] for each in lines if each.get("note") == key]

    def _to_the_end(self, *, on: bool, run: str) -> None:
        assert self.life(on=on, run=run) == [0] * self.ranks, self.log

    def _told(self, run: str, rank: int) -> tuple[list[str], str]:
        kind = "on" if run == "run" or self.seeded else "off"
        file = self.folder / run / f"{kind}.{rank}"
        text = file.read_text() if file.exists() else ""
        return text.splitlines(), text

    def _values(self, run: str, rank: int) -> list[tuple[str, Any]]:
        lines = [json.loads(line) for line in self._told(run, rank)[0]]
        return [(each["key"], each["value"]) for each in lines if "key" in each]

    def _weights(self, run: str, rank: int) -> dict[str, torch.Tensor]:
        kind = "on" if run == "run" or self.seeded else "off"
        found: dict[str, torch.Tensor] = torch.load(
            self.folder / run / f"{kind}-weights.{rank}", weights_only=True
        )
        return found


def _same_weights(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"these differ: {different}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
