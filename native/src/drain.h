/* drain.h -- copying staged chunks from DRAM to the region, beside the training. */
#ifndef LCK_DRAIN_H
#define LCK_DRAIN_H

#include <stdint.h>

#include "lightck.h"
#include "pool.h"
#include "snapshot.h"

/* The chunk that a thread copies or drains next. */
typedef struct lck_task {
  lck_snapshot *snapshot;
  lck_batch *batch;
  uint64_t chunk;
  int drain;
} lck_task;

/* Claim the next chunk of the snapshot that waits for its drain; 0: there is none. */
int lck_drain_find(lck_snapshot *snapshot, lck_pool_thread *thread, lck_task *out);

/* Claim a drain that an idle worker has claimed; 0: none of them has one. */
int lck_drain_seize(lck_snapshot *snapshot, lck_pool_thread *thread, lck_task *out);

/* Sleep until `end` (monotonic ns). */
void lck_sleep_until(uint64_t end);

/* Workers of the idle class drain when a CPU has nothing else to do, which may be never. The DRAM
 * is wanted back when the next snapshot begins; the commit thread, whose priority is the
 * training's, drains whatever is late for that. Under the pool's lock. */

/* Set the deadline of a snapshot that begins: the next one comes as soon as this one did. */
void lck_drain_begins(lck_snapshot *snapshot);

/* Note when the snapshot was sealed, and how much was not drained then. */
void lck_drain_sealed(lck_snapshot *snapshot);

/* Return when the snapshot's drains will be late unless more is drained by then: they are due in
 * equal steps from the seal to the deadline. */
uint64_t lck_drain_due(const lck_snapshot *snapshot);

/* The next chunk to drain of a snapshot that is late, which is a task for the commit thread; or
 * 0, and when to look again. `late`: it was so just now, and ends only when some time is left. */
int lck_drain_late(lck_pool *pool, lck_pool_thread *thread, int late, lck_task *out,
                   uint64_t *again);

#endif
