/* pool.c -- starting and stopping threads, their sleep, and their choice of work. */
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

#define MOST_SPANS (1u << 24)

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

uint64_t lck_deadline_of(int64_t timeout_ns) {
  if (timeout_ns < 0)
    return LCK_ALL;
  uint64_t now = lck_now_ns();
  return (uint64_t)timeout_ns > LCK_ALL - 1 - now ? LCK_ALL : now + (uint64_t)timeout_ns;
}

uint64_t lck_pool_recheck_at(uint64_t deadline) {
  uint64_t again = lck_now_ns() + LCK_RECHECK_NS;
  return deadline < again ? deadline : again;
}

void lck_pool_lock(lck_pool *pool) {
  pthread_mutex_lock(&pool->lock);
}

void lck_pool_unlock(lck_pool *pool) {
  pthread_mutex_unlock(&pool->lock);
}

/* Whether this worker's turn has come: the reserve's when somebody waits or the machine is
 * contended, the idle class's when it is not. */
static int may_work(const lck_pool_thread *thread) {
  lck_pool *pool = thread->pool;
  int contended = atomic_load(&pool->contention.on);
  if (!pool->idle || lck_pool_thread_is_idle(thread))
    return !contended;
  return contended || atomic_load(&pool->urgent) > 0 || atomic_load(&pool->waiters) > 0;
}

void lck_pool_wake(lck_pool *pool) {
  int contended = atomic_load(&pool->contention.on);
  if (!contended)
    lck_wait_queue_wake(&pool->work);
  if (pool->idle &&
      (contended || atomic_load(&pool->urgent) > 0 || atomic_load(&pool->waiters) > 0 ||
       !atomic_exchange(&pool->contention.watched, 1)))
    lck_wait_queue_wake(&pool->reserve);
}

/* ---- Choosing work; inside a visit ------------------------------------------------------------
 */

static lck_snapshot *first_of(const lck_pool *pool) {
  return atomic_load(&pool->first);
}

static int find_capture(lck_snapshot *snapshot, lck_pool_thread *thread, int waited_for,
                        lck_task *out) {
  uint32_t count = atomic_load(&snapshot->batch_count), from = atomic_load(&snapshot->scan_from);
  for (uint32_t i = from; i < count; i++) {
    lck_batch *batch = lck_snapshot_batch(snapshot, i);
    if (!waited_for || atomic_load(&batch->waiting) > 0) {
      uint64_t chunk = lck_batch_claim(snapshot, batch, thread);
      if (chunk != LCK_NO_CHUNK) {
        *out = (lck_task){.snapshot = snapshot, .batch = batch, .chunk = chunk};
        return 1;
      }
    }
    if (i == from && atomic_load(&batch->next) == batch->chunk_count &&
        atomic_compare_exchange_strong(&snapshot->scan_from, &from, i + 1))
      from = i + 1;
  }
  return 0;
}

/* When this worker may copy again: a chunk that took t is followed by a pause of t * (1/pace - 1).
 */
static uint64_t resume_at(const lck_pool *pool, const lck_last_chunk *last) {
  uint64_t pace = atomic_load(&pool->pace);
  return pace == 0 ? LCK_ALL : last->finished + last->spent * (LCK_FULL_PACE - pace) / pace;
}

/* A drain of a snapshot that lck_snapshot_free waits for: in a paused pool it would wait for ever.
 */
static int find_freed(lck_pool *pool, lck_pool_thread *thread, lck_task *out) {
  for (lck_snapshot *s = first_of(pool); s; s = atomic_load(&s->next))
    if (atomic_load(&s->urgent) > 0 && atomic_load(&s->phase) == LCK_PHASE_SEALED &&
        lck_drain_find(s, thread, out))
      return 1;
  return 0;
}

/* Find a chunk that an idle worker has claimed and somebody waits for. */
static int find_claimed(lck_pool *pool, lck_pool_thread *thread, lck_task *out) {
  for (lck_snapshot *s = first_of(pool); s; s = atomic_load(&s->next)) {
    uint32_t count = atomic_load(&s->urgent) > 0 ? atomic_load(&s->batch_count) : 0;
    for (uint32_t i = 0; i < count; i++) {
      lck_batch *batch = lck_snapshot_batch(s, i);
      uint64_t chunk = atomic_load(&batch->waiting) == 0
                           ? LCK_NO_CHUNK
                           : lck_batch_seize(s, batch, thread, LCK_CHUNK_IN_CAPTURE);
      if (chunk != LCK_NO_CHUNK) {
        *out = (lck_task){.snapshot = s, .batch = batch, .chunk = chunk};
        return 1;
      }
    }
    if (atomic_load(&s->phase) == LCK_PHASE_SEALED && lck_drain_seize(s, thread, out))
      return 1;
  }
  return 0;
}

