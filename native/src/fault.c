/* fault.c -- arming, delaying and visiting the fault points of test builds. */
#include "fault.h"

#if defined(LCK_TESTING) || defined(LCK_TRACE)

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "error.h"

#define ERROR_BITS 16
#define ERROR_MASK ((UINT64_C(1) << ERROR_BITS) - 1)
#define ONE_VISIT (UINT64_C(1) << ERROR_BITS)
#define SLICE_NS UINT64_C(10000000)

/* One word per point, so that a visit never pairs one arming's count with another's errno:
 * (visits up to and including the failing one) << ERROR_BITS | errno; 0 is disarmed. */
static _Atomic uint64_t armed[LCK_FAULT_POINTS];
static _Atomic uint64_t delay_ns[LCK_FAULT_POINTS];

typedef int gate(void);
static _Atomic(gate *) gates[LCK_FAULT_POINTS];

int lck_fault_arm(uint32_t point, int64_t after, int error) {
  if (point >= LCK_FAULT_POINTS)
    return lck_fail(LCK_E_INVALID, "fault point %u is not below %d", point, LCK_FAULT_POINTS);
  if (after < 0) {
    atomic_store(&armed[point], 0);
    return 0;
  }
  if (error <= 0 || (uint64_t)error > ERROR_MASK || after >= INT64_MAX >> ERROR_BITS)
    return lck_fail(LCK_E_INVALID, "fault after %lld visits with errno %d is out of range",
                    (long long)after, error);
  atomic_store(&armed[point], ((uint64_t)after + 1) * ONE_VISIT | (uint64_t)error);
  return 0;
}

int lck_fault_delay(uint32_t point, uint64_t ns) {
  if (point >= LCK_FAULT_POINTS)
    return lck_fail(LCK_E_INVALID, "fault point %u is not below %d", point, LCK_FAULT_POINTS);
  atomic_store(&delay_ns[point], ns);
  return 0;
}

void lck_fault_gate(enum lck_fault_point point, gate *open) {
  atomic_store(&gates[point], open);
}

/* In slices, and no longer than the delay stands: a test holds a thread for as long as it needs. */
static void linger(enum lck_fault_point point) {
  uint64_t done = 0, whole;
  while ((whole = atomic_load(&delay_ns[point])) > done) {
    uint64_t ns = whole - done < SLICE_NS ? whole - done : SLICE_NS;
    struct timespec left = {.tv_nsec = (long)ns};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    done += ns;
  }
}

static void pass_gate(enum lck_fault_point point) {
  for (gate *open; (open = atomic_load(&gates[point])) && !open();)
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

int lck_fault_visit(enum lck_fault_point point) {
  pass_gate(point);
  linger(point);
  uint64_t word = atomic_load(&armed[point]), next;
  do {
    if (word == 0)
      return 0;
    next = word < 2 * ONE_VISIT ? 0 : word - ONE_VISIT;
  } while (!atomic_compare_exchange_weak(&armed[point], &word, next));
  return next == 0 ? (int)(word & ERROR_MASK) : 0;
}

/* Raise the SIGBUS that the kernel raises for poison under a huge page. */
void lck_fault_poison(void *address) {
  siginfo_t info = {.si_signo = SIGBUS, .si_code = BUS_MCEERR_AR};
  info.si_addr = address;
  info.si_addr_lsb = 21;
  (void)syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS, &info);
}

#endif
