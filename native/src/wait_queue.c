/* wait_queue.c -- the two system calls of a wait queue. */
#include "wait_queue.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A sleeper counts itself, then the kernel compares; who wakes counts, then reads the sleepers.
 * Both in the one order of sequentially consistent operations, so that one of them sees the other.
 */
void lck_wait_queue_sleep(lck_wait_queue *queue, uint32_t count, uint64_t deadline) {
  struct timespec until = {.tv_sec = (time_t)(deadline / UINT64_C(1000000000)),
                           .tv_nsec = (long)(deadline % UINT64_C(1000000000))};
  atomic_fetch_add(&queue->sleepers, 1);
  (void)syscall(SYS_futex, &queue->wakes, FUTEX_WAIT_BITSET_PRIVATE, count,
                deadline == UINT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
  atomic_fetch_sub(&queue->sleepers, 1);
}

void lck_wait_queue_wake(lck_wait_queue *queue) {
  atomic_fetch_add(&queue->wakes, 1);
  if (atomic_load(&queue->sleepers) > 0)
    (void)syscall(SYS_futex, &queue->wakes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
