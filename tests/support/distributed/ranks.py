"""A job of several ranks: forked from this process, which has imported torch already, over gloo.

    with ranks.started(2, train) as job:
        losses = job.results()

`train(me)` runs in a process of its own on every rank, with torch.distributed initialized. The
job's store is served by one more process, as torchrun's agent does, so that any rank can be killed
without taking the store away. When the block ends nothing of the job is left, whatever happened.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from support.processes import fork

LONG_S = 100.0
"""Far beyond what any test needs; a test that runs into it has failed."""
PATIENCE_S = 45.0
"""Ranks wait for each other this long: also where some never come, and a test waits for that."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LAST_WORDS_S = 0.3


@dataclass(frozen=True)
class Me:
    """Each rank's code is given one of these."""

    rank: int
    world: int
    store: Any = field(repr=False)
    """The raw client of the job's store, for what a test itself wants to say over it."""
    _link: tuple[int, int] = field(repr=False)

    def send(self, value: Any) -> None:
        """Give a value to `Job.receive`."""
        _write(self._link[1], ("said", value))

    def pause(self) -> None:
        """Wait for `Job.let_go`, or for ever."""
        os.read(self._link[0], 1)


@dataclass
class _Process:
    pid: int
    read: int
    write: int
    outcome: tuple[str, Any] | None = None
    """("returned", value) or ("raised", error); ("killed", status) if it ended without a word."""
    said: list[Any] = field(default_factory=list)
    gone: bool = False

    def await_word(self, deadline: float) -> bool:
        """Take in one message; False at the deadline."""
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self.read], [], [], left)[0]:
            return False
        word = _read(self.read)
        if word is None:
            self.outcome = ("killed", self.reap())
        elif word[0] == "said":
            self.said.append(word[1])
        else:
            self.outcome = word
        return True

    def reap(self) -> int:
        """Wait for its end; the status, negative for a signal."""
        self.gone = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)  # also ends a stopped one
            self.reap()
        os.close(self.read)
        os.close(self.write)


class Gone(Exception):
    """A rank ended without a word: it was killed."""


@dataclass
class Job:
    """The running ranks, seen from the test."""

    timeout_s: float
    _ranks: list[_Process] = field(default_factory=list)
    _agent: _Process | None = None

    def results(self) -> list[Any]:
        """Return what each rank's code returned; the first exception of a rank is raised here."""
        outcomes = self.outcomes()
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                outcome.add_note(f"on rank {rank}; the ranks ended with {outcomes}")
                raise outcome
        return outcomes

    def outcomes(self, which: Sequence[int] | None = None) -> list[Any]:
        """Return what all ranks, or some, returned or raised; `Gone` for one that was killed."""
        return [self._outcome(r) for r in (range(len(self._ranks)) if which is None else which)]

    def receive(self, rank: int) -> Any:
        """The next value that a rank sent; its exception is raised if that ended it."""
        process, deadline = self._ranks[rank], time.monotonic() + self.timeout_s
        while not process.said:
            if process.outcome is not None:
                outcome = self._outcome(rank)
                if isinstance(outcome, BaseException):
                    raise outcome
                raise AssertionError(f"rank {rank} sent nothing and returned {outcome!r}")
            if not process.await_word(deadline):
                raise self._hangs(rank)
        return process.said.pop(0)

    def let_go(self, *which: int) -> None:
        """Let ranks that wait in `pause` go on; all of them if none is named."""
        for rank in which or range(len(self._ranks)):
            os.write(self._ranks[rank].write, b".")

    def kill(self, rank: int) -> None:
        """SIGKILL; returns when the rank is dead."""
        os.kill(self._ranks[rank].pid, signal.SIGKILL)
        assert isinstance(self._outcome(rank), Gone)

    def stop(self, rank: int) -> None:
        """SIGSTOP; returns when the rank has stopped."""
        pid = self._ranks[rank].pid
        os.kill(pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])

    def go_on(self, rank: int) -> None:
        """Let a rank go on, by SIGCONT."""
        os.kill(self._ranks[rank].pid, signal.SIGCONT)

    def kill_store(self) -> None:
        """SIGKILL the process that serves the store; returns when it is dead."""
        assert self._agent is not None
        self._agent.end()
        self._agent = None

    def stop_store(self) -> None:
        """SIGSTOP it: the store's clients hang."""
        assert self._agent is not None
        os.kill(self._agent.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self._agent.pid, os.WUNTRACED)[1])

    def pid(self, rank: int) -> int:
        """Number of a rank's process."""
        return self._ranks[rank].pid

    def _outcome(self, rank: int) -> Any:
        process, deadline = self._ranks[rank], time.monotonic() + self.timeout_s
        while process.outcome is None:
            if not process.await_word(deadline):
                raise self._hangs(rank)
        kind, value = process.outcome
        return Gone(f"rank {rank} ended with status {value}") if kind == "killed" else value

    def _hangs(self, rank: int) -> TimeoutError:
        """Every rank writes its stacks on stderr, which pytest shows."""
        for process in self._ranks:
            if not process.gone:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_LAST_WORDS_S)
        missing = [r for r, process in enumerate(self._ranks) if process.outcome is None]
        return TimeoutError(
            f"nothing from rank {rank} in {self.timeout_s} s; ranks that still run: {missing};"
            " their stacks are on stderr"
        )

    def _end(self) -> None:
        for process in [*self._ranks, *filter(None, [self._agent])]:
            process.end()


