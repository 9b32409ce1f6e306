"""Claim a path for writing: open the region that is there if nothing would be lost, or make one."""

from __future__ import annotations

import hashlib
import os

from lightck.config import Config
from lightck.errors import ConfigError, LightckError, RegionBusyError, UnrestoredError
from lightck.events import event
from lightck.region import allocator, backing, place, statistics
from lightck.region.layout import Entry
from lightck.region.region import Region
from lightck.region.spec import RegionSpec

HUGE_PAGE_BYTES = 2 << 20


def claim(config: Config, entries: tuple[Entry, ...], manifest_bytes: int) -> Region:
    """Open the region that is there, if it may be written, or make one of the right size."""
    where = place.locate(config.path, 0, create=True, backend=config.backend)
    if where.backend != "native" and config.numa_node is not None:
        raise ConfigError(
            f"numa_node = {config.numa_node}: with backend {where.backend!r} PMDK maps the memory;"
            ' only backend = "auto" binds it to a node'
        )
    durable = config.durability == "process"
    if where.exists and not backing.is_blank(where):
        try:
            region = Region.open(
                where, writable=True, process_durable=durable, numa_node=config.numa_node
            )
        except RegionBusyError as error:
            raise _naming_owner(error, where) from error
        try:
            _take_over(region, config)
            region.fit(entries, manifest_bytes)
            if region.info.slot_count != config.slots:  # fixed when the region was made
                event("slots_kept", slots=region.info.slot_count, asked=config.slots)
        except BaseException:
            region.close()
            raise
        return region
    needed = allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, _page_bytes(where))
    assert needed is not None
    spec = RegionSpec(
        run_id=hashlib.blake2b(config.run_id.encode(), digest_size=16).digest(),
        slot_count=config.slots,
        slot_bytes=needed.needed_bytes,
        process_durable=durable,
        numa_node=config.numa_node,
    )
    return Region.create(where, spec)


def _naming_owner(error: RegionBusyError, where: place.Place) -> RegionBusyError:
    """The same error with the number of the owner's process, where that is known."""
    try:
        region = Region.open(where, writable=False)
    except LightckError:
        return error  # only a message depends on it: libpmemobj lets nobody look, for one
    try:
        owner = statistics.owner(region.native)
    finally:
        region.close()
    if owner is None:
        return error
    this = " (this one)" if owner.number == os.getpid() else ""
    named = RegionBusyError(f"{error}; its owner is process {owner.number}{this}")
    named.code = error.code
    return named


def _page_bytes(where: place.Place) -> int:
    """Of the mapping to come: devices and hugetlbfs (its block size says so) have huge pages."""
    huge = where.is_device or os.statvfs(where.path).f_bsize >= HUGE_PAGE_BYTES
    return HUGE_PAGE_BYTES if huge else allocator.PAGE_BYTES


def _take_over(region: Region, config: Config) -> None:
    """Go on from what this process restored or wrote, else only where nothing would be lost.

    With `overwrite` too: what was restored stays protected until a newer snapshot is committed.
    """
    recovery = region.recover()
    known = [c.record for c in (*recovery.candidates, *recovery.abandoned)]
    if region.continued in known and not region.overtaken:
        return
    if recovery.is_empty or config.overwrite:
        region.start_anew()
        return
    steps = sorted(c.record.step for c in (*recovery.candidates, *recovery.abandoned))
    raise UnrestoredError(
        f"{region.place.file} holds snapshots of steps {steps} that this process has neither"
        " restored nor written; call lightck.restore(...) first, choose another path, or pass"
        " overwrite=True to give them up"
        + "".join(f"\n  {problem}" for problem in recovery.problems)
    )
