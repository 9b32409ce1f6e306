"""The outcome of each snapshot, told to futures, the user's `on_error`, and the log."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightck.errors import (
    LightckError,
    PreviousPersistError,
    RegionBusyError,
    RegionError,
    TornSnapshotError,
    WaitTimeoutError,
)
from lightck.events import event
from lightck.loop.slip_warning import SlipWatch
from lightck.loop.steps import Steps
from lightck.pipeline.commit_barrier import is_final
from lightck.pipeline.inflight import Counters, InflightSnapshot, torn_error
from lightck.pipeline.pipeline import Pipeline
from lightck.state.inventory import Inventory


@dataclass(eq=False)
class Outcomes:
    """Tells what became of the snapshots.

    Used by the training thread; `poll` also by threads that wait for a future. One lock guards what
    these share: the pipeline's lists of snapshots, the slots, the futures in `wanted`.
    """

    pipeline: Pipeline
    inventory: Inventory
    steps: Steps
    report: Callable[[LightckError], None]
    """Gives a background error to the user, as `on_error` says."""
    surface: Callable[[], None] = lambda: None
    """Raises an error that another thread came across, if the user wants errors raised."""
    lock: threading.RLock = field(default_factory=threading.RLock)
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

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Take note of commits and aborts; errors go to `report`."""
        with self.lock:
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
        for flight in self.pipeline.poll(timeout_s):
            committed = True
            survives = self.pipeline.region.survives
            event("committed", logging.DEBUG, step=flight.step, survives=survives)
            for future in flight.futures:
                future.set_result(flight.step)
        if committed:
            self._tell_removed()

    def _tell_removed(self) -> None:
        """Report, once, that the path no longer leads to the file that is written."""
        region = self.pipeline.region
        if self.removed or region.is_in_place:
            return
        self.removed = True
        self.report(
            RegionError(
                f"{region.place.file} was removed, moved or replaced while it is written: what is"
                " committed is not found under this path, and if the file was removed it is lost"
                " with this process. Attach again to begin a new region there"
            )
        )

    def seal_arrived(self) -> bool:
        """Seal what has arrived (`Pipeline.seal_arrived`), unless another thread has the lock.

        Returns False in that case. Never waits. Any thread.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self.pipeline.seal_arrived()
        finally:
            self.lock.release()

    def tell_troubles(self) -> None:
        """Report what went wrong between the ranks; not while an error is being reported."""
        for trouble in self.pipeline.barrier.troubles():
            self.report(trouble)

    def slipped(self, step: int, why: str) -> None:
        """Note that a due snapshot slipped: it was not opened; several ranks skip it for good."""
        self.slip, self.slipped_step = why, step
        self.why_not_last = why
        self.pipeline.counters.slipped += 1
        event("slipped", logging.DEBUG, step=step, why=why)
        self.slips.note(step, why)
        if self.pipeline.trace is not None:
            self.pipeline.trace.lost_snapshot("slipped", step, why)
        if not self.pipeline.barrier.alone:
            self.fail_wanted(RegionBusyError(f"step {step} has no snapshot: {why}"))

    def torn(self, flight: InflightSnapshot, names: Sequence[str]) -> None:
        """Count a torn snapshot that the pipeline has dropped; the next one is copied at once."""
        step = flight.step
        self.pipeline.counters.torn += 1
        self.synchronous = True
        new = [name for name in names if name not in self._torn_once]
        if len(new) < len(names):
            self.inventory.always_sync.update(self._torn_once.intersection(names))
            self.inventory.invalidate()
        self._torn_once.update(new)
        flight.fail(torn_error(names, step))
        if new:
            self.report(torn_error(new, step))

    def overtaken(self, *, due: bool) -> None:
        """Drop the last step's open or due snapshot: an update has begun before it was known."""
        pipeline, step = self.pipeline, self.steps.step
        why = "torn: an update had begun before it was known"
        with self.lock:
            flight = pipeline.window
            pipeline.drop(why)
            if flight is not None:
                pipeline.counters.torn += 1
                flight.fail(TornSnapshotError(f"step {step} has no snapshot: {why}"))
            if due:
                pipeline.barrier.lost(step, why)
                self.slipped(step, why)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report errors from the body; what follows from a latched region is only counted."""
        try:
            yield
        except TornSnapshotError:
            raise  # reported where it was found
        except LightckError as error:
            if isinstance(error, PreviousPersistError) and not self.latched:
                self.poll(1.0)  # the error that latched the region is told first
            self.pipeline.counters.failed += 1
            self.why_not_last = str(error)
            self.fail_wanted(error)
            if self.latched and is_final(error):
                event("skipped", logging.DEBUG, step=self.steps.step, why=error)
                return
            self.latched = self.latched or is_final(error)  # for good, whatever else fails
            self.report(error)

    def region_lost(self, error: LightckError) -> None:
        """Report, once, that the region's memory is gone.

        If a snapshot under way meets that error, too, its error is the one that is told.
        """
        if not self.latched:
            self.poll(1.0)
        if not self.latched:
            self.latched = True
            self.report(error)

    def fail_wanted(self, error: LightckError) -> None:
        """Fail the futures that wait for a snapshot that is not open yet: none will come."""
        for future in self.wanted:
            future.set_exception(error)
        self.wanted = []

    def stop(self) -> None:
        """End the pipeline; whoever waits for a snapshot gets an error."""
        pipeline, closed = self.pipeline, WaitTimeoutError("the handle was closed")
        with self.lock:  # the thread of a future may be polling
            flights = [*pipeline.in_flight, *filter(None, [pipeline.window])]
            try:
                pipeline.close()
            finally:
                for flight in flights:
                    flight.fail(closed)
                self.fail_wanted(closed)
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
    closing: bool = False
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
        elif threading.get_ident() == self._thread and not self.closing:
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

    def take(self) -> LightckError | None:
        """Return the first error, for `close` to raise, and forget it."""
        error, self.first, self._pending = self.first, None, None
        return error

    def surface(self) -> None:
        """Raise the error that another thread came across, if the user wants errors raised."""
        error, self._pending = self._pending, None
        if error is not None:
            raise error
