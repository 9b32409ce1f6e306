"""Load the native library once, through cffi in ABI mode, with its declarations.

It needs no compiler at run time, and the GIL is released during every call. `CDEF` repeats the
header; a test compares the two with the library's exported symbols.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

from cffi import FFI

from lightck.errors import LightckError, from_native

ABI = 13
_UNKNOWN = 2**64 - 1

CDEF = """
typedef struct lck_region lck_region;
typedef struct lck_pool lck_pool;
typedef struct lck_snapshot lck_snapshot;
typedef struct { uint8_t run_id[16]; uint32_t rank, world, slot_count, flags;
  uint64_t slot_bytes, journal_bytes; int32_t numa_node; uint32_t reserved; } lck_region_spec;
typedef struct { void *base; uint64_t length; } lck_backing;
typedef struct { uint64_t offset, length, slot_bytes; } lck_segment;
typedef struct { uint64_t timeline, sequence; } lck_branch;
typedef struct { uint8_t uuid[16], run_id[16]; uint32_t format_version, rank, world, slot_count;
  uint32_t medium, granularity, page_bytes, latched; uint64_t size, generation, created_ns;
  uint64_t journal_offset, journal_length, timeline, suspect; const void *base; void *device;
  uint32_t segment_count, lineage_count; lck_segment segments[16];
  lck_branch lineage[16]; } lck_region_info;
typedef struct { uint64_t sequence, step, timeline, parent;
  uint64_t layout_offset, layout_length, manifest_offset, manifest_length;
  uint64_t payload_bytes, wall_time_ns; uint8_t run_id[16], share_digest[16];
  uint32_t layout_crc, manifest_crc, flags, slot, rank, world; } lck_record;
typedef struct { uint64_t step, timeline, length, sequence, wall_time_ns;
  uint32_t kind, flags; } lck_journal_entry;
typedef struct { uint64_t offset, length; void *destination; uint32_t crc, reserved; } lck_read;
typedef struct { uint32_t threads, chunk_bytes, idle, spans; } lck_pool_spec;
typedef struct { uint64_t bytes_copied, bytes_skipped, bytes_helped, copy_ns,
  bytes_drained, drain_ns, commits, commit_ns, staging_bytes; } lck_stats;
typedef struct { uint64_t begin_ns, end_ns, bytes, start; uint32_t kind, thread, slot, batch, copy,
  copies; } lck_span;
typedef struct { uint64_t offset; const void *source; uint64_t length; uint32_t layer, flags, crc,
  reserved; } lck_copy;
typedef struct { char cause[16]; uint64_t ns; } lck_stall;
typedef struct { uint8_t boot_id[16]; uint64_t process_start; uint32_t process, ended;
  uint64_t began_ns, updated_ns, began_step, step, captured_step, committed_step, step_ns;
  uint64_t captured, committed, slipped, torn, failed;
  uint64_t bytes_copied, bytes_skipped, bytes_helped, copy_ns, commit_ns, staging_bytes;
  uint64_t payload_bytes, errors; lck_stall stalls[8]; char last_error[560];
  uint64_t bytes_drained, drain_ns; } lck_statistics;
uint32_t lck_abi_version(void);
const char *lck_last_error(void);
int lck_kernel(const char *select, const char **name);
uint32_t lck_crc32c(uint32_t crc, const void *bytes, uint64_t length);
uint32_t lck_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);
uint64_t lck_memory_available(int swap);
int lck_region_create(int fd, int lock_fd, const lck_region_spec *spec, lck_region **out);
int lck_region_open(int fd, int lock_fd, uint32_t flags, int32_t numa_node, lck_region **out);
int lck_region_create_on(const lck_backing *backing, int fd, int lock_fd,
  const lck_region_spec *spec, lck_region **out);
int lck_region_open_on(const lck_backing *backing, int fd, int lock_fd, uint32_t flags,
  lck_region **out);
int lck_region_measure(const lck_region_spec *spec, uint64_t *bytes);
int lck_region_grow(lck_region *region, uint64_t slot_bytes);
int lck_region_branch(lck_region *region, uint64_t timeline, const lck_branch *lineage,
  uint32_t count);
