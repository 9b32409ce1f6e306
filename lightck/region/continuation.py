"""What one live model carries on: the snapshots that it was restored from or recorded as."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lightck.region.native import Record


@dataclass(eq=False)
class Continuation:
    """Lets attach refuse a path whose snapshots would be overwritten by a forgotten restore.

    It belongs to a model, not to the process: a new model, as a notebook's cell makes it when it
    is run again, carries on nothing.
    """

    records: dict[bytes, Record] = field(default_factory=dict)
    """Per region UUID: the snapshot that was restored from there, or committed there last."""
    newest: dict[bytes, int] = field(default_factory=dict)
    """Per region UUID: the newest sequence that was there then. A later one is somebody else's."""
    given_up: set[Path] = field(default_factory=set)
    """Region files that cannot be opened, and of which restore got from other ranks what they had:
    attach may move them away."""

    def clear(self) -> None:
        """Forget all of it: the live state is about to become another snapshot's."""
        self.records.clear()
        self.newest.clear()
        self.given_up.clear()
