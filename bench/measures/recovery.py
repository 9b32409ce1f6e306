"""Measure a job's way from a failure to training again, without the start of processes.

This process forks the ranks, life after life. Each life restores what the one before has saved,
attaches with no step ever due, trains a little and fails in a forward: one rank is killed, raises,
or stops until every rank is sent SIGTERM; the others wait for it in the allreduce. The work that
starts a process is done before the clock of a restart: imports, the model, the process group.

Records:
    recovery: seconds from the failure to training again: saved, ended and restart together.
    detected: of it, until the last rank that lives begins to save.
    saved: from there until everything is committed, the share of a dead rank too.
    ended: from there until the last process is gone.
    restart: from the call of restore on the next life's ranks until the last one is attached.
    first_step: seconds of the step after it, once every rank has compared what it has restored.
    state: bytes of the state.
    saved_ratio: saved / sync_copy.
    sync_copy: seconds of the yardstick, on rank 0 of the first life while the others wait.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

import lightck
from bench.errors import BenchError
from bench.measures import Job
from bench.record import Record, sampled, single
from bench.statistics import trimmed_mean
from bench.work import State, Training, difference, digests, tensors
from bench.yardstick import SyncCopy

FAULTS = ("kill", "term", "exception")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PATIENCE_S = 300.0  # for any one message of a rank
_NEVER = 1 << 40


class _Failure(Exception):  # noqa: N818 - of the bench's own
    """The error that a rank raises."""


def measure(job: Job) -> list[Record]:
    """Measure the job; see the module and `bench.measures.run`."""
    if job.contender.engine != "lightck":
        raise BenchError(f"{job.contender.label}: only lightck saves when a rank fails")
    if job.method.fault not in FAULTS:
        raise BenchError(f"fault = {job.method.fault!r}: must be one of {', '.join(FAULTS)}")
    importlib.import_module("torch._dynamo")  # an optimizer would load it at its first step
    found: dict[str, list[float]] = {}
    with _life(job) as life:
        last = life.trained(None)
    state, copies = last.bytes, last.copies_s
    for i in range(job.method.settle + job.method.least):
        with _life(job) as life:
            now = life.trained(last)
        parts = {**last.parts, "restart": now.restart_s, "first_step": now.first_step_s}
        parts["recovery"] = sum(parts[part] for part in ("detected", "saved", "ended", "restart"))
        for name, seconds in parts.items() if i >= job.method.settle else ():
            found.setdefault(name, []).append(seconds)
        last = now
        job.tell(f"{i + 1} of {job.method.settle + job.method.least} failures")
    lives = job.method.settle + job.method.least
    note = f"{lives} failures, each restored to the last complete step and equal bit for bit"
    return [
        sampled("recovery", "s", found["recovery"], note=note),
        *(sampled(name, "s", found[name]) for name in ("detected", "saved", "ended", "restart")),
        sampled("first_step", "s", found["first_step"]),
        single("state", "B", state),
        sampled("saved_ratio", "", found["saved"], scale=trimmed_mean(copies)),
        sampled("sync_copy", "s", copies),
    ]


@dataclass
class _End:
    """The begin and end of a life."""

    step: int
    """The last complete step at the failure."""
    states: list[State]
    """Digests of each rank's state."""
    bytes: int
    copies_s: list[float]
    """Copies of the state by the yardstick; in the first life only."""
    restart_s: float
    first_step_s: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class _Life:
    """The ranks of one life, seen from the process that has forked them."""

    job: Job
    ranks: list[Any]
    ends: list[Connection]

    def trained(self, before: _End | None) -> _End:
        """Let the ranks restore, train and fail; return how the life ended."""
        self._hear("ready")
        began = time.monotonic()
        for end in self.ends:
            end.send(None if before is None else (before.step, before.states[self.ends.index(end)]))
        attached = max(self._hear("attached"))
        compared = max(self._hear("compared"))  # with what was saved: no part of a restart
        stepped = max(self._hear("stepped"))
        said = self._hear("state")
        steps = {each[0] for each in said}
        if len(steps) != 1:
            raise BenchError(f"the ranks are at steps {sorted(steps)}")
        found = _End(
            steps.pop(),
            [each[1] for each in said],
            said[0][2],
            said[0][3],
            attached - began,
            stepped - compared,
        )
        for end in self.ends:
            end.send("fail")
        found.parts = self._failed(found.step)
        return found

    def _failed(self, step: int) -> dict[str, float]:
        """Return the parts of the time that the failure took."""
        fault, last = self.job.method.fault, len(self.ends) - 1
        failed = self._word(last, "failing")
        if fault == "term":
            failed = time.monotonic()
            for rank in self.ranks:
                os.kill(rank.pid, signal.SIGTERM)
        saving = range(last) if fault == "kill" else range(last + 1)
        words = [self._word(rank, "saved") for rank in saving]
        for rank in self.ranks:
            rank.join(_PATIENCE_S)
        ended = time.monotonic()
        for _, _, saved in words:
            if not saved.fresh or saved.step != step:
                raise BenchError(f"step {step} was to be saved, this was: {saved}")
        detected, done = (max(word[i] for word in words) for i in (0, 1))
        return {"detected": detected - failed, "saved": done - detected, "ended": ended - done}

    def _hear(self, what: str) -> list[Any]:
        return [self._word(rank, what) for rank in range(len(self.ends))]

    def _word(self, rank: int, what: str) -> Any:
        end = self.ends[rank]
        wait([end, self.ranks[rank].sentinel], _PATIENCE_S)
        if not end.poll():
            raise BenchError(f"rank {rank}: no {what!r}, though it ended or {_PATIENCE_S:.0f} s")
        kind, value = end.recv()
        if kind != what:
            raise BenchError(f"rank {rank}: {kind}: {value}, instead of {what!r}")
        return value


