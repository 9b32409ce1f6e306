"""Gives errors in the background to the user: warns, raises or calls, as `on_error` says."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from lightck.errors import LightckError
from lightck.events import event


@dataclass(eq=False)
class Reporter:
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
