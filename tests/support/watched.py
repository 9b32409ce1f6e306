"""A process under the watchdog, with a rescue that only tells; forked for each test."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightck.failure.hang import HangWatch
from lightck.failure.watchdog import WATCHDOG, HandleGuard
from lightck.types import Failure, Saved
from support.processes import Child, Parent, start
from support.savers import LoneSaver


@dataclass(frozen=True)
class Still:
    """A `LoopProgress` of a loop that does not move."""

    step: int = 7
    updating: bool = False
    inside: bool = False
    ticks: int = 0
    step_s: float | None = None
    thread: int = field(default_factory=threading.get_ident)


@dataclass
class Telling(LoneSaver):
    """A `JitSaver` that tells the parent what it is asked to save."""

    parent: Parent
    seen: Still = field(default_factory=Still)
    during: Callable[[], object] = lambda: None
    """This happens while it saves."""
    fresh: bool = True
    says_answered: bool = False
    """Also tell when a signal has been answered: what comes until then shares its save."""
    _owed: bool = False

    def progress(self) -> Still:
        if self._owed and self.says_answered:
            self.parent.send("answered")
        self._owed = False
        return self.seen

    def save(self, reason: str, deadline: float) -> Saved:
        self.parent.send(("save", reason))
        self.during()
        self._owed = True
        return Saved(reason, self.seen.step, fresh=self.fresh)


def guard(parent: Parent, rescue: Telling | None = None, **settings: Any) -> HandleGuard:
    """Make what is watched over; whatever is reported goes to the parent."""
    settings = {"grace_s": 20.0, **settings}
    report = lambda error: parent.send(("error", str(error)))  # noqa: E731
    hang = HangWatch.of_world(Failure(**settings), 1)
    return HandleGuard(rescue or Telling(parent), hang, report)


@contextmanager
def process(code: Callable[[Parent], Any]) -> Iterator[Child]:
    """Run code in a child, which is dead when the block ends."""
    child = start(code)
    try:
        yield child
    finally:
        # The test may have joined it already.
        with suppress(ProcessLookupError, ChildProcessError):
            child.kill()
            child.join()


def says_no_more(child: Child) -> bool:
    """The child ends without another word."""
    with pytest.raises(AssertionError, match="without a word"):
        child.receive()
    return True


def arrive(number: int) -> None:
    """This process gets a signal; its byte lies in the watchdog's pipe when this returns.

    Sent to this very thread it is delivered before the call returns; sent to the process, perhaps
    later.
    """
    signal.pthread_kill(threading.get_ident(), number)


def stuck() -> None:
    """Never returns, and runs no Python: a mutex that this thread holds already."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def idle() -> None:
    """Runs Python whenever a signal comes; returns never."""
    while True:
        signal.pause()


def on_main() -> bool:
    """This is the main thread."""
    return threading.current_thread() is threading.main_thread()


def send(child: Child, *numbers: int) -> None:
    """Send signals."""
    for number in numbers:
        os.kill(child.pid, number)


def watched(
    parent: Parent, then: Callable[[], object], rescue: Any = None, **settings: Any
) -> None:
    """Attach, say so, and go on with `then` on the main thread."""
    WATCHDOG.watch(guard(parent, rescue, **settings))
    parent.send("watched")
    then()


def state() -> tuple[Any, ...]:
    """Everything of the process that the watchdog touches."""
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    names = sorted(thread.name for thread in threading.enumerate())
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    return ([signal.getsignal(number) for number in numbers], fd, names)


def silent(**settings: Any) -> HandleGuard:
    """Make what is watched over and is never to save anything."""

    class Nobody(Parent):
        def send(self, value: Any) -> None:
            raise AssertionError(value)

    return guard(Nobody(-1, -1), **settings)
