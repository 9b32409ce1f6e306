"""Describe to the native writer a region to make, or a mapping that somebody else made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightck.region._ffi import check, ffi, library

PROCESS_DURABLE = 2
JOURNAL_BYTES = 3 << 19
"""Default size of the boundary journal: three entries of 512 KiB."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The parameters of a region to create (see `lck_region_spec`)."""

    run_id: bytes
    slot_count: int
    slot_bytes: int
    rank: int = 0
    world: int = 1
    journal_bytes: int = JOURNAL_BYTES
    process_durable: bool = False
    numa_node: int | None = None

    @property
    def measure(self) -> int:
        """Return how many bytes the region takes on a medium with pages of 4 KiB."""
        size = ffi.new("uint64_t *")
        check(library().lck_region_measure(self.to_native(), size), "measure a region")
        return int(size[0])

    def to_native(self) -> Any:
        """Convert to the native structure `lck_region_spec`."""
        native = ffi.new("lck_region_spec *")
        native.run_id = self.run_id
        native.rank, native.world = self.rank, self.world
        native.slot_count, native.slot_bytes = self.slot_count, self.slot_bytes
        native.journal_bytes = self.journal_bytes
        native.flags = PROCESS_DURABLE if self.process_durable else 0
        native.numa_node = -1 if self.numa_node is None else self.numa_node
        return native


@dataclass(frozen=True, slots=True)
class Backing:
    """A mapping that somebody else made (see `lck_backing`)."""

    base: int
    length: int
    release: Callable[[], object]
    """Unmaps the mapping; called once, when no region is open on it any more."""

    def to_native(self) -> Any:
        """Convert to the native structure `lck_backing`."""
        base = ffi.cast("void *", self.base)
        return ffi.new("lck_backing *", {"base": base, "length": self.length})
