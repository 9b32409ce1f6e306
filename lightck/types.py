"""Frozen records and Protocols that several packages share; no behaviour."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Hazard:
    """The failures of the whole job that are to be expected now, per second.

    Attributes:
        rate: all of them.
        unrecoverable: those of them that leave no just-in-time snapshot; all with `failure="off"`.
    """

    rate: float
    unrecoverable: float


@dataclass(frozen=True, slots=True)
class Moment:
    """The values by which a policy decides whether a snapshot is due.

    Attributes:
        step: the step that has just ended; counts from 1.
        time_s: now, in seconds of a monotonic clock; only differences mean anything.
        epoch: the epochs that the loop has marked with `handle.epoch()` so far.
        last_step: step of the last due snapshot; None before the first.
        last_time_s: `time_s` of the last due snapshot; None before the first.
        last_epoch: `epoch` of the last due snapshot; None before the first.
        cost_s: what one snapshot adds to the training, seconds: the training thread's stall, and by
            how much the steps beside which its copy ran are longer; None until known.
        persist_s: measured time from a snapshot's opening to its commit, seconds; None until known.
        step_s: measured time of one step, the median of the last ones, seconds; None until known.
        quiet_s: median seconds of a step beside which no snapshot ran; None until known.
        quiet_age: steps since there was such a step.
        saved_step: newest step that is committed on all ranks; None: there is none.
        in_flight: a due snapshot is open, on its way, or of unknown fate.
        hazard: what failures are to be expected now; None: the policy does not need it.
        progress: how fast the loss falls now / on average since the start; None: not known.
        finite: the last loss that was seen is a number.
        world: number of ranks.
        metrics: the last values given to `handle.report`.
        extremes: least and greatest value of each metric, of all that were reported before a policy
            was last asked: what is in `metrics` since then is not among them.
    """

    step: int
    time_s: float
    epoch: int = 0
    last_step: int | None = None
    last_time_s: float | None = None
    last_epoch: int | None = None
    cost_s: float | None = None
    persist_s: float | None = None
    step_s: float | None = None
    quiet_s: float | None = None
    quiet_age: int = 0
    saved_step: int | None = None
    in_flight: bool = False
    hazard: Hazard | None = None
    progress: float | None = None
    finite: bool = True
    world: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    extremes: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)


class Fate(enum.Enum):
    """The outcome of a step's snapshot over all ranks."""

    UNKNOWN = "unknown"
    WHOLE = "whole"
    """Every rank has committed the snapshot."""
    DEAD = "dead"
    """A rank has not committed the snapshot, and never will."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a just-in-time snapshot.

    Attributes:
        reason: what it was taken for: `SIGTERM`, `hang`, the text given to `snapshot_now`, ...
        step: newest step that is committed on this rank; None: there is none.
        fresh: whether that is the last complete step: then at most the running minibatch is lost.
        early: whether it was finished before forward start.
        why: why it is not fresh; empty if it is.
        seconds: from the reason to the commit, or to giving up.
    """

    reason: str
    step: int | None
    fresh: bool
    early: bool = False
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The settings of the just-in-time path; `failure="jit"` is `Failure()`.

    Attributes:
        signals: names of the signals at which a snapshot is taken, also while the main thread is
            stuck in a collective. After it, SIGTERM ends the process (its parent sees that signal),
            SIGINT raises KeyboardInterrupt, SIGUSR1 and SIGUSR2 go on; the user's handlers run:
            those installed before attach after the snapshot, later ones at once.
        notice: the machine's end is announced by this file's appearance, or by this function's
            truth; it is called about once a second, on a thread of its own. Training goes on.
        grace_s: seconds from SIGTERM or a notice to the end of the process: what is saved must be
            committed by then. 30 is what torchrun and Slurm give.
        hang_steps: no progress inside a collective for so many measured steps is a hang; it is
            saved within a second more. So is a long evaluation that the others wait for.
        hang_s: no progress elsewhere for so many seconds is one: validation, compilation and slow
            loaders are none. In a process's first two steps, whose time is not known, it counts in
            collectives, too.
        hang_exit_s: seconds after the snapshot of a hang at which the process is ended, with status
            75; None: it is left alone, and goes on if it can. More than a validation takes on one
            rank while others wait for it; `hang_s` is then to be more than first steps compile. Who
            waits for a rank that has not saved the same step ends after that one has, `hang_s` and
            `grace_s` later at most.
        on_failure: called with what was saved, on the thread that saved it; when it returns True
            the process goes on as if nothing had come.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGUSR1")
    notice: Path | Callable[[], bool] | None = None
    grace_s: float = 30.0
    hang_steps: float = 3.0
    hang_s: float = 600.0
    hang_exit_s: float | None = None
    on_failure: Callable[[Saved], object] | None = None


