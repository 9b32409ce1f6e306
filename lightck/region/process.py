"""Identify a process by its number, start time and boot; a number alone is used again."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot of a machine."""

    number: int
    start: int
    """The start time in ticks since boot; 0: not known."""
    boot: bytes

    @classmethod
    def this(cls) -> Process:
        """Return the calling process."""
        return cls(os.getpid(), _start(os.getpid()) or 0, boot())

    @property
    def is_here(self) -> bool:
        """Return whether the process is of this boot of this machine and can be looked up."""
        return self.boot == boot()

    @property
    def is_running(self) -> bool:
        """Return whether the process runs, as far as this process's PID namespace shows."""
        return self.is_here and self.start != 0 and _start(self.number) == self.start


def boot() -> bytes:
    """Return the 16-byte id of this boot; zeros where the kernel does not tell."""
    with suppress(OSError, ValueError):
        return uuid.UUID((_PROC / "sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)


def _start(number: int) -> int | None:
    """Return the start time of a live process in ticks since boot (field 22 of `stat`), or None.

    The name before that field may hold anything, parentheses too.
    """
    try:
        text = (_PROC / str(number) / "stat").read_bytes()
        fields = text[text.rindex(b")") + 2 :].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
