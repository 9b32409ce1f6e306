/* pool_thread.h -- the state of each of a pool's threads: its ring of spans, and where it runs.
 *
 * Workers of the idle class give way to everything else on their CPUs, at once and for as long as
 * it lasts: on a busy machine for seconds. Nobody waits for one of them. Whoever needs a chunk that
 * such a worker has claimed seizes it and copies it anew, from the same source to the same
 * place (revoke.h, lck_batch_seize); and none of them ever holds a lock that a caller takes. */
#ifndef LCK_POOL_THREAD_H
#define LCK_POOL_THREAD_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "lightck.h"
#include "revoke.h"

#define LCK_POOL_THREADS (LCK_THREAD_CALLER + 1u)

/* A chunk takes some 25 us: a worker that has a CPU is done with it before it is seized. */
#define LCK_SEIZE_AFTER_NS UINT64_C(60000)

struct lck_cell;

/* One of a pool's threads, or all callers together. */
typedef struct lck_pool_thread {
  lck_pool *pool;
  uint32_t number; /* LCK_THREAD_*, or the worker's number */

  struct lck_cell *cells; /* its ring; NULL: nothing is recorded */
  uint64_t mask;          /* cells - 1; a power of two less one */
  _Atomic uint64_t next;

  /* Used by every worker. */
  _Atomic uint64_t visits; /* of the list of snapshots, twice each; odd: it may be looking at one */

  /* Used by workers of the idle class. */
  cpu_set_t cpus;                /* its share of the CPUs; constant once the threads run */
  _Atomic pid_t id;              /* of the thread, once work can be taken from it; or 0 */
  _Atomic uint64_t busy_since;   /* it claimed its last chunk no earlier; ns */
  _Atomic uint64_t sleeps_until; /* in the middle of a chunk, for the write limit; ns */
  lck_revocable revocable;
} lck_pool_thread;

/* Return part `part` of `parts` of the CPUs: neighbours, and at least one, if need be shared. */
cpu_set_t lck_cpu_share(const cpu_set_t *allowed, uint32_t part, uint32_t parts);

/* Number the pool's threads, and share the calling thread's CPUs out among the idle workers. */
void lck_pool_threads_make(lck_pool *pool);

/* Put the calling worker into the idle class and onto its CPUs; the kernel may refuse both. */
void lck_pool_thread_enter_idle(lck_pool_thread *thread);

/* Between two looks at something that another thread is about to change. */
static inline void lck_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#endif
