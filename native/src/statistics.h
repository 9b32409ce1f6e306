/* statistics.h -- the statistics page that waits for the commit thread, where a store may block. */
#ifndef LCK_STATISTICS_H
#define LCK_STATISTICS_H

#include "format.h"
#include "lightck.h"

/* The statistics page to store next. Under the pool's lock. */
typedef struct lck_pending_page {
  lck_region *region; /* NULL: nothing waits */
  statistics_disk page;
} lck_pending_page;

/* Store the pending page, without the lock meanwhile; 1 if there was one. Under the pool's lock. */
int lck_statistics_store(lck_pool *pool);

#endif
