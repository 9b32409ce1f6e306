"""Run the parts of a check, one after the other, within a time for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.errors import BenchError
from bench.gpu import build, results, tree
from bench.gpu.parts import TESTS, Part, contenders_of, definition_of, files_of, seconds_of
from bench.place import ROOT

DONE, KEPT, FAILED, SKIPPED = "done", "kept", "failed", "SKIPPED"
_NEEDED = ("torch", "numpy", "pyarrow", "cffi", "transformers", "pytest", "pytest-timeout")
_ROOM = 16 << 30  # bytes of tmpfs: three slots of the largest state, and what other engines write
_ENDING_S = 5.0  # from asking a part to end until it is killed


@dataclass
class Outcome:
    """The outcome of a part."""

    part: str
    state: str
    seconds: float = 0.0
    why: str = ""


@dataclass
class Check:
    """One run of `make gpu-check`.

    Attributes:
        device: `cuda`, or `cpu` to see that everything runs: with tiny models then.
        out: folder for the findings.
        until: monotonic time at which everything must be done.
        again: measure parts again although an earlier run has measured them.
        commit: name of the sources.
        outcomes: outcomes of the parts so far, those of earlier runs included.
    """

    device: str
    out: Path
    until: float
    again: bool = False
    commit: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        """Return whether tiny models replace the real ones."""
        return self.device == "cpu"

    def run(self, parts: Sequence[Part]) -> int:
        """Run parts; return the exit status, 1 if one failed."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.commit = self.commit or tree.name()
        self._recall()
        self._preflight()
        library = self._built()
        wanted = [part for part in parts if self.again or not self._has(part)]
        for part in parts:
            behind = wanted[wanted.index(part) + 1 :] if part in wanted else []
            self.outcomes[part.name] = found = self._part(part, behind, library)
            took = f"{found.state}, {found.seconds:.0f} s{_because(found)}"
            print(f"== {part.name}: {took}", flush=True)
            self._store()
        self._summary(parts)
        return int(any(self.outcomes[part.name].state == FAILED for part in parts))

    def _preflight(self) -> None:
        """Print what machine this is; refuse what cannot work, before any time is spent.

        Raises:
            BenchError: a package is missing.
        """
        print(f"gpu-check on {self.device}, {tree.name()}, into {self.out}", flush=True)
        for name, value in results.machine_of(self.device).items():
            print(f"  {name}: {value}")
        missing = [name for name in _NEEDED if not machine.installed(name)]
        if missing:
            raise BenchError(f"no {', '.join(missing)}: docs/gpu-check.md says how to carry them")
        print("  " + ", ".join(f"{k} {v}" for k, v in machine.versions(_NEEDED).items()))
        free = shutil.disk_usage("/dev/shm").free
        if not self.small and free < _ROOM:
            print(
                f"  /dev/shm has {free >> 30} GiB free, {_ROOM >> 30} are needed for the large"
                " models: as root, mount -o remount,size=64G /dev/shm"
            )

    def _built(self) -> Path:
        begin = time.monotonic()
        library = build.library()
        print(f"  {library}: {time.monotonic() - begin:.0f} s", flush=True)
        return library

    def _part(self, part: Part, behind: Sequence[Part], library: Path) -> Outcome:
        left = self.until - time.monotonic()
        most = seconds_of(part, behind, left)
        if not self.again and self._has(part):
            return Outcome(part.name, KEPT, self.outcomes[part.name].seconds, "of an earlier run")
        if not most:
            why = f"{left:.0f} s left, it needs {part.least_s:.0f}: GPU_PARTS='{part.name}' runs it"
            return Outcome(part.name, SKIPPED, 0.0, why)
        print(f"== {part.name}: at most {most:.0f} s", flush=True)
        begin = time.monotonic()
        run = self._tests if part.group == TESTS else self._measured
        environment = {**os.environ, "LIGHTCK_NATIVE": str(library)}
        state, why = run(part, most, environment)
        return Outcome(part.name, state, time.monotonic() - begin, why)

    def _has(self, part: Part) -> bool:
        before = self.outcomes.get(part.name)
        return before is not None and before.state in (DONE, KEPT)

    def _tests(self, part: Part, seconds: float, environment: Mapping[str, str]) -> tuple[str, str]:
        """Run a file of tests; show and keep what pytest prints."""
        marked = "not gpu" if self.small else "gpu"
        files = [f"tests/gpu/{name}" for name in files_of(part)]
        if not files:
            return DONE, "there are none"
        command = [sys.executable, "-m", "pytest", *files]
        # Another torch or its packages may warn of something: that is no failure.
        command += ["-m", marked, "-q", "-rs", "-p", "no:cacheprovider", "-W", "default"]
        command += ["--timeout", "120", "--durations", "5"]
        said: list[str] = []
        with open(self.out / "tests.txt", "a") as file:  # one file for all, as few files come back

            def keep(line: str) -> None:
                said.append(line)
                file.write(line)

            keep(f"--- {part.name}\n")
            status = _bounded(command, seconds, environment, keep)
        last = said[-1].strip("= \n")
        if status is None:
            return FAILED, f"stopped after {seconds:.0f} s: {last}"
        return (FAILED if status else DONE), last

    def _measured(
        self, part: Part, seconds: float, environment: Mapping[str, str]
    ) -> tuple[str, str]:
        """Measure a definition, or one model of it."""
        told = self.out / "outcome.json"
        told.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gpu", "measure", part.name, str(told)]
        command += ["--device", self.device, "--seconds", str(max(seconds - _ENDING_S, 1.0))]
        status = _bounded(command, seconds, environment, lambda text: None)
        outcome: dict[str, Any] = {"records": [], "failed": {}, "versions": {}}
        if told.exists():
            outcome = json.loads(told.read_text())
            told.unlink()
        whole = definition_of(part, device=self.device, small=self.small)
        failed = dict(outcome["failed"])
        ended = f"stopped after {seconds:.0f} s" if status is None else f"ended with {status}"
        with_records = {record["engine"] for record in outcome["records"]}
        for contender in contenders_of(part, whole):
            if contender.label not in with_records:
                failed.setdefault(contender.label, ended)
        results.add(self.out, whole, outcome, failed, self._about())
        if failed or status != 0:
            return FAILED, "; ".join(f"{k}: {_last(v)}" for k, v in failed.items()) or ended
        return DONE, ""

    def _about(self) -> dict[str, Any]:
        where = results.machine_of(self.device)
        return {"commit": self.commit, "machine": where, "tiny": self.small}

    # ---- what is kept between runs ---------------------------------------------------------

    def _recall(self) -> None:
        """Take over what an earlier run of these very sources has found here."""
        try:
            kept = json.loads((self.out / "check.json").read_text())
        except (OSError, ValueError):
            return
        if (kept["commit"], kept["device"]) == (self.commit, self.device):
            self.outcomes = {each["part"]: Outcome(**each) for each in kept["parts"]}

    def _store(self) -> None:
        kept = {
            "commit": self.commit,
            "device": self.device,
            "parts": [asdict(each) for each in self.outcomes.values()],
        }
        (self.out / "check.json").write_text(json.dumps(kept, indent=1))
        (self.out / "report.md").write_text(results.render(self.out, kept))

    def _summary(self, parts: Sequence[Part]) -> None:
        for part in parts:
            found = self.outcomes[part.name]
            print(f"{found.state:8} {part.name}{_because(found)}")
        print(self.out / "report.md", flush=True)


