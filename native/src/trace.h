/* trace.h -- what was done to a region's bytes, in order, for the crash-image enumerator.
 *
 * Only a build with -DLCK_TRACE records; in every other one these are empty inlines, and the code
 * is the same as without the calls. An event is recorded after what it tells of, by the thread that
 * did it, so that nobody relies on a store that the trace does not have yet. One trace at a time.
 */
#ifndef LCK_TRACE_H
#define LCK_TRACE_H

#include <stdint.h>

#include "lightck.h"

enum lck_trace_op {
  LCK_TRACE_STORE,       /* through the cache; no order among the 8-byte words of one event */
  LCK_TRACE_NT,          /* non-temporal, whole lines */
  LCK_TRACE_FLUSH,       /* of every line of the range */
  LCK_TRACE_FENCE,       /* drains this thread's flushes and non-temporal stores, nobody else's */
  LCK_TRACE_SYNC_BEGIN,  /* a sync covers what was stored before it began */
  LCK_TRACE_SYNC,        /* ... once it has succeeded */
  LCK_TRACE_EXTEND,      /* the file has `length` bytes */
  LCK_TRACE_SETTLE,      /* its length and extents are durable */
  LCK_TRACE_SYNC_FAILED, /* what it covered may be lost, and no later sync covers it */
  LCK_TRACE_TOUCH,       /* dirties the range's pages again without changing a byte */
  LCK_TRACE_MARK,        /* by the driver: `offset` says which, `length` its value */
};

#ifdef LCK_TRACE

typedef struct lck_event {
  uint32_t op, thread;
  uint64_t offset, length;
  uint64_t bytes; /* STORE, NT: where their bytes start in the trace's */
} lck_event;

typedef struct lck_trace_log {
  lck_event *events;
  unsigned char *bytes;
  uint64_t event_count, byte_count, event_room, byte_room;
} lck_trace_log;

/* Record into an empty log until stop; the log and its memory are the caller's. */
void lck_trace_start(lck_trace_log *log);
void lck_trace_stop(void);
void lck_trace_free(lck_trace_log *log);

/* Set the granularity that every region opened from now on takes its medium for: LCK_GRAN_*, or -1
 * for the true one. */
void lck_trace_force(int granularity);

void lck_trace(enum lck_trace_op op, const lck_region *region, uint64_t offset, uint64_t length);
void lck_trace_payload(const lck_region *region, uint64_t offset, uint64_t length, int cached);
uint32_t lck_trace_granularity(uint32_t detected);

#else

static inline void lck_trace(enum lck_trace_op op, const lck_region *region, uint64_t offset,
                             uint64_t length) {
  (void)op, (void)region, (void)offset, (void)length;
}

static inline void lck_trace_payload(const lck_region *region, uint64_t offset, uint64_t length,
                                     int cached) {
  (void)region, (void)offset, (void)length, (void)cached;
}

static inline uint32_t lck_trace_granularity(uint32_t detected) {
  return detected;
}

#endif

#endif
