"""Choose what maps a region: the native writer itself, or libpmemobj inside one of its pools.

Pools are rare, and cffi takes about 15 ms to read libpmemobj's declarations: its module is imported
where a pool is met.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from lightck.config import Config
from lightck.region import location
from lightck.region.location import Location
from lightck.region.native_region import Backing, RegionSpec

Given = tuple[int, int, Backing | None]
"""Two descriptors, one to sync and one that carries the locks, and the mapping unless the native
writer makes it."""
_SPARE = 4
"""A region in a pool cannot grow: it gets 1/4 more space, for state that appears late."""


@contextlib.contextmanager
def opened(where: Location, *, writable: bool) -> Iterator[Given]:
    """Yield what opening an existing region takes; the body must release the mapping."""
    with location.opened(where, writable=writable) as (fd, lock_fd):
        yield fd, lock_fd, _in_pool(where) if where.backend == "pmemobj" else None


@contextlib.contextmanager
def created(where: Location, spec: RegionSpec) -> Iterator[Given]:
    """Yield what making a region takes; the region is published when the body ends."""
    if where.backend == "pmemobj":
        with _new_in_pool(where, spec) as given:
            yield given
        return
    with location.created(where) as (fd, lock_fd):
        yield fd, lock_fd, None


def _with_spare(size: int) -> int:
    from lightck.region.backends import libpmemobj

    granule = libpmemobj.ALIGNMENT
    return size + -(-size // _SPARE // granule) * granule


def _in_pool(where: Location) -> Backing:
    from lightck.region.backends import libpmemobj

    pool = libpmemobj.open_pool(where.file)
    try:
        return pool.backing()
    except BaseException:
        pool.close()
        raise


@contextlib.contextmanager
def _new_in_pool(where: Location, spec: RegionSpec) -> Iterator[Given]:
    from lightck.region.backends import libpmemobj

    size = spec.measure
    if not where.exists:
        spare = min(_with_spare(size), max(size, libpmemobj.MOST_BYTES - libpmemobj.ALIGNMENT))
        libpmemobj.make_pool(where, spare)
    with location.opened(where, writable=True) as (fd, lock_fd):
        pool = libpmemobj.open_pool(where.file)
        try:
            pool.allocate(_with_spare(size), size)
            mapping = pool.backing()
        except BaseException:
            pool.close()
            raise
        yield fd, lock_fd, mapping
        pool.made()


def every_file(path: str | os.PathLike[str] | None) -> list[Location]:
    """Return every rank's region at a path, then the failure regions of its nodes.

    Raises:
        RegionError: the place is not safe.
    """
    where = location.locate(Config.resolve(path=path).path, 0, create=False)
    return [*region_files(path), *location.failure_files(where)]


def region_files(path: str | os.PathLike[str] | None) -> list[Location]:
    """Return every rank's region at a path; a device or a pool is one region.

    Raises:
        RegionError: the place is not safe.
    """
    where = location.locate(Config.resolve(path=path).path, 0, create=False)
    return [each for each in location.every_rank(where) if not is_blank(each)]


def is_blank(where: Location) -> bool:
    """Return whether no region was ever made here; only a device or a pool can be blank."""
    if where.backend == "pmemobj" and where.exists:
        from lightck.region.backends import libpmemobj

        return libpmemobj.is_blank(where.file)
    return location.is_blank(where)
