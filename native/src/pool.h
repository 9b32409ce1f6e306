/* pool.h -- the threads behind the snapshots, and the DRAM that staged ones go through.
 *
 * `threads` workers copy chunks. One more thread, the keeper, invalidates slots and commits: those
 * may sync, and a worker that syncs would be missing where somebody waits for a capture. Besides,
 * it drains what idle workers are late with (drain.h). */
#ifndef LCK_POOL_H
#define LCK_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "lane.h"
#include "lightck.h"
#include "statistics.h"
#include "timeline.h"

#define LCK_MAX_THREADS 64u
#define LCK_FULL_PACE 1000u
#define LCK_AHEAD_NS UINT64_C(8000000) /* so far drains run ahead of the limit */
#define LCK_COPIES_AHEAD_NS UINT64_C(1000000)

/* Anonymous memory, held by one snapshot or cached for the next. */
typedef struct lck_area {
  unsigned char *base;
  uint64_t length, used;
  struct lck_area *next;
} lck_area;

struct lck_pool {
  pid_t owner; /* process that created it; any other is a forked child */
  uint32_t threads, chunk_bytes;
  int idle; /* workers take what others leave of their CPUs, see lane.h */

  /* Protects the list of snapshots, their `users`, `phase`, `doomed` and `claimed` fields and their
   * failure, the cached areas, the notice, and every sleep. Held for short scans only: never across
   * a copy, a sync or a system call that may block for longer than a worker takes to move. Taken
   * with lck_pool_lock. */
  pthread_mutex_t lock;
  pthread_cond_t work;     /* workers: something became claimable, or the pace changed */
  pthread_cond_t duty;     /* the keeper: something to invalidate or to commit */
  pthread_cond_t progress; /* callers: a batch, a snapshot or a user of one is done */
  int stop;
  lck_snapshot *first, *last; /* open snapshots, oldest first; bounded by the regions' slots */
  lck_notice notice;          /* statistics that the keeper has yet to store */
  uint64_t began, interval;   /* of the last snapshot; between it and the one before; ns, or 0 */
  lck_area *cached;           /* unbounded in number, but emptied whenever none of them fits */

  /* A sleeper counts itself and then looks for work; whoever makes work stores it and then reads
   * the count. Both in the one order of sequentially consistent operations, so one sees the other:
   * no lock is needed to find out that nobody sleeps. */
  _Atomic uint32_t sleepers; /* workers */
  _Atomic uint32_t waiters;  /* callers */
  _Atomic uint32_t urgent;   /* captures and frees that wait: what they wait for is not paced */
  _Atomic uint32_t pace;     /* per mille */

  _Atomic uint64_t limit, booked; /* bytes/s written; until when they are spoken for, ns */

  _Atomic uint64_t bytes_copied, bytes_skipped, bytes_helped, copy_ns, commits, commit_ns;
  _Atomic uint64_t bytes_drained, drain_ns;
  _Atomic uint64_t staging_bytes;

  lck_lane lanes[LCK_LANES]; /* indexed by lck_moment.thread */

  uint32_t started; /* threads to join */
  pthread_t members[LCK_MAX_THREADS + 1];
};

/* 0, or LCK_E_INVALID / LCK_E_FORKED with text. */
int lck_pool_usable(const lck_pool *pool);

/* Take pool->lock. */
void lck_pool_lock(lck_pool *pool);

/* Wake workers, if any sleeps, after something became claimable. */
void lck_pool_wake(lck_pool *pool);

/* Wake callers, if any waits, after something they may wait for. */
void lck_pool_notify(lck_pool *pool);

uint64_t lck_now_ns(void); /* monotonic */

/* Now; 0: there is no limit. */
uint64_t lck_pool_write_begins(const lck_pool *pool);

/* So far copies run ahead of the limit, in ns. */
uint64_t lck_pool_copies_ahead(const lck_pool *pool);

/* Sleep until the medium may take more, after `bytes` were written from `began` on (0: now); or do
 * not yet, if it will within `ahead` ns. */
void lck_pool_throttle(lck_pool *pool, uint64_t began, uint64_t bytes, uint64_t ahead);

/* Sleep on `condition` under the pool's lock until about `deadline` (monotonic; LCK_ALL: none). */
void lck_pool_sleep(lck_pool *pool, pthread_cond_t *condition, uint64_t deadline);

/* Body of a thread; its argument is its lane. */
void *lck_worker_main(void *lane);
void *lck_keeper_main(void *lane);

/* Take `length` bytes, 64-aligned, from the areas in *held, adding a cached or a new one when none
 * has room. NULL: no memory. The memory is not zeroed and stays until *held is given back. */
unsigned char *lck_staging_take(lck_pool *pool, lck_area **held, uint64_t length);

/* Return all areas in *held to the cache. */
void lck_staging_give(lck_pool *pool, lck_area **held);

/* Unmap the list. */
void lck_staging_drop(lck_pool *pool, lck_area *areas);

#endif
