/* drain.h -- the way from DRAM to the region, behind the training's back: its tasks and its pace.
 */
#ifndef LCK_DRAIN_H
#define LCK_DRAIN_H

#include <stdint.h>

#include "lightck.h"
#include "pool.h"
#include "snapshot.h"

/* What a thread does next. */
typedef struct lck_task {
  lck_snapshot *snapshot;
  lck_batch *batch;
  uint64_t chunk;
  int drain;
} lck_task;

/* Claim the next chunk of the snapshot that waits for its drain; 0: there is none. */
int lck_drain_find(lck_snapshot *snapshot, lck_lane *lane, lck_task *out);

/* Take a drain out of the hands of an idle worker; 0: none of them has one. */
int lck_drain_seize(lck_snapshot *snapshot, lck_lane *lane, lck_task *out);

void lck_sleep_until(uint64_t end); /* monotonic ns */

/* Workers of the idle class drain when a CPU has nothing else to do, which may be never. The DRAM
 * is wanted back when the next snapshot begins; the keeper, whose priority is the training's,
 * drains whatever is late for that. Under the pool's lock. */

/* A snapshot begins, as far as the last one as those before. */
void lck_drain_begins(lck_snapshot *snapshot);

/* It is sealed. */
void lck_drain_sealed(lck_snapshot *snapshot);

/* When what is drained by now will be too little, had nothing else been drained: in equal steps
 * from the seal to the deadline. */
uint64_t lck_drain_due(const lck_snapshot *snapshot);

/* The next chunk to drain of a snapshot that is late, which is a task for the keeper; or 0, and
 * when to look again. `behind`: it was so just now, and ends only when there is some time in hand.
 */
int lck_drain_late(lck_pool *pool, lck_lane *lane, int behind, lck_task *out, uint64_t *again);

#endif
