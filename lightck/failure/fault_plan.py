"""Fault injection inside a training process that `lightck chaos` has started.

`attach` and `restore` look at one environment variable; without it this module is not even
imported. It names a folder that all lives of the job share: `plan.json` says which faults are to
happen where, one file per fault says that it has happened, and every process writes its events to
`events.jsonl`. Times are CLOCK_MONOTONIC's: there is one machine.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightck.distributed.topology import here
from lightck.events import log
from lightck.reader.assembly import AssembledSnapshot

F = TypeVar("F", bound=Callable[..., Any])
VARIABLE = "LIGHTCK_CHAOS"
LOSSES = "LIGHTCK_CHAOS_LOSSES"
PLAN, EVENTS = "plan.json", "events.jsonl"
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP; continued after --hold",
    "hang": "the training thread sleeps for ever; the job is ended after --patience, or once saved,"
    " unless its `hang_exit_s` does that",
    "exception": "an exception out of the training code",
    "gil": "a C call that holds Python's lock for --hold: no other thread of Python runs",
    "term": "SIGTERM, of rank `*` to the command itself",
    "slow": "for --hold the medium takes that long for a snapshot",
    "full": "for --hold no file of the process grows beyond the region's size",
    "corrupt": "a flipped bit in the newest snapshot of the rank's region, then SIGKILL",
    "network": "the loopback device goes down for --hold, in a network namespace of the job's own",
}
PHASES = {
    "forward": "in the middle of the forward",
    "backward": "in the middle of the backward",
    "allreduce": "at the backward's end, gradients still under way",
    "fence": "before the update, copies still under way",
    "commit": "behind the fence, while the snapshot is committed",
    "update": "parameters changed, the step not complete",
    "between": "right after the step, before anything that the loop does about it",
    "evaluation": "in a forward without gradients after the step, of a training that has one there",
    "restore": "in the middle of the first restore of STEP or newer",
    "save": "in the middle of the first just-in-time save of STEP or newer that copies anything",
}
ANY_NEWER = ("restore", "save")
"""Phases that have no fixed step: the fault happens at the first one of its step or later."""
NOT_IN = {"restore": ("slow", "full", "corrupt"), "save": ("exception", "corrupt")}
"""The kinds impossible in a phase: they need an attached region, or the phase runs no user code."""


class InjectedError(RuntimeError):
    """The exception that chaos raises in the user's loop."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, and where it happens.

    Attributes:
        kind: one of `KINDS`.
        step: the step that is being trained, from 1; `between` and `evaluation` come after its end.
        phase: one of `PHASES`.
        rank: the rank that it happens on; None: every rank.
    """

    kind: str
    step: int
    phase: str = "forward"
    rank: int | None = 0


def write_plan(folder: Path, faults: Sequence[Fault], hold_s: float) -> None:
    """Write the faults that a job's processes are to inject to the plan in `folder`."""
    plan = {"hold_s": hold_s, "faults": [asdict(each) for each in faults]}
    (folder / PLAN).write_text(json.dumps(plan))


