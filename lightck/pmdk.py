"""Report what libpmem2 knows of the medium below a run's regions.

Regions in a libpmemobj pool are a setting: `lightck.attach(model, path=..., backend="pmemobj")`.
Neither library is needed to build or import lightck.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightck.errors import NoSnapshotError, PmdkMissingError, RegionError
from lightck.load import region_files
from lightck.region import location
from lightck.region.backends.pmdk import ffi, pmem2, text_of

_GRANULARITIES = ("byte", "cache line", "page")
"""The names of PMEM2_GRANULARITY_*, by number."""
_PAGE = 2  # PMEM2_GRANULARITY_PAGE: any medium will do
_PROT_READ = 1 << 30
_NO_BAD_BLOCK = -100029
_DEVICE_BYTES = 256


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
    pmem2()
    files = region_files(path)
    if not files:
        raise NoSnapshotError(f"{path}: there is no lightck region")
    return [_report(where) for where in files]


def _report(where: location.Location) -> MediaReport:
    unknown: list[str] = []
    label = str(where.file)
    with (
        location.opened(where, writable=False) as (fd, _),
        _source(fd, label) as source,
    ):
        return MediaReport(
            file=where.file,
            granularity=_granularity(source, label, unknown),
            forced=bool(os.environ.get("PMEM2_FORCE_GRANULARITY")),
            device=_device(source, unknown),
            numa_node=_number(source, "numa_node", "int *", unknown),
            bad_blocks=_bad_blocks(source, unknown),
            unsafe_shutdowns=_number(source, "device_usc", "uint64_t *", unknown),
            unknown=tuple(unknown),
        )


@contextlib.contextmanager
def _source(fd: int, label: str) -> Iterator[Any]:
    held = ffi.new("struct pmem2_source **")
    _check(pmem2().pmem2_source_from_fd(held, fd), label)
    try:
        yield held[0]
    finally:
        pmem2().pmem2_source_delete(held)


def _granularity(source: Any, label: str, unknown: list[str]) -> str | None:
    """Return how libpmem2 makes stores durable in a mapping of the medium; None: it has none."""
    lib = pmem2()
    config, held = ffi.new("struct pmem2_config **"), ffi.new("struct pmem2_map **")
    try:
        _check(lib.pmem2_config_new(config), label)
        try:
            _check(lib.pmem2_config_set_required_store_granularity(config[0], _PAGE), label)
            _check(lib.pmem2_config_set_protection(config[0], _PROT_READ), label)
            _check(lib.pmem2_map_new(held, config[0], source), f"{label}: map")
        finally:
            lib.pmem2_config_delete(config)
        found = _GRANULARITIES[lib.pmem2_map_get_store_granularity(held[0])]
        _check(lib.pmem2_map_delete(held), f"{label}: unmap")
    except RegionError as error:
        unknown.append(str(error))
        return None
    return found


def _device(source: Any, unknown: list[str]) -> str | None:
    size, text = ffi.new("size_t *", _DEVICE_BYTES), ffi.new("char[]", _DEVICE_BYTES)
    if _told(pmem2().pmem2_source_device_id(source, text, size), "device_id", unknown):
        return str(ffi.string(text).decode(errors="replace")) or None
    return None


def _number(source: Any, what: str, kind: str, unknown: list[str]) -> int | None:
    value = ffi.new(kind)
    code = getattr(pmem2(), f"pmem2_source_{what}")(source, value)
    return int(value[0]) if _told(code, what, unknown) else None


def _bad_blocks(source: Any, unknown: list[str]) -> tuple[tuple[int, int], ...] | None:
    lib = pmem2()
    context, block = ffi.new("struct pmem2_badblock_context **"), ffi.new("pmem2_badblock *")
    if not _told(lib.pmem2_badblock_context_new(context, source), "badblock", unknown):
        return None
    found: list[tuple[int, int]] = []
    try:
        while (code := lib.pmem2_badblock_next(context[0], block)) == 0:
            found.append((int(block.offset), int(block.length)))
    finally:
        lib.pmem2_badblock_context_delete(context)
    if code != _NO_BAD_BLOCK and not _told(code, "badblock", unknown):
        return None
    return tuple(found)


def _told(code: int, what: str, unknown: list[str]) -> bool:
    if code != 0:
        unknown.append(f"{what}: {text_of(pmem2().pmem2_errormsg())} (code {code})")
    return code == 0


def _check(code: int, context: str) -> None:
    if code != 0:
        text = text_of(pmem2().pmem2_errormsg())
        raise RegionError(f"{context}: libpmem2: {text} (code {code})")


__all__ = ["MediaReport", "PmdkMissingError", "media_report"]
