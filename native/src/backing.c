#include "backing.h"

#include <inttypes.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bus.h"
#include "error.h"
#include "format.h"
#include "medium.h"
#include "space.h"

/* Lengths and addresses that the primitives and madvise rely on. */
static int check(const lck_region *region, const lck_backing *backing) {
  uintptr_t unit = (uintptr_t)region->page_bytes;
  if (backing->base == NULL || (uintptr_t)backing->base % unit != 0)
    return lck_fail(LCK_E_INVALID, "the mapping starts at %p, expected a multiple of %" PRIuPTR,
                    backing->base, unit);
  if (backing->length < LCK_JOURNAL_OFFSET || backing->length > LCK_SPACE_LIMIT)
    return lck_fail(LCK_E_INVALID, "a mapping of %" PRIu64 " bytes, expected %" PRIu64 "..%" PRIu64,
                    backing->length, LCK_JOURNAL_OFFSET, LCK_SPACE_LIMIT);
  if (backing->granularity > LCK_GRAN_PAGE)
    return lck_fail(LCK_E_INVALID, "granularity %u of the mapping, expected 0..%u",
                    backing->granularity, (unsigned)LCK_GRAN_PAGE);
  if (region->numa_node >= 0)
    return lck_fail(LCK_E_INVALID, "NUMA node %d: whoever maps the memory binds it",
                    region->numa_node);
  return 0;
}

/* `region->granularity` is what the medium needs, found out by trying. A promise that less will do
 * is how PMEM2_FORCE_GRANULARITY lies: stores then stop where the page cache does. */
static void hear_promise(lck_region *region, const lck_backing *backing) {
  uint32_t promise = backing->granularity;
  int in_lines = promise == LCK_GRAN_BYTE || promise == LCK_GRAN_LINE;
  int on_dax = region->medium == LCK_FSDAX || region->medium == LCK_DEVDAX;
  if (in_lines && region->medium == LCK_FILE) {
    region->granularity = LCK_GRAN_NONE;
    region->flags |= LCK_PROCESS_DURABLE;
  }
  if (on_dax && promise > region->granularity)
    region->granularity = promise;
  /* With less than lines where lines are needed, its flush may do nothing. */
  if (promise == LCK_GRAN_LINE || (promise == LCK_GRAN_BYTE && !on_dax))
    region->flush = backing->flush;
  if (in_lines)
    region->drain = backing->drain;
}

int lck_backing_adopt(lck_region *region, const lck_backing *backing) {
  /* A tmpfs of huge pages is mapped in small ones just as well. */
  if (region->medium == LCK_TMPFS)
    region->page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
  int rc = check(region, backing);
  if (rc != 0)
    return rc;
  uint64_t length = backing->length - backing->length % region->page_bytes;
  if (madvise(backing->base, length, MADV_DONTFORK) != 0)
    return lck_fail_errno(LCK_E_IO, "keep %" PRIu64 " bytes from forked children", length);
  region->base = backing->base;
  region->reserved_length = length;
  region->backed = 1;
  hear_promise(region, backing);
  return lck_bus_watch(region->base, length);
}
