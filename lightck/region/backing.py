"""Choose what maps a region: the native writer, libpmem2, or libpmemobj inside one of its pools."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from lightck.config import Config
from lightck.events import event
from lightck.region import place, pmdk, pmem2, pmemobj
from lightck.region.place import Place
from lightck.region.spec import Backing, RegionSpec

Given = tuple[int, int, Backing | None]
"""Two descriptors, one to sync and one that carries the locks, and the mapping unless the native
writer makes it."""
_SPARE = 4
"""A region that PMDK maps cannot grow: it gets 1/4 more space, for state that appears late."""


@contextlib.contextmanager
def opened(where: Place, *, writable: bool) -> Iterator[Given]:
    """Yield what opening an existing region takes; the body must release the mapping.

    A region that libpmem2 mapped for its owner is an ordinary file: readers map it themselves.
    """
    with place.opened(where, writable=writable) as (fd, lock_fd):
        if where.backend == "pmemobj":
            yield fd, lock_fd, _in_pool(where)
        elif where.backend == "pmem2" and writable:
            _fill_holes(where, fd)
            _tell_shutdowns(where, fd)
            yield fd, lock_fd, pmem2.provide(fd, str(where.file))
        else:
            yield fd, lock_fd, None


@contextlib.contextmanager
def created(where: Place, spec: RegionSpec) -> Iterator[Given]:
    """Yield what making a region takes; the region is published when the body ends."""
    if where.backend == "pmemobj":
        with _new_in_pool(where, spec) as given:
            yield given
        return
    if where.backend == "pmem2":
        pmdk.pmem2()  # raises if it is missing, before gigabytes are allocated
    with place.created(where) as (fd, lock_fd):
        mapping = None
        if where.backend == "pmem2":
            if not where.is_device:
                place.allocate(fd, _with_spare(spec.measure), where.file)
            _tell_shutdowns(where, fd)
            mapping = pmem2.provide(fd, str(where.file))
        yield fd, lock_fd, mapping


def _with_spare(size: int) -> int:
    granule = pmemobj.ALIGNMENT
    return size + -(-size // _SPARE // granule) * granule


def _in_pool(where: Place) -> Backing:
    pool = pmemobj.open_pool(where.file)
    try:
        return pool.backing()
    except BaseException:
        pool.close()
        raise


@contextlib.contextmanager
def _new_in_pool(where: Place, spec: RegionSpec) -> Iterator[Given]:
    size = spec.measure
    if not where.exists:
        spare = min(_with_spare(size), max(size, pmemobj.MOST_BYTES - pmemobj.ALIGNMENT))
        pmemobj.make_pool(where, spare)
    with place.opened(where, writable=True) as (fd, lock_fd):
        pool = pmemobj.open_pool(where.file)
        try:
            pool.allocate(_with_spare(size), size)
            mapping = pool.backing()
        except BaseException:
            pool.close()
            raise
        yield fd, lock_fd, mapping
        pool.made()


def _fill_holes(where: Place, fd: int) -> None:
    """Allocate the holes of a copied region file.

    A store into a hole could find the medium full.
    """
    status = os.fstat(fd)
    if not where.is_device and status.st_blocks * 512 < status.st_size:
        place.allocate(fd, status.st_size, where.file)


def region_files(path: str | os.PathLike[str] | None) -> list[Place]:
    """Return every rank's region at a path; a device or a pool is one region.

    Raises:
        RegionError: the place is not safe.
    """
    where = place.locate(Config.resolve(path=path).path, 0, create=False)
    return [each for each in place.every_rank(where) if not is_blank(each)]


def is_blank(where: Place) -> bool:
    """Return whether no region was ever made here; only a device or a pool can be blank."""
    if where.backend == "pmemobj" and where.exists:
        return pmemobj.is_blank(where.file)
    return place.is_blank(where)


# ---- unsafe shutdowns ----


def shutdowns_file(where: Place) -> Path:
    """Return the path of the file with the count of unsafe shutdowns that the last owner read."""
    return where.file.with_suffix(".shutdowns")


def last_shutdowns(where: Place) -> tuple[str, int] | None:
    """Return the device and its count of unsafe shutdowns at the last opening for writing.

    Returns None if there is no readable count.
    """
    try:
        device, count = shutdowns_file(where).read_text(encoding="utf-8").split()
        return device, int(count)
    except (OSError, ValueError):  # none yet, or not ours: only a message depends on it
        return None


def _tell_shutdowns(where: Place, fd: int) -> None:
    """Warn if the medium lost power unsafely since its last owner, and store the new count.

    All that is read is checked anyway: the warning tells why a snapshot may be missing.
    """
    if where.is_device:
        return
    media = pmem2.media_of(fd, str(where.file))
    if media.unsafe_shutdowns is None:
        return
    now = (media.device or "unknown", media.unsafe_shutdowns)
    before = last_shutdowns(where)
    if before is not None and before[0] == now[0] and before[1] < now[1]:
        event(
            "unsafe_shutdown",
            logging.WARNING,
            path=where.file,
            device=now[0],
            times=now[1] - before[1],
        )
    if before != now:
        draft = shutdowns_file(where).with_suffix(".shutdowns-new")
        draft.write_text(f"{now[0]} {now[1]}\n", encoding="utf-8")
        os.replace(draft, shutdowns_file(where))
