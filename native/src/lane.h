/* lane.h -- what a pool knows of each of its threads: its ring of moments, and where it runs.
 *
 * Workers of the idle class give way to everything else on their CPUs, at once and for as long as
 * it lasts. Nobody may have to wait for a thread like that. So whoever waits for workers lends them
 * the CPU that the wait leaves free, and takes them home afterwards: both by
 * sched_setaffinity(worker), both from the waiting thread.
 *
 * No result depends on where a thread runs, so nothing here is locked and every race is one of
 * speed. Two threads that wait at the same time may lend the same worker: each takes it home after
 * its own last loan, so that the last call of all takes it home; and who still waits lends again
 * within LCK_LEND_AGAIN_NS. A refusal of the kernel leaves a worker where it is. */
#ifndef LCK_LANE_H
#define LCK_LANE_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "lightck.h"

#define LCK_LANES (LCK_THREAD_CALLER + 1u)

/* A chunk takes some 25 us and the pool's lock is held for less: who runs is done soon. */
#define LCK_PATIENCE_NS UINT64_C(30000)
#define LCK_LEND_AGAIN_NS UINT64_C(1000000)

struct lck_batch;
struct lck_cell;

/* One of a pool's threads, or all callers together. */
typedef struct lck_lane {
  lck_pool *pool;
  uint32_t thread; /* LCK_THREAD_*, or the worker's number */

  struct lck_cell *cells; /* its ring; NULL: nothing is recorded */
  uint64_t mask;          /* cells - 1; a power of two less one */
  _Atomic uint64_t next;

  /* Of a worker in an idle pool. */
  cpu_set_t home;   /* its share of the CPUs; constant once the threads run */
  _Atomic pid_t id; /* of the thread, once it is at home there; 0: never lend it */
  _Atomic(const struct lck_batch *)
      holds; /* NULL, or where it may have a chunk in hand: stored
                before every claim, so that whoever finds all chunks
                of a batch claimed then finds everyone who holds one */
} lck_lane;

/* Part `part` of `parts` of the CPUs: neighbours, and at least one, if need be shared. */
cpu_set_t lck_lane_share(const cpu_set_t *allowed, uint32_t part, uint32_t parts);

/* Number the lanes, and share the CPUs of the calling thread out among the workers. */
void lck_lanes_make(lck_pool *pool);

/* The calling worker takes its class and its place; both are wishes that the kernel may refuse. */
void lck_lane_settle(lck_lane *lane);

/* 1 if a worker with a chunk of the batch can only run here: it does not while the caller does. */
int lck_lanes_behind(lck_pool *pool, const struct lck_batch *batch);

/* Move all workers that hold a chunk of `batch` (NULL: all workers) to the CPU of the caller, who
 * is about to sleep. Returns a bit for each that went. A worker lends nothing. Takes some
 * microseconds for each of them, and may wait for one that runs to be stopped. */
uint64_t lck_lanes_lend(lck_pool *pool, const struct lck_batch *batch);

/* Move those workers to their own CPUs. By the one who lent, not by themselves: its CPU is busy
 * again, so that they would not get to it. */
void lck_lanes_take_home(lck_pool *pool, uint64_t lent);

/* Between two looks at something that another thread is about to change. */
static inline void lck_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#endif
