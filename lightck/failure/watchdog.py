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
from dataclasses import asdict, dataclass, field, replace

from lightck.errors import LightckError
from lightck.events import deliver, event, event_aside
from lightck.failure import budget
from lightck.failure.hang import LOOK_S, HangWatch, current_collective, user_line
from lightck.failure.jit_save import JitSaver
from lightck.failure.signals import Outcome, Signals
from lightck.failure.triggers import PreemptionNotice
from lightck.types import Failure, Saved

# ---- one handle's state, and one save for it, on a thread of its own -----------------------------

_TOLD_S = 1.0
"""Seconds that a save waits for `on_event` to receive it: the process may end then."""
MEASURE_S = 10.0
"""Seconds between checks whether a snapshot fits into the grace period."""


@dataclass(eq=False)
class HandleGuard:
    """The watchdog's state for one handle. Public methods are for the watchdog's thread."""

    saver: JitSaver
    hang: HangWatch
    report: Callable[[LightckError], object]
    """Reports an error to the user."""
    world: int = 1
    hang_save: SaveTask | None = None
    """The save for the hang that the loop is in."""
    _exit_in_s: float | None = None
    """Seconds, as far as they count, after which the process is ended for the hang."""
    _notice: PreemptionNotice | None = None
    _noticed: bool = False
    """True if a notice has come and is not answered yet."""
    _signalled_at: int | None = None
    """The step at which `on_failure` was asked about a signal whose own handler may raise."""
    _warned: bool = False
    """True once the user knows that a snapshot does not fit into the grace period."""
    _measure_at_s: float = 0.0

    @property
    def failure(self) -> Failure:
        """The user's settings of the failure path."""
        return self.hang.failure

    @property
    def numbers(self) -> set[int]:
        """The numbers of the signals that the user wants to be handled."""
        return {signal.Signals[name] for name in self.failure.signals}

    def watch_notice(self, signals: Signals) -> None:
        """Begin to poll the user's preemption notice, if there is one; it wakes the watchdog."""

        def note() -> None:
            self._noticed = True
            signals.wake()

        if self.failure.notice is not None:
            self._notice = PreemptionNotice(self.failure.notice, note, self.tell)

    def stop_notice(self) -> None:
        """Poll the preemption notice no more."""
        if self._notice is not None:
            self._notice.stop()

    def new_reasons(self) -> list[str]:
        """Return the reasons to save that have come up since the last call, but signals, hangs."""
        noticed, self._noticed = self._noticed, False
        return [*(["notice"] if noticed else []), *filter(None, [self.saver.new_peer_failure()])]

    def note_signal(self) -> None:
        """Note that `on_failure` is asked now about a signal whose Python handler may raise."""
        self._signalled_at = self.saver.progress().step

    def is_from_signal(self, error: BaseException) -> bool:
        """Tell whether an exception only comes from a signal that was handled here."""
        step = self._signalled_at
        is_wish = not isinstance(error, Exception)  # KeyboardInterrupt, SystemExit
        return is_wish and step is not None and self.saver.progress().step <= step + 1

    def has_asked_about(self, error: BaseException) -> bool:
        """Tell whether the user was asked about the exception, as a signal's; forgets it then."""
        known = self.is_from_signal(error)
        self._signalled_at = None
        return known

    def tell(self, error: LightckError) -> None:
        """Report an error to the user; an exception of the report is logged and ends no thread.

        A filter on warnings, or `on_error`, may raise one. Any thread.
        """
        try:
            self.report(error)
        except Exception as second:  # noqa: BLE001
            event("untold", logging.ERROR, error=error, why=repr(second))

    def observe(self, now_s: float) -> dict[str, object] | None:
        """Look at the loop; return the details of a hang, once when it is found."""
        before, progress = self.hang.suspected, self.saver.progress()
        position = None
        if self.world > 1:
            position = current_collective(progress.thread) or self.saver.hung_device()
        found = self.hang.observe(now_s, progress, position)
        if found is not None:
            return {
                "still_s": round(found.idle_s, 2),
                "limit_s": round(found.limit_s, 2),
                "where": found.position.text if found.position else user_line(progress.thread),
            }
        if before is not None and self.hang.suspected is None:
            self.hang_save = self._exit_in_s = None
            event_aside("hang_over", after_s=round(before.idle_s, 1))
        return None

    def begin_hang(self, save: SaveTask) -> None:
        """Note the save that has begun for the hang that was found."""
        self.hang_save = save

    def is_exit_due(self, now_s: float, *, saving: bool) -> bool:
        """Tell whether the process has to end for a hang that goes on, if the user wants that.

        The rank that it waits for must first have noticed the same, and have ended, or have
        announced what it has: only then can others write that rank's share. Time in which the
        process itself was stopped does not count.

        Args:
            now_s: seconds of the monotonic clock.
            saving: a save is under way, and has time left.
        """
        save, after_s = self.hang_save, self.failure.hang_exit_s
        if save is None or after_s is None or save.goes_on:
            return False
        if self._exit_in_s is not None:
            self._exit_in_s -= self.hang.counted_s
        elif save.done.is_set() or now_s >= save.deadline_s:
            self._exit_in_s = after_s
        if self._exit_in_s is None or self._exit_in_s > 0 or self._is_seen_to():
            return False
        # To notice it there, and to save:
        others_s = self.hang.outside_limit_s + self.failure.grace_s
        return self._exit_in_s <= -others_s or not (saving or not self.saver.is_settled())

    def _is_seen_to(self) -> bool:
        """Tell whether the hang is another rank's, which is ended in place of this one."""
        found = self.hang.suspected
        return found is not None and self.saver.ends_hang(found.position)

    def check_budget(self, now_s: float) -> None:
        """Warn once if a snapshot does not fit into the grace period, as soon as that is known."""
        if self._warned or now_s < self._measure_at_s:
            return
        grace_s = self.failure.grace_s
        cost = self.saver.snapshot_cost(budget.usable_s(grace_s))
        if cost is None:
            return
        self._measure_at_s = now_s + MEASURE_S
        text = budget.shortfall(cost, grace_s)
        if text is not None:
            self._warned = True
            event_aside("budget", logging.WARNING, text=text)


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
    known: Saved | None = None
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
            if self.known is not None:
                self.saved = replace(self.known, reason=self.reason)
            else:
                self.saved = self.guard.saver.save(self.reason, self.deadline_s)
            fields = asdict(self.saved) | {"seconds": round(self.saved.seconds, 3)}
            event("saved", logging.WARNING, **{"reason": self.reason, **self.about, **fields})
            deliver(min(_TOLD_S, max(0.0, self.deadline_s - time.monotonic())))
            decide = self.guard.failure.on_failure
            self.goes_on = decide is not None and decide(self.saved) is True
        except Exception as error:  # noqa: BLE001 - on_failure is the user's
            self.guard.tell(LightckError(f"the snapshot for {self.reason} failed: {error!r}"))
        finally:
            self.done.set()


