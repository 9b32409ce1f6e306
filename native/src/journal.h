/* journal.h -- the boundary journal's space in a region that is being made. */
#ifndef LCK_JOURNAL_H
#define LCK_JOURNAL_H

#include "region.h"

/* Leave nothing on a device that could be taken for an entry. The caller syncs on
 * page media. Errors: LCK_E_IO. */
int lck_journal_blank(lck_region *region, const superblock_disk *super);

#endif
