/* allocate.h -- bytes of a region's file, before any store can need them. */
#ifndef LCK_ALLOCATE_H
#define LCK_ALLOCATE_H

#include "region.h"

/* Allocate [offset, +length); 0 or an errno. `fresh`: nothing is there yet, so zeros may be written
 * where the file system cannot allocate. Beyond RLIMIT_FSIZE: EFBIG, and no SIGXFSZ. */
int lck_allocate(const lck_region *region, uint64_t offset, uint64_t length, int fresh);

#endif
