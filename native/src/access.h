/* access.h -- every load from a region's mapping, which may be gone: its file cut by somebody, its
 * memory poisoned, its disk unreadable. Such an access is an error of the region, never the end of
 * the process; stores go through persist.h, which stands on the same section. */
#ifndef LCK_ACCESS_H
#define LCK_ACCESS_H

#include <stdint.h>

#include "bus.h"
#include "lightck.h"

/* Run body(argument), which touches the region's mapping, as one section (see lck_bus_run for what
 * it may not do). Errors: LCK_E_IO, with the offset, the region's size, the file's length now and
 * what to do; a region that is open for writing is then latched. */
int lck_access_run(const lck_region *region, void (*body)(void *), void *argument);

/* Run body(argument) as one section over a region's mapping, of which only the addresses are given:
 * the region may be closed meanwhile. 0, or 1 with *fault, which nobody was told of yet. */
int lck_access_try(unsigned char *base, uint64_t reserved_length, void (*body)(void *),
                   void *argument, lck_bus_fault *fault);

/* Set the error text of a fault and latch a region that is open for writing; returns LCK_E_IO. */
int lck_access_failed(const lck_region *region, const lck_bus_fault *fault);

/* Copy [offset, +length) of the region out. */
int lck_access_load(const lck_region *region, uint64_t offset, void *to, uint64_t length);

/* Load one aligned 8-byte word, with acquire order. */
int lck_access_word(const lck_region *region, uint64_t offset, uint64_t *word);

/* Compute the CRC32C of [offset, +length) of the region. */
int lck_access_sum(const lck_region *region, uint64_t offset, uint64_t length, uint32_t *crc);

/* Check that the file still has all bytes of the region: somebody who cuts it between a store and
 * its sync makes no fault. Errors: as lck_access_run. */
int lck_access_whole(const lck_region *region);

#endif
