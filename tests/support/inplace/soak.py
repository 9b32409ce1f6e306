"""Kills, stops and cuts ranks of a `lightck run` at random moments; looks at what that left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

TRAINER = Path(__file__).with_name("soaked.py")
MOST_S = 120.0
AHEAD = 300
"""Steps between the order to stop and the stop: no rank is ever that far ahead of another."""


@dataclass(frozen=True)
class Held:
    """The resources a process held when it was asked."""

    recoveries: int
    threads: int
    descriptors: int
    rss_kib: int


@dataclass
class Soak:
    """One run, its ranks, and what they have said."""

    folder: Path
    process: subprocess.Popen[bytes]
    world: int
    moments: random.Random
    killed: int = 0
    stopped: int = 0
    """Ranks, counted among the killed too, that were ended because they stood."""
    paused: int = 0
    cut: int = 0
    _offsets: dict[int, int] = field(default_factory=dict)
    _rest: dict[int, str] = field(default_factory=dict)
    pids: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    losses: dict[int, dict[int, set[str]]] = field(default_factory=dict)
    held: dict[int, list[Held]] = field(default_factory=dict)
    """Measurements of each process, by its number."""

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def look(self) -> None:
        """Read what ranks have said since the last look."""
        assert self.process.poll() in (None, 0), f"the run has failed: {self.log[-4000:]}"
        for rank in range(self.world):
            with suppress(FileNotFoundError), (self.folder / f"{rank}.said").open() as file:
                file.seek(self._offsets.get(rank, 0))
                text = self._rest.get(rank, "") + file.read()
                self._offsets[rank] = file.tell()
                *lines, self._rest[rank] = text.split("\n")
                for line in lines:
                    self._note(rank, line.split())

    def _note(self, rank: int, words: Sequence[str]) -> None:
        if words[0] == "pid":
            self.pids.setdefault(rank, []).append(int(words[1]))
        elif words[0] == "step":
            step = self.steps[rank] = int(words[1])
            self.losses.setdefault(rank, {}).setdefault(step, set()).add(words[2])
        elif words[0] == "cut":
            self.cut += int(words[1])
        elif words[0] == "held":
            self.held.setdefault(self.pids[rank][-1], []).append(Held(*map(int, words[1:])))

    def wait_for(self, what: str, holds: object) -> None:
        """Wait until something holds of what the ranks have said."""
        assert callable(holds)
        end_s = time.monotonic() + MOST_S
        while True:
            self.look()
            if holds():
                return
            assert time.monotonic() < end_s, f"waited too long for {what}: {self.hanging()}"
            time.sleep(0.02)

    def hanging(self) -> str:
        """Return where everybody is."""
        stacks = []
        for rank, pids in self.pids.items():
            dump = (
                subprocess.run(
                    ["py-spy", "dump", "--pid", str(pids[-1])], capture_output=True, text=True
                )
                if (Path(sys.prefix) / "bin/py-spy").exists()
                else None
            )
            stacks.append(f"rank {rank} {pids[-1]} step {self.steps.get(rank)} {dump}")
        return "\n".join([*stacks, self.log[-6000:]])

    def trains(self, more: int = 3) -> None:
        """Wait until every rank has made some more steps."""
        self.look()
        goal = max(self.steps.values(), default=0) + more
        self.wait_for(
            f"step {goal} on all ranks",
            lambda: all(self.steps.get(rank, 0) >= goal for rank in range(self.world)),
        )

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill one rank of these, whatever it does."""
        rank = self.moments.choice(ranks)
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank][-1], signal.SIGKILL)
            self.killed += 1

    def stop(self, ranks: Sequence[int]) -> None:
        """Stop one rank of these for good: the others have it ended, and replaced."""
        rank = self.moments.choice(ranks)
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank][-1], signal.SIGSTOP)
            self.stopped += 1
            self.killed += 1

    def pause(self, seconds: float) -> None:
        """Stop one rank for a while that costs nothing."""
        pid = self.pids[self.moments.randrange(self.world)][-1]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            self.paused += 1

    def order(self, rank: int, letter: str) -> None:
        """Give a rank an order."""
        with suppress(OSError):
            pipe = os.open(
                self.folder / f"{self.pids[rank][-1]}.orders", os.O_WRONLY | os.O_NONBLOCK
            )
            os.write(pipe, letter.encode())
            os.close(pipe)

    def measure(self) -> None:
        """Note what every process holds."""
        for rank in range(self.world):
            self.order(rank, "m")

    def finish(self) -> None:
        """Let all ranks stop at one step, and wait for the end."""
        self.look()
        last = max(self.steps.values()) + AHEAD
        draft = self.folder / "stop.draft"
        draft.write_text(str(last))
        draft.rename(self.folder / "stop")
        status = self.process.wait(MOST_S)
        assert status == 0, f"the run ended with {status}: {self.log[-4000:]}"
        self.look()

    @property
    def last(self) -> int:
        return int((self.folder / "stop").read_text())

    @property
    def restarts(self) -> list[str]:
        """Why all ranks were restarted, each time."""
        whys = [re.sub(r".*why=", "", each) for each in re.findall(r"in_place_refused.*", self.log)]
        return whys

    def differences(self, golden: Soak) -> list[str]:
        """Return what is not as in a run that nothing has happened to."""
        found = []
        for rank in range(self.world):
            for step in range(1, self.last + 1):
                mine = self.losses[rank].get(step)
                if mine is not None and mine != golden.losses[rank][step]:
                    found.append(f"rank {rank} step {step}: {mine} {golden.losses[rank][step]}")
            missing = self.last - len(self.losses[rank])
            # Each life may be lost between its update and the line that says so.
            if missing > self.killed:
                found.append(f"rank {rank} has not said {missing} of {self.last} steps")
            states = [torch.load(each.folder / f"{rank}.state") for each in (self, golden)]
            if not _same(*states):
                found.append(f"rank {rank}: another state")
        return found


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@contextmanager
def soaking(
    folder: Path, world: int, seed: int, options: Sequence[str], stop: int | None = None
) -> Iterator[Soak]:
    """Start a run; whatever is left of it at the end is ended."""
    (folder / "regions").mkdir(parents=True)
    if stop is not None:
        (folder / "stop").write_text(str(stop))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["run", "--standalone", f"--nproc-per-node={world}", "--max-restarts=1000"]
    if stop is not None:
        words.append("--no-spare")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "lightck.cli", *words, str(TRAINER), str(folder),
                str(folder / "regions"), *options,
            ],
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    soak = Soak(folder, process, world, random.Random(seed))
    try:
        yield soak
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
            for pids in soak.pids.values():
                for pid in pids:
                    with suppress(ProcessLookupError, FileNotFoundError):
                        if str(folder) in Path(f"/proc/{pid}/cmdline").read_text():
                            os.kill(pid, signal.SIGKILL)


def golden(folder: Path, world: int, steps: int, options: Sequence[str]) -> Soak:
    """Return the same run, to which nothing happens."""
    with soaking(folder, world, 0, options, steps) as found:
        status = found.process.wait(600)
        assert status == 0, found.log[-4000:]
        found.look()
    return found


def disturb(soak: Soak, times: int, spared: int | None = None) -> None:
    """Kill, stop, pause or cut ranks at random moments; measure once all train again.

    One in five is a cut, one in five a stop, half of them for good; and one in four kills is
    followed by a second within the recovery.
    """
    ranks = [rank for rank in range(soak.world) if rank != spared]
    soak.trains(10)
    for _ in range(times):
        time.sleep(soak.moments.random() * 0.3)
        soak.look()
        draw = soak.moments.random()
        if draw < 0.2:
            soak.order(soak.moments.randrange(soak.world), "c")
        elif draw < 0.3:
            soak.stop(ranks)
        elif draw < 0.4:
            soak.pause(soak.moments.random())
        else:
            soak.kill(ranks)
            if draw > 0.85:
                time.sleep(soak.moments.random() ** 2 * 3)
                soak.look()
                soak.kill(ranks)
        time.sleep(0.2)
        soak.trains()
        soak.measure()
