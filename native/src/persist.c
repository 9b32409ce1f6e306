#include "persist.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "fault.h"
#include "guard.h"
#include "kernel.h"
#include "mutant.h"
#include "region.h"
#include "trace.h"

/* ---- the CPU's flush and fence ------------------------------------------------------------ */

enum flush_method { FLUSH_UNKNOWN = 0, FLUSH_CLWB, FLUSH_CLFLUSHOPT, FLUSH_CLFLUSH, FLUSH_DC };

#if defined(__x86_64__)

#include <cpuid.h>

/* The clobber keeps the compiler from moving a store to the line's other bytes behind its flush. */
#define EACH_LINE(instruction)                                                                     \
  for (; line < end; line += LCK_LINE)                                                             \
  __asm__ volatile(instruction " %0" : "+m"(*(volatile char *)line)::"memory")

static enum flush_method choose_method(void) {
  unsigned eax, ebx = 0, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
    return FLUSH_CLFLUSH;
  if (ebx & (1u << 24))
    return FLUSH_CLWB;
  return ebx & (1u << 23) ? FLUSH_CLFLUSHOPT : FLUSH_CLFLUSH;
}

static void flush_range(enum flush_method method, unsigned char *line, const unsigned char *end) {
  if (method == FLUSH_CLWB)
    EACH_LINE("clwb");
  else if (method == FLUSH_CLFLUSHOPT)
    EACH_LINE("clflushopt");
  else
    EACH_LINE("clflush");
}

/* sfence is kept on every medium: non-temporal stores wait in buffers that no cache covers, nor any
 * other CPU or the kernel sees. A bare clflush is ordered on AMD by mfence only, which drains those
 * buffers too. */
static void fence(enum flush_method method) {
  if (method == FLUSH_CLFLUSH)
    __asm__ volatile("mfence" ::: "memory");
  else
    __asm__ volatile("sfence" ::: "memory");
}

#elif defined(__aarch64__)

#include <sys/auxv.h>

#define HAS_DCPOP (1ul << 16)

/* Written as sys instructions: assemblers refuse "dc cvap" below ARMv8.2. */
#define EACH_LINE(operation)                                                                       \
  for (; line < end; line += LCK_LINE)                                                             \
  __asm__ volatile("sys #3, c7, " operation ", #1, %0" ::"r"(line) : "memory")

static enum flush_method choose_method(void) {
  return FLUSH_DC;
}

static void flush_range(enum flush_method method, unsigned char *line, const unsigned char *end) {
  (void)method;
  if (getauxval(AT_HWCAP) & HAS_DCPOP)
    EACH_LINE("c12"); /* dc cvap: to the point of persistence */
  else
    EACH_LINE("c10"); /* dc cvac: to the point of coherency */
}

static void fence(enum flush_method method) {
  (void)method;
  __asm__ volatile("dsb sy" ::: "memory");
}

#else
#error "no cache line flush is known for this CPU"
#endif

/* Chosen once; a race chooses the same twice. */
static enum flush_method current_method(void) {
  static int chosen = FLUSH_UNKNOWN;
  int method = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
  if (method == FLUSH_UNKNOWN) {
    method = (int)choose_method();
    __atomic_store_n(&chosen, method, __ATOMIC_RELAXED);
  }
  return (enum flush_method)method;
}

static void flush(const lck_region *region, uint64_t offset, uint64_t length) {
  if (length == 0)
    return;
  uint64_t first = offset & ~(uint64_t)(LCK_LINE - 1);
  if (region->flush != NULL)
    region->flush(region->base + offset, length);
  else if (region->granularity == LCK_GRAN_LINE)
    flush_range(current_method(), region->base + first, region->base + offset + length);
  else
    return;
  lck_trace(LCK_TRACE_FLUSH, region, offset, length);
}

/* The kernels' non-temporal stores are ours, and so is their fence, whoever else has one. */
static void fence_here(const lck_region *region) {
  fence(current_method());
  if (region != NULL && region->drain != NULL)
    region->drain();
  lck_trace(LCK_TRACE_FENCE, NULL, 0, 0);
}

/* ---- stores ------------------------------------------------------------------------------- */

