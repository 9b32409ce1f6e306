"""The handler that a signal had before lightck's, and what it does to the process."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from typing import Any

from lightck.failure import disposition

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


@dataclass(eq=False)
class Taken:
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
        return not callable(self.before) and disposition.is_function(self.action)

    def outcome(self, number: int) -> Outcome:
        """Return what the signal would do to the process without lightck."""
        if callable(self.before):
            return Outcome.FUNCTION
        if self.foreign:
            return Outcome.KERNEL
        if number in _ASK or disposition.is_ignored(self.action):
            return Outcome.GOES_ON
        return Outcome.ENDS if disposition.ends_by_default(number) else Outcome.KERNEL
