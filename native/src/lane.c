#include "lane.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

static _Thread_local int is_worker;

/* ---- A worker's own place ---------------------------------------------------------------------
 */

cpu_set_t lck_lane_share(const cpu_set_t *allowed, uint32_t part, uint32_t parts) {
  uint32_t count = (uint32_t)CPU_COUNT(allowed);
  uint32_t first = parts > count ? part % count : part * count / parts;
  uint32_t end = parts > count ? first + 1 : (part + 1) * count / parts;
  cpu_set_t own;
  CPU_ZERO(&own);
  for (uint32_t cpu = 0, number = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, allowed)) {
      if (first <= number && number < end)
        CPU_SET(cpu, &own);
      number++;
    }
  }
  return own;
}

/* More CPUs than CPU_SETSIZE cannot be told: then nobody has a home. */
void lck_lanes_make(lck_pool *pool) {
  cpu_set_t allowed;
  int known = pool->idle && sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  for (uint32_t i = 0; i < LCK_LANES; i++) {
    pool->lanes[i].pool = pool;
    pool->lanes[i].thread = i;
    if (known && i < pool->threads)
      pool->lanes[i].home = lck_lane_share(&allowed, i, pool->threads);
  }
}

/* On a CPU of its own a worker takes every idle sliver at once; the kernel would have to move it
 * there first. It treats a CPU with nothing but idle threads as idle when it places others. */
void lck_lane_settle(lck_lane *lane) {
  static const struct sched_param none;
  is_worker = 1;
  if (lane->pool->idle && sched_setscheduler(0, SCHED_IDLE, &none) == 0 &&
      CPU_COUNT(&lane->home) > 0 && sched_setaffinity(0, sizeof lane->home, &lane->home) == 0)
    atomic_store(&lane->id, (pid_t)syscall(SYS_gettid));
}

/* ---- Lending ----------------------------------------------------------------------------------
 */

/* The caller's CPU as a set; 0 if it cannot be told. */
static int here(cpu_set_t *cpus) {
  int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE)
    return 0;
  CPU_ZERO(cpus);
  CPU_SET((size_t)cpu, cpus);
  return 1;
}

static int may_hold(const lck_lane *lane, const struct lck_batch *batch) {
  return !batch || atomic_load(&lane->holds) == batch;
}

int lck_lanes_behind(lck_pool *pool, const struct lck_batch *batch) {
  cpu_set_t cpu;
  if (!here(&cpu))
    return 0;
  for (uint32_t i = 0; i < pool->threads; i++) {
    const lck_lane *lane = &pool->lanes[i];
    if (atomic_load(&lane->id) != 0 && may_hold(lane, batch) && CPU_EQUAL(&lane->home, &cpu))
      return 1;
  }
  return 0;
}

uint64_t lck_lanes_lend(lck_pool *pool, const struct lck_batch *batch) {
  cpu_set_t cpu;
  uint64_t lent = 0;
  if (is_worker || !here(&cpu))
    return 0;
  for (uint32_t i = 0; i < pool->threads; i++) {
    const lck_lane *lane = &pool->lanes[i];
    pid_t id = atomic_load(&lane->id);
    if (id != 0 && may_hold(lane, batch) && !CPU_EQUAL(&lane->home, &cpu) &&
        sched_setaffinity(id, sizeof cpu, &cpu) == 0)
      lent |= UINT64_C(1) << i;
  }
  return lent;
}

void lck_lanes_take_home(lck_pool *pool, uint64_t lent) {
  for (uint32_t i = 0; i < pool->threads; i++) {
    const lck_lane *lane = &pool->lanes[i];
    if (lent >> i & 1)
      (void)sched_setaffinity(atomic_load(&lane->id), sizeof lane->home, &lane->home);
  }
}

/* A worker that has the lock may have lost its CPU. (pthread_cond_wait takes the lock back by
 * itself: there the wait is as long as the worker's.) */
void lck_pool_lock(lck_pool *pool) {
  if (pthread_mutex_trylock(&pool->lock) == 0)
    return;
  uint64_t lent = 0;
  if (pool->idle && !is_worker) {
    uint64_t until = lck_now_ns() + LCK_PATIENCE_NS;
    while (lck_now_ns() < until) {
      lck_pause();
      if (pthread_mutex_trylock(&pool->lock) == 0)
        return;
    }
    lent = lck_lanes_lend(pool, NULL);
  }
  pthread_mutex_lock(&pool->lock);
  lck_lanes_take_home(pool, lent);
}
