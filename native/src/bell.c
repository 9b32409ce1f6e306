#include "bell.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A sleeper counts itself, then the kernel compares; who rings counts, then reads the sleepers.
 * Both in the one order of sequentially consistent operations, so that one of them sees the other.
 */
void lck_bell_sleep(lck_bell *bell, uint32_t count, uint64_t deadline) {
  struct timespec until = {.tv_sec = (time_t)(deadline / UINT64_C(1000000000)),
                           .tv_nsec = (long)(deadline % UINT64_C(1000000000))};
  atomic_fetch_add(&bell->sleepers, 1);
  (void)syscall(SYS_futex, &bell->rung, FUTEX_WAIT_BITSET_PRIVATE, count,
                deadline == UINT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
  atomic_fetch_sub(&bell->sleepers, 1);
}

void lck_bell_ring(lck_bell *bell) {
  atomic_fetch_add(&bell->rung, 1);
  if (atomic_load(&bell->sleepers) > 0)
    (void)syscall(SYS_futex, &bell->rung, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
