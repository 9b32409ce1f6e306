"""The thread that notices failures, has the state saved, and then lets the process go on or end.

There is one per process, however many handles there are. It needs nothing of the main thread, which
may be stuck inside a collective. Saves, and the user's `on_failure`, run on a thread of their own:
a medium that hangs cannot keep a signal from its effect.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightck.errors import LightckError
from lightck.events import deliver, event, event_aside
from lightck.failure import budget
from lightck.failure.budget import Measured
from lightck.failure.hang import HangWatch, Place, Progress, collective, standing
from lightck.failure.signals import Outcome, Signals
from lightck.failure.triggers import PreemptionNotice
from lightck.types import Failure, Saved

# ---- one handle's state, and one save for it, on a thread of its own -----------------------------

LOOK_S = 0.25
"""Seconds between looks at a loop of several ranks, where hangs are found in seconds."""
_TOLD_S = 1.0
"""Seconds that a save waits for `on_event` to receive it: the process may end then."""
ALONE_LOOK_S = 1.0
"""Seconds between looks with one rank, for which only `hang_s` counts."""


class Rescue(Protocol):
    """The saves that a guard needs."""

    def progress(self) -> Progress:
        """Return the loop's progress. Any thread; takes no lock."""

    def save(self, reason: str, deadline: float) -> Saved:
        """Commit the last complete step if that can be done by `deadline`. Any thread."""


