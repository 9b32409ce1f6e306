#include "lane.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

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
  int known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  pool->cpus = known ? (uint32_t)CPU_COUNT(&allowed) : 1;
  for (uint32_t i = 0; i < LCK_LANES; i++) {
    pool->lanes[i].pool = pool;
    pool->lanes[i].thread = i;
    if (known && pool->idle && i < pool->threads)
      pool->lanes[i].home = lck_lane_share(&allowed, i, pool->threads);
  }
}

/* On a CPU of its own a worker takes every idle sliver at once; the kernel would have to move it
 * there first. It treats a CPU with nothing but idle threads as idle when it places others. */
void lck_lane_settle(lck_lane *lane) {
  static const struct sched_param none;
  lck_revoke_enter(&lane->tenure);
  if (sched_setscheduler(0, SCHED_IDLE, &none) == 0 && CPU_COUNT(&lane->home) > 0)
    (void)sched_setaffinity(0, sizeof lane->home, &lane->home);
  atomic_store(&lane->id, (pid_t)syscall(SYS_gettid));
}
