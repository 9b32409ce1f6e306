/* bell.h -- sleeping until somebody rings, without a lock.
 *
 * Who waits for something reads the count, looks whether it is there, and sleeps on that count; who
 * has made it rings. A ring between the two makes the sleep return at once, so that none is missed.
 * Neither ever holds anything that the other has to wait for: an idle-class thread that has lost
 * its CPU in here holds nobody up. */
#ifndef LCK_BELL_H
#define LCK_BELL_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct lck_bell {
  _Atomic uint32_t rung;
  _Atomic uint32_t sleepers; /* counted before the kernel compares `rung`: see lck_bell_ring */
} lck_bell;

/* The count, to be read before looking. */
static inline uint32_t lck_bell_count(const lck_bell *bell) {
  return atomic_load(&bell->rung);
}

/* Return when it has rung since `count` was read, at about `deadline` (monotonic ns; UINT64_MAX:
 * none), or for no reason. */
void lck_bell_sleep(lck_bell *bell, uint32_t count, uint64_t deadline);

/* Wake all who sleep. A system call only if somebody does. */
void lck_bell_ring(lck_bell *bell);

#endif
