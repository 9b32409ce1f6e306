/* pool.c -- threads, their sleep and their choice of work. */
#include "pool.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "api.h"
#include "bus.h"
#include "drain.h"
#include "error.h"
#include "snapshot.h"

#define MOST_MOMENTS (1u << 24)

int lck_pool_usable(const lck_pool *pool) {
  if (!pool)
    return lck_fail(LCK_E_INVALID, "no pool");
  if (pool->owner != getpid())
    return lck_fail(LCK_E_FORKED, "the pool belongs to process %d", (int)pool->owner);
  return 0;
}

uint64_t lck_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void lck_pool_sleep(lck_pool *pool, pthread_cond_t *condition, uint64_t deadline) {
  if (deadline == LCK_ALL) {
    pthread_cond_wait(condition, &pool->lock);
    return;
  }
  struct timespec until = {.tv_sec = (time_t)(deadline / UINT64_C(1000000000)),
                           .tv_nsec = (long)(deadline % UINT64_C(1000000000))};
  pthread_cond_timedwait(condition, &pool->lock, &until);
}

/* Holding the lock in between sees to it that who counted itself is asleep by now; letting go of it
 * before the broadcast, that nobody wakes up to find it held by a thread that it has displaced. */
void lck_pool_wake(lck_pool *pool) {
  if (atomic_load(&pool->sleepers) > 0) {
    lck_pool_lock(pool);
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_broadcast(&pool->work);
  }
}

void lck_pool_notify(lck_pool *pool) {
  if (atomic_load(&pool->waiters) > 0) {
    lck_pool_lock(pool);
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_broadcast(&pool->progress);
  }
}

/* ---- Choosing work; all under the pool's lock ------------------------------------------------ */

static int find_capture(lck_snapshot *snapshot, lck_lane *lane, int waited_for, lck_task *out) {
  uint32_t count = atomic_load(&snapshot->batch_count);
  for (uint32_t i = snapshot->scan_from; i < count; i++) {
    lck_batch *batch = lck_snapshot_batch(snapshot, i);
    if (!waited_for || atomic_load(&batch->waiting) > 0) {
      atomic_store(&lane->holds, batch);
      uint64_t chunk = lck_batch_claim(batch);
      if (chunk != LCK_NO_CHUNK) {
        *out = (lck_task){.snapshot = snapshot, .batch = batch, .chunk = chunk};
        return 1;
      }
    }
    if (i == snapshot->scan_from && atomic_load(&batch->next) == batch->chunk_count)
      snapshot->scan_from++;
  }
  return 0;
}

/* When this worker may copy again: a chunk that took t is followed by a pause of t * (1/pace - 1).
 */
static uint64_t resume_at(const lck_pool *pool, const lck_lap *lap) {
  uint64_t pace = atomic_load(&pool->pace);
  return pace == 0 ? LCK_ALL : lap->finished + lap->spent * (LCK_FULL_PACE - pace) / pace;
}

/* A drain of a snapshot that lck_snapshot_free waits for: in a paused pool it would wait for ever.
 */
static int find_freed(lck_pool *pool, lck_lane *lane, lck_task *out) {
  for (lck_snapshot *s = pool->first; s; s = s->next)
    if (atomic_load(&s->urgent) > 0 && s->phase == LCK_PHASE_SEALED && !atomic_load(&s->halted) &&
        lck_drain_find(s, lane, out))
      return 1;
  return 0;
}

/* What somebody waits for comes first and is never paced; then captures, because sources wait for
 * them; then drains. Returns 0 with the time to look again. */
static int find_task(lck_pool *pool, const lck_lap *lap, lck_task *out, uint64_t *again) {
  *again = LCK_ALL;
  if (atomic_load(&pool->urgent) > 0) {
    for (lck_snapshot *s = pool->first; s; s = s->next)
      if (atomic_load(&s->urgent) > 0 && !atomic_load(&s->halted) &&
          find_capture(s, lap->lane, 1, out))
        return 1;
  }
  uint64_t resume = resume_at(pool, lap);
  if (resume == LCK_ALL || (resume > lap->finished && resume > lck_now_ns())) {
    *again = resume;
    return atomic_load(&pool->urgent) > 0 && find_freed(pool, lap->lane, out);
  }
  for (lck_snapshot *s = pool->first; s; s = s->next)
    if (!atomic_load(&s->halted) && find_capture(s, lap->lane, 0, out))
      return 1;
  for (lck_snapshot *s = pool->first; s; s = s->next)
    if (!atomic_load(&s->halted) && lck_drain_find(s, lap->lane, out))
      return 1;
  return 0;
}

