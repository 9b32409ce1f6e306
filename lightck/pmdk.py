"""Report what libpmem2 knows of the medium below a run's regions.

The back ends themselves are a setting: `lightck.attach(model, path=..., backend="pmem2")`, or
`"pmemobj"`. Neither library is needed to build or import lightck.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightck.errors import NoSnapshotError, PmdkMissingError
from lightck.load import region_files
from lightck.region import backing, place, pmdk, pmem2

GRANULARITIES = {1: "byte", 2: "cache line", 3: "page"}


@dataclass(frozen=True, slots=True)
class MediaReport:
    """The report of libpmem2 on the medium below one region's file, pool or device.

    Sizes are in bytes.
    """

    file: Path
    granularity: str | None
    """How libpmem2 would make stores durable: `byte`, `cache line` or `page`. What lightck does is
    shown by `lightck inspect`: it asks the kernel (MAP_SYNC), not the environment."""
    forced: bool
    """PMEM2_FORCE_GRANULARITY chose the granularity, which makes nothing more durable."""
    device: str | None
    numa_node: int | None
    bad_blocks: tuple[tuple[int, int], ...] | None
    """The bad blocks as (offset, length) within the file or device; None: unknown. Reading one ends
    in SIGBUS."""
    unsafe_shutdowns: int | None
    """Unsafe shutdowns of the devices below, in all; None: they are not counted here."""
    unsafe_shutdowns_before: int | None
    """The same count when the region was last opened for writing with `backend="pmem2"`."""
    unknown: tuple[str, ...]
    """The reasons why fields are None, in libpmem2's words."""

    @property
    def shut_down_unsafely(self) -> bool:
        """Return whether power was lost unsafely since the region was last opened for writing.

        That is a loss of power before the stores had reached the medium.
        """
        now, before = self.unsafe_shutdowns, self.unsafe_shutdowns_before
        return now is not None and before is not None and now > before


def media_report(path: str | os.PathLike[str] | None = None) -> list[MediaReport]:
    """Ask libpmem2 about the media below the regions at `path`, and return one report per rank.

    Nothing of a region is read, so that bad blocks are found without touching them.

    Raises:
        PmdkMissingError: libpmem2 is not installed.
        NoSnapshotError: no region is there.
        RegionError: the place is not safe.
    """
    pmdk.pmem2()
    files = region_files(path)
    if not files:
        raise NoSnapshotError(f"{path}: there is no lightck region")
    return [_report(where) for where in files]


def _report(where: place.Place) -> MediaReport:
    with place.opened(where, writable=False) as (fd, _):
        media = pmem2.media_of(fd, str(where.file))
    before = backing.last_shutdowns(where)
    same = before is not None and before[0] == (media.device or "unknown")
    return MediaReport(
        file=where.file,
        granularity=GRANULARITIES.get(media.granularity or 0),
        forced=bool(os.environ.get("PMEM2_FORCE_GRANULARITY")),
        device=media.device,
        numa_node=media.numa_node,
        bad_blocks=media.bad_blocks,
        unsafe_shutdowns=media.unsafe_shutdowns,
        unsafe_shutdowns_before=before[1] if before is not None and same else None,
        unknown=media.unknown,
    )


__all__ = ["MediaReport", "PmdkMissingError", "media_report"]
