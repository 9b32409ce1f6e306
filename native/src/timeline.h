/* timeline.h -- when each thread of a pool did what: bounded rings, written without a lock.
 *
 * A pool made without a timeline has no rings, and every call here ends at one branch. (Not to be
 * confused with trace.h, which records stores for the crash tests, nor with a region's timelines.)
 */
#ifndef LCK_TIMELINE_H
#define LCK_TIMELINE_H

#include <stdatomic.h>
#include <stdint.h>

#include "lane.h"
#include "lightck.h"

#define LCK_MOMENT_WORDS (sizeof(lck_moment) / sizeof(uint64_t))

/* `stamp` is the moment's number plus one while `words` hold it, and 0 while they change. */
typedef struct lck_cell {
  _Atomic uint64_t stamp;
  _Atomic uint64_t words[LCK_MOMENT_WORDS];
} lck_cell;

/* Give every thread of the pool a ring of `moments` (rounded up to a power of two; 0: none). */
int lck_timeline_make(lck_pool *pool, uint32_t moments);
void lck_timeline_free(lck_pool *pool);

/* Add a moment; its `thread` is the lane's. Any number of threads may share a lane as long as none
 * of them sleeps in here while the others go once around the ring. */
void lck_timeline_note(lck_lane *lane, lck_moment *moment);

/* Between enter and leave, each `stage` on this thread ends a stage that began with the last call.
 * Elsewhere `stage` does nothing: whoever commits need not know whether anybody is looking. */
void lck_timeline_enter(lck_lane *lane, uint32_t slot);
void lck_timeline_stage(uint32_t did, uint64_t bytes);
void lck_timeline_leave(void);

#endif
