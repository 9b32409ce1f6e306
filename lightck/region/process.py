"""Which process is which: a number is used again, number and start on one boot are not."""

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
    """Ticks since boot; 0: not known."""
    boot: bytes

    @classmethod
    def this(cls) -> Process:
        """The calling one."""
        return cls(os.getpid(), _start(os.getpid()) or 0, boot())

    @property
    def is_here(self) -> bool:
        """It belongs to this boot of this machine, so that looking for it means something."""
        return self.boot == boot()

    @property
    def is_running(self) -> bool:
        """It is there, as far as this process can see (not beyond its PID namespace)."""
        return self.is_here and self.start != 0 and _start(self.number) == self.start


def boot() -> bytes:
    """Id of this boot, 16 bytes; zeros where the kernel does not tell."""
    with suppress(OSError, ValueError):
        return uuid.UUID((_PROC / "sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)


def _start(number: int) -> int | None:
    """Field 22 of `stat`; the name before it may hold anything, parentheses too."""
    try:
        text = (_PROC / str(number) / "stat").read_bytes()
        fields = text[text.rindex(b")") + 2 :].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
