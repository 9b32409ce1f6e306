"""Run a training command under chaos: follow its processes, act on faults, start it again."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightck.cli.chaos.plan import spelled
from lightck.cli.output import BAD_DATA, Refusal
from lightck.failure.fault_plan import EVENTS, LOSSES, VARIABLE, Fault, write_plan

_POLL_S = 0.01
_ENDS_S = 10.0
"""Seconds that killed processes may take to be gone."""
_OTHERS_S = 3.0
"""Seconds to wait for the other ranks once the first has saved: a rank before its forward waits one
second for it, and then all ranks also save the instant before that forward."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PLACEHOLDER = "{path}"
NETWORK = (
    "unshare",
    "--net",
    "--map-root-user",
    "sh",
    "-c",
    'ip link set lo up && exec "$@"',
    "sh",
)
Event = dict[str, Any]


@dataclass(frozen=True)
class TimeLimits:
    """Time limits, in seconds."""

    hold_s: float = 2.0
    """The duration of a fault that passes."""
    patience_s: float = 10.0
    """The duration of a hang until the job is ended from outside."""
    quiet_s: float = 120.0
    """The time without an event after which the job counts as stuck, and is ended."""


@dataclass
class Run:
    """The record of a command over all its starts."""

    folder: Path
    events: list[Event] = field(default_factory=list)
    """Events of the command's processes and of this one, which reports `started`, `ended` and
    `acted`."""

    @property
    def region(self) -> Path:
        """Return the path of the run's snapshots."""
        return self.folder / "region"

    @property
    def losses(self) -> Path:
        """Return the file that the command writes as $LIGHTCK_CHAOS_LOSSES."""
        return self.folder / "losses"

    @property
    def lives(self) -> int:
        """Return how often the command was started."""
        return sum(each["event"] == "started" for each in self.events)

    def steps(self) -> int:
        """Return the last step of any rank."""
        return max((e["step"] for e in self.events if e["event"] == "step"), default=0)

    def world(self) -> int:
        """Return the number of ranks."""
        return max((e["world"] for e in self.events if e["event"] == "attaching"), default=0)