int lck_region_suspect(lck_region *region, uint64_t sequence);
int lck_region_describe(const lck_region *region, lck_region_info *out);
int lck_region_close(lck_region *region);
int lck_slot_read(const lck_region *region, uint32_t slot, lck_record *out);
int lck_slot_lease(lck_region *region, uint32_t slot, int hold);
int lck_slot_fetch(const lck_region *region, const lck_read *reads, uint64_t count,
  uint32_t threads, uint64_t *bad);
int lck_journal_write(lck_region *region, const lck_journal_entry *entry, const void *blob);
int lck_journal_read(const lck_region *region, uint32_t kind, lck_journal_entry *out, void *blob,
  uint64_t room);
int lck_pool_create(const lck_pool_spec *spec, lck_pool **out);
int lck_pool_wake_time(lck_pool *pool, uint64_t timeout_ns, uint64_t *ns);
int lck_pool_pace(lck_pool *pool, uint32_t per_mille);
int lck_pool_limit(lck_pool *pool, uint64_t bytes_per_s);
int lck_pool_stage(lck_pool *pool, uint64_t bytes);
int lck_pool_stats(const lck_pool *pool, lck_stats *out);
int lck_pool_trace(lck_pool *pool, lck_span *spans, uint64_t room, uint64_t *count,
  uint64_t *lost);
int lck_pool_publish(lck_pool *pool, lck_region *region, const lck_statistics *values);
int lck_region_statistics(const lck_region *region, lck_statistics *out, int *owned);
int lck_pool_destroy(lck_pool *pool);
int lck_snapshot_begin(lck_pool *pool, lck_region *region, uint32_t slot, lck_snapshot **out);
int lck_snapshot_add(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
  uint32_t *batch);
int lck_snapshot_release(lck_snapshot *snapshot, uint32_t batch, uint64_t bytes);
int lck_snapshot_cuts(const lck_snapshot *snapshot, uint32_t batch, uint64_t *starts, uint64_t room,
  uint64_t *count);
int lck_snapshot_feed(lck_snapshot *snapshot, uint32_t batch, uint64_t end, const void *from);
int lck_snapshot_taken(lck_snapshot *snapshot, uint32_t batch, uint64_t end, int64_t timeout_ns,
  int help);
int lck_snapshot_capture(lck_snapshot *snapshot, uint32_t batch, int64_t timeout_ns, int help);
int lck_snapshot_audit(lck_snapshot *snapshot, uint32_t batch, uint64_t seed, int everything,
  uint64_t *bad);
int lck_snapshot_digests(const lck_snapshot *snapshot, uint32_t batch, uint32_t *crcs);
int lck_snapshot_seal(lck_snapshot *snapshot, const lck_record *record, const void *layout,
  const void *manifest);
int lck_snapshot_wait(lck_snapshot *snapshot, int64_t timeout_ns, int *state);
int lck_snapshot_free(lck_snapshot *snapshot);
"""

ffi: Any = FFI()
ffi.cdef(CDEF)


def library_path() -> str:
    """Return the path of the native library: the one built with the package.

    `$LIGHTCK_NATIVE` names another build (sanitizers, fault injection).
    """
    override = os.environ.get("LIGHTCK_NATIVE")
    if override:
        return override
    spec = importlib.util.find_spec("lightck._native")
    if spec is None or spec.origin is None:
        raise LightckError("lightck._native is not built: reinstall lightck on a machine with gcc")
    return spec.origin


@cache
def library() -> Any:
    """Return the loaded library after checking its ABI version.

    Raises:
        LightckError: the library is missing, or was built for another version of this module.
    """
    path = library_path()
    lib = ffi.dlopen(path)
    found = lib.lck_abi_version()
    if found != ABI:
        raise LightckError(f"{path}: native ABI {found}, expected {ABI}; reinstall lightck")
    return lib


def free_dram_bytes() -> int:
    """Return the bytes of DRAM that can be taken without evicting or swapping; 0 if unknown."""
    found = int(library().lck_memory_available(0))
    return 0 if found == _UNKNOWN else found


def last_error() -> str:
    """Return the text of the calling thread's last native error."""
    text: bytes = ffi.string(library().lck_last_error())
    return text.decode(errors="replace")


def check(code: int, context: str) -> None:
    """Raise the exception that belongs to a native code below 0.

    `context` names region, slot and step, as far as the caller knows them.
    """
    if code < 0:
        raise from_native(code, last_error(), context=context)