@contextmanager
def _life(job: Job) -> Iterator[_Life]:
    """Fork the ranks of a life and serve their job's store; nothing of them is left afterwards."""
    context = multiprocessing.get_context("fork")
    life = _Life(job, [], [])
    try:
        for rank in range(job.work.forks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(job, rank, theirs))
            process.start()
            theirs.close()
            life.ranks.append(process)
            life.ends.append(ours)
        # Start the store after the forks: its thread and the locks it may hold would be in none of
        # them.
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        for end in life.ends:
            end.send(store.port)
        yield life
    finally:
        for process, end in zip(life.ranks, life.ends, strict=True):
            process.kill()
            process.join()
            process.close()
            end.close()


# ---- in the ranks -----------------------------------------------------------------------------


def _rank(job: Job, rank: int, end: Connection) -> None:
    """Run one rank's process."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    lock = threading.Lock()  # the snapshot of a failure is reported on another thread
    said: list[str] = []

    def say(what: str, value: Any) -> None:
        with lock:
            said.append(what)
            end.send((what, value))

    try:
        _lives(job, rank, end, say)
    except BaseException as error:  # noqa: BLE001 - in the end that of the failure, here or there
        if "state" not in said:
            say("error", repr(error))
    os._exit(1)  # how a failed process ends is not measured here


def _lives(job: Job, rank: int, end: Connection, say: Callable[..., None]) -> None:
    patience = timedelta(seconds=_PATIENCE_S)
    tcp = dist.TCPStore  # type: ignore[attr-defined]
    store = tcp("127.0.0.1", end.recv(), None, False, patience, wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = job.work.forks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    training = Training(job.work, seed=1, rank=rank)
    dist.barrier()
    say("ready", None)
    before = end.recv()

    def saved(what: lightck.types.Saved) -> None:
        now = time.monotonic()
        say("saved", (now - what.seconds, now, what))

    path = job.folder / "run"
    lightck.restore(training.model, training.optimizer, path)
    handle = lightck.attach(
        training.model,
        training.optimizer,
        path,
        policy=_NEVER,
        failure=lightck.Failure(on_failure=saved, hang_steps=1e9),  # the failure itself comes first
        **job.contender.settings,
    )
    say("attached", time.monotonic())
    if before is not None:
        _must_be_equal(handle.step, training, *before)
    dist.barrier()
    say("compared", time.monotonic())
    with handle:
        training.steps(1)
        say("stepped", time.monotonic())
        training.steps(job.method.warmup)
        state = training.state()
        said = digests(state), sum(t.nbytes for t in tensors(state))
        dist.barrier()
        copies = _copies(job, state) if rank == 0 and before is None else []
        say("state", (handle.step, *said, copies))
        end.recv()
        if rank == world - 1:
            training.plain.register_forward_hook(lambda *_: _fail(job.method.fault, say))
        training.compute()


def _copies(job: Job, state: State) -> list[float]:
    yardstick = SyncCopy(job.folder, tensors(state))
    try:
        return [yardstick() for _ in range(job.method.least)]
    finally:
        yardstick.close()


def _must_be_equal(step: int, training: Training, wanted: int, kept: State) -> None:
    problem = difference(kept, digests(training.state()))
    if step != wanted or problem is not None:
        raise BenchError(f"restored step {step}, saved was step {wanted}: {problem}")


def _fail(fault: str, say: Callable[..., None]) -> None:
    say("failing", time.monotonic())
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exception":
        raise _Failure
    time.sleep(_PATIENCE_S)
