"""Jobs of `lightck run` with planned faults, and their comparison with undisturbed ones."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightck.cli.chaos.runner import descendants
from lightck.failure.fault_plan import EVENTS, VARIABLE, Fault, write_plan
from support.distributed import ranks
from support.inplace import trainer

TRAINER = Path(trainer.__file__)
MOST_S = 280.0
"""Seconds after which a job counts as hanging."""
HOLD_S = 1.0


@dataclass(frozen=True)
class Job:
    """A job that has ended, by what it has said."""

    folder: Path
    world: int
    steps: int
    faults: Sequence[Fault] = ()
    status: int = 0

    @property
    def log(self) -> str:
        """The command and all workers wrote."""
        return "".join(each.read_text() for each in sorted(self.folder.glob("*.log")))

    def said(self, rank: int, word: str) -> list[list[str]]:
        """The lines of a rank that begin with a word, split, without it."""
        file = self.folder / "out" / f"{rank}.said"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        lines = [line.split() for line in whole.splitlines()]
        return [line[1:] for line in lines if line[0] == word]

    def pids(self, rank: int) -> list[str]:
        """The processes that the rank was."""
        return [line[0] for line in self.said(rank, "pid")]

    def losses(self, rank: int) -> dict[int, set[str]]:
        """All that was ever said of each step."""
        found: dict[int, set[str]] = {}
        for step, loss in self.said(rank, "step"):
            found.setdefault(int(step), set()).add(loss)
        return found

    def recoveries(self, rank: int) -> int:
        """The number of recoveries that a rank's last process has counted."""
        return int(self.said(rank, "recoveries")[-1][0])

    def state(self, rank: int) -> Any:
        """The rank's state at its end."""
        return torch.load(self.folder / "out" / f"{rank}.state")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what lightck logged in the workers under this name, and what chaos did."""
        file = self.folder / "chaos" / EVENTS
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        logged = [each["fields"] for each in lines if each.get("name") == name]
        return logged or [each for each in lines if each["event"] == name]

    def refusals(self) -> set[str]:
        """The reasons for which all ranks were restarted; a process may not have attached yet."""
        logged = re.findall(r"lightck: in_place_refused .*?why=(.*)", self.log)
        return {*logged, *(each["why"] for each in self.events("in_place_refused"))}


def environment(folder: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a job: its chaos folder, one thread per rank."""
    plain = {k: v for k, v in os.environ.items() if k != "LIGHTCK_POLICY"}
    return {
        **plain,
        "OMP_NUM_THREADS": "1",
        VARIABLE: str(folder / "chaos"),
        **(more or {}),
    }


def command(
    folder: Path, world: int, steps: int, options: Iterable[str], launch: Sequence[str]
) -> list[str]:
    """The command of a job; `launch` stands in the place of `--standalone --nproc-per-node`."""
    usual = ["--standalone", f"--nproc-per-node={world}"]
    out = [str(folder / "out"), str(folder / "regions"), str(steps), *options]
    run = [sys.executable, "-m", "lightck.cli", "run"]
    return [*run, *(usual if not launch else ()), *launch, str(TRAINER), *out]


def prepare(folder: Path, faults: Sequence[Fault] = (), hold_s: float = HOLD_S) -> None:
    """Make a job's folders, with the plan of its faults."""
    for name in ("out", "regions", "chaos"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "chaos" / EVENTS).touch()
    write_plan(folder / "chaos", faults, hold_s)