def _because(found: Outcome) -> str:
    return f": {found.why}" if found.why else ""


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _bounded(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    keep: Callable[[str], object],
) -> int | None:
    """Run a command and show what it prints; return its status, None if it had to be stopped.

    It has a session of its own, so that no process that it started outlives it.
    """
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _with_root(environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def show() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            keep(line)
            print(line if line.startswith("  ") else f"  {line}", end="", flush=True)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        status: int | None = _status(child, seconds)
    finally:
        _kill(child, signal.SIGKILL)  # processes that it left, which may hold its output open
        child.wait()
    reader.join(_ENDING_S)
    if child.stdout is not None and not reader.is_alive():
        child.stdout.close()
    return status


def _status(child: subprocess.Popen[str], seconds: float) -> int | None:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        _kill(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the caller kills it then
        child.wait(_ENDING_S)
    return None


def _kill(child: subprocess.Popen[str], number: int) -> None:
    # It may have ended by itself, or its number belong to somebody else by now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _with_root(environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))


def available(device: str) -> str:
    """Return why nothing can be run on a device; empty if it can."""
    import torch

    if device == "cpu" or torch.cuda.is_available():
        return ""
    return f"no CUDA device (torch {torch.__version__}): nothing was run; GPU_DEVICE=cpu tries it"
