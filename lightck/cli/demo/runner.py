"""Start, watch and kill the demo's training processes, and compare what they did."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightck.cli.output import BAD_DATA, Refusal

_POLL_S = 0.001


@dataclass
class Run:
    """The record of one training process."""

    began_after: int = 0
    """The step that the process was restored to; 0: it started from the beginning."""
    losses: dict[int, str] = field(default_factory=dict)
    """The loss of each step, exactly (hexadecimal)."""
    killed: bool = False
    into_step: float | None = None
    """The time from the last step's end to the kill, in steps, as measured."""
    seconds: float = 0.0
    """The time from the start of the process to its end."""
    end: dict[str, Any] | None = None
    """The digests and measurements, if the process came to its end."""

    @property
    def last(self) -> int:
        """Return the last step that the process finished."""
        return max(self.losses, default=self.began_after)


@dataclass(frozen=True)
class Kill:
    """The time to kill: a share of a step after a step was finished."""

    after_step: int
    share: float


class Trainer:
    """One training process, used in a `with`; when that ends, the process is gone."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        """Start the process; its log and its output go to `folder`."""
        self._log = folder / f"{name}.log"
        self._output = folder / f"{name}.out"
        self._log.touch()
        self._reader = self._log.open("rb")
        self._partial = b""
        self._arrivals: list[float] = []
        self.run = Run()
        self._began = time.monotonic()
        command = [sys.executable, "-m", "lightck.cli.demo.train", "--log", str(self._log)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.close()

    def follow(self, kill: Kill | None, on_step: Callable[[int, str], object]) -> Run:
        """Watch the process to its end, or kill it.

        Raises:
            Refusal: the process failed, or ended before it could be killed.
        """
        while self._process.poll() is None:
            self._read(on_step)
            if kill is not None and self.run.last >= kill.after_step and self.run.losses:
                self._kill(kill)
                break
            time.sleep(_POLL_S)
        code = self._process.wait()
        self.run.seconds = time.monotonic() - self._began
        self._read(on_step)
        if kill is not None and code == -signal.SIGKILL:
            return self.run
        if code != 0 or self.run.end is None:
            text = self._output.read_text(errors="replace").strip()[-4000:]
            raise Refusal(f"the training process failed (exit status {code}):\n{text}", BAD_DATA)
        if kill is not None:
            raise Refusal("the training ended before it could be killed; give it more --steps")
        return self.run

    def _kill(self, kill: Kill) -> None:
        step_s = self._step_s()
        left = kill.share * step_s - (time.monotonic() - self._arrivals[-1])
        if left > 0:
            time.sleep(left)
        since = time.monotonic() - self._arrivals[-1]
        os.kill(self._process.pid, signal.SIGKILL)
        self.run.killed = True
        self.run.into_step = since / step_s

    def _step_s(self) -> float:
        """Return the seconds of a step of this process, as seen from here."""
        pauses = [b - a for a, b in zip(self._arrivals, self._arrivals[1:], strict=False)]
        return statistics.median(pauses) if pauses else 0.0

    def _read(self, on_step: Callable[[int, str], object]) -> None:
        """Read the log's new lines; the last one may be incomplete."""
        *lines, self._partial = (self._partial + self._reader.read()).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "start":
                self.run.began_after = event["step"]
            elif event["event"] == "end":
                self.run.end = event
            else:
                self._arrivals.append(time.monotonic())
                self.run.losses[event["step"]] = event["loss"]
                on_step(event["step"], event["loss"])


def differences(reference: Run, runs: Sequence[Run], steps: int) -> list[str]:
    """List the differences between the uninterrupted run and the processes that did its work.

    Every loss of every process counts, those of repeated steps as well. The reference itself must
    be whole, and each process after the first must have been restored from a snapshot.
    """
    found = []
    wanted = range(1, steps + 1)
    for name, run in [("reference", reference), ("last process", runs[-1])]:
        if run.end is None or not run.end["digests"]:
            found.append(f"the {name} left no digests")
    if sorted(reference.losses) != list(wanted):
        found.append(f"the reference has steps {sorted(reference.losses)}, expected 1 to {steps}")
    missing = set(wanted).difference(*(run.losses for run in runs))
    if missing:
        found.append(f"no process trained steps {sorted(missing)}")
    for number, run in enumerate(runs, 1):
        if number > 1 and not 0 < run.began_after <= runs[number - 2].last:
            found.append(f"process {number} began after step {run.began_after}, not at a snapshot")
        for step, loss in run.losses.items():
            expected = reference.losses.get(step)
            if loss != expected:
                found.append(f"process {number}, step {step}: loss {loss}, expected {expected}")
    expected_digests = reference.end["digests"] if reference.end else {}
    digests = runs[-1].end["digests"] if runs[-1].end else {}
    for name in sorted(expected_digests.keys() | digests.keys()):
        if expected_digests.get(name) != digests.get(name):
            found.append(f"{name} differs at the end")
    return found