@dataclass(eq=False)
class EventWriter(logging.Handler):
    """A writer of this process's events, including lightck's log events, one line each.

    Lines are whole, even if the process is killed.
    """

    folder: Path
    rank: int

    def __post_init__(self) -> None:
        """Open the events file for appending, and subscribe to lightck's log."""
        super().__init__(logging.INFO)
        self._fd = os.open(
            self.folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)
        log.addHandler(self)

    __hash__ = logging.Handler.__hash__

    def write(self, event: str, **fields: Any) -> None:
        """Write one event. Any thread."""
        record = {"event": event, "t": time.monotonic(), "rank": self.rank, "pid": os.getpid()}
        os.write(self._fd, (json.dumps({**record, **fields}, default=str) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log event of lightck."""
        name = getattr(record, "lightck_event", None)
        if name is not None:
            self.write("log", name=name, fields=getattr(record, "lightck", {}))


@dataclass(eq=False)
class FaultPlan:
    """The plan of faults in this process."""

    folder: Path
    rank: int
    faults: Sequence[Fault] = field(init=False)
    hold_s: float = field(init=False)
    events: EventWriter = field(init=False)
    _for_job: bool = False
    """True if the fault that is being injected is meant for every rank."""

    def __post_init__(self) -> None:
        """Read the plan; from now on events are written."""
        plan = json.loads((self.folder / PLAN).read_text())
        self.faults = [Fault(**each) for each in plan["faults"]]
        self.hold_s = plan["hold_s"]
        self.events = EventWriter(self.folder, self.rank)

    def reach(
        self, phase: str, step: int, complete: int, more: Mapping[str, Callable[[], object]]
    ) -> None:
        """Inject the faults that are planned here.

        Args:
            phase: the phase that this process is in.
            step: the step of that phase.
            complete: the last complete step.
            more: callables for those kinds of faults that only the caller can inject.
        """
        for number, fault in enumerate(self.faults):
            here = step == fault.step or (phase in ANY_NEWER and step >= fault.step)
            if fault.phase != phase or not here or fault.rank not in (None, self.rank):
                continue
            if self._claim(number, fault):
                losses = os.environ.get(LOSSES, "")
                record = os.path.getsize(losses) if losses and os.path.exists(losses) else 0
                at = {"number": number, "kind": fault.kind, "step": step, "phase": phase}
                self.events.write("fault", complete=complete, losses=record, **at)
                (more.get(fault.kind) or getattr(self, fault.kind))()
                self.events.write("over", **at)

    def _claim(self, number: int, fault: Fault) -> bool:
        """Claim the fault for this process: each happens once; False if another has claimed it."""
        self._for_job = fault.rank is None
        from_outside = fault.kind in ("term", "network")
        each_rank = self._for_job and not from_outside
        name = f"fired-{number}-{self.rank}" if each_rank else f"fired-{number}"
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def kill(self) -> None:
        """Kill this process without a warning."""
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Stop this process; `lightck chaos` continues it."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def hang(self) -> None:
        """Sleep for ever; signals are still handled, and other threads run."""
        while True:
            time.sleep(1.0)

    def exception(self) -> None:
        """Raise an exception as if the loop's own code did."""
        raise InjectedError("lightck chaos: an exception on purpose")

    def gil(self) -> None:
        """Hold the GIL for the hold time: PyDLL keeps it during the call.

        The sleep is repeated, because a signal would end a single one.
        """
        until = time.monotonic() + self.hold_s
        usleep = ctypes.PyDLL(None).usleep
        while (left := until - time.monotonic()) > 0:
            usleep(int(left * 1e6))

    def term(self) -> None:
        """Send SIGTERM to this process; if the command is meant, `lightck chaos` sends it."""
        if not self._for_job:
            os.kill(os.getpid(), signal.SIGTERM)

    def network(self) -> None:
        """Do nothing here: `lightck chaos` takes the network device down, and up again."""


@functools.cache
def _process_faults(folder: str, process: int, rank: int) -> FaultPlan:
    return FaultPlan(Path(folder), rank)


def process_faults() -> FaultPlan:
    """Return the `FaultPlan` of this process."""
    return _process_faults(os.environ[VARIABLE], os.getpid(), here()[0])


def with_restore_faults(restore: F) -> F:
    """Wrap `restore` to inject faults after it has read tensors, before it restores the rest."""
    read = AssembledSnapshot.read

    @functools.wraps(restore)
    def restoring(*args: Any, **settings: Any) -> Any:
        plan = process_faults()

        def read_half(self: AssembledSnapshot, addresses: Any) -> None:
            read(self, addresses)
            plan.reach("restore", self.record.step, self.record.step, {})

        AssembledSnapshot.read = read_half  # type: ignore[method-assign]
        try:
            return restore(*args, **settings)
        finally:
            AssembledSnapshot.read = read  # type: ignore[method-assign]

    wrapped: Any = restoring
    return wrapped  # type: ignore[no-any-return]
