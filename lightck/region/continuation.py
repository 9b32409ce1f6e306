"""Record which snapshots a live model continues: those it was restored from or recorded as."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lightck.region.native_region import Record


@dataclass(eq=False)
class Continuation:
    """The snapshots that one model continues.

    With it attach refuses a path whose snapshots would be overwritten because a restore was
    forgotten. It belongs to a model, not to the process: a new model, as a notebook's cell makes it
    when it is run again, continues nothing.
    """

    records: dict[bytes, Record] = field(default_factory=dict)
    """The snapshot, by region UUID, that the model was last restored from or committed as."""
    newest: dict[bytes, int] = field(default_factory=dict)
    """The region's newest sequence at the model's last restore or commit, by region UUID. A later
    one is somebody else's."""
    given_up: set[Path] = field(default_factory=set)
    """Region files that cannot be opened and whose state restore got from other ranks: attach may
    rename them."""

    def clear(self) -> None:
        """Forget everything, because the live state is about to become another snapshot's."""
        self.records.clear()
        self.newest.clear()
        self.given_up.clear()
