"""How a signal was before lightck listened to it, and where that takes the process."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from typing import Any

from lightck.failure import disposition

_ASK = {signal.SIGUSR1, signal.SIGUSR2}
"""Asked for by name, they ask for a snapshot: their default, the end, cannot be meant."""


class Outcome(enum.IntEnum):
    """Where a signal takes the process; the most final is the last."""

    GOES_ON = 0
    FUNCTION = 1
    """A function of Python runs on the main thread."""
    KERNEL = 2
    """A handler that C code has installed, or a stop."""
    ENDS = 3


@dataclass(eq=False)
class Taken:
    """A signal that comes to us, and how it was before."""

    before: Any
    """As `signal.getsignal` says: a function, SIG_DFL, SIG_IGN; None: set by C code."""
    action: bytes
    """The same as the C library keeps it."""
    ours: bytes = b""
    """The action since: Python's own."""
    trips: int = 0
    """Since the last call. Like the rest, of the listening thread only."""
    echo: bool = False
    """A trip will come that we have caused."""
    chained: bool = False
    """A handler installed after ours has called ours for the last signal."""
    owed: bool = False
    """That one is answered; should such a handler still call ours, what was before follows."""

    @property
    def foreign(self) -> bool:
        """C code had installed a handler without telling Python."""
        return not callable(self.before) and disposition.is_function(self.action)

    def outcome(self, number: int) -> Outcome:
        """Where the process would go without us."""
        if callable(self.before):
            return Outcome.FUNCTION
        if self.foreign:
            return Outcome.KERNEL
        if number in _ASK or disposition.is_ignored(self.action):
            return Outcome.GOES_ON
        return Outcome.ENDS if disposition.ends_by_default(number) else Outcome.KERNEL
