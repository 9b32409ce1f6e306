"""Report what libpmem2 knows of the medium below a run's regions.

Regions in a libpmemobj pool are a setting: `lightck.attach(model, path=..., backend="pmemobj")`.
Neither library is needed to build or import lightck.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightck.errors import NoSnapshotError, PmdkMissingError
from lightck.load import region_files
from lightck.region import location
from lightck.region.backends import libpmem2, pmdk

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
    unknown: tuple[str, ...]
    """The reasons why fields are None, in libpmem2's words."""


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


def _report(where: location.Location) -> MediaReport:
    with location.opened(where, writable=False) as (fd, _):
        media = libpmem2.media_of(fd, str(where.file))
    return MediaReport(
        file=where.file,
        granularity=GRANULARITIES.get(media.granularity or 0),
        forced=bool(os.environ.get("PMEM2_FORCE_GRANULARITY")),
        device=media.device,
        numa_node=media.numa_node,
        bad_blocks=media.bad_blocks,
        unsafe_shutdowns=media.unsafe_shutdowns,
        unknown=media.unknown,
    )


__all__ = ["MediaReport", "PmdkMissingError", "media_report"]
