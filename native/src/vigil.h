/* vigil.h -- waiting for what workers do, without leaving them to starve; see lane.h. */
#ifndef LCK_VIGIL_H
#define LCK_VIGIL_H

#include "snapshot.h"

/* Somebody who waits. */
typedef struct lck_vigil {
  lck_snapshot *snapshot;
  const lck_batch *batch; /* NULL: all of the snapshot's */
  uint64_t finished;      /* chunks of it, at the last look; LCK_ALL: not looked yet */
  uint64_t lent;          /* workers, a bit each */
} lck_vigil;

/* Look how far the workers are: they are left alone while they get on. */
void lck_vigil_look(lck_vigil *vigil);

/* Sleep, under the pool's lock, until there may be something to see. Workers that got nothing done
 * meanwhile are lent a CPU; others are left alone, because many get more done on their own CPUs
 * than all of them here. */
void lck_vigil_keep(lck_vigil *vigil, uint64_t deadline);

/* Take home whoever was lent. */
void lck_vigil_end(const lck_vigil *vigil);

/* The time after `timeout_ns`; LCK_ALL for a negative one. */
uint64_t lck_deadline_of(int64_t timeout_ns);

#endif