# ---- the watchdog --------------------------------------------------------------------------------

LINGER_S = 2.0
"""Seconds in which another rank learns of a failure, comes to its boundary or not, and says so."""
_POLL_S = 0.02
_LAST_EVENT_S = 1.0
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
        guard.watch_notice(signals)
        guard.check_budget(time.monotonic())

    def release(self, guard: HandleGuard) -> None:
        """Stop watching over a handle; events that came until now are answered first.

        Returns when nothing is being saved for it, or the deadline of that has passed.
        """
        guard.stop_notice()
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

    def await_peers(self, guard: HandleGuard) -> None:
        """Wait until other ranks need no save of this one, before an exception leaves training.

        It waits `LINGER_S` at most, as before a signal ends the process. The watchdog saves what
        another rank needs, so its own threads must not call this.
        """
        until_s = time.monotonic() + LINGER_S
        while not guard.saver.is_settled() and time.monotonic() < until_s:
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
        return min([guard.hang.next_look_s() for guard in self._guards], default=0.0)

    def _turn(self, signals: Signals, arrived: Sequence[int]) -> None:
        if arrived:
            self._answer(signals, arrived)
        now = time.monotonic()
        for guard in [*self._guards]:
            for reason in guard.new_reasons():
                self._start(guard, reason, self._deadline([guard]))
            self._look_for_hang(guard, now)
            guard.check_budget(now)

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
                    self._pause(guards, deadline_s)
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
            self._pause(guards, None)

    def _ask_once(
        self, guards: Sequence[HandleGuard], signals: Signals, numbers: Iterable[int]
    ) -> None:
        """Note the step at which `on_failure` is asked, if a signal's Python handler may raise."""
        if any(map(signals.runs_python, numbers)):
            for guard in guards:
                guard.note_signal()

    def _pause(self, guards: Sequence[HandleGuard], until_s: float | None) -> None:
        for guard in guards:
            guard.saver.pause_training(until_s)

    def _linger(self, guards: Sequence[HandleGuard], deadline_s: float) -> None:
        """Before the end, save again if another rank needs another instant; `LINGER_S` at most."""
        until_s = min(deadline_s, time.monotonic() + LINGER_S)
        while time.monotonic() < until_s:
            for guard in guards:
                reason = guard.saver.new_peer_failure()
                if reason is not None:
                    self._start(guard, reason, deadline_s).wait(deadline_s)
            if all(guard.saver.is_settled() for guard in guards):
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
            begun.append(self._start(guard, reason, deadline_s, known=known.get(guard)))
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
        known: Saved | None = None,
        about: dict[str, object] | None = None,
    ) -> SaveTask:
        saving = SaveTask(guard, reason, deadline_s, about or {}, known)
        self._saving = [*self._under_way(), saving]
        return saving.start()

    def _under_way(self, guard: HandleGuard | None = None) -> list[SaveTask]:
        """Return the saves that have not ended, of one guard or of all."""
        every = [each for each in self._saving if not each.done.is_set()]
        return [each for each in every if guard is None or each.guard is guard]

    # ---- hangs -------------------------------------------------------------------------------

    def _look_for_hang(self, guard: HandleGuard, now_s: float) -> None:
        """Save for a hang when it is found, and end the process for it when that is due."""
        about = guard.observe(now_s)
        if about is not None:
            guard.begin_hang(self._start(guard, "hang", self._deadline([guard]), about=about))
        saving = any(now_s < each.deadline_s for each in self._under_way(guard))
        if guard.is_exit_due(now_s, saving=saving):
            about = {"why": "hang", "status": HANG_STATUS}
            event_aside("ending", logging.ERROR, wait_s=_LAST_EVENT_S, **about)
            os._exit(HANG_STATUS)


WATCHDOG = Watchdog()
"""The watchdog of this process."""


os.register_at_fork(after_in_child=WATCHDOG.forget)
