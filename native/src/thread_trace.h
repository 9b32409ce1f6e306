/* thread_trace.h -- when each thread of a pool did what: bounded rings, written without a lock.
 *
 * A pool made without spans has no rings, and every call here ends at one branch. (Not to be
 * confused with trace.h, which records stores for the crash tests.)
 */
#ifndef LCK_THREAD_TRACE_H
#define LCK_THREAD_TRACE_H

#include <stdatomic.h>
#include <stdint.h>

#include "lightck.h"
#include "pool_thread.h"

#define LCK_SPAN_WORDS (sizeof(lck_span) / sizeof(uint64_t))

/* `stamp` is the span's number plus one while `words` hold it, and 0 while they change. */
typedef struct lck_cell {
  _Atomic uint64_t stamp;
  _Atomic uint64_t words[LCK_SPAN_WORDS];
} lck_cell;

/* Give every thread of the pool a ring of `spans` (rounded up to a power of two; 0: none). */
int lck_thread_trace_make(lck_pool *pool, uint32_t spans);
void lck_thread_trace_free(lck_pool *pool);

/* Add a span to a thread's ring; its `thread` is the number of `thread`. Any number of threads may
 * share one ring as long as none of them sleeps in here while the others go once around the ring.
 */
void lck_thread_trace_add(lck_pool_thread *thread, lck_span *span);

/* Between enter and leave, each `stage` on this thread ends a stage that began with the last call.
 * Elsewhere `stage` does nothing: whoever commits need not know whether anybody is looking. */
void lck_thread_trace_enter(lck_pool_thread *thread, uint32_t slot);
void lck_thread_trace_stage(uint32_t kind, uint64_t bytes);
void lck_thread_trace_leave(void);

#endif
