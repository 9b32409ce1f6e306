/* superblock.h -- the two copies of a region's identity: what may be trusted, and how they change.
 */
#ifndef LCK_SUPERBLOCK_H
#define LCK_SUPERBLOCK_H

#include "region.h"

/* Choose the newer whole copy of the two at the medium's start, which may hold anything.
 * Bounds within the region are proven on return, the file's length is not.
 * Errors: LCK_E_FORMAT (not a region, other version); LCK_E_CORRUPT; LCK_E_IO. */
int lck_superblock_read(const lck_region *region, superblock_disk *out);

/* Make `next` the region's superblock, with the next generation, and keep it in memory. The older
 * copy is rewritten first and durable before the other is touched: at any instant one is whole.
 * Afterwards both say the same, so that damage to either is harmless. */
int lck_superblock_write(lck_region *region, const superblock_disk *next);

/* *twin: the mapped copies are both whole and the same. Errors: LCK_E_IO. */
int lck_superblock_twin(const lck_region *region, int *twin);

/* The superblock as last written. Any thread. */
superblock_disk lck_superblock_copy(const lck_region *region);

#endif