void lck_persist_payload(lck_region *region, uint64_t offset, const void *source, uint64_t length,
                         uint32_t *crc) {
  const lck_kernel_table *kernel = lck_kernel_current();
  *crc = kernel->copy(lck_guard_store(region, offset), source, length, *crc);
  lck_trace_payload(region, offset, length, kernel->cached);
  if (kernel->cached && !LCK_MUTANT(MUTANT_PAYLOAD_NOT_FLUSHED))
    flush(region, offset, length);
}

void lck_persist_store(lck_region *region, uint64_t offset, const void *bytes, uint64_t length) {
  if (length == 0)
    return;
  memcpy(lck_guard_store(region, offset), bytes, length);
  lck_trace(LCK_TRACE_STORE, region, offset, length);
  flush(region, offset, length);
}

void lck_persist_publish(lck_region *region, uint64_t offset, uint64_t word) {
  /* A plain store may be torn or repeated by the compiler; an atomic one may not. */
  __atomic_store_n((uint64_t *)(void *)lck_guard_store(region, offset), word, __ATOMIC_RELEASE);
  lck_trace(LCK_TRACE_STORE, region, offset, sizeof(word));
  flush(region, offset, sizeof(word));
}

void lck_persist_note(lck_region *region, uint64_t offset, const void *bytes, uint64_t length) {
  uint64_t *turn = (uint64_t *)(void *)lck_guard_store(region, offset);
  uint64_t odd = __atomic_load_n(turn, __ATOMIC_RELAXED) | 1;
  __atomic_exchange_n(turn, odd, __ATOMIC_SEQ_CST);
  memcpy(turn + 1, (const unsigned char *)bytes + sizeof(*turn), length - sizeof(*turn));
  __atomic_store_n(turn, odd + 1, __ATOMIC_RELEASE);
  lck_trace(LCK_TRACE_STORE, region, offset, length);
}

void lck_persist_touch(lck_region *region, uint64_t offset, uint64_t length) {
  uint64_t step = (uint64_t)sysconf(_SC_PAGESIZE);
  for (uint64_t at = offset; at < offset + length; at += step) {
    volatile unsigned char *byte = lck_guard_store(region, at);
    *byte = *byte;
  }
}

/* ---- order -------------------------------------------------------------------------------- */

void lck_persist_fence(lck_region *region) {
  fence_here(region);
}

/* After a failed sync the kernel may count dirty pages as clean: a retry that succeeds would
 * promise what never reached the medium. Nor does it report the failure twice: of two threads whose
 * pages were lost the second would hear of none, but for the latch. Under region->sync. */
static int sync_file(lck_region *region) {
  int latched = atomic_load(&region->latched);
  if (latched != 0)
    return lck_fail(LCK_E_PREVIOUS, "the region is latched by an earlier failure, code %d",
                    latched);
  int error = lck_fault_visit(LCK_FAULT_SYNC);
  if (error == 0 && fdatasync(region->fd) == 0)
    return 0;
  if (LCK_MUTANT(MUTANT_SYNC_RETRIED)) {
    lck_trace(LCK_TRACE_SYNC_FAILED, region, 0, 0);
    return 0;
  }
  if (error != 0)
    errno = error;
  return lck_region_latch(region, lck_fail_errno(LCK_E_IO, "fdatasync of the region's file"));
}

int lck_persist_sync(lck_region *region) {
  fence_here(region);
  if (region->granularity != LCK_GRAN_PAGE)
    return 0;
  pthread_mutex_lock(&region->sync);
  lck_trace(LCK_TRACE_SYNC_BEGIN, region, 0, 0);
  int rc = sync_file(region);
  if (rc == 0)
    lck_trace(LCK_TRACE_SYNC, region, 0, 0);
  else
    lck_trace(LCK_TRACE_SYNC_FAILED, region, 0, 0);
  pthread_mutex_unlock(&region->sync);
  return rc;
}

int lck_persist_adopt(lck_region *region) {
  uint64_t end = region->super.journal_offset + region->super.journal_length;
  int touch = region->granularity == LCK_GRAN_LINE || region->granularity == LCK_GRAN_PAGE;
  if (touch && !LCK_MUTANT(MUTANT_ADOPTED_CLEAN)) {
    lck_persist_touch(region, 0, end);
    lck_trace(LCK_TRACE_TOUCH, region, 0, end);
  }
  flush(region, 0, end);
  return lck_persist_sync(region);
}
