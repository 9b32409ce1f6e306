/* medium.h -- what a region lies on, found out by trying, never by name.
 */
#ifndef LCK_MEDIUM_H
#define LCK_MEDIUM_H

#include "region.h"

/* Fill in medium, granularity, page_bytes and granule of a region whose descriptors are set. */
int lck_medium_detect(lck_region *region);

/* Space that is as large as it will ever be, and may hold anything: a device's or a backing's. */
static inline int lck_medium_fixed(const lck_region *region) {
  return region->backed || region->medium == LCK_DEVDAX;
}

/* Length of the file, device or backing now. */
int lck_medium_length(const lck_region *region, uint64_t *length);

/* Read up to `length` <= LCK_GRANULE bytes at the region's start without trusting them; *got
 * receives how many there are. */
int lck_medium_read_head(const lck_region *region, void *bytes, uint64_t length, uint64_t *got);

/* Read one decimal number from a sysfs file; 0, or -1 without text. */
int lck_medium_number(const char *path, uint64_t *value);

#endif
