/* space.c -- reserving addresses, mapping, allocating and faulting in a region's space. */
#include "space.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allocate.h"
#include "bus.h"
#include "calls.h"
#include "error.h"
#include "guard.h"
#include "medium.h"
#include "memory.h"
#include "mutant.h"
#include "persist.h"
#include "pool.h"
#include "trace.h"

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#define MPOL_BIND_MODE 2
#define NODES 1024

#define RESERVATION (UINT64_C(1) << 40) /* addresses cost nothing; a region may grow up to this */
#define UNKNOWN UINT64_MAX

#define SLICE (UINT64_C(32) << 20) /* what one thread faults in at a time */
#define FAULTERS 4                 /* threads at most */

#define AROUND (UINT64_C(64) << 10) /* what the kernel maps around a fault, by default */

/* ---- addresses ---------------------------------------------------------------------------- */

int lck_space_reserve(lck_region *region, uint64_t size) {
  if (region->backed)
    return 0;
  uint64_t granule = region->granule;
  uint64_t length = size > RESERVATION / 2 ? size * 2 : RESERVATION;
  if (size > LCK_SPACE_LIMIT)
    return lck_fail(LCK_E_NOMEM, "%" PRIu64 " bytes of addresses needed, at most %" PRIu64, size,
                    LCK_SPACE_LIMIT);
  unsigned char *start;
  for (;; length = length / 2 > size ? length / 2 / granule * granule : size) {
    start = mmap(NULL, LCK_MAPPINGS * length + granule, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED)
      break;
    if (length <= size)
      return lck_fail_errno(LCK_E_NOMEM, "reserve %" PRIu64 " bytes of addresses",
                            LCK_MAPPINGS * length + granule);
  }
  uint64_t head = (granule - (uint64_t)(uintptr_t)start % granule) % granule;
  if (head > 0)
    munmap(start, head);
  if (head < granule)
    munmap(start + head + LCK_MAPPINGS * length, granule - head);
  region->base = start + head;
  region->reserved_length = length;
  lck_guard_place(region, length);
  (void)madvise(region->base, LCK_MAPPINGS * length, MADV_DONTFORK);
  return lck_bus_watch(region->base, LCK_MAPPINGS * length);
}

void lck_space_release(lck_region *region) {
  if (region->base != NULL)
    lck_bus_forget(region->base);
  if (region->base != NULL && !region->backed)
    munmap(region->base, LCK_MAPPINGS * region->reserved_length);
}

static int map_once(const lck_region *region, unsigned char *start, int protection, uint64_t offset,
                    uint64_t length) {
  int flags = MAP_FIXED | MAP_SHARED;
  if (region->medium == LCK_FSDAX || region->medium == LCK_DEVDAX)
    flags = MAP_FIXED | MAP_SHARED_VALIDATE | MAP_SYNC;
  if (region->medium == LCK_HUGETLBFS)
    flags |= MAP_NORESERVE; /* pages are allocated one step later, on the right node */
  void *at = lck_call_mmap(start, length, protection, flags, region->fd, (off_t)offset);
  if (at == MAP_FAILED)
    return lck_fail_errno(LCK_E_IO, "map %" PRIu64 " bytes at offset %" PRIu64, length, offset);
  if (lck_call_madvise(at, length, MADV_DONTFORK) != 0)
    return lck_fail_errno(LCK_E_IO, "keep %" PRIu64 " bytes from forked children", length);
  return 0;
}

static int map_range(const lck_region *region, uint64_t offset, uint64_t length) {
  if (region->backed)
    return 0;
  if (region->flags & LCK_READ_ONLY)
    return map_once(region, region->base + offset, PROT_READ, offset, length);
  int rc = map_once(region, region->base + offset, LCK_BASE_PROTECTION, offset, length);
  if (rc == 0 && LCK_MAPPINGS > 1)
    rc = map_once(region, lck_guard_store(region, offset), PROT_READ | PROT_WRITE, offset, length);
  return rc;
}