/* Find a task. What somebody waits for comes first and is never paced; then captures, because
 * sources wait for them; then drains. Returns 0 with the time to look again. */
static int find_task(lck_pool *pool, const lck_last_chunk *last, lck_task *out, uint64_t *again) {
  *again = LCK_ALL;
  if (atomic_load(&pool->urgent) > 0) {
    for (lck_snapshot *s = first_of(pool); s; s = atomic_load(&s->next))
      if (atomic_load(&s->urgent) > 0 && find_capture(s, last->thread, 1, out))
        return 1;
  }
  uint64_t resume = resume_at(pool, last);
  if (resume == LCK_ALL || (resume > last->finished && resume > lck_now_ns())) {
    *again = resume;
    return atomic_load(&pool->urgent) > 0 && find_freed(pool, last->thread, out);
  }
  for (lck_snapshot *s = first_of(pool); s; s = atomic_load(&s->next))
    if (find_capture(s, last->thread, 0, out))
      return 1;
  for (lck_snapshot *s = first_of(pool); s; s = atomic_load(&s->next))
    if (lck_drain_find(s, last->thread, out))
      return 1;
  return 0;
}

/* Whether drains are left of a snapshot that they alone keep from its commit. */
static int has_drains_left(const lck_snapshot *s) {
  return atomic_load(&s->phase) == LCK_PHASE_SEALED && atomic_load(&s->staged) &&
         !atomic_load(&s->halted) && !atomic_load(&s->failure) && !lck_snapshot_due(s);
}

/* Whether somebody waits for what another worker may have claimed. Whoever begins to wait wakes the
 * reserve, and so does a seal. */
static int is_claimed_work_awaited(const lck_pool *pool) {
  for (lck_snapshot *s = first_of(pool); s; s = atomic_load(&s->next))
    if (atomic_load(&s->urgent) > 0 || has_drains_left(s))
      return 1;
  return 0;
}

/* A worker of the reserve that finds nothing takes what others do not get on with: after a while,
 * for it may be done by now. On a contended machine, where it has its turn between snapshots, too,
 * each look would interrupt the training: there it looks again only while somebody waits. Elsewhere
 * it looks until its turn is over, for its first one watches over the idle ones then. */
static int find_for_reserve(lck_pool *pool, const lck_last_chunk *last, lck_task *out,
                            uint64_t *again) {
  *again = LCK_ALL;
  if (!may_work(last->thread)) {
    if (last->thread->number == pool->reserve_from && !atomic_load(&pool->contention.on))
      *again = lck_contention_check(pool);
    return 0;
  }
  if (find_task(pool, last, out, again))
    return 1;
  if (!atomic_load(&pool->contention.on) || is_claimed_work_awaited(pool)) {
    uint64_t soon = lck_now_ns() + LCK_RECHECK_NS;
    *again = *again < soon ? *again : soon;
  }
  return find_claimed(pool, last->thread, out);
}

/* ---- Threads --------------------------------------------------------------------------------- */

/* Run the task, then claim further chunks of the batch until something might matter more. */
static void run_task(lck_pool *pool, const lck_task *todo, lck_last_chunk *last) {
  lck_batch *batch = todo->batch;
  if (todo->drain) {
    lck_chunk_drain(todo->snapshot, batch, todo->chunk, last);
    return;
  }
  uint64_t chunk = todo->chunk;
  while (chunk != LCK_NO_CHUNK) {
    lck_chunk_capture(todo->snapshot, batch, chunk, 0, last);
    int waited_for = atomic_load(&batch->waiting) > 0;
    if (!may_work(last->thread) || (!waited_for && (atomic_load(&pool->pace) < LCK_FULL_PACE ||
                                                    atomic_load(&pool->urgent) > 0))) {
      return;
    }
    atomic_store(&last->thread->busy_since, last->finished);
    chunk = lck_batch_claim(todo->snapshot, batch, last->thread);
  }
}

