/* fault.h -- faults for tests, at the place where they happen; compiled out of the release build.
 *
 * A test build (-DLCK_TESTING) exports lck_fault_arm(point, after, error) and
 * lck_fault_delay(point, ns). `after` visits of the point pass, the next one fails with `error`,
 * an errno; the point is then disarmed (after < 0 disarms at once). A delay sleeps at every visit.
 */
#ifndef LCK_FAULT_H
#define LCK_FAULT_H

#include <stdint.h>

enum lck_fault_point {
  LCK_FAULT_ALLOCATE = 0,   /* posix_fallocate of a new segment */
  LCK_FAULT_SYNC = 1,       /* msync or fdatasync */
  LCK_FAULT_COPY = 2,       /* a worker's or helper's chunk */
  LCK_FAULT_INVALIDATE = 3, /* before a slot is invalidated */
  LCK_FAULT_COMMIT = 4,     /* after the payload, before the manifest */
  LCK_FAULT_RECORD = 5,     /* after the manifest, before the record */
  LCK_FAULT_POINTS = 6,
};

#if defined(LCK_TESTING) || defined(LCK_TRACE)
#define LCK_TEST_API __attribute__((visibility("default")))
LCK_TEST_API int lck_fault_arm(uint32_t point, int64_t after, int error);
LCK_TEST_API int lck_fault_delay(uint32_t point, uint64_t ns);
int lck_fault_visit(enum lck_fault_point point); /* 0, or the errno to fail with */
#else
static inline int lck_fault_visit(enum lck_fault_point point) {
  (void)point;
  return 0;
}
#endif

#endif
