"""The watchdog's state for one handle, and one save for it, on a thread of its own."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightck.errors import LightckError
from lightck.events import deliver, event
from lightck.failure.budget import Measured
from lightck.failure.hang import HangWatch, Place, Progress
from lightck.failure.notice import Notice
from lightck.types import Failure, Saved

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
class Guard:
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
    notice: Notice | None = None
    noticed: bool = False
    """True if a notice has come and is not answered yet."""
    asked_at: int | None = None
    """The step at which `on_failure` was asked about a signal whose own handler may raise."""
    told_budget: bool = False
    measure_at_s: float = 0.0
    hang_saving: Saving | None = None
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
class Saving:
    """One save, and the user's decision about what follows, on a thread of its own.

    Everything is logged on that thread, too: whatever blocks it delays the watchdog until the
    deadline at most.
    """

    guard: Guard
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

    def start(self) -> Saving:
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
