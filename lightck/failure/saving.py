"""What is watched over for one handle, and one save for it, on a thread of its own."""

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
"""Between looks at a loop of several ranks, where hangs are found in seconds."""
_TOLD_S = 1.0
"""How long a save waits for `on_event` to be told of it: the process may end then."""
ALONE_LOOK_S = 1.0
"""With one rank `hang_s` is all there is."""


class Rescue(Protocol):
    """Saves what can be saved."""

    def progress(self) -> Progress:
        """Where the loop is. Any thread; takes no lock."""

    def save(self, reason: str, deadline: float) -> Saved:
        """Commit the last complete step if that can be done by `deadline`. Any thread."""


@dataclass(eq=False)
class Guard:
    """What the watchdog does for one handle."""

    rescue: Rescue
    failure: Failure
    report: Callable[[LightckError], object]
    """Gives an error to the user."""
    world: int = 1
    measured: Callable[[], Measured | None] = lambda: None
    """What a snapshot costs; None: not known yet."""
    elsewhere: Callable[[], str | None] = lambda: None
    """What has failed on another rank since the last call; at once. One thread calls it."""
    settled: Callable[[], bool] = lambda: True
    """No other rank can make this one save again; at once."""
    waits: Callable[[], Place | None] = lambda: None
    """Where a device may wait for other ranks; at once."""
    hold: Callable[[float | None], object] = lambda until: None
    """Training goes no further than a save needs, until then; None: it goes on."""
    notice: Notice | None = None
    noticed: bool = False
    """A notice has come and is not answered yet."""
    asked_at: int | None = None
    """Step at which `on_failure` was asked about a signal whose own handler may raise."""
    told_budget: bool = False
    measure_at_s: float = 0.0
    hang_saving: Saving | None = None
    """For the hang that it is in."""
    exit_in_s: float | None = None
    """Seconds, as far as they count, after which the process is ended for it."""

    def __post_init__(self) -> None:
        """Nothing has been seen yet."""
        self.hang = HangWatch(self.failure, LOOK_S if self.world > 1 else ALONE_LOOK_S)

    @property
    def numbers(self) -> set[int]:
        """Of the signals that it wants to hear of."""
        return {signal.Signals[name] for name in self.failure.signals}

    def knows(self, error: BaseException) -> bool:
        """Whether an exception is only what became of a signal, as that was handled here."""
        step = self.asked_at
        is_wish = not isinstance(error, Exception)  # KeyboardInterrupt, SystemExit
        return is_wish and step is not None and self.rescue.progress().step <= step + 1

    def has_asked_about(self, error: BaseException) -> bool:
        """Whether the user has been asked about it, as `knows` tells; once."""
        known = self.knows(error)
        self.asked_at = None
        return known

    def tell(self, error: LightckError) -> None:
        """Tell the user; what telling raises (a filter on warnings, `on_error`) ends no thread."""
        try:
            self.report(error)
        except Exception as second:  # noqa: BLE001
            event("untold", logging.ERROR, error=error, why=repr(second))


@dataclass(eq=False)
class Saving:
    """One save, and the user's word on what is to follow, on a thread of its own.

    Everything is logged there, too: what holds this thread up keeps the watchdog until the deadline
    at most.
    """

    guard: Guard
    reason: str
    deadline_s: float
    about: dict[str, object] = field(default_factory=dict)
    """What is to be said of the reason."""
    given: Saved | None = None
    """What has just been saved for another reason: that will do."""
    saved: Saved | None = None
    goes_on: bool = False
    """`on_failure` has said so."""
    done: threading.Event = field(default_factory=threading.Event)
    thread: int = 0

    def start(self) -> Saving:
        """Begin."""
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
        """At most the minibatch that was running is lost."""
        return self.saved is not None and self.saved.fresh

    def _run(self) -> None:
        self.thread = threading.get_ident()
        try:
            # Saved first, told then.
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
