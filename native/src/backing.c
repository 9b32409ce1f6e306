/* backing.c -- checking a mapping that somebody else made, and taking it over. */
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
  if (region->numa_node >= 0)
    return lck_fail(LCK_E_INVALID, "NUMA node %d: whoever maps the memory binds it",
                    region->numa_node);
  return 0;
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
  return lck_bus_watch(region->base, length);
}