@contextlib.contextmanager
def started(
    words: Sequence[str], folder: Path, name: str, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A running command; nothing of it is left behind."""
    with (folder / f"{name}.log").open("ab") as output:
        process = subprocess.Popen(
            words, env=dict(env), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def run(
    folder: Path,
    world: int,
    steps: int,
    *options: str,
    faults: Sequence[Fault] = (),
    more: Sequence[str] = (),
    hold_s: float = HOLD_S,
) -> Job:
    """Run a job to its end, on one node.

    Args:
        folder: for all that it writes; a job that has ended there is gone on with.
        world: number of ranks.
        steps: number of steps.
        options: of the trainer.
        faults: to inject.
        more: options of `lightck run`.
        hold_s: seconds that a stopped rank stands.
    """
    prepare(folder, faults, hold_s)
    launch = ["--standalone", f"--nproc-per-node={world}", *more]
    words = command(folder, world, steps, options, launch)
    with started(words, folder, "run", environment(folder)) as process:
        try:
            status = process.wait(MOST_S)
        except subprocess.TimeoutExpired:
            job = Job(folder, world, steps, faults, -1)
            raise AssertionError(f"the job hangs: {told(job)}") from None
    return Job(folder, world, steps, faults, status)


def told(job: Job) -> str:
    """Return what to show of a job that did not end as it should."""
    said = {rank: f"{job.pids(rank)} {sorted(job.losses(rank))}" for rank in range(job.world)}
    return f"{said}\n{job.log[-8000:]}"


@dataclass
class Golden:
    """Undisturbed jobs of forked ranks, without `lightck run`; each is run once."""

    folder: Path
    _jobs: dict[tuple[Any, ...], Job] = field(default_factory=dict)

    def of(self, world: int, steps: int, *options: str) -> Job:
        """The undisturbed job with these options."""
        key = (world, steps, *sorted(options))
        if key not in self._jobs:
            folder = self.folder / str(len(self._jobs))
            prepare(folder)
            (folder / "out" / "killed").touch()  # nobody is lost here

            def train(me: ranks.Me) -> None:
                trainer.main(folder / "out", folder / "regions", steps, {*options})

            with ranks.started(world, train) as running:
                running.results()
            job = Job(folder, world, steps)
            for rank in range(world):
                losses = job.losses(rank)
                assert [*losses] == [*range(1, steps + 1)], told(job)
                assert all(len(each) == 1 for each in losses.values())
            self._jobs[key] = job
        return self._jobs[key]


def same(one: Any, other: Any) -> bool:
    """Tell whether two trees are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_golden(job: Job, golden: Job, silent: int = 0) -> None:
    """The job ended as the undisturbed one: each loss bit for bit, and each tensor.

    A step's loss may lack where a fault hit the rank before it said it, and `silent` more.
    """
    assert job.status == 0, told(job)
    for rank in range(job.world):
        hits = silent + sum(fault.rank in (None, rank) for fault in job.faults)
        losses, wanted = job.losses(rank), golden.losses(rank)
        lacking = wanted.keys() - losses.keys()
        assert len(lacking) <= hits, f"rank {rank} said nothing of {lacking}: {told(job)}"
        wrong = [step for step, each in losses.items() if each != wanted.get(step)]
        assert not wrong, f"rank {rank}, steps {wrong}: {told(job)}"
        assert same(job.state(rank), golden.state(rank)), f"rank {rank}: {told(job)}"


def assert_fired(job: Job) -> None:
    """Each planned fault has happened."""
    fired = {each["number"] for each in job.events("fault")}
    assert fired == {*range(len(job.faults))}, f"{fired}: {told(job)}"


def assert_in_place(job: Job, golden: Job, recoveries: int | None = None) -> None:
    """Only the lost ranks were replaced; survivors did every step once, in one process."""
    assert_fired(job)
    assert_golden(job, golden)
    assert not job.refusals(), told(job)
    wanted = len(job.faults) if recoveries is None else recoveries
    for rank in range(job.world):
        hits = sum(fault.rank == rank for fault in job.faults)
        assert len(job.pids(rank)) == 1 + hits, f"rank {rank}: {told(job)}"
        if not hits:
            every = job.said(rank, "step")
            assert every == golden.said(rank, "step"), f"rank {rank}: {told(job)}"
            # On a machine that is busy a broken connection may be noticed before the end: one more.
            assert job.recoveries(rank) >= wanted, f"rank {rank}: {told(job)}"


def assert_restarted(job: Job, golden: Job, why: str) -> None:
    """All ranks were restarted, for this reason, and ended as if nothing had happened."""
    assert_fired(job)
    assert any(why in each for each in job.refusals()), f"{job.refusals()}: {told(job)}"
    for rank in range(job.world):
        assert len(job.pids(rank)) > 1, f"rank {rank} was not restarted: {told(job)}"
    # Behind its update a survivor may wait for a collective before it says the loss.
    assert_golden(job, golden, silent=1)
