"""Signals, received through a pipe whatever the main thread is doing, and then passed on.

Python writes the number of a signal to its wake-up descriptor in the C handler, at once, also while
the main thread is inside C code (a collective). Its own handler, which Python calls on the main
thread whenever that runs Python again, adds a byte of its own, so that one stream states the order
of events:

    trip    the kernel has delivered the signal
    call    Python has called our handler: at least one trip of that signal comes before
    passed  Python has called our handler, which calls the earlier one
    chained a handler installed after ours has called ours, and before us there was no function

A call without a trip means that another library has taken the wake-up descriptor (asyncio does when
it handles signals): those signals are noticed when the main thread runs Python.

The earlier handler runs after the snapshot (`pass_on`): a Python function on the main thread; a
handler of C code and the default action through the kernel. A handler that is installed later
replaces ours, and Python runs it at once. If it calls the handler that it found, ours, the one
before ours follows. With SIG_DFL or SIG_IGN set later the kernel acts and no signal is noticed.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from lightck.events import event, event_aside

# ---- the kernel's action at a signal, read and set from any thread -------------------------------
# `signal.signal` works on the main thread only, which may be stuck, and knows nothing of handlers
# that C code has installed (faulthandler, MPI, ...).

_ROOM = 512  # more than `struct sigaction` has anywhere: 152 bytes with glibc on x86-64
DEFAULT = bytes(_ROOM)
"""The default action, as `write` takes it."""
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_libc = ctypes.CDLL(None, use_errno=True)


def read(number: int) -> bytes:
    """Return the action of a signal, as the C library keeps it."""
    return _sigaction(number, None)


def write(number: int, action: bytes) -> None:
    """Set a signal's action to one that was read before. Any thread."""
    _sigaction(number, action)


def _sigaction(number: int, action: bytes | None) -> bytes:
    before = ctypes.create_string_buffer(_ROOM)
    after = None if action is None else ctypes.create_string_buffer(action, _ROOM)
    if _libc.sigaction(number, after, before) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"sigaction of signal {number}: {os.strerror(error)}")
    return before.raw


def is_function(action: bytes) -> bool:
    """Tell whether a handler runs: the action is neither the default nor to ignore."""
    return _handler(action) not in (signal.SIG_DFL, signal.SIG_IGN)


def is_ignored(action: bytes) -> bool:
    """Tell whether the kernel drops the signal."""
    return _handler(action) == signal.SIG_IGN


def same_handler(one: bytes, other: bytes) -> bool:
    """Tell whether both actions lead to the same handler."""
    return _handler(one) == _handler(other)


