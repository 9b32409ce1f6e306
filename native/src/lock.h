/* lock.h -- who may write: the owner lock, the slots' leases, and what a forked child must drop.
 *
 * All are open-file-description locks on single bytes far beyond any data of the lock descriptor,
 * so that the kernel drops them with the last descriptor of a dead process. Byte 0 of that range is
 * the owner's, byte 1 + i belongs to slot i: readers share it, the writer of the slot excludes
 * them. */
#ifndef LCK_LOCK_H
#define LCK_LOCK_H

#include "region.h"

/* Duplicate the descriptors into the region and enter it in the list of open regions, in one step
 * for any fork: a child never keeps a duplicate that its handler does not know. */
int lck_lock_adopt(lck_region *region, int fd, int lock_fd);

/* Take the owner lock. Errors: LCK_E_BUSY, LCK_E_IO. */
int lck_lock_own(lck_region *region);

/* Whether anybody owns the region: this handle, another one or another process. Errors: LCK_E_IO.
 */
int lck_lock_owned(const lck_region *region, int *owned);

/* Drop every lock, close the duplicates, leave the list. */
void lck_lock_release(lck_region *region);

#endif
