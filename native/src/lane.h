/* lane.h -- what a pool knows of each of its threads: its ring of moments, and where it runs.
 *
 * Workers of the idle class give way to everything else on their CPUs, at once and for as long as
 * it lasts: on a busy machine for seconds. Nobody waits for one of them. Whoever needs a chunk that
 * such a worker has in hand takes it away and copies it anew, from the same source to the same
 * place (revoke.h, lck_batch_seize); and none of them ever holds a lock that a caller takes. */
#ifndef LCK_LANE_H
#define LCK_LANE_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "lightck.h"
#include "revoke.h"

#define LCK_LANES (LCK_THREAD_CALLER + 1u)

/* A chunk takes some 25 us: a worker that runs has it done before it is taken away. */
#define LCK_PATIENCE_NS UINT64_C(60000)

struct lck_cell;

/* One of a pool's threads, or all callers together. */
typedef struct lck_lane {
  lck_pool *pool;
  uint32_t thread; /* LCK_THREAD_*, or the worker's number */

  struct lck_cell *cells; /* its ring; NULL: nothing is recorded */
  uint64_t mask;          /* cells - 1; a power of two less one */
  _Atomic uint64_t next;

  /* Of a worker. */
  _Atomic uint64_t visits; /* of the list of snapshots, twice each; odd: it may be looking at one */

  /* Of a worker of the idle class. */
  cpu_set_t home;                /* its share of the CPUs; constant once the threads run */
  _Atomic pid_t id;              /* of the thread, once work can be taken from it; or 0 */
  _Atomic uint64_t busy_since;   /* it claimed its last chunk no earlier; ns */
  _Atomic uint64_t sleeps_until; /* in the middle of a chunk, for the write limit; ns */
  lck_tenure tenure;
} lck_lane;

/* Part `part` of `parts` of the CPUs: neighbours, and at least one, if need be shared. */
cpu_set_t lck_lane_share(const cpu_set_t *allowed, uint32_t part, uint32_t parts);

/* Number the lanes, and share the CPUs of the calling thread out among the idle workers. */
void lck_lanes_make(lck_pool *pool);

/* The calling worker of the idle class takes its class and its place; both are wishes that the
 * kernel may refuse. */
void lck_lane_settle(lck_lane *lane);

/* Between two looks at something that another thread is about to change. */
static inline void lck_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#endif
