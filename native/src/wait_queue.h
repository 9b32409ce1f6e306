/* wait_queue.h -- threads that sleep until another one wakes them, without a lock.
 *
 * A thread that waits for something reads the count, looks whether it is there, and sleeps on that
 * count; whoever has made it wakes the queue. A wake between the two makes the sleep return at
 * once, so that none is missed. Neither ever holds anything that the other has to wait for: an
 * idle-class thread that has lost its CPU in here holds nobody up. */
#ifndef LCK_WAIT_QUEUE_H
#define LCK_WAIT_QUEUE_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct lck_wait_queue {
  _Atomic uint32_t wakes;
  _Atomic uint32_t
      sleepers; /* counted before the kernel compares `wakes`: see lck_wait_queue_wake */
} lck_wait_queue;

/* Return the count of wakes, to be read before looking for what is waited for. */
static inline uint32_t lck_wait_queue_count(const lck_wait_queue *queue) {
  return atomic_load(&queue->wakes);
}

/* Sleep until the queue was woken since `count` was read, or about `deadline` (monotonic ns;
 * UINT64_MAX: none); it may also return for no reason. */
void lck_wait_queue_sleep(lck_wait_queue *queue, uint32_t count, uint64_t deadline);

/* Wake every sleeper. Makes a system call only if there is one. */
void lck_wait_queue_wake(lck_wait_queue *queue);

#endif
