"""Claim a path for writing: open the region that is there if nothing would be lost, or make one.

Claiming has two parts, `find` and `take`: ranks have to know of the regions that all of them find
before any is made.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, field
from itertools import count

from lightck.config import Config
from lightck.errors import (
    ConfigError,
    CorruptSnapshotError,
    LightckError,
    RegionBusyError,
    RegionError,
    RegionFormatError,
    RegionIOError,
    UnrestoredError,
)
from lightck.events import event
from lightck.region import allocator, location, stats_page
from lightck.region.backends import select
from lightck.region.layout import Entry
from lightck.region.native_region import JOURNAL_BYTES, RegionSpec
from lightck.region.region import Continuation, Region

HUGE_PAGE_BYTES = 2 << 20
STANDS_S = 1.0
"""Seconds in which an owner must not be seen to run before its region is left to it."""
_SHARED = 3
"""Slots of one rank among several: the protected one, one whose global outcome is not known yet,
and one to write."""


STORE_RUN = hashlib.blake2b(b"lightck.Store", digest_size=16, person=b"lightck.Store").digest()
"""The run id of every region of a `Store`; a training's is made without `person`."""


@dataclass(eq=False)
class ClaimedLocation:
    """A location that this process may write to, and the region in it, if there is one."""

    where: location.Location
    region: Region | None
    """The region, owned by this process; None: it has to be made."""
    continuation: Continuation = field(default_factory=Continuation)
    """The snapshots that the model continues."""

    @property
    def run_id(self) -> bytes | None:
        """Return the id of the run that the region was made for, or None without a region."""
        return None if self.region is None else self.region.info.run_id

    def close(self) -> None:
        """Close the region and give up its lock; idempotent."""
        if self.region is not None:
            self.region.close()


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The identity of the rank whose region is claimed.

    Attributes:
        rank: the rank, of `world`.
        world: number of ranks that write now; the region stays when that number changes.
        run_id: the run id for a region that has to be made; None: made from the config's `run_id`.
    """

    rank: int = 0
    world: int = 1
    run_id: bytes | None = None


def _move_away(where: location.Location, why: LightckError) -> None:
    """Rename the damaged file, and keep every earlier one: its user may want to look at it."""
    every = (where.file.with_name(f"{where.file.name}.damaged{n or ''}") for n in count())
    aside = next(path for path in every if not os.path.lexists(path))
    os.rename(where.file, aside)
    event("moved_aside", logging.WARNING, file=where.file, to=aside, why=why)


def _owner_stands(where: location.Location) -> bool:
    """Tell whether a region's owner, a process of an earlier life, has stood still for a while."""
    if not where.is_plain or where.path == where.file:
        return False
    try:
        region = Region.open(where, writable=False)
    except LightckError:
        return False
    try:
        owner = stats_page.owner(region.native)
    finally:
        region.close()
    return owner is not None and owner.stands_still(STANDS_S)


def _leave_to_owner(where: location.Location, why: LightckError) -> None:
    """Put a copy of a region in its place, and leave the file itself to its owner, which stands.

    What is there stays restorable from the copy. Should the owner go on after all, it writes to a
    file that has no name any more.

    Raises:
        RegionError: there is no room for the copy, or others make one; the region is in its place.
    """
    with (
        location.created(where, replaces=True) as (fd, _),
        location.opened(where, writable=False) as (source, _),
    ):
        size = os.fstat(source).st_size
        location.allocate(fd, size, where.file)
        at = 0
        try:
            while at < size:
                sent = os.sendfile(fd, source, at, size - at)
                if not sent:  # the file was cut meanwhile
                    raise why
                at += sent
            os.fsync(fd)  # what was durable is so in the copy, before that takes the name
        except OSError as error:  # as on hugetlbfs, which files cannot be written to
            raise why from error
    event("left_to_owner", logging.WARNING, file=where.file, bytes=size, why=why)


def find(
    config: Config, rank: int, continuation: Continuation, *, of_store: bool = False
) -> ClaimedLocation:
    """Become the owner of the region that is there, if it may be written.

    Args:
        config: names the path, and says whether older snapshots may be overwritten.
        rank: whose region it is.
        continuation: the snapshots that the model continues.
        of_store: a `Store` claims it, which goes on from what is there itself.

    Raises:
        UnrestoredError: snapshots are there that were not restored; nothing was overwritten.
        RegionBusyError: another process owns the region.
        RegionError: it is another rank's, or a store's for a training, or the other way round.
    """
    where = location.locate(config.path, rank, create=True, backend=config.backend)
    if where.backend != "native" and config.numa_node is not None:
        raise ConfigError(
            f"numa_node = {config.numa_node}: with backend {where.backend!r} PMDK maps the memory;"
            ' only backend = "auto" binds it to a node'
        )
    if not where.exists or select.is_blank(where):
        return ClaimedLocation(where, None, continuation)
    durable = config.durability == "process"
    try:
        region = Region.open(
            where,
            writable=True,
            process_durable=durable,
            numa_node=config.numa_node,
            continuation=continuation,
        )
    except RegionBusyError as error:
        if not _owner_stands(where):
            raise naming_owner(error, where) from error
        _leave_to_owner(where, naming_owner(error, where))
        return find(config, rank, continuation, of_store=of_store)
    except (RegionFormatError, CorruptSnapshotError, RegionIOError) as error:
        if where.file not in continuation.given_up or not where.is_plain:
            raise
        _move_away(where, error)
        continuation.given_up.discard(where.file)
        return ClaimedLocation(where, None, continuation)
    try:
        _check_rank(region, rank)
        check_kind(region, of_store=of_store)
        if not of_store:
            _take_over(region, config)
    except BaseException:
        region.close()
        raise
    return ClaimedLocation(where, region, continuation)


