/* statistics.h -- what the keeper does for lck_pool_publish on media where a store may block. */
#ifndef LCK_STATISTICS_H
#define LCK_STATISTICS_H

#include "format.h"
#include "lightck.h"

/* The page to store next. Under the pool's lock. */
typedef struct lck_notice {
  lck_region *region; /* NULL: nothing waits */
  statistics_disk page;
} lck_notice;

/* Store what waits, without the lock meanwhile; 1 if there was something. Under the lock. */
int lck_statistics_store(lck_pool *pool);

#endif
