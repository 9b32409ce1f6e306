/* guard.h -- where the primitives of persist.c store, and nobody else.
 *
 * In builds with -DLCK_GUARD (tests) a region that is open for writing is mapped twice: `base`,
 * which all code has, cannot be written; a second mapping of the same pages lies `writable` bytes
 * further on, and only the primitives go there. A store that passes them by faults at its own
 * offset. Everywhere else there is one mapping, and the code is the same as without these calls.
 * A mapping that somebody else made (backing.h) has no second one: its distance is 0. */
#ifndef LCK_GUARD_H
#define LCK_GUARD_H

#include <stdint.h>
#include <sys/mman.h>

#include "region.h"

#ifdef LCK_GUARD

enum { LCK_MAPPINGS = 2, LCK_BASE_PROTECTION = PROT_READ };

static inline void lck_guard_place(lck_region *region, uint64_t distance) {
  region->writable = distance;
}

static inline unsigned char *lck_guard_store(const lck_region *region, uint64_t offset) {
  return region->base + region->writable + offset;
}

#else

enum { LCK_MAPPINGS = 1, LCK_BASE_PROTECTION = PROT_READ | PROT_WRITE };

static inline void lck_guard_place(lck_region *region, uint64_t distance) {
  (void)region, (void)distance;
}

static inline unsigned char *lck_guard_store(const lck_region *region, uint64_t offset) {
  return region->base + offset;
}

#endif

#endif
