"""The global commit of one rank: a background thread that runs the protocol over the job's store.

No collective is used, and nothing here waits for the training thread: its calls record events and
read memory. A second thread only waits for the oldest outcome that other ranks decide, on a
connection of its own, so that the outcome is known as soon as the store has it, and the wait does
not delay this rank's own reports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightck.distributed.commit.due_steps import DueAnnouncer, DueCalendar, DueStep, key
from lightck.distributed.commit.protocol import (
    UNLIKE,
    AbortReason,
    Add,
    Call,
    Claim,
    CommitProtocol,
    Delete,
    Read,
    StoreStats,
)
from lightck.distributed.store import Store
from lightck.errors import CoordinationError, StoreError
from lightck.events import event
from lightck.types import Fate

LATE = "not known in time"  # of a step that a rank passed before it read the announcement
_IDLE_S = 60.0  # longest sleep of the thread without an event
_WATCH_S = 600.0  # one wait for an outcome; torch prints two lines when it ends without one


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the global commit's waits, in seconds.

    Attributes:
        call_s: a store whose call has had no answer for so long counts as unreachable.
        patience_s: a step without an outcome for so long is claimed dead by any rank that waits for
            it.
    """

    call_s: float = 10.0
    patience_s: float = 300.0


class CommitCoordinator:
    """The due steps, and their outcomes over all ranks, as one rank knows them.

    Threads: every method may be called from any thread and returns at once, except `wait` and
    `close`. `on_fate`, `on_suspect` and `on_trouble` are called on background threads, without any
    lock held. An exception that they raise ends the thread and goes to `threading.excepthook`; no
    snapshot is opened any more.
    """

    def __init__(
        self,
        store: Store,
        ledger: CommitProtocol,
        calendar: DueCalendar,
        *,
        limits: Limits | None = None,
        on_trouble: Callable[[CoordinationError], None] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            store: a store below a prefix that belongs to this attach alone; cloned for the watcher.
            ledger: of this rank, fresh; its `patience_s`, `on_fate`, `on_suspect` are set here.
            calendar: of this rank, fresh.
            limits: see `Limits`.
            on_trouble: called when the store stops answering (once per outage), when a rank takes
                no more snapshots, when ranks hold unlike state, and when an announcement's key has
                another value; default: a log event.

        Raises:
            StoreError: no second connection.
        """
        self.traffic = StoreStats()
        self._store, self._watcher_store = store, store.clone()
        self._limits = limits or Limits()
        self._ledger, self._calendar = ledger, calendar
        self._told, ledger.on_fate = ledger.on_fate, self._note_fate
        self._warned, ledger.on_suspect = ledger.on_suspect, self._note_suspect
        ledger.patience_s = self._limits.patience_s
        self._announcer = DueAnnouncer(calendar)
        self._on_trouble = on_trouble or _log_trouble
        self._lock = threading.Lock()  # ledger, calendar, announcer, _outbox, flags below
        self._changed = threading.Condition(self._lock)
        self._outbox: list[tuple[str, bytes]] = []
        self._news: list[Callable[[], None]] = []
        self._troubles: list[CoordinationError] = []
        self._looks = calendar.announced and ledger.rank != 0  # rank 0 knows what it published
        self._look_at_s = 0.0
        self._call_began_s: float | None = None
        self._closing = self._stopped = False
        self._broken: BaseException | None = None
        self._ended: set[int] = set()  # ranks that take no more snapshots
        self._unlike = False  # reported already, and no step has become whole since
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=f"lightck-{name}", daemon=True)
            for name, run in (("commit", self._run), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    # ---- events and questions: any thread, no waiting ----

    def due(self, step: int) -> DueStep | None:
        """Return the due step if `step`, which ends now here, is due; called once for each step."""
        with self._lock:
            return self._calendar.at(step)

    def why_not_open(self) -> str | None:
        """Return why no snapshot may be opened now; None if one may.

        A rank that may not open one reports the due step `lost`, as for any other skipped snapshot.
        """
        with self._lock:
            if self._closing:
                return "closed"
            if self._broken:
                return f"the thread of the global commit ended: {self._broken!r}"
            if self._ledger.ended:
                return f"rank {self._ledger.ended.rank} takes no more: {self._ledger.ended.why}"
            began = self._call_began_s
            if began is not None and time.monotonic() - began > self._limits.call_s:
                return f"the job's store has not answered for {time.monotonic() - began:.0f} s"
            return None if self._ledger.reachable else "the job's store does not answer"

    @property
    def reachable(self) -> bool:
        """Tell whether the store answers, as far as is known."""
        with self._lock:
            began = self._call_began_s
            hangs = began is not None and time.monotonic() - began > self._limits.call_s
            return self._ledger.reachable and not hangs and self._broken is None

    @property
    def compared(self) -> tuple[int, int]:
        """Return at how many steps this rank's digest could be compared, and at how many not.

        The two counters change one at a time: they are read without waiting for the lock.
        """
        return self._ledger.compared, self._ledger.incomparable

    def opened(self, due: DueStep) -> None:
        """Record that a slot is about to be invalidated for `due`."""
        with self._changed:
            self._ledger.opened(due, time.monotonic())

    def committed(self, step: int, form: bytes = b"", digest: bytes = b"") -> None:
        """Record that this rank's record of `step` is durable.

        Args:
            step: a step that was opened.
            form: a digest of the state's form, which all ranks have in common; a step with
                different ones is dead.
            digest: a digest of a sample of replicated bytes; a step with different ones is suspect.
                See `ReplicaSample`.
        """
        with self._changed:
            self._ledger.committed(step, time.monotonic(), form, digest)
            self._changed.notify_all()

    def lost(self, due: DueStep, why: str, *, for_good: bool = False) -> None:
        """Record that this rank has no snapshot of `due`: it was skipped, was torn or failed.

        Args:
            due: the result of `due`.
            why: a few words, for the other ranks' logs.
            for_good: this rank takes no more snapshots; the others stop opening any.
        """
        with self._changed:
            self._ledger.lost(due, why, time.monotonic(), for_good=for_good)
            self._changed.notify_all()

    def reusable(self, timeline: int, step: int) -> bool:
        """Tell whether the slot that holds this snapshot may be overwritten."""
        with self._lock:
            return self._ledger.reusable(timeline, step)

    def fate(self, step: int) -> Fate:
        """Return the outcome of a recent step, as far as this rank has read it."""
        with self._lock:
            return self._ledger.fate(step)

    def announce(self, step: int, step_s: float | None = None) -> int | None:
        """Publish, on rank 0, the step that shall have the snapshot that is wanted as `step` ends.

        Returns:
            The step to come; None if a step that every rank knows is due no later.

        Raises:
            ValueError: this is not rank 0.
        """
        if self._ledger.rank != 0:
            raise ValueError(f"rank {self._ledger.rank} announces nothing: rank 0 decides")
        with self._changed:
            target = self._announcer.choose(step, step_s, time.monotonic())
            if target is not None:
                self._outbox.append((key(self._announcer.count - 1), str(target).encode()))
                self._changed.notify_all()
            return target

    # ---- waiting ----

    def wait(self, step: int, seconds: float) -> Fate:
        """Wait up to `seconds` until the outcome of `step` is known here; return what is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._ledger.fate(step) is not Fate.UNKNOWN, seconds)
            return self._ledger.fate(step)

    def close(self, seconds: float = 30.0) -> list[int]:
        """Wait for the outcomes of the steps committed here, then end the threads. Idempotent.

        A step that other ranks have not settled in half of the time is claimed dead, so that no
        rank is waited for beyond it.

        Returns:
            Steps whose outcome this rank never learned.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(self._settled, seconds / 2)
            self._ledger.abandon(f"rank {self._ledger.rank} closed")
            self._ledger.patience_s = 0.0
            self._changed.notify_all()
            self._changed.wait_for(self._settled, seconds / 2)
            self._stopped = True
            self._changed.notify_all()
            left = self._ledger.unsettled
        for thread in self._threads:
            # A thread is left running, as a daemon, only if the server hangs.
            thread.join(1.0 if left else self._limits.call_s)
        return left

    def _settled(self) -> bool:
        return self._broken is not None or not (self._ledger.unsettled or self._outbox)

    # ---- the threads ----

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            raise  # to threading.excepthook: a defect here, or in a listener

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                call = self._ledger.next_call(now)
                look = None if call else self._next_look(now)
                if call is None and look is None:
                    if self._stopped:
                        return
                    self._changed.wait(self._sleep_s(now))
                    continue
                self._call_began_s = now
            if call is not None:
                self._make(call)
            elif look is not None:
                self._look(*look)
            self._tell()

    def _sleep_s(self, now: float) -> float:
        times = [now + _IDLE_S]
        wake = self._ledger.wake_at_s()
        times += [wake] if wake is not None else []
        times += [self._look_at_s] if self._looks and not self._closing else []
        return max(0.001, min(times) - now)

    def _next_look(self, now: float) -> tuple[str, bytes | None] | None:
        if not self._ledger.reachable:
            return None
        if self._outbox:
            return self._outbox[0]
        if self._closing or not self._looks or now < self._look_at_s:
            return None
        return key(self._calendar.learned), None

    def _make(self, call: Call) -> None:
        try:
            answer = self._ask(call)
        except StoreError as error:
            with self._changed:
                self._call_began_s = None
                was, now = self._ledger.reachable, time.monotonic()
                self._ledger.failed(now)
                self._lost_touch(was, error)
                self._changed.notify_all()
            return
        with self._changed:
            self._call_began_s = None
            self._ledger.answered(answer, time.monotonic())
            self._changed.notify_all()

    def _ask(self, call: Call) -> object:
        match call:
            case Add():
                self.traffic.reports += 1
                return self._store.add(call.key, call.amount)
            case Claim():
                self.traffic.claims += 1
                return self._store.claim(call.key, call.value)
            case Read():
                self.traffic.looks += 1
                return self._store.read(call.key)
            case Delete():
                self.traffic.deletions += len(call.keys)
                self._store.delete(call.keys)
                return None

    def _look(self, name: str, publish: bytes | None) -> None:
        """Publish an announcement, or look for the next one."""
        try:
            if publish is not None:
                self.traffic.claims += 1
                found: bytes | None = self._store.claim(name, publish)
            else:
                self.traffic.looks += 1
                found = self._store.read(name)
        except StoreError as error:
            with self._changed:
                self._call_began_s = None
                was = self._ledger.reachable
                self._ledger.unanswered(time.monotonic())
                self._lost_touch(was, error)
            return
        with self._changed:
            self._call_began_s, now = None, time.monotonic()
            if publish is not None:
                del self._outbox[0]
                if found != publish:
                    self._troubles.append(
                        CoordinationError(f"{name} is {found!r}, not {publish!r}: it is another's")
                    )
            if found is not None and name == key(self._calendar.learned):
                late = self._calendar.learn(int(found), now)
                if late is not None:
                    self._ledger.lost(late, LATE, now)
            self._look_at_s = now + self._calendar.poll_s(now)
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stopped
                        or (self._ledger.reachable and self._ledger.watched is not None)
                    )
                )
                step = self._ledger.watched
                if self._stopped or step is None:
                    return
            name = f"f/{step}"
            try:
                self.traffic.watches += 2
                there = self._watcher_store.wait(name, min(_WATCH_S, self._limits.patience_s))
                value = self._watcher_store.read(name) if there else None
            except StoreError as error:
                with self._changed:
                    was = self._ledger.reachable
                    self._ledger.unanswered(time.monotonic())
                    self._lost_touch(was, error)
                    self._changed.notify_all()
                continue
            with self._changed:
                if value is not None:
                    self._ledger.heard(step, value)
                self._changed.notify_all()
            self._tell()

    # ---- reports to the listeners ----

    def _note_fate(self, due: DueStep, fate: Fate, death: AbortReason | None) -> None:
        self._news.append(lambda: self._told(due, fate, death))
        if death and death.why == LATE:
            self._announcer.came_late()
        if death and death.why == UNLIKE and not self._unlike:
            self._troubles.append(CoordinationError(f"step {due.step} is in no snapshot: {UNLIKE}"))
        if death is None or death.why == UNLIKE:
            self._unlike = death is not None
        if death and death.for_good and death.rank not in self._ended:
            self._ended.add(death.rank)
            self._troubles.append(
                CoordinationError(f"rank {death.rank} takes no more snapshots: {death.why}")
            )

    def _note_suspect(self, step: int, differed: int) -> None:
        self._news.append(lambda: self._warned(step, differed))

    def _lost_touch(self, was_reachable: bool, error: StoreError) -> None:
        self.traffic.failures += 1
        if was_reachable:
            self._troubles.append(error)

    def _tell(self) -> None:
        with self._lock:
            news, self._news = self._news, []
            troubles, self._troubles = self._troubles, []
        for tell in news:
            tell()
        for trouble in troubles:
            self._on_trouble(trouble)


def _log_trouble(error: CoordinationError) -> None:
    event("ranks", logging.WARNING, error=error)