@dataclass(eq=False)
class HandleGuard:
    """The watchdog's state for one handle."""

    rescue: Rescue
    failure: Failure
    report: Callable[[LightckError], object]
    """Reports an error to the user."""
    world: int = 1
    measured: Callable[[], Measured | None] = lambda: None
    """Returns the cost of a snapshot; None: not known yet."""
    elsewhere: Callable[[], str | None] = lambda: None
    """Returns a new failure on another rank since the last call, at once. One thread calls it."""
    settled: Callable[[], bool] = lambda: True
    """Returns, at once, whether no other rank can make this one save again."""
    waits: Callable[[], Place | None] = lambda: None
    """Returns where a device may be waiting for other ranks, at once; None if none is."""
    hold: Callable[[float | None], object] = lambda until: None
    """Lets training go no further than a save needs until the given time; None releases it."""
    notice: PreemptionNotice | None = None
    noticed: bool = False
    """True if a notice has come and is not answered yet."""
    asked_at: int | None = None
    """The step at which `on_failure` was asked about a signal whose own handler may raise."""
    told_budget: bool = False
    measure_at_s: float = 0.0
    hang_saving: SaveTask | None = None
    """The save for the hang that the loop is in."""
    exit_in_s: float | None = None
    """Seconds, as far as they count, after which the process is ended for the hang."""

    def __post_init__(self) -> None:
        """Start the hang detection; nothing has been observed yet."""
        self.hang = HangWatch(self.failure, LOOK_S if self.world > 1 else ALONE_LOOK_S)

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of the signals that the user wants to be handled."""
        return {signal.Signals[name] for name in self.failure.signals}

    def knows(self, error: BaseException) -> bool:
        """Tell whether an exception only comes from a signal that was handled here."""
        step = self.asked_at
        is_wish = not isinstance(error, Exception)  # KeyboardInterrupt, SystemExit
        return is_wish and step is not None and self.rescue.progress().step <= step + 1

    def has_asked_about(self, error: BaseException) -> bool:
        """Tell whether the user was asked about the exception, as `knows` does; forgets it then."""
        known = self.knows(error)
        self.asked_at = None
        return known

    def tell(self, error: LightckError) -> None:
        """Report an error to the user; an exception of the report is logged and ends no thread.

        A filter on warnings, or `on_error`, may raise one.
        """
        try:
            self.report(error)
        except Exception as second:  # noqa: BLE001
            event("untold", logging.ERROR, error=error, why=repr(second))


@dataclass(eq=False)
class SaveTask:
    """One save, and the user's decision about what follows, on a thread of its own.

    Everything is logged on that thread, too: whatever blocks it delays the watchdog until the
    deadline at most.
    """

    guard: HandleGuard
    reason: str
    deadline_s: float
    about: dict[str, object] = field(default_factory=dict)
    """Details of the reason, for the log."""
    given: Saved | None = None
    """A snapshot just made for another reason, which is used instead of a new save."""
    saved: Saved | None = None
    goes_on: bool = False
    """True if `on_failure` has decided that the training goes on."""
    done: threading.Event = field(default_factory=threading.Event)
    thread: int = 0

    def start(self) -> SaveTask:
        """Start the save; without a new thread if none can be started."""
        try:
            threading.Thread(target=self._run, name="lightck-save", daemon=True).start()
        except RuntimeError:  # no more threads: then on this one
            self._run()
        return self

    def wait(self, deadline_s: float) -> bool:
        """Wait for its end; False at the deadline."""
        return self.done.wait(max(0.0, deadline_s - time.monotonic()))

    @property
    def fresh(self) -> bool:
        """Tell whether only the minibatch that was running is lost, at most."""
        return self.saved is not None and self.saved.fresh

    def _run(self) -> None:
        self.thread = threading.get_ident()
        try:
            # Save first, report then.
            if self.given is not None:
                self.saved = replace(self.given, reason=self.reason)
            else:
                self.saved = self.guard.rescue.save(self.reason, self.deadline_s)
            self._tell(self.saved)
            deliver(min(_TOLD_S, max(0.0, self.deadline_s - time.monotonic())))
            decide = self.guard.failure.on_failure
            self.goes_on = decide is not None and decide(self.saved) is True
        except Exception as error:  # noqa: BLE001 - on_failure is the user's
            self.guard.tell(LightckError(f"the snapshot for {self.reason} failed: {error!r}"))
        finally:
            self.done.set()

    def _tell(self, saved: Saved) -> None:
        said: dict[str, Any] = {
            "reason": saved.reason,
            **self.about,
            "step": saved.step,
            "fresh": saved.fresh,
        }
        said |= {"early": saved.early, "seconds": round(saved.seconds, 3), "why": saved.why}
        event("saved", logging.WARNING, **said)


# ---- the watchdog --------------------------------------------------------------------------------

MEASURE_S = 10.0
"""Seconds between checks whether a snapshot fits into the grace period."""
LINGER_S = 2.0
"""Seconds in which another rank learns of a failure, comes to its boundary or not, and says so."""
_POLL_S = 0.02
_LAST_WORD_S = 1.0
INTERRUPT_S = 5.0
"""Seconds that SIGINT alone waits for its save; what is sealed is still written after them."""
HANG_STATUS = 75
"""Exit status of a process that is ended for a hang: EX_TEMPFAIL, try again."""


class Watchdog:
    """The watchdog over the guards of this process. Public methods: any thread."""

    def __init__(self) -> None:
        """Create it without a thread."""
        self.forget()

    def forget(self) -> None:
        """Reset it, without a thread: in a forked child, whose handles are dead."""
        self._lock = threading.Lock()
        """Guards the list of guards, and the thread's start and end."""
        self._guards: list[HandleGuard] = []
        self._signals: Signals | None = None
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._ended = threading.Event()
        """Set when the thread touches nothing any more."""
        self._saving: list[SaveTask] = []
        self._failed = False

    # ---- for handles -------------------------------------------------------------------------

    def watch(self, guard: HandleGuard) -> None:
        """Watch over one more handle."""
        with self._lock:
            signals = self._signals = self._signals or Signals()
            self._guards.append(guard)
            if not signals.take(self._wanted()):
                event(
                    "signals_unheard",
                    logging.WARNING,
                    signals=",".join(guard.failure.signals),
                    why="attach was not called on the main thread, which alone may set handlers:"
                    " at these signals nothing is saved",
                )
            self._begin()
        source = guard.failure.notice
        if source is not None:

            def tell() -> None:
                guard.noticed = True
                signals.wake()

            guard.notice = PreemptionNotice(source, tell, lambda error: guard.tell(error))
        self._measure(guard, time.monotonic())

    def release(self, guard: HandleGuard) -> None:
        """Stop watching over a handle; events that came until now are answered first.

        Returns when nothing is being saved for it, or the deadline of that has passed.
        """
        if guard.notice is not None:
            guard.notice.stop()
        with self._lock:
            if guard not in self._guards:
                return
            thread, signals = self._thread, self._signals
            assert thread is not None and signals is not None
            last = self._guards == [guard]
            if last:
                self._leaving = True
            else:
                self._guards.remove(guard)
        here = threading.get_ident()
        if thread.ident == here or any(each.thread == here for each in self._under_way()):
            # `on_failure` closes the handle: this thread cannot wait for itself.
            about = guard, last, thread, signals
            threading.Thread(target=self._part, args=about, daemon=True).start()
        else:
            self._part(guard, last, thread, signals)

    def hear_out(self, guard: HandleGuard) -> None:
        """Wait until other ranks need no save of this one, before an exception leaves training.

        It waits `LINGER_S` at most, as before a signal ends the process. The watchdog saves what
        another rank needs, so its own threads must not call this.
        """
        until_s = time.monotonic() + LINGER_S
        while not guard.settled() and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _part(
        self, guard: HandleGuard, last: bool, thread: threading.Thread, signals: Signals
    ) -> None:
        interrupted = None
        if last:
            signals.wake()
        # Wait through a KeyboardInterrupt, too, which the thread itself may have passed on: the
        # pipe that it still reads must not be closed. It ends by the deadline of what it answers.
        # An event, since `join` takes an interrupted wait for the thread's end (Python 3.11).
        while last and not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as error:  # noqa: BLE001
                interrupted = error
        if last:
            thread.join()
        for saving in self._under_way(guard):
            saving.wait(saving.deadline_s)
        self._end_or_go_on(guard, signals, ended=last)
        if interrupted is not None:
            raise interrupted

    def _end_or_go_on(self, guard: HandleGuard, signals: Signals, *, ended: bool) -> None:
        with self._lock:
            if self._signals is not signals:
                return  # another guard, released at the same time, has given them back
            if ended and guard in self._guards:
                self._guards.remove(guard)
                self._thread, self._leaving = None, False
            if self._guards:  # others; perhaps one that came while the thread was ending
                signals.take(self._wanted())
                self._begin()
                return
            self._signals = None
        signals.give_back()

    def _begin(self) -> None:
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(
                target=self._run, args=(self._signals,), name="lightck-watchdog", daemon=True
            )
            self._thread.start()

    def _wanted(self) -> set[int]:
        return {number for guard in self._guards for number in guard.numbers}

    # ---- the thread --------------------------------------------------------------------------

    def _run(self, signals: Signals) -> None:
        while True:
            leaving = self._leaving  # before the last wait, so that what came is answered
            try:
                pause_s = 0.0 if leaving else self._pause_s()
                self._turn(signals, signals.wait(pause_s))
            except Exception as error:  # this thread must not end by an error
                self._tell_once(error)
                time.sleep(LOOK_S)
            if leaving:
                self._ended.set()
                return

    def _pause_s(self) -> float:
        return min([guard.hang.due_in_s() for guard in self._guards], default=0.0)

    def _turn(self, signals: Signals, arrived: Sequence[int]) -> None:
        if arrived:
            self._answer(signals, arrived)
        now = time.monotonic()
        for guard in [*self._guards]:
            if guard.noticed:
                guard.noticed = False
                self._start(guard, "notice", self._deadline([guard]))
            reason = guard.elsewhere()
            if reason is not None:
                self._start(guard, reason, self._deadline([guard]))
            self._look(guard, now)
            self._measure(guard, now)

    def _tell_once(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            told = LightckError(f"the watchdog failed, and goes on: {error!r}")
            for guard in [*self._guards]:
                with suppress(RuntimeError):  # no thread is left to report it on
                    threading.Thread(target=guard.tell, args=(told,), daemon=True).start()

    # ---- signals -----------------------------------------------------------------------------

    def _answer(self, signals: Signals, arrived: Sequence[int]) -> None:
        """Save once for all signals that come meanwhile; then do what the most final of them says.

        After a signal that ends the process nothing is trained that would not be saved. For a later
        signal `on_failure` is asked again. What could not be saved is tried once more.
        """
        guards = [g for g in self._guards if g.numbers.intersection(arrived)]
        deadline_s = self._deadline(guards)
        if {*arrived} == {signal.SIGINT}:  # a user waits at the keyboard
            deadline_s = min(deadline_s, time.monotonic() + INTERRUPT_S)
        known: dict[HandleGuard, Saved] = {}
        seen: set[int] = set()
        passed: dict[int, None] = {}
        try:
            while arrived:
                seen.update(arrived)
                passed.update(dict.fromkeys(arrived))
                last = max(arrived, key=signals.outcome)
                reason = signal.Signals(last).name
                if signals.outcome(last) is Outcome.ENDS:
                    self._hold(guards, deadline_s)
                self._ask_once(guards, signals, arrived)
                saves = self._save(guards, reason, deadline_s, known)
                known = {each.guard: each.saved for each in saves if each.saved and each.fresh}
                if any(each.goes_on for each in saves):
                    for number in arrived:
                        del passed[number]
                arrived = [number for number in signals.wait(0.0) if number not in seen]
            if any(signals.outcome(number) is Outcome.ENDS for number in passed):
                self._linger(guards, deadline_s)
        finally:
            self._ask_once(guards, signals, passed)
            signals.pass_on(passed)
            self._hold(guards, None)

    def _ask_once(
        self, guards: Sequence[HandleGuard], signals: Signals, numbers: Iterable[int]
    ) -> None:
        """Note the step at which `on_failure` is asked, if a signal's Python handler may raise."""
        if any(map(signals.runs_python, numbers)):
            for guard in guards:
                guard.asked_at = guard.rescue.progress().step

    def _hold(self, guards: Sequence[HandleGuard], until_s: float | None) -> None:
        for guard in guards:
            guard.hold(until_s)

    def _linger(self, guards: Sequence[HandleGuard], deadline_s: float) -> None:
        """Before the end, save again if another rank needs another instant; `LINGER_S` at most."""
        until_s = min(deadline_s, time.monotonic() + LINGER_S)
        while time.monotonic() < until_s:
            for guard in guards:
                reason = guard.elsewhere()
                if reason is not None:
                    self._start(guard, reason, deadline_s).wait(deadline_s)
            if all(guard.settled() for guard in guards):
                return
            time.sleep(_POLL_S)

    def _deadline(self, guards: Iterable[HandleGuard]) -> float:
        grace_s = min((guard.failure.grace_s for guard in guards), default=0.0)
        return time.monotonic() + budget.usable_s(grace_s)

    def _save(
        self,
        guards: Sequence[HandleGuard],
        reason: str,
        deadline_s: float,
        known: dict[HandleGuard, Saved],
    ) -> list[SaveTask]:
        """Save for all guards at once; returns when that is done, or at the deadline."""
        known = {**known}
        begun = []
        for guard in guards:
            for saving in self._under_way(guard):  # for a hang, or a notice
                saving.wait(deadline_s)
                if saving.saved is not None and saving.fresh:
                    known[guard] = saving.saved
            begun.append(self._start(guard, reason, deadline_s, given=known.get(guard)))
        for saving in begun:
            if not saving.wait(deadline_s):
                event_aside("late", logging.ERROR, reason=reason, why="not saved by the deadline")
        return begun

    def _start(
        self,
        guard: HandleGuard,
        reason: str,
        deadline_s: float,
        *,
        given: Saved | None = None,
        about: dict[str, object] | None = None,
    ) -> SaveTask:
        saving = SaveTask(guard, reason, deadline_s, about or {}, given)
        self._saving = [*self._under_way(), saving]
        return saving.start()

    def _under_way(self, guard: HandleGuard | None = None) -> list[SaveTask]:
        """Return the saves that have not ended, of one guard or of all."""
        every = [each for each in self._saving if not each.done.is_set()]
        return [each for each in every if guard is None or each.guard is guard]

    # ---- hangs -------------------------------------------------------------------------------

    def _look(self, guard: HandleGuard, now_s: float) -> None:
        before = guard.hang.suspected
        progress = guard.rescue.progress()
        place = (collective(progress.thread) or guard.waits()) if guard.world > 1 else None
        found = guard.hang.look(now_s, progress, place)
        if found is not None:
            about: dict[str, object] = {
                "still_s": round(found.still_s, 2),
                "limit_s": round(found.limit_s, 2),
                "where": found.place.text if found.place else standing(progress.thread),
            }
            deadline_s = self._deadline([guard])
            guard.hang_saving = self._start(guard, "hang", deadline_s, about=about)
        elif before is not None and guard.hang.suspected is None:
            guard.hang_saving = guard.exit_in_s = None
            event_aside("hang_over", after_s=round(before.still_s, 1))
        self._end_of(guard, now_s)

    def _end_of(self, guard: HandleGuard, now_s: float) -> None:
        """End the process for a hang that goes on, if the user wants that.

        The rank that it waits for must first have noticed the same, and have ended, or have
        announced what it has: only then can others write that rank's share. Time in which the
        process itself was stopped does not count.
        """
        saving, after_s = guard.hang_saving, guard.failure.hang_exit_s
        if saving is None or after_s is None or saving.goes_on:
            return
        if guard.exit_in_s is not None:
            guard.exit_in_s -= guard.hang.counted_s
        elif saving.done.is_set() or now_s >= saving.deadline_s:
            guard.exit_in_s = after_s
        if guard.exit_in_s is None or guard.exit_in_s > 0:
            return
        others_s = guard.hang.elsewhere_s + guard.failure.grace_s  # to notice it there, and to save
        saves = any(now_s < each.deadline_s for each in self._under_way(guard))
        if (saves or not guard.settled()) and guard.exit_in_s > -others_s:
            return
        about = {"why": "hang", "status": HANG_STATUS}
        event_aside("ending", logging.ERROR, wait_s=_LAST_WORD_S, **about)
        os._exit(HANG_STATUS)

    # ---- the budget --------------------------------------------------------------------------

    def _measure(self, guard: HandleGuard, now_s: float) -> None:
        """Warn once if a snapshot does not fit into the grace period, as soon as that is known."""
        if guard.told_budget or now_s < guard.measure_at_s:
            return
        measured = guard.measured()
        if measured is None:
            return
        guard.measure_at_s = now_s + MEASURE_S
        text = budget.shortfall(measured, guard.failure.grace_s)
        if text is not None:
            guard.told_budget = True
            event_aside("budget", logging.WARNING, text=text)


WATCHDOG = Watchdog()
"""The watchdog of this process."""


os.register_at_fork(after_in_child=WATCHDOG.forget)
