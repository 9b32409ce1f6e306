"""Load PMDK's libraries on first use, through cffi in ABI mode, or say which is missing."""

from __future__ import annotations

import mmap
import os
from functools import cache
from typing import Any

from cffi import FFI

from lightck.errors import PmdkMissingError, RegionError

CDEF = """
struct pmem2_config;
struct pmem2_source;
struct pmem2_map;
struct pmem2_badblock_context;
typedef struct { size_t offset, length; } pmem2_badblock;
int pmem2_config_new(struct pmem2_config **cfg);
int pmem2_config_delete(struct pmem2_config **cfg);
int pmem2_config_set_required_store_granularity(struct pmem2_config *cfg, int g);
int pmem2_config_set_protection(struct pmem2_config *cfg, unsigned prot);
int pmem2_source_from_fd(struct pmem2_source **src, int fd);
int pmem2_source_delete(struct pmem2_source **src);
int pmem2_source_numa_node(const struct pmem2_source *src, int *numa_node);
int pmem2_source_device_id(const struct pmem2_source *src, char *id, size_t *len);
int pmem2_source_device_usc(const struct pmem2_source *src, uint64_t *usc);
int pmem2_badblock_context_new(struct pmem2_badblock_context **bbctx,
  const struct pmem2_source *src);
int pmem2_badblock_next(struct pmem2_badblock_context *bbctx, pmem2_badblock *bb);
void pmem2_badblock_context_delete(struct pmem2_badblock_context **bbctx);
int pmem2_map_new(struct pmem2_map **map_ptr, const struct pmem2_config *cfg,
  const struct pmem2_source *src);
int pmem2_map_delete(struct pmem2_map **map_ptr);
int pmem2_map_get_store_granularity(struct pmem2_map *map);
const char *pmem2_errormsg(void);

typedef struct pmemobjpool PMEMobjpool;
typedef struct { uint64_t pool_uuid_lo, off; } PMEMoid;
typedef struct { uint8_t magic[8]; uint32_t version, made; PMEMoid space;
  uint64_t offset, length; } lightck_root;
PMEMobjpool *pmemobj_open(const char *path, const char *layout);
PMEMobjpool *pmemobj_create(const char *path, const char *layout, size_t poolsize, unsigned mode);
void pmemobj_close(PMEMobjpool *pop);
PMEMoid pmemobj_root(PMEMobjpool *pop, size_t size);
size_t pmemobj_root_size(PMEMobjpool *pop);
int pmemobj_alloc(PMEMobjpool *pop, PMEMoid *oidp, size_t size, uint64_t type_num,
  void *constructor, void *arg);
void pmemobj_free(PMEMoid *oidp);
void *pmemobj_memset_persist(PMEMobjpool *pop, void *dest, int c, size_t len);
void pmemobj_persist(PMEMobjpool *pop, const void *addr, size_t len);
const char *pmemobj_errormsg(void);

int madvise(void *addr, size_t length, int advice);
void *mmap(void *addr, size_t length, int prot, int flags, int fd, int64_t offset);
"""

_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000
_mapped: dict[int, int] = {}
"""Length by start address of what PMDK has mapped in this process, or had in the one that forked
it."""

ffi: Any = FFI()
ffi.cdef(CDEF)


@cache
def pmem2() -> Any:
    """Return libpmem2, the library that knows media.

    Raises:
        PmdkMissingError: it is not installed.
    """
    return _load("libpmem2.so.1", "libpmem2")


@cache
def pmemobj() -> Any:
    """Return libpmemobj, the library that has the pools.

    Raises:
        PmdkMissingError: it is not installed.
    """
    return _load("libpmemobj.so.1", "libpmemobj1")


@cache
def libc() -> Any:
    """Return the C library, for calls that Python's own modules do not offer."""
    return ffi.dlopen(None)


def _load(name: str, package: str) -> Any:
    try:
        return ffi.dlopen(name)
    except OSError as error:
        raise PmdkMissingError(
            f"this needs PMDK's {name}, which cannot be loaded ({error});"
            f" on Debian: apt-get install {package}"
        ) from error


def keep_from_children(base: int, length: int) -> None:
    """Keep a mapping out of forked children, which see only its addresses as taken, until `forget`.

    A lock that a mapping carries would last as long as the child. The addresses stay taken in the
    child because it inherits PMDK's register of mappings, which refuses a second mapping with
    EEXIST.
    """
    if libc().madvise(ffi.cast("void *", base), length, mmap.MADV_DONTFORK) != 0:
        raise RegionError(f"keep {length} bytes from forked children: {os.strerror(ffi.errno)}")
    _mapped[base] = length


def forget(base: int) -> None:
    """Drop a mapping that is gone, or about to go, from the register."""
    del _mapped[base]


def _hold_addresses() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for base, length in _mapped.items():
        libc().mmap(ffi.cast("void *", base), length, 0, flags, -1, 0)


os.register_at_fork(after_in_child=_hold_addresses)


def text_of(message: Any) -> str:
    """Return a library's last error as text."""
    text: bytes = ffi.string(message)
    return text.decode(errors="replace")
