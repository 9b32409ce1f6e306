"""Measure a restart after a kill: how soon the next process makes a step, and what is lost.

Each failure takes two new processes. The first trains from the start, with a snapshot every `block`
steps, until SIGKILL reaches it: after at least two intervals, at moments spread over the third. The
second begins when the first is gone: it starts Python, imports, makes the model, restores,
attaches, makes one step. Another, before all, trains without an engine and digests the state of the
steps that are due: training is deterministic, so that what comes back is compared bit for bit, and
nothing of the comparison disturbs the one that is killed.

Records:
    restart_s: from the start of the second process to the end of its first step.
    start_s: of it, until it begins to attach and restore: Python, imports, the model.
    restore_s: of it, until the state is back and the engine attached.
    first_step_s: of it, the step.
    lost_steps: complete steps that were made after the one that came back.
    lost_work_s: from the end of the step that came back to SIGKILL.
    interval_steps: from one snapshot to the next.
    state: bytes.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from bench import engines
from bench.definition import Contender, Method
from bench.engines.lightck import restored
from bench.errors import BenchError
from bench.measures import Job
from bench.measures.loop import Loop
from bench.place import ROOT
from bench.record import Record, sampled, single
from bench.work import Training, Work, digests

_ENGINES = ("lightck", "torch.save", "checkfreq", "dcp")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_AFTER = 2  # intervals without a failure,
_LEAST = 8  # and steps: something is complete by then
_BEFORE = 1  # step before attaching: engines count from there, on a training that has all its state
_SEED = 7


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    if job.contender.engine not in _ENGINES:
        raise BenchError(
            f"{job.contender.label}: what {job.contender.engine} leaves when it is killed cannot be"
            f" found again here; restart takes {', '.join(_ENGINES)}"
        )
    chance = random.Random(_SEED)
    every, count = job.method.block, job.method.least
    begin = max(_AFTER * every, _LEAST)
    known, state = _reference(job, begin + every + 1)
    found: dict[str, list[float]] = {}
    for i in range(count):
        after = begin + every * (i + chance.random()) / count
        folder = job.folder / f"failure-{i}"
        folder.mkdir()
        for name, value in _failure(job, folder, after, known).items():
            found.setdefault(name, []).append(value)
        shutil.rmtree(folder)  # the medium may be memory
        job.tell(f"{i + 1} of {count} failures")
    note = f"{count} times killed, each restored state equal bit for bit"
    units = {name: "" if name == "lost_steps" else "s" for name in found}
    return [
        sampled("restart_s", "s", found.pop("restart_s"), note=note),
        *(sampled(name, units[name], values) for name, values in found.items()),
        single("interval_steps", "", every),
        single("state", "B", state),
    ]


def _reference(job: Job, steps: int) -> tuple[dict[int, Any], int]:
    """Return digests of the state at each step that is due, and its bytes."""
    known: dict[int, Any] = {}
    with _life(job, job.folder, "reference", steps) as life:
        while len(known) < steps // job.method.block:
            _, step, digest, state = life.hear("due")
            known[step] = digest
    return known, state


def _failure(job: Job, folder: Path, after: float, known: dict[int, Any]) -> dict[str, float]:
    """Kill one training at so many steps after its start, and start the next one."""
    done: dict[int, float] = {}
    with _life(job, folder, "train") as life:
        while len(done) < 2 or max(done) < int(after):
            _, step, moment = life.hear("done")
            done[step] = moment
        last = max(done)
        time.sleep((done[last] - done[last - 1]) * (after % 1))
        killed = time.monotonic()  # it takes half a second more until its memory is freed
        life.kill()
        for _, step, moment in life.rest("done"):
            done[step] = moment
    begin = time.monotonic()
    with _life(job, folder, "restart") as life:
        _, started = life.hear("started")
        _, step, back, digest, paused = life.hear("restored")
        _, stepped = life.hear("stepped")
    if step not in known or digest != known[step]:
        raise BenchError(f"restored step {step}, which is not as it was; due were {sorted(known)}")
    return {
        "restart_s": stepped - begin - paused,
        "start_s": started - begin,
        "restore_s": back - started,
        "first_step_s": stepped - back - paused,
        "lost_steps": max(done) - step,
        "lost_work_s": killed - done[step],
    }


@dataclass
class _Life:
    """A training process seen from its parent, with its messages line by line."""

    said: IO[str]
    kill: Callable[[], object]
    """Kill the process and return when it is gone; a second call has no effect."""

    def hear(self, what: str) -> list[Any]:
        """Return the values of the next message.

        Raises:
            BenchError: the process sends something else, or is gone.
        """
        line = self.said.readline()
        found = json.loads(line) if line else ["nothing: it has ended"]
        if found[0] != what:
            raise BenchError(f"a training process, instead of {what!r}: {found[0]}")
        return cast(list[Any], found)

    def rest(self, what: str) -> Iterator[list[Any]]:
        """Yield the messages that a process had sent before it ended.

        A line that is cut off is skipped.
        """
        for line in self.said:
            if line.endswith("\n") and (found := json.loads(line))[0] == what:
                yield found


@contextmanager
def _life(job: Job, folder: Path, what: str, steps: int = 0) -> Iterator[_Life]:
    """Start a new process; nothing of it is left afterwards."""
    asked = {
        "contender": asdict(job.contender),
        "work": asdict(job.work),
        "method": asdict(job.method),
        "folder": str(folder),
        "what": what,
        "steps": steps,
        "threads": torch.get_num_threads(),
    }
    reads, writes = os.pipe()
    kill = (_forked if job.method.patient else _started)(asked, writes)
    os.close(writes)
    with open(reads) as said:
        try:
            yield _Life(said, kill)
        finally:
            kill()


def _started(asked: dict[str, Any], writes: int) -> Callable[[], object]:
    """Start a new Python; return the function that kills it."""
    command = [sys.executable, "-m", "bench.measures.restart", str(writes), json.dumps(asked)]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[writes])

    def kill() -> None:
        process.kill()
        process.wait()

    return kill


def _forked(asked: dict[str, Any], writes: int) -> Callable[[], object]:
    """Fork a process for a tiny model, where the start of Python is not measured.

    It has one thread: where the parent has run a parallel region, a child hangs in its first one.
    """
    asked = {**asked, "threads": 1}
    process = multiprocessing.get_context("fork").Process(target=_lives, args=(asked, writes))
    process.start()

    def kill() -> None:
        process.kill()
        process.join()

    return kill


# ---- in the new process ------------------------------------------------------------------------


def _lives(asked: dict[str, Any], writes: int) -> None:
    """Run the whole life of a process."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with open(writes, "w", buffering=1) as told:

        def say(*words: Any) -> None:
            told.write(json.dumps(words) + "\n")

        try:
            _train(asked, say)
        except BaseException:  # noqa: BLE001 - the parent has nothing else to tell its user
            say(traceback.format_exc())
    os._exit(0)


