#include "crowd.h"

#include <time.h>

#include "pool.h"
#include "snapshot.h"

#define TERM_LEAST 16u
#define TERM_MOST 256u
#define LOOK_LEAST_NS UINT64_C(1000000)
#define LOOK_MOST_NS UINT64_C(50000000)
#define LOOKS_IN_A_WINDOW 8u

void lck_crowd_begins(lck_pool *pool) {
  lck_crowd *crowd = &pool->crowd;
  if (crowd->left == 0)
    crowd->term = TERM_LEAST; /* they got on since the last try */
  else if (--crowd->left == 0)
    atomic_store(&crowd->on, 0);
}

void lck_crowd_awaited(const lck_snapshot *snapshot) {
  atomic_store(&snapshot->pool->crowd.window, lck_now_ns() - snapshot->began);
}

static void begin_crowded(lck_pool *pool) {
  lck_crowd *crowd = &pool->crowd;
  lck_pool_lock(pool);
  if (crowd->term < TERM_LEAST)
    crowd->term = TERM_LEAST;
  crowd->left = crowd->term;
  crowd->term = crowd->term < TERM_MOST ? 2 * crowd->term : TERM_MOST;
  atomic_store(&crowd->on, 1);
  lck_pool_unlock(pool);
  lck_bell_ring(&pool->reserve);
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

static uint64_t look_after(const lck_crowd *crowd) {
  uint64_t part = atomic_load(&crowd->window) / LOOKS_IN_A_WINDOW;
  return part < LOOK_LEAST_NS ? LOOK_LEAST_NS : part > LOOK_MOST_NS ? LOOK_MOST_NS : part;
}

/* Whoever makes work after `watched` is 0 wakes the watcher; what was made before is seen by the
 * second look. */
static int ends(lck_pool *pool) {
  if (is_waiting(pool))
    return 0;
  pool->crowd.since = 0;
  atomic_store(&pool->crowd.watched, 0);
  return !is_waiting(pool);
}

uint64_t lck_crowd_look(lck_pool *pool) {
  lck_crowd *crowd = &pool->crowd;
  if (ends(pool))
    return LCK_ALL;
  atomic_store(&crowd->watched, 1);
  uint64_t now = lck_now_ns(), so_far = moved(pool), used = own_cpu_ns(), after = look_after(crowd);
  int stands_still =
      crowd->since != 0 && so_far == crowd->moved && atomic_load(&pool->pace) == LCK_FULL_PACE;
  if (stands_still && now < crowd->since + after)
    return crowd->since + after;
  /* A fifth of the CPUs is what a busy training leaves idle at most. */
  if (stands_still && used - crowd->used < (now - crowd->since) * pool->cpus / 5 * 4) {
    crowd->since = 0;
    atomic_store(&crowd->watched, 0);
    begin_crowded(pool);
    return 0;
  }
  crowd->since = now;
  crowd->moved = so_far;
  crowd->used = used;
  return now + after;
}
