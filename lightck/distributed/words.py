"""What a fate key may hold: whole, whole but suspect, or dead and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """Why a step is dead.

    Attributes:
        rank: who said so.
        why: in words.
        for_good: that rank takes no more snapshots.
    """

    rank: int
    why: str
    for_good: bool = False

    def encode(self) -> bytes:
        """Return the value of the fate key."""
        return f"dead {self.rank} {int(self.for_good)} {self.why}".encode("ascii", "replace")[:200]

    @staticmethod
    def decode(value: bytes) -> Death | None:
        """Read a fate key's value; None if it says whole."""
        if value == WHOLE or value.startswith(SUSPECT):
            return None
        word, rank, for_good, why = value.decode("ascii").split(" ", 3)
        if word != "dead":
            raise ValueError(f"a fate must be 'whole' or 'dead ...', not {value!r}")
        return Death(int(rank), why, for_good == "1")


WHOLE = b"whole"
SUSPECT = b"whole suspect "
"""Whole, but replicas differ; the step whose digests did follows."""