def _train(asked: dict[str, Any], say: Callable[..., None]) -> None:
    torch.set_num_threads(asked["threads"])
    work, method = Work(**asked["work"]), Method(**asked["method"])
    contender, folder = Contender(**asked["contender"]), Path(asked["folder"])
    training = Training(work)
    if asked["what"] == "reference":
        for step in range(1, asked["steps"] + 1):
            training.steps(1)
            if step % method.block == 0:
                say("due", step, digests(training.state()), training.bytes())
        return
    loop = Loop(training, engines.make(contender.engine, contender.settings))
    loop.patient = method.patient
    if asked["what"] == "train":
        training.steps(_BEFORE)
        _attach(loop, folder)
        while True:
            loop.run(then=(loop.step + 1 + _BEFORE) % method.block == 0)
            say("done", loop.step + _BEFORE, time.monotonic())
    say("started", time.monotonic())
    loop.step = _bring_back(loop, contender.engine, folder)
    back = time.monotonic()
    digest = digests(training.state())
    say("restored", loop.step + _BEFORE, back, digest, time.monotonic() - back)
    loop.run(then=False)
    say("stepped", time.monotonic())


def _attach(loop: Loop, folder: Path) -> None:
    """Attach the engine in a folder where DCP's process group may have met before, now dead."""
    (folder / "store").unlink(missing_ok=True)
    loop.attach(folder)


def _bring_back(loop: Loop, engine: str, folder: Path) -> int:
    """Restore into a new training and attach; return the step."""
    if engine == "lightck":
        step = restored(loop.training, folder / "run")
        loop.attach(folder)
        return step
    _attach(loop, folder)
    if engine == "dcp":  # the newer one of its two folders whose metadata, written last, is there
        whole = sorted(folder.glob("checkpoint-*/.metadata"), key=lambda f: f.stat().st_mtime_ns)
        if not whole:
            raise BenchError(f"no whole checkpoint of DCP in {folder}")
        cast(Any, loop.engine)._begun = int(whole[-1].parent.name.rpartition("-")[2])
    return loop.engine.restore(loop.training)


if __name__ == "__main__":
    _lives(json.loads(sys.argv[2]), int(sys.argv[1]))