/* ---- Threads --------------------------------------------------------------------------------- */

/* Claims further chunks of the batch without the lock, until something might matter more. */
static void run_task(lck_pool *pool, const lck_task *todo, lck_lap *lap) {
  lck_batch *batch = todo->batch;
  if (todo->drain) {
    lck_chunk_drain(todo->snapshot, batch, todo->chunk, lap);
    return;
  }
  uint64_t chunk = todo->chunk;
  while (chunk != LCK_NO_CHUNK) {
    lck_chunk_capture(todo->snapshot, batch, chunk, 0, lap);
    int waited_for = atomic_load(&batch->waiting) > 0;
    if (atomic_load(&todo->snapshot->halted) ||
        (!waited_for &&
         (atomic_load(&pool->pace) < LCK_FULL_PACE || atomic_load(&pool->urgent) > 0))) {
      return;
    }
    chunk = lck_batch_claim(batch);
  }
}

static void let_go(lck_snapshot *snapshot) {
  if (--snapshot->users == 0 && atomic_load(&snapshot->halted))
    pthread_cond_broadcast(&snapshot->pool->progress);
}

void *lck_worker_main(void *argument) {
  lck_lane *lane = argument;
  lck_pool *pool = lane->pool;
  lck_lap lap = {.lane = lane};
  lck_bus_own_thread();
  lck_lane_settle(lane);
  lck_pool_lock(pool);
  while (!pool->stop) {
    lck_task todo;
    uint64_t again;
    atomic_fetch_add(&pool->sleepers, 1);
    int found = find_task(pool, &lap, &todo, &again);
    if (!found) {
      atomic_store(&lane->holds, NULL);
      lck_pool_sleep(pool, &pool->work, again);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    if (found) {
      todo.snapshot->users++;
      pthread_mutex_unlock(&pool->lock);
      run_task(pool, &todo, &lap);
      lck_pool_lock(pool);
      let_go(todo.snapshot);
    }
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

static int due(const lck_snapshot *snapshot) {
  if (snapshot->phase != LCK_PHASE_SEALED || atomic_load(&snapshot->failure))
    return 0;
  return !atomic_load(&snapshot->staged) ||
         atomic_load(&snapshot->drained) == atomic_load(&snapshot->batch_count);
}

/* Without an invalidation or a commit to do: late drains, statistics, sleep. Returns whether drains
 * are late. */
static int fill_in(lck_pool *pool, lck_lap *lap, int behind) {
  lck_task todo;
  uint64_t again;
  if (lck_statistics_store(pool))
    return behind;
  if (!lck_drain_late(pool, lap->lane, behind, &todo, &again)) {
    lck_pool_sleep(pool, &pool->duty, again);
    return 0;
  }
  todo.snapshot->users++;
  pthread_mutex_unlock(&pool->lock);
  lck_chunk_drain(todo.snapshot, todo.batch, todo.chunk, lap);
  lck_pool_lock(pool);
  let_go(todo.snapshot);
  return 1;
}

void *lck_keeper_main(void *argument) {
  lck_lap lap = {.lane = argument};
  lck_pool *pool = lap.lane->pool;
  int behind = 0;
  lck_bus_own_thread();
  lck_pool_lock(pool);
  for (;;) {
    lck_snapshot *s = pool->first;
    while (s && !s->doomed && !due(s))
      s = s->next;
    if (!s) {
      if (pool->stop && !pool->notice.region)
        break;
      behind = fill_in(pool, &lap, behind);
      continue;
    }
    int doomed = s->doomed;
    s->users++;
    pthread_mutex_unlock(&pool->lock);
    if (doomed)
      lck_snapshot_erase(s);
    else
      lck_snapshot_commit(s);
    lck_pool_lock(pool);
    s->users--;
    pthread_cond_broadcast(&pool->progress);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

/* ---- The pool -------------------------------------------------------------------------------- */

static int start(lck_pool *pool, void *(*body)(void *), lck_lane *lane, const char *name) {
  pthread_t *member = &pool->members[pool->started];
  int error = pthread_create(member, NULL, body, lane);
  if (error) {
    errno = error;
    return lck_fail_errno(LCK_E_NOMEM, "starting thread %s", name);
  }
  pthread_setname_np(*member, name);
  pool->started++;
  return 0;
}

static int start_all(lck_pool *pool) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int rc = start(pool, lck_keeper_main, &pool->lanes[LCK_THREAD_KEEPER], "lightck-keeper");
  for (uint32_t i = 0; i < pool->threads && rc == 0; i++) {
    char name[16];
    snprintf(name, sizeof name, "lightck-%u", i % LCK_MAX_THREADS);
    rc = start(pool, lck_worker_main, &pool->lanes[i], name);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return rc;
}

static void stop_and_free(lck_pool *pool) {
  lck_pool_lock(pool);
  pool->stop = 1;
  pthread_cond_broadcast(&pool->work);
  pthread_cond_broadcast(&pool->duty);
  pthread_mutex_unlock(&pool->lock);
  (void)lck_lanes_lend(pool, NULL); /* to their end */
  for (uint32_t i = 0; i < pool->started; i++)
    pthread_join(pool->members[i], NULL);
  lck_staging_drop(pool, pool->cached);
  pthread_cond_destroy(&pool->progress);
  pthread_cond_destroy(&pool->duty);
  pthread_cond_destroy(&pool->work);
  pthread_mutex_destroy(&pool->lock);
  lck_timeline_free(pool);
  free(pool);
}

LCK_API int lck_pool_create(const lck_pool_spec *spec, lck_pool **out) {
  if (!spec || !out || spec->threads < 1 || spec->threads > LCK_MAX_THREADS ||
      spec->chunk_bytes == 0 || spec->chunk_bytes % 4096 != 0 || spec->idle > 1 ||
      spec->moments > MOST_MOMENTS) {
    return lck_fail(LCK_E_INVALID, "pool of %u threads, chunks of %u bytes, idle %u, %u moments",
                    spec ? spec->threads : 0, spec ? spec->chunk_bytes : 0, spec ? spec->idle : 0,
                    spec ? spec->moments : 0);
  }
  lck_pool *pool = calloc(1, sizeof *pool);
  if (!pool)
    return lck_fail(LCK_E_NOMEM, "no memory for a pool");
  pool->owner = getpid();
  pool->threads = spec->threads;
  pool->chunk_bytes = spec->chunk_bytes;
  pool->idle = spec->idle != 0;
  atomic_store(&pool->pace, LCK_FULL_PACE);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, &monotonic);
  pthread_cond_init(&pool->duty, &monotonic);
  pthread_cond_init(&pool->progress, &monotonic);
  pthread_condattr_destroy(&monotonic);
  lck_lanes_make(pool);
  int rc = lck_timeline_make(pool, spec->moments);
  if (rc == 0)
    rc = start_all(pool);
  if (rc) {
    stop_and_free(pool);
    return rc;
  }
  *out = pool;
  return 0;
}

LCK_API int lck_pool_pace(lck_pool *pool, uint32_t per_mille) {
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  if (per_mille > LCK_FULL_PACE)
    return lck_fail(LCK_E_INVALID, "pace of %u per mille", per_mille);
  atomic_store(&pool->pace, per_mille);
  lck_pool_wake(pool);
  return 0;
}

LCK_API int lck_pool_limit(lck_pool *pool, uint64_t bytes_per_s) {
  int rc = lck_pool_usable(pool);
  if (rc == 0)
    atomic_store(&pool->limit, bytes_per_s);
  return rc;
}

LCK_API int lck_pool_stats(const lck_pool *pool, lck_stats *out) {
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  if (!out)
    return lck_fail(LCK_E_INVALID, "no place for the statistics");
  *out = (lck_stats){
      .bytes_copied = atomic_load_explicit(&pool->bytes_copied, memory_order_relaxed),
      .bytes_skipped = atomic_load_explicit(&pool->bytes_skipped, memory_order_relaxed),
      .bytes_helped = atomic_load_explicit(&pool->bytes_helped, memory_order_relaxed),
      .copy_ns = atomic_load_explicit(&pool->copy_ns, memory_order_relaxed),
      .bytes_drained = atomic_load_explicit(&pool->bytes_drained, memory_order_relaxed),
      .drain_ns = atomic_load_explicit(&pool->drain_ns, memory_order_relaxed),
      .commits = atomic_load_explicit(&pool->commits, memory_order_relaxed),
      .commit_ns = atomic_load_explicit(&pool->commit_ns, memory_order_relaxed),
      .staging_bytes = atomic_load_explicit(&pool->staging_bytes, memory_order_relaxed),
  };
  return 0;
}

LCK_API int lck_pool_destroy(lck_pool *pool) {
  if (!pool)
    return 0;
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  lck_pool_lock(pool);
  int open = pool->first != NULL;
  pthread_mutex_unlock(&pool->lock);
  if (open)
    return lck_fail(LCK_E_STATE, "a snapshot is open in the pool");
  stop_and_free(pool);
  return 0;
}