void *lck_worker_main(void *argument) {
  lck_pool_thread *thread = argument;
  lck_pool *pool = thread->pool;
  lck_last_chunk last = {.thread = thread};
  int reserve = thread->number >= pool->reserve_from;
  lck_wait_queue *queue = reserve ? &pool->reserve : &pool->work;
  lck_bus_own_thread();
  if (lck_pool_thread_is_idle(thread))
    lck_pool_thread_enter_idle(thread);
  for (;;) {
    lck_task todo;
    uint64_t again = LCK_ALL;
    uint32_t count = lck_wait_queue_count(queue);
    if (atomic_load(&pool->stop))
      break;
    atomic_store(&thread->busy_since, lck_now_ns());
    atomic_fetch_add(&thread->visits, 1);
    int found = reserve            ? find_for_reserve(pool, &last, &todo, &again)
                : may_work(thread) ? find_task(pool, &last, &todo, &again)
                                   : 0;
    if (found)
      run_task(pool, &todo, &last);
    atomic_fetch_add(&thread->visits, 1);
    if (!found)
      lck_wait_queue_sleep(queue, count, again);
  }
  return NULL;
}

/* Without an invalidation or a commit to do, the commit thread drains what is late, stores
 * statistics or sleeps. Under the pool's lock; returns whether drains are late. */
static int run_other_work(lck_pool *pool, lck_last_chunk *last, int late, uint32_t count) {
  lck_task todo;
  uint64_t again;
  if (lck_statistics_store(pool))
    return late;
  if (!lck_drain_late(pool, last->thread, late, &todo, &again)) {
    lck_pool_unlock(pool);
    lck_wait_queue_sleep(&pool->commit_work, count, again);
    lck_pool_lock(pool);
    return 0;
  }
  todo.snapshot->users++;
  lck_pool_unlock(pool);
  lck_chunk_drain(todo.snapshot, todo.batch, todo.chunk, last);
  lck_pool_lock(pool);
  todo.snapshot->users--;
  return 1;
}

void *lck_commit_main(void *argument) {
  lck_last_chunk last = {.thread = argument};
  lck_pool *pool = last.thread->pool;
  int late = 0;
  lck_bus_own_thread();
  lck_pool_lock(pool);
  for (;;) {
    uint32_t count = lck_wait_queue_count(&pool->commit_work);
    lck_snapshot *s = first_of(pool);
    while (s && !s->invalidation_due && (s->committing || !lck_snapshot_due(s)))
      s = atomic_load(&s->next);
    if (!s) {
      if (atomic_load(&pool->stop) && !pool->pending_page.region)
        break;
      late = run_other_work(pool, &last, late, count);
      continue;
    }
    int invalidating = s->invalidation_due;
    s->users++;
    lck_pool_unlock(pool);
    if (invalidating)
      lck_snapshot_invalidate(s);
    else
      lck_snapshot_try_commit(s, 1, last.thread);
    lck_pool_lock(pool);
    s->users--;
    lck_wait_queue_wake(&pool->progress);
  }
  lck_pool_unlock(pool);
  return NULL;
}

/* ---- Freeing what workers may be looking at -------------------------------------------------- */

static int is_visited(const lck_pool *pool, const lck_snapshot *snapshot) {
  for (uint32_t i = 0; i < pool->workers; i++)
    if (snapshot->visits[i] % 2 == 1 &&
        atomic_load(&pool->threads[i].visits) == snapshot->visits[i])
      return 1;
  return 0;
}

/* Free the snapshots of the deferred list that no worker can be looking at. */
static void free_deferred(lck_pool *pool) {
  for (lck_snapshot **at = &pool->deferred; *at;) {
    lck_snapshot *deferred = *at;
    if (is_visited(pool, deferred)) {
      at = &deferred->deferred;
    } else {
      *at = deferred->deferred;
      lck_snapshot_discard(deferred);
    }
  }
}

/* The snapshot is off the list: a visit that begins from now on cannot find it. */
void lck_pool_free_later(lck_pool *pool, lck_snapshot *snapshot) {
  lck_pool_lock(pool);
  for (uint32_t i = 0; i < pool->workers; i++)
    snapshot->visits[i] = atomic_load(&pool->threads[i].visits);
  snapshot->deferred = pool->deferred;
  pool->deferred = snapshot;
  free_deferred(pool);
  lck_pool_unlock(pool);
}

/* ---- Starting threads ------------------------------------------------------------------------ */

/* Block every signal in the calling thread, and so in the threads that it starts. */
static void block_signals(sigset_t *before) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, before);
}

