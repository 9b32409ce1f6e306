"""The outcome of each snapshot, told to futures, the user's `on_error`, and the log."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from lightck.errors import (
    CoordinationError,
    LightckError,
    PreviousPersistError,
    RegionBusyError,
    RegionError,
    TornSnapshotError,
    WaitTimeoutError,
)
from lightck.events import event
from lightck.history.history import History
from lightck.loop.steps import Steps
from lightck.pipeline.commit_barrier import is_final
from lightck.pipeline.pipeline import (
    Counters,
    InflightSnapshot,
    Pipeline,
    SlipReason,
)
from lightck.region.native_region import RECORD_JIT
from lightck.state.inventory import Inventory

# ---- a warning when due snapshots slip too often, and what to do about it ------------------------

SLIP_STEPS = 100
"""The number of steps during which a slip counts."""
SLIP_SHARE = 0.1
"""The fraction of the due snapshots in that time above which slips are told."""
LEAST_DUE = 10
"""The number of due snapshots below which nothing can be said."""

_REMEDIES: dict[str, str] = {
    SlipReason.SLOTS: "the medium does not finish one before the next is due: take a rarer policy"
    " (policy=10), a slot more (slots=), a faster path (tmpfs, persistent memory), or"
    ' durability="process" on an ordinary file; a reader (lightck export) holds a slot, too',
    SlipReason.DRAM: "the medium is slower than the steps: take a rarer policy (policy=10), a"
    " faster path (tmpfs, persistent memory), or placement='direct' where the medium can be mapped",
    SlipReason.COPY: "the device's copy is not written away before the next is due: take a rarer"
    ' policy (policy=10) or placement="host"',
    SlipReason.GRAPH: "snapshots begin outside of the recording of a graph: mark the update with"
    " handle.before_update() and handle.after_update()",
}
_ELSE = "take a rarer policy (policy=10); the event `slipped` of each has its reason"


@dataclass(eq=False)
class SlipWatch:
    """Counts the due snapshots of the last steps, and those that slipped (were skipped).

    Used by the training thread.
    """

    told: bool = False
    """True once a warning was given; there is one in a handle's life."""
    _due: deque[tuple[int, str | None]] = field(default_factory=deque)
    """The due snapshots' steps, and why each slipped (None: it was opened)."""

    def note(self, step: int, slip: str | None) -> None:
        """Note what became of the snapshot that was due at `step`; warn if too many slipped."""
        self._due.append((step, slip))
        while self._due[0][0] <= step - SLIP_STEPS:
            self._due.popleft()
        if slip is None or self.told or len(self._due) < LEAST_DUE:
            return
        slips = [why for _, why in self._due if why is not None]
        if len(slips) <= SLIP_SHARE * len(self._due):
            return
        self.told = True
        why = max(slips, key=slips.count)
        event(
            "slipping",
            logging.WARNING,
            step=step,
            slipped=len(slips),
            due=len(self._due),
            why=str(why),
            remedy=_REMEDIES.get(why, _ELSE),
        )


