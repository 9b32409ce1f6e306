/* contention.h -- whether other processes leave the idle workers any CPU.
 *
 * A pool of the idle class has as many workers again, the *reserve*, with the caller's priority.
 * They are asleep while the machine has CPU to spare. They copy what somebody waits for, and, on a
 * *contended* machine, everything. It is contended when a snapshot's copies have made no progress
 * for a part of its window although the process itself leaves CPU unused: then others have it. A
 * process that uses all of its CPUs itself loses least when its copies wait for the fence.
 *
 * After some snapshots the idle workers have another try. It costs little: part of one window. */
#ifndef LCK_CONTENTION_H
#define LCK_CONTENTION_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct lck_contention {
  _Atomic int on;
  _Atomic int watched; /* a worker of the reserve looks at the copies from time to time */

  /* From a snapshot's begin to the first wait for it, the last time; ns, 0: not known yet. */
  _Atomic uint64_t window;

  uint64_t since, moved, used; /* the watcher's last look: ns, bytes, CPU time of the process */
  uint32_t left, term; /* under the pool's lock: snapshots until the next try, now and then */
} lck_contention;

struct lck_pool;
struct lck_snapshot;

/* Note that a snapshot begins. Under the pool's lock. */
void lck_contention_begin_snapshot(struct lck_pool *pool);

/* Note that somebody begins to wait for a snapshot's copies. */
void lck_contention_begin_wait(const struct lck_snapshot *snapshot);

/* Look, as the first worker of the reserve, whether the machine is contended; returns when to look
 * again (monotonic ns; UINT64_MAX: when it is woken). */
uint64_t lck_contention_check(struct lck_pool *pool);

#endif