static void unmap_range(const lck_region *region, uint64_t offset, uint64_t length) {
  unsigned char *const starts[] = {region->base + offset, lck_guard_store(region, offset)};
  for (int i = 0; i < LCK_MAPPINGS; i++) {
    void *at = mmap(starts[i], length, PROT_NONE,
                    MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED)
      (void)madvise(at, length, MADV_DONTFORK);
  }
}

/* The policy belongs to the file's pages, so it must be set before they are allocated. */
static int bind_range(lck_region *region, uint64_t offset, uint64_t length) {
  unsigned long nodes[NODES / (8 * sizeof(long))] = {0};
  int32_t node = region->numa_node;
  if (node < 0)
    return 0;
  if (region->medium != LCK_TMPFS && region->medium != LCK_HUGETLBFS)
    return lck_fail(LCK_E_INVALID, "NUMA node %d: only tmpfs and hugetlbfs can be bound", node);
  if (node >= NODES)
    return lck_fail(LCK_E_INVALID, "NUMA node %d: at most %d", node, NODES - 1);
  nodes[(unsigned)node / (8 * sizeof(long))] = 1ul << ((unsigned)node % (8 * sizeof(long)));
  if (syscall(SYS_mbind, region->base + offset, length, MPOL_BIND_MODE, nodes, NODES + 1, 0) != 0)
    return lck_fail_errno(LCK_E_INVALID, "bind %" PRIu64 " bytes to NUMA node %d", length, node);
  return 0;
}

/* ---- space -------------------------------------------------------------------------------- */

static uint64_t free_huge_pages(uint64_t page_bytes) {
  const char *const names[] = {"free_hugepages", "nr_overcommit_hugepages", "resv_hugepages",
                               "surplus_hugepages"};
  uint64_t counts[4] = {0};
  for (int i = 0; i < 4; i++) {
    char path[128];
    snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/%s",
             page_bytes / 1024, names[i]);
    if (lck_medium_number(path, &counts[i]) != 0 && i == 0)
      return UNKNOWN;
  }
  uint64_t have = counts[0] + counts[1];
  uint64_t taken = counts[2] + counts[3];
  return have > taken ? (have - taken) * page_bytes : 0;
}

static uint64_t free_bytes(const lck_region *region) {
  struct statvfs fs;
  uint64_t bytes = UNKNOWN;
  /* A mount without a limit counts no blocks at all. */
  if (fstatvfs(region->fd, &fs) == 0 && fs.f_blocks > 0)
    bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
  uint64_t memory = UNKNOWN;
  if (region->medium == LCK_HUGETLBFS)
    memory = free_huge_pages(region->page_bytes);
  else if (region->medium == LCK_TMPFS)
    memory = lck_memory_available(1); /* a tmpfs may promise more than there is */
  return bytes < memory ? bytes : memory;
}

static int refuse(const lck_region *region, uint64_t need, int error) {
  if (error != ENOSPC && error != EDQUOT && error != EFBIG && error != ENOMEM) {
    errno = error;
    return lck_fail_errno(LCK_E_IO, "allocate %" PRIu64 " bytes", need);
  }
  uint64_t have = free_bytes(region);
  errno = error;
  if (have == UNKNOWN)
    return lck_fail_errno(LCK_E_FULL, "%" PRIu64 " bytes needed, free bytes unknown", need);
  return lck_fail_errno(LCK_E_FULL, "%" PRIu64 " bytes needed, %" PRIu64 " free", need, have);
}

typedef struct faulting {
  lck_region *region;
  uint64_t offset, length, slice;
  _Atomic uint64_t next; /* first byte that no thread has taken */
  lck_first_error failure;
} faulting;

static int populate_range(unsigned char *start, uint64_t length, int advice) {
  int rc;
  do
    rc = lck_call_madvise(start, length, advice);
  while (rc != 0 && errno == EINTR);
  return rc;
}

