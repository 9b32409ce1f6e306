"""The libpmemobj back end: a region allocated inside a pool, found through the pool's root object.

The root is written last to say that the region is there: an allocation that a crash interrupted is
freed by the next one. libpmemobj locks the pool's file (flock) as long as it is mapped, so only one
process at a time can have it; handles of one process share it.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

from lightck.errors import RegionBusyError, RegionError, RegionFormatError, RegionFullError
from lightck.region import location
from lightck.region.backends.pmdk import ffi, forget, keep_from_children, pmemobj, text_of
from lightck.region.location import Location
from lightck.region.native_region import Backing

MOST_BYTES = 0x3FFDFFFC0
"""The largest allocation in a pool, libpmemobj's PMEMOBJ_MAX_ALLOC_SIZE: just under 16 GiB."""
LAYOUT = b"lightck"
ALIGNMENT = 2 << 20
"""Alignment of the region in the pool, so that huge pages can map it."""
_POOL_BYTES = 8 << 20  # a pool's own part: lanes, zone headers, root (5 MiB were measured)
_HEAD_BYTES = 131_072  # superblocks and records: docs/design.md, section 3
_MAGIC = b"LCKPOOL1"
_VERSION = 1
_ROOT_BYTES = 4096
_TYPE = 0x4C434B

_guard = threading.Lock()
_open: dict[tuple[int, int], Pool] = {}
"""The pools that this process has open, by device and inode."""