def take(
    claim: ClaimedLocation,
    config: Config,
    identity: RankIdentity,
    entries: tuple[Entry, ...],
    manifest_bytes: int,
    journal_bytes: int = JOURNAL_BYTES,
) -> Region:
    """Make the region that is not there yet, or make room in the one that is.

    While the failure path is armed, one rank of several has one more slot: a just-in-time snapshot
    takes neither the protected slot nor one whose global outcome is not known. Due snapshots leave
    that slot free.
    """
    slots = config.slots or (2 if identity.world == 1 else _SHARED + (config.failure != "off"))
    if identity.world > 1 and slots == 2:
        why = "due steps slip while it is not known whether every rank has committed the last one"
        event("two_slots", logging.WARNING, world=identity.world, why=why)
    if claim.region is None:
        room = (manifest_bytes, journal_bytes)
        claim.region = _make(claim, config, identity, slots, entries, room)
    else:
        claim.region.fit(entries, manifest_bytes)
    region = claim.region
    if region.info.slot_count != slots:  # fixed when the region was made
        event("slots_kept", slots=region.info.slot_count, asked=slots)
    armed = identity.world > 1 and config.failure != "off"
    region.prepare_writing(
        identity.world, reserved_slots=int(armed and region.info.slot_count > _SHARED)
    )
    return region


def _make(
    claim: ClaimedLocation,
    config: Config,
    identity: RankIdentity,
    slots: int,
    entries: tuple[Entry, ...],
    room: tuple[int, int],
) -> Region:
    manifest_bytes, journal_bytes = room
    needed = allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, _page_bytes(claim.where))
    assert needed is not None
    named = hashlib.blake2b(config.run_id.encode(), digest_size=16).digest()
    spec = RegionSpec(
        run_id=identity.run_id or named,
        rank=identity.rank,
        world=identity.world,
        slot_count=slots,
        slot_bytes=needed.needed_bytes,
        journal_bytes=journal_bytes,
        process_durable=config.durability == "process",
        numa_node=config.numa_node,
    )
    return Region.create(claim.where, spec, claim.continuation)


def _check_rank(region: Region, rank: int) -> None:
    if region.info.rank != rank:
        raise RegionError(
            f"{region.place.file} is the region of rank {region.info.rank}, this is rank {rank}:"
            " was the file renamed or copied? Put it back, or choose another path"
        )


def check_kind(region: Region, *, of_store: bool) -> None:
    """Refuse a store's region to a training, and a training's to a store.

    Raises:
        RegionError: says whose it is, and what to do.
    """
    if (region.info.run_id == STORE_RUN) == of_store:
        return
    kinds = "a training (lightck.attach)", "a store (lightck.Store)"
    whose, whom = kinds if of_store else kinds[::-1]
    raise RegionError(
        f"{region.place.file} holds the snapshots of {whose}, and this is {whom}: choose another"
        f" path, or give them up with `lightck rm {region.place.path}`"
    )


def naming_owner(error: RegionBusyError, where: location.Location) -> RegionBusyError:
    """Return the same error with the process number of the owner, where that is known."""
    try:
        region = Region.open(where, writable=False)
    except LightckError:
        return error  # only a message depends on it, and a pool is one process's
    try:
        owner = stats_page.owner(region.native)
    finally:
        region.close()
    if owner is None:
        return error
    this = " (this one)" if owner.number == os.getpid() else ""
    named = RegionBusyError(f"{error}; its owner is process {owner.number}{this}")
    named.code = error.code
    return named


def _page_bytes(where: location.Location) -> int:
    """Return the page size of the mapping to come.

    Devices and hugetlbfs (its block size says so) have huge pages.
    """
    huge = where.is_device or os.statvfs(where.path).f_bsize >= HUGE_PAGE_BYTES
    return HUGE_PAGE_BYTES if huge else allocator.PAGE_BYTES


def _take_over(region: Region, config: Config) -> None:
    """Let the model write here if it continues the newest snapshot, or if no snapshot is lost.

    This holds with `overwrite`, too: the snapshot that the model continues stays protected until a
    newer one is committed.
    """
    recovery = region.recover()
    known = [c.record for c in (*recovery.candidates, *recovery.abandoned)]
    ours = region.continued in known or (region.continued is None and region.written_here)
    if ours and not region.overtaken:
        return
    if recovery.is_empty or config.overwrite:
        region.continuation.forget(region)
        return
    steps = sorted(c.record.step for c in (*recovery.candidates, *recovery.abandoned))
    raise UnrestoredError(
        f"{region.place.file} holds snapshots of steps {steps} that were neither restored into this"
        " model nor recorded from it, in its present state: call lightck.restore(model, ...) first"
        " (a model that is made anew carries on nothing, also not in the process that wrote them),"
        " choose another path, or pass overwrite=True to give them up"
        + "".join(f"\n  {problem}" for problem in recovery.problems)
    )
