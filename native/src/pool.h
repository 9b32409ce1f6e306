/* pool.h -- the threads behind the snapshots, and the DRAM that staged ones go through.
 *
 * Workers copy chunks. In an idle pool the first of them, as many as were asked for, are of the
 * idle class; as many more, the *reserve*, have the caller's priority (contention.h). One more
 * thread, the *commit thread*, invalidates slots and commits snapshots where that may sync: a
 * worker that syncs would be missing where somebody waits for a capture. Besides, it drains what
 * idle workers are late with (drain.h).
 *
 * Workers take no lock: one of the idle class may lose its CPU at any instruction, and for as long
 * as others want it. They find work by walking the list of snapshots, whose memory is freed when
 * every worker that may be looking at it has gone on (lck_pool_free_later). */
#ifndef LCK_POOL_H
#define LCK_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "contention.h"
#include "lightck.h"
#include "pool_thread.h"
#include "statistics.h"
#include "thread_trace.h"
#include "wait_queue.h"

#define LCK_MAX_THREADS 64u
#define LCK_FULL_PACE 1000u
#define LCK_AHEAD_NS UINT64_C(8000000) /* how far drains may run ahead of the limit */
#define LCK_COPIES_AHEAD_NS UINT64_C(1000000)
#define LCK_RECHECK_NS UINT64_C(1000000) /* a worker may lose its CPU before it wakes others */

/* Anonymous memory, held by one snapshot or cached for the next. */
typedef struct lck_area {
  unsigned char *base;
  uint64_t length, used;
  struct lck_area *next;
} lck_area;

struct lck_pool {
  pid_t owner;           /* process that created it; any other is a forked child */
  uint32_t workers;      /* all of them */
  uint32_t reserve_from; /* workers [reserve_from, workers) are the reserve */
  uint32_t chunk_bytes;
  uint32_t cpus; /* of the calling thread, at creation; or 1 */
  int idle;      /* workers below `reserve_from` take what others leave of their CPUs */

  /* Protects the list of snapshots, their `invalidation_due`, `users` and `claimed` fields and the
   * steps of their phase, the cached areas, the snapshots to be freed later and the pending page.
   * Held for short scans only, never across a copy, a sync or a sleep, and never by a thread of the
   * idle class. */
  pthread_mutex_t lock;
  lck_wait_queue work;    /* workers; in an idle pool those of the idle class */
  lck_wait_queue reserve; /* the other workers of an idle pool */
  lck_wait_queue
      commit_work; /* the commit thread: something to invalidate, to commit or to look after */
  lck_wait_queue progress; /* callers: a batch, a snapshot or a user of one is done */
  _Atomic int stop;
  _Atomic(lck_snapshot *) first; /* open snapshots, oldest first; bounded by the regions' slots */
  lck_snapshot *last;
  lck_snapshot *deferred;        /* freed ones that workers may be looking at */
  lck_pending_page pending_page; /* statistics that the commit thread has yet to store */
  uint64_t began, interval;      /* of the last snapshot; between it and the one before; ns, or 0 */
  lck_area *cached;              /* unbounded in number, but emptied whenever none of them fits */
  lck_contention contention;

  _Atomic uint32_t urgent;  /* captures and frees that wait: what they wait for is not paced */
  _Atomic uint32_t waiters; /* for commits */
  _Atomic uint32_t pace;    /* per mille */

  _Atomic uint64_t limit, booked; /* bytes/s written; until when they are spoken for, ns */

  _Atomic uint64_t bytes_copied, bytes_skipped, bytes_helped, copy_ns, commits, commit_ns;
  _Atomic uint64_t bytes_drained, drain_ns;
  _Atomic uint64_t staging_bytes;

  lck_pool_thread threads[LCK_POOL_THREADS]; /* indexed by lck_span.thread */

  uint32_t started; /* threads to join */
  pthread_t members[LCK_MAX_THREADS + 1];
};

/* 0, or LCK_E_INVALID / LCK_E_FORKED with text. */
int lck_pool_usable(const lck_pool *pool);

void lck_pool_lock(lck_pool *pool);
void lck_pool_unlock(lck_pool *pool);

/* Wake the workers that may take what has become claimable. Takes no lock. */
void lck_pool_wake(lck_pool *pool);

/* Free a snapshot that is off the list once no worker can be looking at it. */
void lck_pool_free_later(lck_pool *pool, lck_snapshot *snapshot);

/* Return when a caller who waits for workers looks again by itself: soon, or at `deadline`. */
uint64_t lck_pool_recheck_at(uint64_t deadline);

uint64_t lck_now_ns(void); /* monotonic */

/* Return the time after `timeout_ns`; LCK_ALL for a negative one. */
uint64_t lck_deadline_of(int64_t timeout_ns);

/* Return the time at which a write begins, now; 0: there is no limit. */
uint64_t lck_pool_write_begins(const lck_pool *pool);

/* Return how far copies may run ahead of the limit, in ns. */
uint64_t lck_pool_copies_ahead(const lck_pool *pool);

/* Book `bytes` that were written from `began` on (0: now) with the medium. Returns until when to
 * sleep before it may take more; 0: it will within `ahead` ns. */
uint64_t lck_pool_book(lck_pool *pool, uint64_t began, uint64_t bytes, uint64_t ahead);

/* 1 for a worker of the idle class; 0 for the reserve, the commit thread and callers. */
static inline int lck_pool_thread_is_idle(const lck_pool_thread *thread) {
  return thread->pool->idle && thread->number < thread->pool->reserve_from;
}

/* The bodies of a pool's threads; the argument is the lck_pool_thread. */
void *lck_worker_main(void *thread);
void *lck_commit_main(void *thread);

/* Run `body` on up to `threads` threads for the length of this call, the caller being one of them,
 * and return when all are done. It needs no pool. A thread that cannot be had only costs time: the
 * body must find its share by itself. */
void lck_threads_run(void *(*body)(void *), void *argument, uint64_t threads);

/* Take `length` bytes, 64-aligned, from the areas in *held, adding a cached or a new one when none
 * has room. NULL: no memory. The memory is not zeroed and stays until *held is given back. */
unsigned char *lck_staging_take(lck_pool *pool, lck_area **held, uint64_t length);

/* Return all areas in *held to the cache. */
void lck_staging_give(lck_pool *pool, lck_area **held);

/* Unmap a list of areas. */
void lck_staging_drop(lck_pool *pool, lck_area *areas);

#endif