def _handler(action: bytes) -> int:
    """Return `sa_handler`, the first word on x86-64 and aarch64, with glibc and musl."""
    return int.from_bytes(action[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)


def ends_by_default(number: int) -> bool:
    """Tell whether the default action ends the process, not only stops or continues it."""
    return number not in _HARMLESS | _STOPS


def raise_here(number: int) -> None:
    """Deliver a signal to this thread, whatever it blocks; handlers have run when this returns."""
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    try:
        signal.pthread_kill(threading.get_ident(), number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# ---- the handler that a signal had before lightck's, and what it does ----------------------------

_ASK = {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that only request a snapshot: their default, to end the process, is never meant."""


class Outcome(enum.IntEnum):
    """The effect of a signal on the process; the most final is the greatest."""

    GOES_ON = 0
    FUNCTION = 1
    """A Python function runs on the main thread."""
    KERNEL = 2
    """A handler that C code has installed runs, or the process stops."""
    ENDS = 3


@dataclass(eq=False, repr=False)  # `signal` formats handlers, and each may hold the one before
class InstalledSignal:
    """A signal that lightck handles, and its handler before."""

    before: Any
    """The result of `signal.getsignal`: a function, SIG_DFL, SIG_IGN; None: set by C code."""
    action: bytes
    """The same action as the C library keeps it."""
    ours: bytes = b""
    """The action since lightck took the signal: Python's own handler."""
    trips: int = 0
    """Trips since the last call. Like the following fields, used by the listening thread only."""
    echo: bool = False
    """True if the next trip is one that lightck itself has caused."""
    chained: bool = False
    """True if a handler installed after lightck's has called it for the last signal."""
    owed: bool = False
    """True if the last signal is answered, so that the earlier handler runs if lightck's is called.

    A handler installed later may still call lightck's.
    """

    @property
    def foreign(self) -> bool:
        """Tell whether C code had installed a handler without Python's knowledge."""
        return not callable(self.before) and is_function(self.action)

    def outcome(self, number: int) -> Outcome:
        """Return what the signal would do to the process without lightck."""
        if callable(self.before):
            return Outcome.FUNCTION
        if self.foreign:
            return Outcome.KERNEL
        if number in _ASK or is_ignored(self.action):
            return Outcome.GOES_ON
        return Outcome.ENDS if ends_by_default(number) else Outcome.KERNEL


# ---- the signals of this process -----------------------------------------------------------------

_TRIP, _CALL, _PASSED, _CHAINED = range(4)
_NUMBERS = 64  # signals on Linux; a byte, whose 0 is 256, holds a number and which of four it is
_WAKE = bytes([signal.SIGKILL])  # never tripped
_held = threading.local()
"""The signal mask of a thread that is forking."""


@dataclass(eq=False, repr=False)
class Signals:
    """The process's signals that lightck handles; one object in use per process.

    `take` and `give_back` are for the main thread (`give_back` elsewhere restores the kernel's
    actions, and leaves handlers that only call earlier functions of Python), `wait` and `pass_on`
    for the one thread that listens.
    """

    _taken: dict[int, InstalledSignal] = field(default_factory=dict)
    _past: dict[int, InstalledSignal] = field(default_factory=dict)
    """Signals that were given back: a library that has kept our handler may install it again."""
    _released: dict[int, bool] = field(default_factory=dict)
    """Signals for which the next call of our handler calls the earlier function."""
    _earlier_fd: int = -1
    _owns_fd: bool = False
    _listening: bool = True
    _left: bool = False
    """True if it was given back off the main thread: handlers and the wake-up descriptor remain.

    They remain until the main thread takes signals again.
    """
    _lost: bool = False

    def __post_init__(self) -> None:
        """Open the pipe; no signal is taken yet."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._handler = self._called  # one object: `is` tells whether it is still installed
        _living.add(self)

    # ---- taking and giving back: the main thread ---------------------------------------------

    @property
    def numbers(self) -> frozenset[int]:
        """Return the numbers of the signals that are handled."""
        return frozenset(self._taken)

    def take(self, wanted: Iterable[int]) -> bool:
        """Handle these signals and no others; False, and nothing is done, off the main thread.

        Python lets its main thread alone set handlers.
        """
        wanted = set(wanted)
        if wanted == self._taken.keys():
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        for each in [each for each in _living if each._left]:
            each._forget()
            _living.discard(each)
        if not self._owns_fd and wanted:
            self._earlier_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._owns_fd = True
        for number in self._taken.keys() - wanted:
            self._past[number] = self._taken.pop(number)
            self._restore(number, self._past[number])
        for number in wanted - self._taken.keys():
            # The action first: it is gone once Python has set its own.
            taken = InstalledSignal(signal.getsignal(number), read(number))
            self._taken[number] = taken
            signal.signal(number, self._handler)
            taken.ours = read(number)
        return True

    def give_back(self) -> None:
        """Restore the handlers that are still ours; raise signals that came and were not answered.

        The thread that listened has ended.
        """
        if threading.current_thread() is not threading.main_thread():
            for number, each in self._taken.items():
                # Only the main thread can replace Python's handler. Where it stands in C code, or
                # is about to (`pause`), the earlier action must not wait until it runs Python.
                if not callable(each.before) and same_handler(read(number), each.ours):
                    write(number, each.action)
            self.pass_on(self.wait(0.0))  # after it: whatever came while lightck's were there
            self._listening = False
            if self._owns_fd:
                self._retire(self._write)
                self._left = True
            else:
                os.close(self._write)
                _living.discard(self)
            os.close(self._read)
            return
        self._listening = False
        taken, self._taken = self._taken, {}
        self._past |= taken
        ours = {n for n, each in taken.items() if self._restore(n, each)}
        self._release_fd()
        unanswered = [n for n in self.wait(0.0, taken) if n in ours]
        os.close(self._read)
        _living.discard(self)
        for number in unanswered:
            signal.raise_signal(number)

    def _restore(self, number: int, taken: InstalledSignal) -> bool:
        """Restore a signal's earlier handler; False if the present one is not ours, which stays.

        The present one may be C code's, too. Should it call ours, ours does what the one before
        did.
        """
        if signal.getsignal(number) is not self._handler:
            return False
        there = read(number)
        given_back = self._left and same_handler(there, taken.action)
        if not same_handler(there, taken.ours) and not given_back:
            return False
        signal.signal(number, signal.SIG_DFL if taken.before is None else taken.before)
        if taken.foreign:
            write(number, taken.action)
        return True

    def _release_fd(self) -> None:
        """Return the wake-up descriptor to its earlier owner."""
        if not self._owns_fd:
            os.close(self._write)
            return
        now = signal.set_wakeup_fd(-1)
        if now == self._write:
            try:
                signal.set_wakeup_fd(self._earlier_fd)
            except (ValueError, OSError) as error:  # its owner has closed it meanwhile
                event("wakeup_gone", logging.DEBUG, fd=self._earlier_fd, why=error)
            os.close(self._write)
        else:
            signal.set_wakeup_fd(now)
            self._retire(self._write)

    def _retire(self, fd: int) -> None:
        """Point a descriptor that Python may still write to at its earlier owner, or at /dev/null.

        Python may also be told to use it again: it must never become another file.
        """
        try:
            os.dup2(self._earlier_fd, fd, inheritable=False)
        except OSError:  # -1, or closed
            null = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
            os.dup2(null, fd, inheritable=False)
            os.close(null)

    # ---- our handler: the main thread --------------------------------------------------------

    def _called(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Takes no lock; writes at most a byte, to a pipe that never blocks."""
        taken = self._taken.get(number)
        release = self._released.pop(number, None)
        if self._listening and taken is not None:
            # Called by a handler that was installed after ours: the chain goes on at once if a
            # function of Python comes next; else the listener lets the rest follow its save.
            chained = signal.getsignal(number) is not self._handler
            here = callable(taken.before)
            if release is not None:
                self._say(_PASSED, number)
            else:
                self._say(_CHAINED if chained and not here else _CALL, number)
            if here and (chained or release is not None):
                taken.before(number, frame)
            return
        past = taken or self._past[number]  # nobody listens: act as if lightck had never been there
        outcome = past.outcome(number)
        if outcome is Outcome.FUNCTION:
            past.before(number, frame)
        elif outcome is Outcome.KERNEL:
            self._deliver(number, past)
        elif outcome is Outcome.ENDS:
            self.end(number)

    def _say(self, kind: int, number: int) -> None:
        try:
            os.write(self._write, bytes([(kind * _NUMBERS + number) % 256]))
        except BlockingIOError:
            pass  # thousands are waiting there: the listener is being woken already

    # ---- listening ---------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `wait` return. Any thread."""
        try:
            os.write(self._write, _WAKE)
        except BlockingIOError:
            pass  # it is being woken already, by thousands of bytes

    def wait(self, timeout_s: float, taken: dict[int, InstalledSignal] | None = None) -> list[int]:
        """Return the signals that came, in order, each once; waits for the first, or a `wake`."""
        taken = self._taken if taken is None else taken
        if not self._poll.poll(max(0.0, timeout_s) * 1000):
            return []
        try:
            stream = os.read(self._read, 65536)
        except BlockingIOError:
            return []
        arrived: dict[int, None] = {}
        overdue: dict[int, None] = {}
        forward = bytearray()
        for code in stream.replace(_WAKE, b""):
            kind, number = divmod((code - 1) % 256, _NUMBERS)
            number += 1
            each = taken.get(number)
            if kind == _TRIP and self._is_for_others(number, each):
                forward.append(number)
            if each is not None and kind == _CHAINED:
                each.chained = True
                if each.owed:
                    overdue[number] = None
            if self._arrives(kind, each):
                arrived[number] = None
        self._forward(bytes(forward))
        self.pass_on([number for number in overdue if number not in arrived])
        return list(arrived)

    def _is_for_others(self, number: int, taken: InstalledSignal | None) -> bool:
        """Tell whether the earlier owner of the descriptor (asyncio) is to get this trip.

        It gets one for each signal: if an earlier Python function will run after the save, it gets
        the trip when that runs.
        """
        if taken is None or taken.echo or not callable(taken.before):
            return True
        return signal.getsignal(number) not in (self._handler, taken.before)

    def _arrives(self, kind: int, taken: InstalledSignal | None) -> bool:
        """Tell whether a byte of the stream means a signal that came and was not answered."""
        if taken is None:
            return False  # a signal that only the earlier owner of the descriptor wants
        if kind == _TRIP:
            taken.trips += 1
            ours, taken.echo = taken.echo, False
            if not ours:
                taken.chained = taken.owed = False
            return not ours
        heard, taken.trips = taken.trips > 0, 0
        if heard:
            return False
        if kind == _PASSED:
            taken.echo = False  # another has the descriptor: the trip we caused went there
            return False
        if not self._lost:
            self._lost = True
            event_aside(
                "wakeup_lost",
                logging.WARNING,
                why="another library has taken signal.set_wakeup_fd: signals are noticed only when"
                " the main thread runs Python",
            )
        taken.chained, taken.owed = kind == _CHAINED, False
        return True

    def _forward(self, numbers: bytes) -> None:
        if self._earlier_fd < 0 or not numbers:
            return
        try:
            os.write(self._earlier_fd, numbers)
        except OSError as error:
            event_aside("wakeup_gone", logging.DEBUG, fd=self._earlier_fd, why=error)

    # ---- where it goes from there ------------------------------------------------------------

    def outcome(self, number: int) -> Outcome:
        """Return what a signal will do to the process."""
        taken = self._taken.get(number)
        if taken is None:
            return Outcome.GOES_ON
        # Python itself runs the handler that replaced ours, and whatever that calls.
        replaced = signal.getsignal(number) is not self._handler
        if replaced and (callable(taken.before) or not taken.chained):
            return Outcome.GOES_ON
        return taken.outcome(number)

    def runs_python(self, number: int) -> bool:
        """Tell whether a Python function runs for the signal: it may raise."""
        taken, now = self._taken.get(number), signal.getsignal(number)
        before = taken.before if taken is not None else None
        return callable(before if now is self._handler else now)

    def pass_on(self, numbers: Iterable[int]) -> None:
        """Let signals do what they would have done; if one of them ends the process, only that.

        Functions of Python are called on the main thread, when it runs Python.
        """
        outcomes = {number: self.outcome(number) for number in numbers}
        for number, outcome in outcomes.items():
            if outcome is Outcome.ENDS:
                self.end(number)
        for number, outcome in outcomes.items():
            taken = self._taken.get(number)
            if taken is None:
                continue
            taken.owed = not taken.chained
            if outcome is Outcome.FUNCTION:
                self._released[number] = True
                taken.echo = True
                # It also interrupts a system call of the main thread, as the first one did.
                signal.pthread_kill(_main_ident(), number)
            elif outcome is Outcome.KERNEL:
                self._deliver(number, taken)

    def _deliver(self, number: int, taken: InstalledSignal) -> None:
        """Raise the signal with its earlier action on this thread, then set ours again."""
        ours = read(number)
        write(number, taken.action)
        try:
            raise_here(number)
        finally:
            write(number, ours)

    def end(self, number: int) -> None:
        """End the process by a signal's default action, so that its parent sees that signal.

        Does not need the main thread. Python cleans up nothing, as without us.
        """
        write(number, DEFAULT)
        raise_here(number)
        # The first process of a PID namespace (a container) is spared by default actions.
        os._exit(128 + number)

    # ---- fork --------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Restore everything as it was before us.

        Used in a forked child, and for an object that was given back off the main thread.
        """
        self._listening = False
        for number, taken in self._taken.items():
            self._restore(number, taken)
        self._past, self._taken = self._past | self._taken, {}
        self._released.clear()
        self._release_fd()
        if not self._left:
            os.close(self._read)


_living: weakref.WeakSet[Signals] = weakref.WeakSet()


def _main_ident() -> int:
    ident = threading.main_thread().ident
    assert ident is not None, "the main thread runs"
    return ident


def _hold() -> None:
    """Block the signals before a fork: the child's would be ours until it leaves our pipe."""
    numbers = {number for each in _living for number in each.numbers}
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _go_on() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _in_child() -> None:
    for each in list(_living):
        each._forget()
    _living.clear()
    _go_on()


os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_in_child)