# ---- the outcomes --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Reported(AbstractContextManager[None]):
    """Context of `Outcomes.reported`; a class, because every step enters it several times."""

    report: Callable[[LightckError], None]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Report an error of lightck's own and suppress it; a torn snapshot's was reported."""
        if not isinstance(error, LightckError) or isinstance(error, TornSnapshotError):
            return False
        self.report(error)
        return True


@dataclass(eq=False)
class Outcomes:
    """Tells what became of the snapshots.

    Used by the training thread; `poll` also by threads that wait for a future. The pipeline's lock
    guards what these share: its lists of snapshots, the slots, the futures in `wanted`.
    """

    pipeline: Pipeline
    inventory: Inventory
    steps: Steps
    reporter: ErrorReporter
    history: History | None = None
    """The history, which keeps snapshots beyond the slots; None: there is none."""
    wanted: list[Future[int]] = field(default_factory=list)
    """Futures of `snapshot()` calls that wait for the next boundary."""
    latched: bool = False
    """True if the region takes no more snapshots, and the user knows."""
    removed: bool = False
    """True if the region's file is no longer where it was, and the user knows."""
    synchronous: bool = False
    """True if the last snapshot was torn, so that the next one is copied at once."""
    slip: str | None = None
    """The reason why the last snapshot that was skipped slipped."""
    slipped_step: int = -1
    """The step of the last snapshot that slipped."""
    why_not_last: str = "its snapshot was lost"
    """The reason why the last step of all has no snapshot."""
    counted: Counters = field(default_factory=Counters)
    """A copy of the pipeline's counters from the last `poll`, never changed: for any thread."""
    slips: SlipWatch = field(default_factory=SlipWatch)
    _torn_once: set[str] = field(default_factory=set)
    _epochs: dict[int, int] = field(default_factory=dict)
    """The epochs that had been marked when each snapshot on its way was opened."""

    def __post_init__(self) -> None:
        """Note what a commit into this region survives."""
        self._survives = self.pipeline.region.survives
        self._reported = _Reported(self.report)

    def fence(self, optimizer: int | None = None, *, aside: bool = False) -> bool:
        """Fence the open snapshot (`Pipeline.fence`); count and report it if it is torn.

        Returns False in that case. `aside`: by another thread than the one that updates.
        """
        snapshot = self.pipeline.window
        if snapshot is None or self.pipeline.fence(optimizer, aside=aside):
            return True
        self._torn(snapshot)
        return False

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Take note of commits and aborts; errors go to `report`."""
        with self.pipeline.lock:
            try:
                with self.reported():
                    self._take_note(timeout_s)
            finally:
                self.count()

    def count(self) -> None:
        """Publish a copy of the counters, which are consistent now, for any thread."""
        self.counted = Counters(**vars(self.pipeline.counters))

    def _take_note(self, timeout_s: float | None) -> None:
        committed = False
        for snapshot in self.pipeline.poll(timeout_s):
            committed = True
            event("committed", logging.DEBUG, step=snapshot.step, survives=self._survives)
            self.keep(snapshot)
            for future in snapshot.futures:
                future.set_result(snapshot.step)
        if committed:
            self._tell_removed()

    def opened(self, step: int, epoch: int) -> None:
        """Note a snapshot that was opened, and how many epochs the loop had marked then."""
        if self.history is not None:
            self._epochs[step] = epoch

    def keep(self, snapshot: InflightSnapshot) -> None:
        """Let the history keep a snapshot that is whole, before its slot may be reused."""
        record = snapshot.writer.record
        if self.history is not None and record is not None:
            self.history.committed(record, self._epochs.get(snapshot.step, 0))
            self._epochs = {s: e for s, e in self._epochs.items() if s > snapshot.step}

    def _tell_removed(self) -> None:
        """Report, once, that the path no longer leads to the file that is written."""
        region = self.pipeline.region
        if self.removed or region.is_in_place:
            return
        self.removed = True
        self.reporter(
            RegionError(
                f"{region.place.file} was removed, moved or replaced while it is written: what is"
                " committed is not found under this path, and if the file was removed it is lost"
                " with this process. Attach again to begin a new region there"
            )
        )

    def tell_troubles(self) -> None:
        """Report what went wrong between the ranks; not while an error is being reported."""
        for trouble in self.pipeline.barrier.troubles():
            self.reporter(trouble)

    def slipped(self, step: int, why: str) -> None:
        """Note that a due snapshot slipped: it was not opened; several ranks skip it for good."""
        self.slip, self.slipped_step = why, step
        self.last_step_lost(why)
        self.pipeline.counters.count_slipped()
        event("slipped", logging.DEBUG, step=step, why=why)
        if self.history is not None:
            self.history.slot_needed()
        self.slips.note(step, why)
        if self.pipeline.trace is not None:
            self.pipeline.trace.lost_snapshot("slipped", step, why)
        if not self.pipeline.barrier.alone:
            self.fail_pending_futures(RegionBusyError(f"step {step} has no snapshot: {why}"))

    def last_step_lost(self, why: str) -> None:
        """Note why the last step of all would have no snapshot, if it were this one."""
        self.why_not_last = why

    def take_over_wanted(self, snapshot: InflightSnapshot) -> bool:
        """Let those who want a snapshot at the next boundary wait for this one, just opened.

        Returns whether it must be copied at once: somebody waits, or the last one was torn.
        """
        at_once = self.synchronous or bool(self.wanted)
        if at_once:
            self.synchronous = False
            snapshot.add_futures(self.wanted)
            self.wanted = []
        return at_once

    def join_wanted(self, step: int) -> None:
        """Let those who want a snapshot wait for the one of `step` that there is already.

        Several ranks take one snapshot of a step at most.
        """
        for snapshot in self.pipeline.in_flight:
            if snapshot.step == step:
                snapshot.add_futures(self.wanted)
                self.wanted = []
        if self.pipeline.counters.last_committed_step == step:
            for future in self.wanted:
                future.set_result(step)
            self.wanted = []
        self.fail_pending_futures(CoordinationError(f"step {step} has lost its snapshot already"))

    def forget_slip(self) -> None:
        """Forget which step slipped: it is taken after all."""
        self.slipped_step = -1

    def _torn(self, snapshot: InflightSnapshot) -> None:
        """Count a torn snapshot that the pipeline has dropped; the next one is copied at once.

        One made just in time is not counted, and only its maker is told: the loop went on
        meanwhile, which is no fault of the loop.
        """
        if snapshot.flags & RECORD_JIT:
            return
        step, names = snapshot.step, snapshot.torn
        if self.pipeline.trace is not None:
            self.pipeline.trace.lost_snapshot("torn", step, names[0])
        self.pipeline.counters.count_torn()
        self.synchronous = True
        new = [name for name in names if name not in self._torn_once]
        if len(new) < len(names):
            self.inventory.always_sync.update(self._torn_once.intersection(names))
            self.inventory.invalidate()
        self._torn_once.update(new)
        snapshot.fail(torn_error(names, step))
        if new:
            self.reporter(torn_error(new, step))

    def drop_for_unseen_update(self, *, due: bool) -> None:
        """Drop the last step's open or due snapshot: an update has begun before it was known."""
        pipeline, step = self.pipeline, self.steps.step
        why = "torn: an update had begun before it was known"
        with self.pipeline.lock:
            snapshot = pipeline.window
            pipeline.drop(why)
            if snapshot is not None:
                pipeline.counters.count_torn()
                snapshot.fail(TornSnapshotError(f"step {step} has no snapshot: {why}"))
            if due:
                pipeline.barrier.lost(step, why)
                self.slipped(step, why)

    def reported(self) -> AbstractContextManager[None]:
        """Report errors from the body; what follows from a latched region is only counted."""
        return self._reported

    def report(self, error: LightckError) -> None:
        """Report an error that a snapshot has met, and fail those who wait for the next one."""
        if isinstance(error, PreviousPersistError) and not self.latched:
            self.poll(1.0)  # the error that latched the region is told first
        self.pipeline.counters.count_failed()
        self.last_step_lost(str(error))
        self.fail_pending_futures(error)
        if self.latched and is_final(error):
            event("skipped", logging.DEBUG, step=self.steps.step, why=error)
            return
        self.latched = self.latched or is_final(error)  # for good, whatever else fails
        self.reporter(error)

    def region_failed(self, error: LightckError) -> None:
        """Report, once, that the region's memory is gone.

        If a snapshot under way meets that error, too, its error is the one that is told.
        """
        if not self.latched:
            self.poll(1.0)
        if not self.latched:
            self.latched = True
            self.reporter(error)

    def fail_pending_futures(self, error: LightckError) -> None:
        """Fail the futures that wait for a snapshot that is not open yet: none will come."""
        for future in self.wanted:
            future.set_exception(error)
        self.wanted = []

    def stop(self) -> None:
        """End the pipeline; whoever waits for a snapshot gets an error."""
        pipeline, closed = self.pipeline, WaitTimeoutError("the handle was closed")
        with self.pipeline.lock:  # the thread of a future may be polling
            snapshots = [*pipeline.in_flight, *filter(None, [pipeline.window])]
            try:
                pipeline.close()
            finally:
                for snapshot in snapshots:
                    snapshot.fail(closed)
                self.fail_pending_futures(closed)
                self.count()


