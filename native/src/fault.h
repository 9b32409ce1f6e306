/* fault.h -- faults for tests, at the place where they happen; compiled out of the release build.
 *
 * A test build (-DLCK_TESTING) exports lck_fault_arm(point, after, error) and
 * lck_fault_delay(point, ns). `after` visits of the point pass, the next one fails with `error`,
 * an errno; the point is then disarmed (after < 0 disarms at once). A delay sleeps at every visit,
 * until it is over or taken back (0).
 * Native tests may also put up a gate, lck_fault_gate(point, open): who visits the point stays
 * until open() says 1 (NULL takes the gate away).
 */
#ifndef LCK_FAULT_H
#define LCK_FAULT_H

#include <stdint.h>

enum lck_fault_point {
  LCK_FAULT_ALLOCATE = 0,   /* fallocate; with other system calls, see calls.h */
  LCK_FAULT_SYNC = 1,       /* fdatasync, fsync */
  LCK_FAULT_COPY = 2,       /* a worker's or helper's chunk */
  LCK_FAULT_INVALIDATE = 3, /* before a slot is invalidated */
  LCK_FAULT_COMMIT = 4,     /* after the payload, before the manifest */
  LCK_FAULT_RECORD = 5,     /* after the manifest, before the record */
  LCK_FAULT_TRUNCATE = 6,   /* ftruncate */
  LCK_FAULT_MAP = 7,        /* mmap of the medium */
  LCK_FAULT_ADVISE = 8,     /* madvise: fault in, keep from children */
  LCK_FAULT_WRITE = 9,      /* pwrite of zeros */
  LCK_FAULT_READ = 10,      /* pread of the superblocks */
  LCK_FAULT_STAT = 11,      /* fstat */
  LCK_FAULT_LIMIT = 12,     /* getrlimit of the file size */
  LCK_FAULT_LOCK = 13,      /* fcntl: owner lock, claim, lease */
  LCK_FAULT_POISON = 14,    /* an access to the mapping: SIGBUS, as from poisoned memory */
  LCK_FAULT_POINTS = 15,
};

#if defined(LCK_TESTING) || defined(LCK_TRACE)
#define LCK_TEST_API __attribute__((visibility("default")))
LCK_TEST_API int lck_fault_arm(uint32_t point, int64_t after, int error);
LCK_TEST_API int lck_fault_delay(uint32_t point, uint64_t ns);
void lck_fault_gate(enum lck_fault_point point, int (*open)(void));
int lck_fault_visit(enum lck_fault_point point); /* 0, or the errno to fail with */
void lck_fault_poison(void *address);            /* SIGBUS there, with 2 MiB lost */
#else
static inline int lck_fault_visit(enum lck_fault_point point) {
  (void)point;
  return 0;
}

static inline void lck_fault_poison(void *address) {
  (void)address;
}
#endif

#endif
