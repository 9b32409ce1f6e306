/* backing.h -- a region on a mapping that somebody else made. */
#ifndef LCK_BACKING_H
#define LCK_BACKING_H

#include "region.h"

/* Take the mapping as the region's space, once the medium is known.
 * Errors: LCK_E_INVALID (alignment, length, NUMA node); LCK_E_IO. */
int lck_backing_adopt(lck_region *region, const lck_backing *backing);

#endif