# ---- background errors, given to the user as `on_error` says: warns, raises or calls -------------


@dataclass(eq=False)
class ErrorReporter:
    """Gives background errors to the user, never silently, and keeps the first one for `close`."""

    on_error: str | Callable[[BaseException], object]
    first: LightckError | None = None
    latest: LightckError | None = None
    count: int = 0
    """The number of errors so far."""
    _closing: bool = False
    """True while the handle is closed: the error is then raised at the end of that."""
    _thread: int = field(default_factory=threading.get_ident)
    """The id of the training thread: only there can an error be raised at once."""
    _pending: LightckError | None = None

    def __call__(self, error: LightckError) -> None:
        """Report an error, on any thread."""
        self.note(error)
        event("error", logging.ERROR, kind=type(error).__name__, text=error)
        if callable(self.on_error):
            self.on_error(error)
        elif self.on_error != "raise":
            warnings.warn(f"lightck: {error}", RuntimeWarning, stacklevel=3)
        elif threading.get_ident() == self._thread and not self._closing:
            raise error
        else:
            self._pending = error

    def not_told(self, error: BaseException, name: str) -> None:
        """Report that `on_event` has raised, to the user alone: nothing else is lost."""
        ours = LightckError(
            f"on_event failed at the event {name!r}: {error!r}; training goes on, further failures"
            " of it are not told"
        )
        ours.__cause__ = error
        if callable(self.on_error):
            self.on_error(ours)
        else:
            warnings.warn(f"lightck: {ours}", RuntimeWarning, stacklevel=2)

    def note(self, error: LightckError) -> None:
        """Remember an error for `close` without telling it now."""
        self.latest = error
        self.count += 1
        if self.first is None:
            self.first = error

    def begin_close(self) -> None:
        """Keep errors for `take` from now on: the handle is being closed."""
        self._closing = True

    def take(self) -> LightckError | None:
        """Return the first error, for `close` to raise, and forget it."""
        error, self.first, self._pending = self.first, None, None
        return error

    def surface(self) -> None:
        """Raise the error that another thread came across, if the user wants errors raised."""
        error, self._pending = self._pending, None
        if error is not None:
            raise error


def torn_error(names: Sequence[str], step: int) -> TornSnapshotError:
    """Make the error that reports a torn snapshot."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return TornSnapshotError(
        f"snapshot of step {step} was dropped: {names[0]}{more} changed between the forward and the"
        " next optimizer step. The next snapshot is copied at once; a tensor that changes there"
        " again is copied at the start of the forward from then on",
        names=names,
    )
