"""Measure how a job goes on when one of its ranks is killed in a backward.

The job is started as a user starts it: `lightck run`, torchrun, or what another engine brings. One
rank after the other is killed with SIGKILL in the middle of a backward, each once all ranks train
and the next spare is ready. All processes write what they do with the machine's clock. Each loss of
each rank is compared with those of the same training undisturbed.

Records:
    pause_s: the longest time in which a rank that was not killed completed no step.
    kill_s: from SIGKILL until all ranks can compute: attached, and recovered.
    again_s: of it, from when the agent has seen the end of the process.
    noticed_s: of it, until then: the kernel frees the dead process, the agent looks.
    setup_s: of it, the replacement's script until its restore: process group, model, optimizer.
    beyond_s: again_s without setup_s.
    step_s: from when all can compute until all have completed a step.
    kept_bytes: memory for inputs behind the third step.
    results_bytes: small results kept at most.
    rss_bytes: the largest resident memory of a rank before the first failure.
    same: 1 if every loss of every rank is that of the undisturbed training, bit for bit.
    moved: ranks whose process is another one afterwards, per failure.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError, Unavailable
from bench.in_place.common import VARIABLE, Asked
from bench.measures import Job, in_place_cost
from bench.place import ROOT
from bench.record import Record, sampled, single

CASES = ("in place", "torchrun", "torchft", "nvrx", "cost")
PYTHONS = {"torchft": "LIGHTCK_BENCH_TORCHFT", "nvrx": "LIGHTCK_BENCH_NVRX"}
"""Environment variables that name the Python of engines with an environment of their own."""
_PATIENCE_S = 300.0
_POLL_S = 0.02
_PRELOADED = {"gpt2": "transformers.models.gpt2.modeling_gpt2"}


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    case = job.method.case
    if case == "cost":
        return in_place_cost.measure(job)
    if case not in CASES:
        raise BenchError(f"case = {case!r}: must be one of {', '.join(CASES)}")
    found: dict[str, list[float]] = {}
    most: dict[str, float] = {}
    same = True
    for i in range(job.method.least if case == "nvrx" else 1):  # there is no second loss
        folder = job.folder / f"job-{i}"
        disturbed = _Running.folders(job, folder)
        with _job(job, disturbed) as running:
            count = 1 if case == "nvrx" else job.method.settle + job.method.least
            for failure in range(count):
                parts = _failure(job, running, failure)
                if case == "nvrx" or failure >= job.method.settle:
                    for name, value in parts.items():
                        found.setdefault(name, []).append(value)
                job.tell(f"{failure + 1} of {count} failures: {parts}")
            if running.spare and case == "in place":
                running.require_spares()
            last = running.stop()
            if (rss := running.most("rss", 0)) is not None:
                most["rss_bytes"] = max(most.get("rss_bytes", 0), rss)
            if case == "in place":
                for name, what in (("kept_bytes", "inputs"), ("results_bytes", "results")):
                    if (kept := running.most(what, 3)) is None:
                        raise BenchError(f"no step behind the third says its {what}: more warmup")
                    most[name] = kept
        same &= running.losses() == _undisturbed(job, folder / "undisturbed", last)
    if case == "in place" and not same:
        raise BenchError("a loss differs from that of the undisturbed training")
    units = {name: "" if name == "moved" else "s" for name in found}
    note = "each loss equal bit for bit" if same else "losses differ from an undisturbed training's"
    return [
        *(sampled(name, units[name], values, note=note) for name, values in found.items()),
        *(single(name, "B", value) for name, value in most.items()),
        single("same", "", float(same)),
    ]


# ---- a failure --------------------------------------------------------------------------------


def _failure(job: Job, running: _Running, number: int) -> dict[str, float]:
    """Kill one rank, wait until all train again; return the parts of the time."""
    world, case = job.work.forks, job.method.case
    victim = 1 + number % (world - 1) if case == "nvrx" else (number + 1) % world
    running.until_ready(job.method.warmup)
    before = running.processes()
    (running.folder / f"fail-{victim}").touch()
    failed = running.wait("the failure", lambda: running.first(victim, "failing", running.asked_s))
    ranks = [rank for rank in range(world) if case != "nvrx" or rank != victim]

    def gone_on() -> bool:
        return all(running.stepped(rank, failed, 2) for rank in ranks)

    running.wait("all ranks to train again", gone_on)
    survivors = [rank for rank in ranks if rank != victim]
    parts = {"pause_s": max(running.pause(rank, failed) for rank in survivors)}
    attached = [running.first(rank, "attached", failed) for rank in ranks]
    recovered: list[float] = []
    if case == "in place":
        recovered = [running.first(rank, "recovered", failed) for rank in ranks]
    can = max(filter(None, [*attached, *recovered]))
    parts["kill_s"] = can - failed
    noticed = running.first("agent", "noticed", failed)
    if case == "in place":
        began, built = (running.first(victim, what, failed) for what in ("began", "built"))
        setup = built - began
        parts |= {"again_s": can - noticed, "noticed_s": noticed - failed, "setup_s": setup}
        parts["beyond_s"] = parts["again_s"] - setup
    parts["step_s"] = max(running.stepped(rank, can, 1) for rank in ranks) - can
    after = running.processes()
    parts["moved"] = float(sum(before[rank] != after[rank] for rank in ranks))
    if case == "in place" and parts["moved"] != 1.0:
        raise BenchError(f"{parts['moved']:.0f} processes are others: not recovered in place")
    return parts


@dataclass(eq=False)
class _Running:
    """A job that runs, by the marks of its ranks."""

    folder: Path
    world: int
    process: subprocess.Popen[bytes]
    step_ms: float
    spare: bool = False
    asked_s: float = 0.0
    _marks: dict[str, list[list[Any]]] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def folders(job: Job, folder: Path) -> Path:
        """Make the folders of a job."""
        (folder / "marks").mkdir(parents=True)
        (folder / "regions").mkdir()
        return folder

    def marks(self, name: object) -> list[list[Any]]:
        """Return the marks of a rank, or of `agent`."""
        name = str(name)
        known, path = self._marks.setdefault(name, []), self.folder / f"{name}.marks"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read.get(name, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[name] = self._read.get(name, 0) + len(whole)
            known += [json.loads(line) for line in whole.splitlines()]
        return known

    def first(self, name: object, what: str, after: float) -> float:
        """Return the moment of the first mark after a moment; 0 if there is none yet."""
        return next((m[1] for m in self.marks(name) if m[0] == what and m[1] > after), 0.0)

    def stepped(self, rank: int, after: float, count: int) -> float:
        """Return when a rank has completed so many steps after a moment; 0: not yet."""
        ends = [m[1] for m in self.marks(rank) if m[0] == "step" and m[1] > after]
        return float(ends[count - 1]) if len(ends) >= count else 0.0

    def pause(self, rank: int, failed: float) -> float:
        """Return the longest time between two steps' ends, from the last before a failure on."""
        ends = [m[1] for m in self.marks(rank) if m[0] == "step"]
        last = max((end for end in ends if end <= failed), default=failed)
        ends = [end for end in ends if end >= last]
        return float(max(b - a for a, b in zip(ends, ends[1:], strict=False)))

    def processes(self) -> list[int]:
        """Return the process of each rank."""
        return [int(self.marks(rank)[-1][2]) for rank in range(self.world)]

    def most(self, what: str, behind: int) -> float | None:
        """Return the largest value of a rank behind a step, before the first failure.

        None: no rank has said one.
        """
        found: list[float] = []
        failed = min((self.first(rank, "failing", 0.0) or 1e18 for rank in range(self.world)))
        for rank in range(self.world):
            steps = [m for m in self.marks(rank) if m[0] == "step" and m[1] < failed]
            found += [m[3][what] for m in steps if m[3]["step"] > behind and what in m[3]]
        return max(map(float, found), default=None)

    def losses(self) -> dict[tuple[int, int], set[str]]:
        """Return the losses of each rank and step."""
        found: dict[tuple[int, int], set[str]] = {}
        for rank in range(self.world):
            for what, _, _, more in self.marks(rank):
                if what == "step":
                    found.setdefault((rank, more["step"]), set()).add(more["loss"])
        return found

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        """Wait until something is true; return it.

        Raises:
            BenchError: the job has ended, or it takes too long.
        """
        end = time.monotonic() + _PATIENCE_S
        while not (value := found()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise BenchError(f"waited for {what}, status {self.process.poll()}: {self.log()}")
            time.sleep(_POLL_S)
        return value

    def until_ready(self, warmup: int) -> None:
        """Wait until all ranks have trained some steps, and what waits is done importing."""
        now = time.monotonic()
        ranks = [r for r in range(self.world) if not self._gone(r)]
        self.wait("the first steps", lambda: all(self.stepped(r, now, warmup) for r in ranks))
        if self.spare:
            self.wait("the spare", self._spare_waits)
        self.asked_s = time.monotonic()

    def _gone(self, rank: int) -> bool:
        return bool(self.marks(rank)) and not Path(f"/proc/{self.marks(rank)[-1][2]}").exists()

    def _spare_waits(self) -> bool:
        """Tell whether a process that is no rank has imported, and sleeps."""
        names = [*range(self.world), "agent"]
        ranks = {int(m[-1][2]) for name in names if (m := self.marks(name))}
        children = _children(self.process.pid)
        spares = [each for each in children if each not in ranks]
        before = {each: _ticks(each) for each in spares}
        time.sleep(0.5)
        return any(ticks > 50 and ticks == _ticks(each) for each, ticks in before.items())

    def stop(self) -> int:
        """Let all ranks come to the same last step; return it."""
        newest = max(
            m[3]["step"] for r in range(self.world) for m in self.marks(r) if m[0] == "step"
        )
        last = int(newest) + max(2, round(1000.0 / self.step_ms) if self.step_ms else 2)
        self.end_at(last)
        return last

    def end_at(self, step: int) -> None:
        """Let all ranks end behind a step, and wait for that."""
        other = self.folder / "stop.new"
        other.write_text(str(step))
        other.rename(self.folder / "stop")
        try:
            status = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = -1
        if status:
            raise BenchError(f"the job's end: status {status}: {self.log()}")

    def require_spares(self) -> None:
        """Refuse a job whose spares had to start Python anew: it is no measurement of spares.

        Raises:
            BenchError: with what the job has said of it.
        """
        said = (self.folder / "log").read_text(errors="replace").splitlines()
        if unused := [line for line in said if "spare_not_used" in line]:
            raise BenchError(f"{len(unused)} replacements without a spare: {unused[0]}")

    def log(self) -> str:
        """Return the end of what the job has said."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _ticks(pid: int) -> int:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


# ---- jobs -------------------------------------------------------------------------------------


def _undisturbed(job: Job, folder: Path, last: int) -> dict[tuple[int, int], set[str]]:
    """Return the losses of the same training without a failure, and without lightck."""
    _Running.folders(job, folder)
    contender = replace(job.contender, engine="none")
    method = replace(job.method, case="torchrun")
    work = replace(job.work, step_ms=0.0)
    with _job(replace(job, contender=contender, method=method, work=work), folder) as running:
        running.end_at(last)
    return running.losses()


@contextmanager
def _job(job: Job, folder: Path) -> Iterator[_Running]:
    """Start a job; nothing of it is left afterwards."""
    work, case = job.work, job.method.case
    engine = job.contender.engine
    asked = Asked(
        *(str(folder / "marks"), str(folder / "regions"), engine, work.model, work.forks),
        *(work.batch, work.sequence, work.step_ms, job.method.block),
    )
    environment = {**os.environ, VARIABLE: asked.text(), "PYTHONPATH": str(ROOT)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["MASTER_PORT"] = str(_free_port())
    if case == "torchrun":  # as lightck's guide says for workers that are all restarted
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    settings = job.contender.settings
    command = _command(job, folder / "marks")
    with open(folder / "marks" / "log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    spare = case == "in place" and settings.get("spare", True) or "--spare" in command
    running = _Running(folder / "marks", work.forks, process, work.step_ms, bool(spare))
    try:
        yield running
    finally:
        _end(process)


def _command(job: Job, folder: Path) -> Sequence[str]:
    """Return the command that starts a job.

    Raises:
        Unavailable: the engine is not installed.
    """
    case, world = job.method.case, job.work.forks
    ranks = ["--standalone", "--nproc-per-node", str(world), "--max-restarts", "1000"]
    launch = [sys.executable, "-m", "bench.in_place.launch"]
    if case == "torchrun":
        return [*launch, "torchrun", str(folder), *ranks, "-m", "bench.in_place.script"]
    if case == "in place":
        spare = [] if job.contender.settings.get("spare", True) else ["--no-spare"]
        preloaded = ["bench.in_place.script", *filter(None, [_PRELOADED.get(job.work.model)])]
        launch += ["lightck", str(folder), *ranks, *spare]
        return [*launch, "--preload", ",".join(preloaded), "-m", "bench.in_place.script"]
    python = _python(case)
    options = ["--again"] if case == "torchft" else []
    options += ["--spare"] if job.contender.settings.get("spare", False) else []
    return [python, "-m", "bench.in_place.supervise", case, *options]


def _python(case: str) -> str:
    module = {"torchft": "torchft", "nvrx": "nvidia_resiliency_ext.inprocess"}[case]
    python = os.environ.get(PYTHONS[case], sys.executable)
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [""])[-1]
        raise Unavailable(f"{python}: {why}; {PYTHONS[case]} names the Python that has {module}")
    return python


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job, with all that it has started."""
    found, waiting = {process.pid}, [process.pid]
    while waiting:
        more = _children(waiting.pop())
        found |= {*more}
        waiting += more
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