static int fault_slice(lck_region *region, uint64_t offset, uint64_t length) {
  int rc = populate_range(lck_guard_store(region, offset), length, MADV_POPULATE_WRITE);
  if (rc == 0 && LCK_MAPPINGS > 1)
    rc = populate_range(region->base + offset, length, MADV_POPULATE_READ);
  if (rc == 0)
    return 0;
  /* An old kernel; or an access that would raise SIGBUS, which then tells where. */
  if (errno == EINVAL || errno == EFAULT || errno == EHWPOISON)
    return lck_persist_touch(region, offset, length);
  return lck_fail_errno(LCK_E_IO, "fault in %" PRIu64 " bytes at offset %" PRIu64, length, offset);
}

static void *fault_in(void *argument) {
  faulting *job = argument;
  while (!lck_error_recorded(&job->failure)) {
    uint64_t at = atomic_fetch_add(&job->next, job->slice);
    if (at >= job->length)
      break;
    uint64_t left = job->length - at;
    lck_error_record(&job->failure, fault_slice(job->region, job->offset + at,
                                                left < job->slice ? left : job->slice));
  }
  return NULL;
}

/* Ordinary files are left to the page cache: faulting them in for writing would dirty every page.
 * Elsewhere most of the time goes into zeroing pages, which several threads share. */
static int populate(lck_region *region, uint64_t offset, uint64_t length) {
  if (region->medium == LCK_FILE)
    return 0;
  faulting job = {.region = region,
                  .offset = offset,
                  .length = length,
                  .slice = region->page_bytes > SLICE ? region->page_bytes : SLICE};
  uint64_t slices = (length + job.slice - 1) / job.slice;
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  uint64_t threads = cores < 1 ? 1 : cores < FAULTERS ? (uint64_t)cores : FAULTERS;
  lck_threads_run(fault_in, &job, slices < threads ? slices : threads);
  return lck_error_report(&job.failure);
}