@dataclass
class Job:
    """A command that is run until it ends well; only one at a time in a process."""

    command: Sequence[str]
    folder: Path
    faults: Sequence[Fault]
    limits: TimeLimits
    on_event: Callable[[Event], object]
    run: Run = field(init=False)
    _process: subprocess.Popen[bytes] | None = None
    _read_to: int = 0
    _due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    """Actions that are due, each with its time."""
    _last_word: float = 0.0
    _hang: tuple[int, float] | None = None
    """The fault for which the job will be ended, and the time."""
    _ends_hangs: bool = False
    """The job ends hanging processes by itself."""
    _living: dict[int, int] = field(default_factory=dict)
    """Processes that have begun to attach, and their ranks."""
    _others: frozenset[int] = frozenset()
    """Children of this process that do not belong to the job."""

    def __post_init__(self) -> None:
        """Make the folder and write the plan of faults into it."""
        self.folder.mkdir()
        write_plan(self.folder, self.faults, self.limits.hold_s)
        self.run = Run(self.folder)

    def to_the_end(self) -> Run:
        """Start the command, and start it again whenever a fault has ended it.

        Raises:
            Refusal: the command failed by itself, or never attached to a region of its own.
        """
        self._others = frozenset(descendants(os.getpid()))
        with _adopting_orphans():
            while True:
                fired = len(self._fired())
                code = self._one_life()
                if code == 0:
                    return self.run
                numbers = self._fired()
                if len(numbers) == fired:
                    after = f" after {spelled(self.faults[numbers[-1]])}" if numbers else ""
                    raise Refusal(f"{self._why_ended(code)}{after}:\n{self.tail()}", BAD_DATA)

    def _why_ended(self, code: int) -> str:
        """Say why the last start ended, if no fault has ended it."""
        begin = max(i for i, e in enumerate(self.run.events) if e["event"] == "started")
        if any(e.get("stuck") for e in self.run.events[begin:]):
            return (
                f"the command said nothing for {self.limits.quiet_s:g} s (--quiet), and was ended"
            )
        return f"the command failed by itself (exit status {code})"

    def tail(self) -> str:
        """Return the end of the last start's output."""
        text = (self.folder / f"life-{self.run.lives}.out").read_text(errors="replace")
        return f"$ {' '.join(self._spelled())}\n{text.strip()[-3000:]}"

    def _fired(self) -> list[int]:
        """Return the numbers of the faults that were injected, in their order."""
        return [each["number"] for each in self.run.events if each["event"] == "fault"]

    def _spelled(self) -> list[str]:
        where = str(self.run.region)
        networked = any(each.kind == "network" for each in self.faults)
        words = [each.replace(PLACEHOLDER, where) for each in self.command]
        return [*(NETWORK if networked else ()), *words]

    def _one_life(self) -> int:
        """Start the command once and return its exit status."""
        run, life = self.run, self.run.lives + 1
        environment = os.environ | {
            VARIABLE: str(self.folder),
            LOSSES: str(run.losses),
            "LIGHTCK_PATH": str(run.region),
            # Without it, torchrun's workers mostly fail to connect after a restart.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.folder / f"life-{life}.out").open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self._spelled(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                script = self.command[0].endswith(".py")
                hint = f"; is it `python {self.command[0]}`?" if script else ""
                raise Refusal(f"{self.command[0]}: {error.strerror}{hint}") from error
        self._say("started", life=life, pid=self._process.pid)
        try:
            while self._process.poll() is None:
                self._look()
                time.sleep(_POLL_S)
        finally:
            # What is left of the job has lost its parent: it must not hold the region.
            self._end()
        code = self._process.returncode
        self._look()
        self._say("ended", life=life, code=code)
        return code

    # ---- watching and acting ---------------------------------------------------------------

    def _look(self) -> None:
        for event in self._new_events():
            self.run.events.append(event)
            self._last_word = time.monotonic()
            self.on_event(event)
            self._act(event)
        self._see_who_is_gone()
        now = time.monotonic()
        ready = [each for each in self._due if each[0] <= now]
        self._due = [each for each in self._due if each[0] > now]
        for _, action in ready:
            action()
        if self._hang is not None and now >= self._hang[1]:
            self._say("acted", number=self._hang[0], what="the job was ended")
            self._end()
        elif now - self._last_word > self.limits.quiet_s:
            self._say("acted", what=f"no word for {self.limits.quiet_s:g} s: ended", stuck=True)
            self._end()

    def _see_who_is_gone(self) -> None:
        """Report processes of ranks that have ended.

        Torchrun ends and starts its workers by itself.
        """
        for pid, rank in list(self._living.items()):
            if not _lives(pid):
                del self._living[pid]
                self._say("gone", pid=pid, rank=rank)

    def _new_events(self) -> Iterator[Event]:
        file = self.folder / EVENTS
        if not file.exists():
            return
        with file.open("rb") as stream:
            stream.seek(self._read_to)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._read_to += len(line)
                yield json.loads(line)

    def _act(self, event: Event) -> None:
        """Do what a fault needs from outside the process."""
        pid, hold = event.get("pid", 0), self.limits.hold_s
        if event["event"] == "attaching":
            self._living[pid] = event["rank"]
            self._ends_hangs = event["ends_hangs"]
        if self._hang is not None and is_saved(event) and not self._ends_hangs:
            # Once the other ranks have saved too, waiting longer brings nothing.
            self._hang = self._hang[0], min(self._hang[1], time.monotonic() + _OTHERS_S)
        if event["event"] != "fault":
            return
        fault = self.faults[event["number"]]
        if fault.kind == "stop":
            self._in(hold, lambda: _signal(pid, signal.SIGCONT))
        elif fault.kind == "hang":
            self._hang = event["number"], time.monotonic() + self.limits.patience_s
        elif fault.kind == "term" and fault.rank is None:
            assert self._process is not None
            _signal(self._process.pid, signal.SIGTERM)
        elif fault.kind == "network":
            self._loopback(pid, "down")
            self._in(hold, lambda: self._loopback(pid, "up"))

    def _in(self, seconds: float, action: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _loopback(self, pid: int, state: str) -> None:
        enter = ("nsenter", "-t", str(pid), "--user", "--net", "--preserve-credentials")
        done = subprocess.run(
            [*enter, "ip", "link", "set", "lo", state], capture_output=True, text=True
        )
        self._say("acted", what=f"lo {state}", why=done.stderr.strip() or None)

    def _end(self) -> None:
        """End every process of the job."""
        self._due.clear()
        self._hang = None
        process = self._process
        assert process is not None
        deadline = time.monotonic() + _ENDS_S
        while left := descendants(os.getpid(), self._others):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            process.poll()
            _reap(left, process.pid)
            if time.monotonic() > deadline:
                raise Refusal(f"processes {left} of the job do not end", BAD_DATA)
            time.sleep(_POLL_S)

    def _say(self, event: str, **fields: Any) -> None:
        said = {"event": event, "t": time.monotonic(), **fields}
        self._last_word = said["t"]
        self.run.events.append(said)
        self.on_event(said)


def is_saved(event: Event) -> bool:
    """Return whether the event is the end of a just-in-time snapshot, good or bad."""
    return event["event"] == "log" and bool(event["name"] == "saved")


def network_refusal() -> str | None:
    """Return why the job can have no network of its own here; None: it can."""
    try:
        done = subprocess.run([*NETWORK, "true"], capture_output=True, text=True)
    except OSError as error:
        return f"unshare: {error.strerror}"
    return None if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make orphans children of this process: torchrun's workers, if torchrun is killed.

    Raises:
        Refusal: the kernel does not support it.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        raise Refusal(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def descendants(root: int, but: Collection[int] = ()) -> list[int]:
    """Return all descendants of a process, also those that have ended and are not reaped."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                after_name = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(after_name[1]), []).append(int(entry))
    found, new = [], [root]
    while new:
        new = [child for each in new for child in children.get(each, []) if child not in but]
        found += new
    return found


def _reap(pids: Sequence[int], known: int) -> None:
    for pid in pids:
        if pid != known:  # that one is reaped by its Popen
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _lives(pid: int) -> bool:
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