@runtime_checkable
class Probe(Protocol):
    """A source of symptoms of failures to come: a GPU's counters, the kernel's log, ...

    Attributes:
        name: what it is called in events and in `lightck health`.
        period_s: seconds from one reading to the next.
    """

    name: str
    period_s: float

    def read(self) -> Mapping[str, float]:
        """Return the symptoms that are there now, by name, with how often: two bad GPUs are 2.

        Empty where there is nothing to read. May block: each probe has a thread of its own.
        """
        ...


@runtime_checkable
class Policy(Protocol):
    """The method that decides which steps are due; any object that has it is a policy.

    Three members more are used where a policy has them: `needs`, a frozenset out of "hazard",
    "health" and "loss", what the moment must hold; `interval_s(moment)`, the seconds from one
    snapshot to the next as of now, None while not known; and `why(moment)`, a sentence about it.
    """

    def due(self, moment: Moment) -> bool:
        """Return whether the step that has just ended gets a snapshot.

        Must be pure: the same moment always gives the same answer, because ranks and a restarted
        run ask again. Called once per step on the training thread; must not block.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and restored: schedulers, scalers, samplers, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; may share storage with the object."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state; the result is ignored."""
        ...


@runtime_checkable
class ReleaseSchedule(Protocol):
    """The methods that decide when the copies of a snapshot may run; never what or in which order.

    One object lives as long as its handle and gets one `open`, any number of `tick`s,
    `communicates` and `training_waits`, and one `close` per snapshot, so that it can learn a step's
    number of calls.

    Thread: `open` and `close` on the training thread, the others on whichever thread runs the
    gradient hook (autograd's device thread on a GPU), never two calls at the same time; none may
    block.
    """

    def open(self, total_bytes: int) -> int:
        """Begin a snapshot.

        Args:
            total_bytes: bytes of all held-back copies of this snapshot.

        Returns:
            Bytes released at once, 0 to `total_bytes`.
        """
        ...

    def tick(self) -> int:
        """Note that a layer's gradient is ready.

        Returns:
            Total bytes released from now on; never less than before.
        """
        ...

    def communicates(self, share: float) -> int:
        """Note that gradients are being communicated while the training goes on computing.

        Args:
            share: of this backward's gradient bytes, how much is under way or done, 0 to 1.

        Returns:
            The same as `tick`.
        """
        ...

    def training_waits(self) -> int:
        """Note that the training thread computes nothing: it waits for communication to end.

        Returns:
            The same as `tick`.
        """
        ...

    def close(self) -> None:
        """Note that the fence came: the engine now releases whatever was held back."""
        ...


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """The result of `restore`.

    Attributes:
        step: the step whose state is live now; training goes on with `step + 1`.
        slot: the slot it was read from.
        sequence: the snapshot's commit number in its region.
        wall_time: when the snapshot was committed, UTC.
        path: the folder or device it came from.
        early: whether the snapshot was finished before forward start.
        timeline: the timeline that wrote it.
        leftover: names of extras in the snapshot that no given object has.
        skipped: name to reason, for state that was not restored (`strict=False`); `rng` where
            another rank's own state was taken over, whose random numbers must not be drawn twice,
            `rng/cuda` where there is another number of CUDA devices.
        fell_back: one message for each newer snapshot that is not whole, or part of it, or suspect;
            also for parts of this one that had to be healed; on every rank the same.
        suspect: replicas were found to differ there or before; no other snapshot was whole.
        why: one sentence that says why this snapshot was chosen.
        world: number of ranks that wrote it.
        rank: the writing rank whose buffers, extras and generators this process has now.
        healed: one sentence for each rank that was given the snapshot by another: how many bytes,
            by which rank, and whose buffers and data position it has now; the same on every rank.
    """

    step: int
    slot: int
    sequence: int
    wall_time: datetime
    path: Path
    early: bool = False
    timeline: int = 0
    leftover: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    fell_back: tuple[str, ...] = ()
    suspect: bool = False
    why: str = ""
    world: int = 1
    rank: int = 0
    healed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters of a handle since its `attach`; a copy, taken at the moment of the call.

    Attributes:
        captured: snapshots whose every copy has left the live tensors.
        streamed: the part of `captured` of which an update of `lightck.optim` wrote a part itself.
        committed: snapshots that are durable on the medium's terms and visible to restore; of
            several ranks: durable on every one of them.
        slipped: due steps without a snapshot because the slots, or the DRAM for staging, were busy,
            or because this rank could not reach the others.
        torn: snapshots dropped because a tensor changed inside the window.
        failed: snapshots dropped because of an error.
        dead: snapshots that this rank has committed and another rank has not, because it slipped,
            failed, ...
        compared: snapshots at which a sample of the replicas here was compared with another rank's.
        uncompared: snapshots at which that was due and impossible: nothing to digest, or of other
            form.
        skipped_unchanged_bytes: bytes not written again because they were proved unchanged.
        bytes_copied: bytes copied, by workers and by the training thread.
        bytes_helped: the part of `bytes_copied` that the training thread copied at the fence.
        stall_s: training-thread seconds spent in lightck, by cause (`fence`, `boundary`, ...).
        copy_rate: bytes per second of one copying thread; 0 until known.
        commit_s: mean seconds from the last copy to the durable commit record; 0 until known.
        whole_s: mean seconds from this rank's commit record to knowing that every rank has its own;
            0 with one rank, and until known.
        at_once_bytes: bytes up to which a state is copied by the training thread at forward start,
            as measured when the copies were last planned; 0: none is.
        copied_at_once: whether the state is.
        placement: where copies from DRAM go first: `direct` or `staged`.
        placement_why: one sentence: why, with what was measured.
        staging_bytes: DRAM held for staged snapshots now.
        device_mode: how tensors in a device's memory reach the region: `direct`, `host` or
            `device`; empty while there are none. With several devices, the last one's.
        device_why: one sentence: why that mode.
        bytes_from_device: bytes copied from devices' memory.
        ring_bytes: pinned DRAM held for transfers now.
        device_copy_bytes: devices' memory held for copies of the state now.
        moved_in_draws: how often an extra that is taken at the start of the forward changed while a
            batch was drawn: then it is ahead of the data by one batch (see `at_step`).
        overhead: share of the last five minutes that snapshots have cost, by stalls and by what
            their copies slowed down, as measured.
        policy: a sentence on how often snapshots are taken now, and why.
        risk: what threatens the region's medium (a failing drive); empty: nothing that is known.
        recoveries: how often the job has recovered in place, from a lost rank or from broken
            connections; see `lightck run`.
        recovering_s: seconds that this took, in all.
        not_kept: with the failure path armed, the last error that kept a step's boundary state, or
            its entry in the journal, from being kept; empty: there was none.
    """

    captured: int = 0
    streamed: int = 0
    committed: int = 0
    slipped: int = 0
    torn: int = 0
    failed: int = 0
    dead: int = 0
    compared: int = 0
    uncompared: int = 0
    skipped_unchanged_bytes: int = 0
    bytes_copied: int = 0
    bytes_helped: int = 0
    stall_s: Mapping[str, float] = field(default_factory=dict)
    copy_rate: float = 0.0
    commit_s: float = 0.0
    whole_s: float = 0.0
    at_once_bytes: int = 0
    copied_at_once: bool = False
    placement: str = ""
    placement_why: str = ""
    staging_bytes: int = 0
    device_mode: str = ""
    device_why: str = ""
    bytes_from_device: int = 0
    ring_bytes: int = 0
    device_copy_bytes: int = 0
    moved_in_draws: int = 0
    overhead: float = 0.0
    policy: str = ""
    risk: str = ""
    recoveries: int = 0
    recovering_s: float = 0.0
    not_kept: str = ""
