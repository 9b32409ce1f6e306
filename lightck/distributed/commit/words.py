"""The values of a fate key: whole, whole but suspect, or dead and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """The reason why a step is dead.

    Attributes:
        rank: the rank that claimed it.
        why: the reason, in words.
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
        """Decode a fate key's value; None if the step is whole.

        Raises:
            ValueError: the value is not that of a fate key.
        """
        if value == WHOLE or value.startswith(SUSPECT):
            return None
        word, rank, for_good, why = value.decode("ascii").split(" ", 3)
        if word != "dead":
            raise ValueError(f"a fate must be 'whole' or 'dead ...', not {value!r}")
        return Death(int(rank), why, for_good == "1")


WHOLE = b"whole"
SUSPECT = b"whole suspect "
"""The prefix of a whole but suspect step; the step whose digests differed follows."""