class Pool:
    """An open pool; call `close` once for each `open_pool`."""

    def __init__(self, handle: Any, file: Path, length: int, key: tuple[int, int]) -> None:
        """Take ownership of an open `PMEMobjpool`; see `open_pool`."""
        self.handle = handle
        self.file = file
        self.length = length
        self.users = 1
        self.process = os.getpid()
        self._key = key
        self.base = int(ffi.cast("uintptr_t", handle))

    def close(self) -> None:
        """Give one use up; the last close unmaps and unlocks the pool.

        Regions in it must be closed before.
        """
        with _guard:
            self.users -= 1
            if self.users == 0 and self.process == os.getpid():
                del _open[self._key]
                forget(self.base)
                pmemobj().pmemobj_close(self.handle)

    def _root(self) -> Any | None:
        """Return the root object, or None when the pool has none yet.

        Raises:
            RegionError: the root object is another application's.
        """
        size = int(pmemobj().pmemobj_root_size(self.handle))
        if size == 0:
            return None
        found = ffi.cast("lightck_root *", self._at(pmemobj().pmemobj_root(self.handle, size).off))
        magic = bytes(found.magic)
        if size != _ROOT_BYTES or magic not in (_MAGIC, bytes(8)):
            raise RegionError(
                f"{self.file}: the pool's root object ({size} bytes, beginning with {magic!r})"
                " belongs to another application; give lightck a pool of its own:"
                f" pmempool create obj --layout=lightck --size=... {self.file.name}"
            )
        if magic == _MAGIC and found.version != _VERSION:
            raise RegionFormatError(
                f"{self.file}: root object of version {found.version}, expected {_VERSION}"
            )
        return found

    @property
    def holds_region(self) -> bool:
        """Return whether a region was made in the pool completely."""
        root = self._root()
        return root is not None and bool(root.made)

    def allocate(self, wanted: int, least: int) -> None:
        """Allocate `wanted` bytes for a region, or `least`, in a pool without a region.

        Raises:
            RegionFullError: the pool has no such piece.
        """
        lib = pmemobj()
        self._root()  # raises for another application's root, which the next call could enlarge
        at = lib.pmemobj_root(self.handle, _ROOT_BYTES)
        if at.off == 0:
            raise self._full(least)
        root = ffi.cast("lightck_root *", self._at(at.off))
        if root.space.off != 0:
            lib.pmemobj_free(ffi.addressof(root, "space"))
        for length in (wanted, least):
            size = length + ALIGNMENT
            oid = ffi.addressof(root, "space")
            if lib.pmemobj_alloc(self.handle, oid, size, _TYPE, ffi.NULL, ffi.NULL) == 0:
                break
        else:
            raise self._full(least)
        root.version, root.length = _VERSION, length
        root.offset = -(-root.space.off // ALIGNMENT) * ALIGNMENT
        root.magic = _MAGIC
        self._persist(root, ffi.sizeof("lightck_root"))
        # Bytes that an earlier owner of the space left there must not be taken for a region.
        lib.pmemobj_memset_persist(self.handle, self._at(root.offset), 0, _HEAD_BYTES)

    def made(self) -> None:
        """Record durably that the region in the allocated space is there.

        The region must be durable already.
        """
        root = self._root()
        assert root is not None
        root.made = 1
        self._persist(root, ffi.sizeof("lightck_root"))

    def backing(self) -> Backing:
        """Return the allocated space.

        The native writer finds out how stores become durable there.
        """
        root = self._root()
        if root is None or root.offset + root.length > self.length or root.length == 0:
            raise RegionFormatError(
                f"{self.file}: the pool's root object names no space within {self.length} bytes"
            )
        base = int(ffi.cast("uintptr_t", self._at(root.offset)))
        return Backing(base, int(root.length), release=self.close)

    def _at(self, offset: int) -> Any:
        return ffi.cast("char *", self.handle) + offset

    def _persist(self, address: Any, length: int) -> None:
        pmemobj().pmemobj_persist(self.handle, address, length)

    def _full(self, least: int) -> RegionFullError:
        why = text_of(pmemobj().pmemobj_errormsg())
        return RegionFullError(
            f"{self.file}: {least + ALIGNMENT} bytes needed in one piece, which a pool of"
            f" {self.length} bytes does not have (libpmemobj's largest piece has {MOST_BYTES}): "
            + why
        )


def open_pool(file: Path) -> Pool:
    """Open a pool, or share the one that this process has open; the caller closes it.

    Raises:
        PmdkMissingError: libpmemobj is not installed.
        RegionBusyError: another process has it open.
        RegionError: libpmemobj refuses; the message has its text.
    """
    with _guard:
        status = os.stat(file, follow_symlinks=False)
        key = (status.st_dev, status.st_ino)
        found = _open.get(key)
        if found is not None and found.process == os.getpid():
            found.users += 1
            return found
        handle = pmemobj().pmemobj_open(os.fsencode(file), ffi.NULL)
        if handle == ffi.NULL:
            raise _refusal(file, ffi.errno)
        pool = _open[key] = Pool(handle, file, status.st_size, key)
        keep_from_children(pool.base, pool.length)  # the lock is kept from them with it
    return pool


def make_pool(where: Location, space: int) -> None:
    """Make a pool with room for `space` bytes in one piece; it gets its name when complete.

    Raises:
        RegionFullError: bytes needed and free; or more than libpmemobj can give in one piece.
    """
    if space + ALIGNMENT > MOST_BYTES:
        raise RegionFullError(
            f"{where.file}: {space + ALIGNMENT} bytes needed in one piece, libpmemobj's largest"
            f" has {MOST_BYTES}; use another back end, or more ranks"
        )
    lib = pmemobj()
    with location.created(where) as (fd, _):
        draft = location.draft_of(where)
        location.allocate(fd, space + ALIGNMENT + _POOL_BYTES, draft)
        handle = lib.pmemobj_create(os.fsencode(draft), LAYOUT, 0, 0o600)
        if handle == ffi.NULL:
            raise _refusal(draft, ffi.errno)
        lib.pmemobj_close(handle)
        os.fsync(fd)


def is_blank(file: Path) -> bool:
    """Return whether no region was made in the pool."""
    pool = open_pool(file)
    try:
        return not pool.holds_region
    finally:
        pool.close()


def _refusal(file: Path, code: int) -> RegionError:
    text = text_of(pmemobj().pmemobj_errormsg())
    if code in (errno.EAGAIN, errno.EBUSY):
        return RegionBusyError(
            f"{file}: another process has the pool open, and libpmemobj lets in one at a time,"
            f" readers too; try again when it has closed it ({text})"
        )
    hint = ""
    if any(word in text.lower() for word in ("shutdown", "usc", "sds")):
        hint = (
            "; PMDK 2.1 and newer make no pool on a medium that does not count unsafe shutdowns"
            " unless the environment has PMEMOBJ_CONF=sds.at_create=0"
        )
    kind = RegionFormatError if code == errno.EINVAL else RegionError
    return kind(f"{file}: libpmemobj: {text} (errno {code}){hint}")
