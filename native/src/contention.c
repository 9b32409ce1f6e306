/* contention.c -- noticing a contended machine, and giving the idle class another try later. */
#include "contention.h"

#include <time.h>

#include "pool.h"
#include "snapshot.h"

#define TERM_LEAST 16u
#define TERM_MOST 256u
#define LOOK_LEAST_NS UINT64_C(1000000)
#define LOOK_MOST_NS UINT64_C(50000000)
#define LOOKS_IN_A_WINDOW 8u

void lck_contention_begin_snapshot(lck_pool *pool) {
  lck_contention *contention = &pool->contention;
  if (contention->left == 0) {
    contention->term = TERM_LEAST; /* they got on since the last try */
  } else if (--contention->left == 0) {
    atomic_store(&contention->watched, 0); /* the watcher sleeps: the next work wakes it */
    atomic_store(&contention->on, 0);
  }
}

void lck_contention_begin_wait(const lck_snapshot *snapshot) {
  atomic_store(&snapshot->pool->contention.window, lck_now_ns() - snapshot->began);
}

static void begin_contended(lck_pool *pool) {
  lck_contention *contention = &pool->contention;
  lck_pool_lock(pool);
  if (contention->term < TERM_LEAST)
    contention->term = TERM_LEAST;
  contention->left = contention->term;
  contention->term = contention->term < TERM_MOST ? 2 * contention->term : TERM_MOST;
  atomic_store(&contention->on, 1);
  lck_pool_unlock(pool);
  lck_wait_queue_wake(&pool->reserve);
}

/* A copy may run and nobody has begun it. */
static int is_waiting(lck_pool *pool) {
  for (lck_snapshot *s = atomic_load(&pool->first); s; s = atomic_load(&s->next)) {
    uint32_t count = atomic_load(&s->halted) ? 0 : atomic_load(&s->batch_count);
    for (uint32_t i = atomic_load(&s->scan_from); i < count; i++) {
      const lck_batch *batch = lck_snapshot_batch(s, i);
      if (atomic_load(&batch->next) < atomic_load(&batch->released))
        return 1;
    }
  }
  return 0;
}

static uint64_t own_cpu_ns(void) {
  struct timespec used;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return (uint64_t)used.tv_sec * UINT64_C(1000000000) + (uint64_t)used.tv_nsec;
}

static uint64_t moved(const lck_pool *pool) {
  return atomic_load_explicit(&pool->bytes_copied, memory_order_relaxed) +
         atomic_load_explicit(&pool->bytes_skipped, memory_order_relaxed);
}

/* Of a window that is not known yet a short one may be all that an idle thread needs to wake: on a
 * machine that is merely busy the reserve would copy for the next snapshots. */
static uint64_t look_after(const lck_contention *contention) {
  uint64_t window = atomic_load(&contention->window), part = window / LOOKS_IN_A_WINDOW;
  if (window == 0)
    return LOOK_MOST_NS;
  return part < LOOK_LEAST_NS ? LOOK_LEAST_NS : part > LOOK_MOST_NS ? LOOK_MOST_NS : part;
}

/* Whoever makes work after `watched` is 0 wakes the watcher; what was made before is seen by the
 * second look. */
static int ends(lck_pool *pool) {
  if (is_waiting(pool))
    return 0;
  pool->contention.since = 0;
  atomic_store(&pool->contention.watched, 0);
  return !is_waiting(pool);
}

uint64_t lck_contention_check(lck_pool *pool) {
  lck_contention *contention = &pool->contention;
  if (ends(pool))
    return LCK_ALL;
  atomic_store(&contention->watched, 1);
  uint64_t now = lck_now_ns(), so_far = moved(pool), used = own_cpu_ns(),
           after = look_after(contention);
  int no_progress = contention->since != 0 && so_far == contention->moved &&
                    atomic_load(&pool->pace) == LCK_FULL_PACE;
  if (no_progress && now < contention->since + after)
    return contention->since + after;
  /* A fifth of the CPUs is what a busy training leaves idle at most. */
  if (no_progress && used - contention->used < (now - contention->since) * pool->cpus / 5 * 4) {
    contention->since = 0;
    atomic_store(&contention->watched, 0);
    begin_contended(pool);
    return 0;
  }
  contention->since = now;
  contention->moved = so_far;
  contention->used = used;
  return now + after;
}