static int check_limits(const lck_region *region, uint64_t new_size, uint64_t need) {
  struct rlimit limit;
  if (lck_call_getrlimit(&limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      new_size > limit.rlim_cur)
    return lck_fail(LCK_E_FULL,
                    "%" PRIu64 " bytes needed, a file of %" PRIu64
                    " bytes, but RLIMIT_FSIZE is %" PRIu64,
                    need, new_size, (uint64_t)limit.rlim_cur);
  uint64_t have = free_bytes(region);
  if (have != UNKNOWN && need > have)
    return lck_fail(LCK_E_FULL, "%" PRIu64 " bytes needed, %" PRIu64 " free", need, have);
  return 0;
}

/* File size and extents are metadata that neither a flush nor MAP_SYNC of other pages covers. */
static int settle(lck_region *region) {
  if (region->medium != LCK_FSDAX)
    return lck_persist_sync(region);
  if (lck_call_fsync(region->fd) == 0)
    return 0;
  return lck_fail_errno(LCK_E_IO, "fsync of the region's file");
}

/* A copy of a region's file may have holes: a store into one could find the medium full. */
static int fill_holes(lck_region *region, uint64_t size) {
  struct stat file;
  if (lck_call_fstat(region->fd, &file) != 0)
    return lck_fail_errno(LCK_E_IO, "stat the region's file");
  uint64_t present = (uint64_t)file.st_blocks * 512;
  /* The file may be longer than the region: a growth that was cut short. */
  if (lck_medium_fixed(region) || !S_ISREG(file.st_mode) || present >= (uint64_t)file.st_size)
    return 0;
  uint64_t least = present < size ? size - present : 0;
  int rc = 0;
  if (region->medium == LCK_TMPFS || region->medium == LCK_HUGETLBFS)
    rc = check_limits(region, 0, least);
  int error = rc == 0 ? lck_allocate(region, 0, size, 0) : 0;
  return error != 0 ? refuse(region, least, error) : rc;
}

int lck_space_map(lck_region *region, uint64_t size) {
  int rc = map_range(region, 0, size);
  if (rc != 0 || region->flags & LCK_READ_ONLY)
    return rc;
  rc = bind_range(region, 0, size);
  if (rc == 0)
    rc = fill_holes(region, size);
  if (rc != 0 || region->medium != LCK_TMPFS || region->backed)
    return rc != 0 ? rc : populate(region, 0, size);
  atomic_store(&region->unmapped, UINT32_MAX); /* see lck_space_touch */
  return 0;
}

void lck_space_touch(const lck_region *region, uint32_t slot, uint64_t offset, uint64_t length) {
  if (!(atomic_load_explicit(&region->unmapped, memory_order_relaxed) >> slot & 1))
    return;
  const volatile unsigned char *start = lck_guard_store(region, 0);
  for (uint64_t at = offset; at < offset + length; at += AROUND - at % AROUND)
    (void)start[at];
}

void lck_space_touched(lck_region *region, uint32_t slot) {
  atomic_fetch_and(&region->unmapped, ~(UINT32_C(1) << slot));
}

static int prepare_file(const lck_region *region, uint64_t old_size, uint64_t new_size) {
  uint64_t need = new_size - old_size;
  uint64_t length;
  int rc = lck_medium_length(region, &length);
  if (rc != 0)
    return rc;
  if (lck_medium_fixed(region) && new_size > length)
    return lck_fail(LCK_E_FULL, "%" PRIu64 " bytes needed, %" PRIu64 " free %s", need,
                    length > old_size ? length - old_size : 0,
                    region->backed ? "in the mapping, which cannot grow" : "on the device");
  if (lck_medium_fixed(region))
    return 0;
  if (length < old_size)
    return lck_fail(LCK_E_IO,
                    "the file of a region of %" PRIu64 " bytes has %" PRIu64
                    " bytes now: it was cut while it was open",
                    old_size, length);
  /* What lies beyond was left by a growth that a crash cut short. */
  if (length > old_size && lck_call_ftruncate(region->fd, (off_t)old_size) != 0)
    return lck_fail_errno(LCK_E_IO, "cut the file to %" PRIu64 " bytes", old_size);
  return check_limits(region, new_size, need);
}

int lck_space_extend(lck_region *region, uint64_t old_size, uint64_t new_size) {
  uint64_t need = new_size - old_size;
  if (!region->backed && new_size > region->reserved_length)
    return lck_fail(LCK_E_FULL, "%" PRIu64 " bytes needed, %" PRIu64 " bytes of addresses free",
                    need, region->reserved_length - old_size);
  int rc = prepare_file(region, old_size, new_size);
  if (rc != 0)
    return rc;
  rc = map_range(region, old_size, need);
  if (rc == 0)
    rc = bind_range(region, old_size, need);
  int error = rc == 0 && !lck_medium_fixed(region) ? lck_allocate(region, old_size, need, 1) : 0;
  if (rc == 0 && error == 0)
    rc = populate(region, old_size, need);
  lck_trace(LCK_TRACE_EXTEND, region, 0, new_size);
  if (rc == 0 && error == 0 && !LCK_MUTANT(MUTANT_GROWTH_NOT_SETTLED)) {
    rc = settle(region);
    if (rc == 0)
      lck_trace(LCK_TRACE_SETTLE, region, 0, new_size);
  }
  if (rc != 0 || error != 0)
    lck_space_retract(region, old_size, new_size);
  /* Only now, so that the free bytes named are those that anyone would find. */
  return error != 0 ? refuse(region, need, error) : rc;
}

void lck_space_retract(lck_region *region, uint64_t size, uint64_t length) {
  if (!region->backed)
    unmap_range(region, size, length - size);
  if (!lck_medium_fixed(region))
    (void)!lck_call_ftruncate(region->fd, (off_t)size);
}