@contextmanager
def started(
    world: int,
    code: Callable[[Me], Any],
    *,
    timeout_s: float = LONG_S,
    patience_s: float = PATIENCE_S,
    initialized: bool = True,
) -> Iterator[Job]:
    """Run `code` on every rank of a job.

    Args:
        world: number of ranks.
        code: called as `code(me)` in each rank's process; a closure will do. What it sends and
            returns must be picklable.
        timeout_s: how long the test waits for any one word of a rank.
        patience_s: how long ranks wait for each other: torch's own time-out.
        initialized: with `init_process_group`; without it the ranks know nothing of each other.
    """
    job = Job(timeout_s)
    try:
        port = None
        if initialized:
            job._agent = _start(_serve, [])
            assert job._agent.await_word(time.monotonic() + timeout_s), "the store does not start"
            (port,) = job._agent.said
        for rank in range(world):
            others = [p for p in (*job._ranks, job._agent) if p is not None]
            run = lambda link, rank=rank: _run(link, rank, world, port, patience_s, code)  # noqa: E731
            job._ranks.append(_start(run, others))
        yield job
    finally:
        job._end()


def _serve(link: tuple[int, int]) -> None:
    """Serve the job's store, in a process of its own."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    _write(link[1], ("said", server.port))
    signal.pause()


def _run(
    link: tuple[int, int],
    rank: int,
    world: int,
    port: int | None,
    patience_s: float,
    code: Callable[[Me], Any],
) -> Any:
    """A rank's process."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = None
    if port is not None:
        limit = timedelta(seconds=patience_s)
        store = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    return code(Me(rank, world, store, link))


def _start(code: Callable[[tuple[int, int]], Any], others: Sequence[_Process]) -> _Process:
    """Fork a process that runs `code` and says how that ended."""
    parent, up, down = os.getpid(), os.pipe(), os.pipe()
    pid = fork()
    if pid:
        os.close(up[1])
        os.close(down[0])
        return _Process(pid, up[0], down[1])
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before it could take us with it
        for fd in (up[0], down[1], *(fd for other in others for fd in (other.read, other.write))):
            os.close(fd)
        try:
            outcome: tuple[str, Any] = ("returned", code((down[0], up[1])))
            status = 0
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            traceback.print_exc()
            outcome = ("raised", _picklable(error))
        _write(up[1], outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _picklable(error: BaseException) -> BaseException:
    """Itself, or a RuntimeError with its text where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001 - whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")


def _write(fd: int, word: tuple[str, Any]) -> None:
    data = pickle.dumps(word)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int) -> tuple[str, Any] | None:
    """The next word; None when the writer is gone."""
    head = _exactly(fd, 8)
    data = head and _exactly(fd, int.from_bytes(head, "little"))
    return pickle.loads(data) if data else None


def _exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            return None
        data += more
    return data