void lck_threads_run(void *(*body)(void *), void *argument, uint64_t threads) {
  pthread_t others[LCK_MAX_THREADS - 1];
  uint32_t started = 0;
  sigset_t before;
  block_signals(&before);
  while (started < LCK_MAX_THREADS - 1 && started + 1 < threads &&
         pthread_create(&others[started], NULL, body, argument) == 0)
    started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  body(argument);
  for (uint32_t i = 0; i < started; i++)
    pthread_join(others[i], NULL);
}

static int start(lck_pool *pool, void *(*body)(void *), lck_pool_thread *thread, const char *name) {
  pthread_t *member = &pool->members[pool->started];
  int error = pthread_create(member, NULL, body, thread);
  if (error) {
    errno = error;
    return lck_fail_errno(LCK_E_NOMEM, "starting thread %s", name);
  }
  pthread_setname_np(*member, name);
  pool->started++;
  return 0;
}

static int start_all(lck_pool *pool) {
  sigset_t before;
  block_signals(&before);
  int rc = start(pool, lck_commit_main, &pool->threads[LCK_THREAD_COMMIT], "lightck-commit");
  for (uint32_t i = 0; i < pool->workers && rc == 0; i++) {
    char name[16];
    snprintf(name, sizeof name, "lightck-%u", i % LCK_MAX_THREADS);
    rc = start(pool, lck_worker_main, &pool->threads[i], name);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return rc;
}

/* ---- The pool -------------------------------------------------------------------------------- */

static void stop_and_free(lck_pool *pool) {
  atomic_store(&pool->stop, 1);
  lck_wait_queue_wake(&pool->work);
  lck_wait_queue_wake(&pool->reserve);
  lck_wait_queue_wake(&pool->commit_work);
  for (uint32_t i = 0; i < pool->started; i++)
    pthread_join(pool->members[i], NULL);
  free_deferred(pool);
  lck_staging_drop(pool, pool->cached);
  pthread_mutex_destroy(&pool->lock);
  lck_thread_trace_free(pool);
  free(pool);
}

LCK_API int lck_pool_create(const lck_pool_spec *spec, lck_pool **out) {
  if (!spec || !out || spec->threads < 1 || spec->threads > LCK_MAX_THREADS ||
      spec->chunk_bytes == 0 || spec->chunk_bytes % 4096 != 0 || spec->idle > 1 ||
      spec->spans > MOST_SPANS) {
    return lck_fail(LCK_E_INVALID, "pool of %u threads, chunks of %u bytes, idle %u, %u spans",
                    spec ? spec->threads : 0, spec ? spec->chunk_bytes : 0, spec ? spec->idle : 0,
                    spec ? spec->spans : 0);
  }
  lck_pool *pool = calloc(1, sizeof *pool);
  if (!pool)
    return lck_fail(LCK_E_NOMEM, "no memory for a pool");
  pool->owner = getpid();
  pool->reserve_from = spec->threads;
  pool->chunk_bytes = spec->chunk_bytes;
  pool->workers = spec->idle && 2 * spec->threads <= LCK_MAX_THREADS && lck_revoke_possible()
                      ? 2 * spec->threads
                      : spec->threads;
  pool->idle = pool->workers > pool->reserve_from;
  atomic_store(&pool->pace, LCK_FULL_PACE);
  pthread_mutex_init(&pool->lock, NULL);
  lck_pool_threads_make(pool);
  int rc = lck_thread_trace_make(pool, spec->spans);
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
  lck_wait_queue_wake(&pool->commit_work); /* late drains are not paced */
  return 0;
}

static uint64_t visits_of(const lck_pool *pool) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < LCK_MAX_THREADS; i++)
    sum += atomic_load(&pool->threads[i].visits);
  return sum;
}

LCK_API int lck_pool_wake_time(lck_pool *pool, uint64_t timeout_ns, uint64_t *ns) {
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  if (!ns)
    return lck_fail(LCK_E_INVALID, "no place for the time");
  uint64_t before = visits_of(pool), began = lck_now_ns();
  lck_pool_wake(pool);
  do {
    lck_pause();
    *ns = lck_now_ns() - began;
  } while (visits_of(pool) == before && *ns < timeout_ns);
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
  int open = first_of(pool) != NULL;
  lck_pool_unlock(pool);
  if (open)
    return lck_fail(LCK_E_STATE, "a snapshot is open in the pool");
  stop_and_free(pool);
  return 0;
}
