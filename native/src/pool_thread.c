/* pool_thread.c -- which CPUs the idle workers run on, and their scheduling class. */
#include "pool_thread.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

cpu_set_t lck_cpu_share(const cpu_set_t *allowed, uint32_t part, uint32_t parts) {
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

/* More CPUs than CPU_SETSIZE cannot be told: then no worker has CPUs of its own. */
void lck_pool_threads_make(lck_pool *pool) {
  cpu_set_t allowed;
  int known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  pool->cpus = known ? (uint32_t)CPU_COUNT(&allowed) : 1;
  for (uint32_t i = 0; i < LCK_POOL_THREADS; i++) {
    pool->threads[i].pool = pool;
    pool->threads[i].number = i;
    if (known && lck_pool_thread_is_idle(&pool->threads[i]))
      pool->threads[i].cpus = lck_cpu_share(&allowed, i, pool->reserve_from);
  }
}

/* On a CPU of its own a worker takes every idle sliver at once; the kernel would have to move it
 * there first. It treats a CPU with nothing but idle threads as idle when it places others. */
void lck_pool_thread_enter_idle(lck_pool_thread *thread) {
  static const struct sched_param none;
  lck_revoke_enter(&thread->revocable);
  if (sched_setscheduler(0, SCHED_IDLE, &none) == 0 && CPU_COUNT(&thread->cpus) > 0)
    (void)sched_setaffinity(0, sizeof thread->cpus, &thread->cpus);
  atomic_store(&thread->id, (pid_t)syscall(SYS_gettid));
}
