"""Call the native library through its header, where Python's interface is too coarse."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from cffi import FFI

import lightck
from bench.errors import BenchError

ABI = 15  # of the declarations below, a part of native/include/lightck.h
_SLOT = 0
_PAGE = 4096  # extents start on pages, as large ones do in lightck

CDEF = """
typedef struct lck_region lck_region;
typedef struct lck_pool lck_pool;
typedef struct lck_snapshot lck_snapshot;
typedef struct { uint8_t run_id[16]; uint32_t rank, world, slot_count, flags;
  uint64_t slot_bytes, journal_bytes; int32_t numa_node; uint32_t reserved; } lck_region_spec;
typedef struct { uint64_t offset, length, slot_bytes; } lck_segment;
typedef struct { uint64_t timeline, sequence; } lck_branch;
typedef struct { uint8_t uuid[16], run_id[16]; uint32_t format_version, rank, world, slot_count;
  uint32_t medium, granularity, page_bytes, latched; uint64_t size, generation, created_ns;
  uint64_t journal_offset, journal_length, timeline, suspect; const void *base; void *device;
  uint32_t segment_count, lineage_count; lck_segment segments[16];
  lck_branch lineage[16]; } lck_region_info;
typedef struct { uint32_t threads, chunk_bytes, idle, spans; } lck_pool_spec;
typedef struct { uint64_t offset; const void *source; uint64_t length; uint32_t layer, flags, crc,
  reserved; } lck_copy;
typedef struct { uint64_t offset, length; void *destination; uint32_t crc, reserved; } lck_read;
uint32_t lck_abi_version(void);
const char *lck_last_error(void);
int lck_kernel(const char *select, const char **name);
uint32_t lck_crc32c(uint32_t crc, const void *bytes, uint64_t length);
uint64_t lck_memory_available(int swap);
int lck_region_create(int fd, int lock_fd, const lck_region_spec *spec, lck_region **out);
int lck_region_describe(const lck_region *region, lck_region_info *out);
int lck_region_close(lck_region *region);
int lck_pool_create(const lck_pool_spec *spec, lck_pool **out);
int lck_pool_destroy(lck_pool *pool);
int lck_snapshot_begin(lck_pool *pool, lck_region *region, uint32_t slot, lck_snapshot **out);
int lck_snapshot_add(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
  uint32_t *batch);
int lck_snapshot_release(lck_snapshot *snapshot, uint32_t batch, uint64_t bytes);
int lck_snapshot_capture(lck_snapshot *snapshot, uint32_t batch, int64_t timeout_ns, int help);
int lck_snapshot_digests(const lck_snapshot *snapshot, uint32_t batch, uint32_t *crcs);
int lck_snapshot_free(lck_snapshot *snapshot);
int lck_slot_fetch(const lck_region *region, const lck_read *reads, uint64_t count,
  uint32_t threads, uint64_t *bad);
"""

ffi: Any = FFI()
ffi.cdef(CDEF)


@cache
def library() -> Any:
    """Return the library that lightck itself uses: `$LIGHTCK_NATIVE`, else the one in the package.

    Raises:
        BenchError: it is missing, or has another ABI than this module was written for.
    """
    override = os.environ.get("LIGHTCK_NATIVE")
    built = sorted(Path(str(lightck.__file__)).parent.glob("_native*.so"))
    if not override and not built:
        raise BenchError("lightck has no native library here: run `make venv`")
    path = override or str(built[0])
    lib = ffi.dlopen(path)
    found = lib.lck_abi_version()
    if found != ABI:
        raise BenchError(f"{path}: native ABI {found}, bench/library.py is written for {ABI}")
    return lib


def check(code: int) -> None:
    """Raise BenchError with the library's text if a call failed."""
    if code < 0:
        text = ffi.string(library().lck_last_error()).decode(errors="replace")
        raise BenchError(f"native error {code}: {text}")


def kernel() -> str:
    """Return the name of the copy kernel in use."""
    name = ffi.new("const char **")
    check(library().lck_kernel(ffi.NULL, name))
    text: str = ffi.string(name[0]).decode()
    return text


class Writer:
    """A region with one worker, which takes whole snapshots of given memory."""

    def __init__(
        self, folder: Path, sources: list[tuple[int, int]], chunk_bytes: int = 262_144
    ) -> None:
        """Make and pre-fault the region; `sources` are addresses and lengths."""
        self._lib = library()
        sizes = [-(-length // _PAGE) * _PAGE for _, length in sources]
        self._region = self._created(folder / "region", sum(sizes))
        info = ffi.new("lck_region_info *")
        check(self._lib.lck_region_describe(self._region, info))
        offset = info.segments[0].offset  # slot 0 owns the segment's first part
        self._copies = ffi.new("lck_copy[]", len(sources))
        for i, (address, length) in enumerate(sources):
            copy = self._copies[i]
            copy.offset, copy.source, copy.length = offset, ffi.cast("void *", address), length
            copy.layer = i
            offset += sizes[i]
        self._pool = ffi.new("lck_pool **")
        wanted = ffi.new("lck_pool_spec *", {"threads": 1, "chunk_bytes": chunk_bytes})
        check(self._lib.lck_pool_create(wanted, self._pool))
        self._snapshot = ffi.new("lck_snapshot **")
        self._batch = ffi.new("uint32_t *")

    def _created(self, path: Path, slot_bytes: int) -> Any:
        wanted = {"world": 1, "slot_count": 2, "slot_bytes": slot_bytes, "numa_node": -1}
        region = ffi.new("lck_region **")
        with open(path, "w+b") as file, open(path, "r+b") as lock:
            spec = ffi.new("lck_region_spec *", wanted)
            check(self._lib.lck_region_create(file.fileno(), lock.fileno(), spec, region))
        return region[0]

    def begin(self) -> None:
        """Open a snapshot with all copies, held back; give up one that is open."""
        self.drop()
        lib = self._lib
        check(lib.lck_snapshot_begin(self._pool[0], self._region, _SLOT, self._snapshot))
        check(lib.lck_snapshot_add(self._snapshot[0], self._copies, len(self._copies), self._batch))

    def copy(self) -> None:
        """Let the worker copy everything; return when it has."""
        check(self._lib.lck_snapshot_capture(self._snapshot[0], self._batch[0], -1, 0))

    def verify(self) -> None:
        """Read everything back from the region and compare it with the sources' checksums.

        Raises:
            BenchError: an extent differs from its source.
        """
        count = len(self._copies)
        reads = ffi.new("lck_read[]", count)
        for i in range(count):
            copy = self._copies[i]
            reads[i].offset, reads[i].length = copy.offset, copy.length
            reads[i].crc = self._lib.lck_crc32c(0, copy.source, copy.length)
        check(self._lib.lck_slot_fetch(self._region, reads, count, 1, ffi.new("uint64_t *")))

    def drop(self) -> None:
        """Give the open snapshot up, if there is one."""
        check(self._lib.lck_snapshot_free(self._snapshot[0]))
        self._snapshot[0] = ffi.NULL

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        check(self._lib.lck_pool_destroy(self._pool[0]))
        check(self._lib.lck_region_close(self._region))
