/* space.h -- the region's addresses and bytes.
 *
 * A region is mapped into one reservation of addresses, so that base + offset always holds and
 * growth moves nothing. Space is allocated, and on memory-like media faulted in, before any store
 * can reach it: a full medium is an error here, not a SIGBUS in training.
 * Sizes are multiples of the region's page_bytes. */
#ifndef LCK_SPACE_H
#define LCK_SPACE_H

#include "region.h"

#define LCK_SPACE_LIMIT (UINT64_C(1) << 45) /* of a region: a quarter of a process's addresses */

/* Reserve addresses for at least `size` bytes and room to grow, and set base. */
int lck_space_reserve(lck_region *region, uint64_t size);

/* Map existing space [0, size). A writer's is made whole: holes are allocated, pages faulted in; of
 * tmpfs only slot by slot, see lck_space_touch. */
int lck_space_map(lck_region *region, uint64_t size);

/* Inside a section, before payload is stored to [offset, +length) of a slot: map its pages. What is
 * there already on tmpfs costs an owner as much to map as a quarter of what copying into it does,
 * and again when the process ends. A restart pays for that where it writes, as it writes. One fault
 * for reading maps all pages around it, for writing too; one for writing maps a single page. */
void lck_space_touch(const lck_region *region, uint32_t slot, uint64_t offset, uint64_t length);

/* A whole snapshot has been stored there: all pages that it needs have their mappings. */
void lck_space_touched(lck_region *region, uint32_t slot);

/* Map, allocate, fault in and sync [old_size, new_size). On failure file and mapping are as before.
 * Errors: LCK_E_FULL with the bytes needed and free; LCK_E_IO; LCK_E_INVALID (NUMA node). */
int lck_space_extend(lck_region *region, uint64_t old_size, uint64_t new_size);

/* Unmap all of it and return the addresses, if there are any. */
void lck_space_release(lck_region *region);

/* Give [size, length) back: unmap it and cut the file. */
void lck_space_retract(lck_region *region, uint64_t size, uint64_t length);

#endif
