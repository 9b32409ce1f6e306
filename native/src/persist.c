/* persist.c -- the only code that stores to a region, flushes its lines and syncs its file. */
#include "persist.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "access.h"
#include "calls.h"
#include "error.h"
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
  if (length == 0 || region->granularity != LCK_GRAN_LINE)
    return;
  uint64_t first = offset & ~(uint64_t)(LCK_LINE - 1);
  flush_range(current_method(), region->base + first, region->base + offset + length);
  lck_trace(LCK_TRACE_FLUSH, region, offset, length);
}

/* ---- stores ------------------------------------------------------------------------------- */

typedef struct change {
  lck_region *region;
  uint64_t offset;
  const void *bytes;
  uint64_t length, word;
  uint32_t *crc;
} change;

static void put_payload(void *argument) {
  const change to = *(const change *)argument;
  lck_region *region = to.region;
  const lck_kernel_table *kernel = lck_kernel_current();
  *to.crc = kernel->copy(lck_guard_store(region, to.offset), to.bytes, to.length, *to.crc);
  lck_trace_payload(region, to.offset, to.length, kernel->cached);
  if (kernel->cached && !LCK_MUTANT(MUTANT_PAYLOAD_NOT_FLUSHED))
    flush(region, to.offset, to.length);
}

static void hash_in_place(void *argument) {
  const change to = *(const change *)argument;
  lck_region *region = to.region;
  uint64_t padding = (LCK_LINE - to.length % LCK_LINE) % LCK_LINE;
  *to.crc = lck_kernel_current()->crc(region->base + to.offset, to.length, *to.crc);
  memset(lck_guard_store(region, to.offset + to.length), 0, padding);
  lck_trace_payload(region, to.offset, to.length, 1);
  if (!LCK_MUTANT(MUTANT_PAYLOAD_NOT_FLUSHED))
    flush(region, to.offset, to.length + padding);
}

static void put_bytes(void *argument) {
  const change to = *(const change *)argument;
  memcpy(lck_guard_store(to.region, to.offset), to.bytes, to.length);
  lck_trace(LCK_TRACE_STORE, to.region, to.offset, to.length);
  flush(to.region, to.offset, to.length);
}

static void put_word(void *argument) {
  const change to = *(const change *)argument;
  uint64_t *there = (uint64_t *)(void *)lck_guard_store(to.region, to.offset);
  /* A plain store may be torn or repeated by the compiler; an atomic one may not. */
  __atomic_store_n(there, to.word, __ATOMIC_RELEASE);
  lck_trace(LCK_TRACE_STORE, to.region, to.offset, sizeof(to.word));
  flush(to.region, to.offset, sizeof(to.word));
}

static void put_note(void *argument) {
  const change to = *(const change *)argument;
  uint64_t *turn = (uint64_t *)(void *)lck_guard_store(to.region, to.offset);
  uint64_t odd = __atomic_load_n(turn, __ATOMIC_RELAXED) | 1;
  __atomic_exchange_n(turn, odd, __ATOMIC_SEQ_CST);
  memcpy(turn + 1, (const unsigned char *)to.bytes + sizeof(*turn), to.length - sizeof(*turn));
  __atomic_store_n(turn, odd + 1, __ATOMIC_RELEASE);
  lck_trace(LCK_TRACE_STORE, to.region, to.offset, to.length);
}

static void touch(void *argument) {
  const change to = *(const change *)argument;
  uint64_t step = (uint64_t)sysconf(_SC_PAGESIZE);
  for (uint64_t at = to.offset; at < to.offset + to.length; at += step) {
    volatile unsigned char *byte = lck_guard_store(to.region, at);
    *byte = *byte;
    lck_trace(LCK_TRACE_STORE, to.region, at, 1);
  }
}

static void flush_all(void *argument) {
  const change to = *(const change *)argument;
  flush(to.region, to.offset, to.length);
}

int lck_persist_payload(lck_region *region, uint64_t offset, const void *source, uint64_t length,
                        uint32_t *crc) {
  change to = {.region = region, .offset = offset, .bytes = source, .length = length, .crc = crc};
  return lck_access_run(region, put_payload, &to);
}

unsigned char *lck_persist_stream_to(lck_region *region, uint64_t offset) {
  return lck_guard_store(region, offset);
}

void lck_persist_streamed(lck_region *region, uint64_t offset, uint64_t length) {
  lck_trace_payload(region, offset, length, 0);
}

int lck_persist_in_place(lck_region *region, uint64_t offset, uint64_t length, uint32_t *crc) {
  change to = {.region = region, .offset = offset, .length = length, .crc = crc};
  return lck_access_run(region, hash_in_place, &to);
}

int lck_persist_store(lck_region *region, uint64_t offset, const void *bytes, uint64_t length) {
  change to = {.region = region, .offset = offset, .bytes = bytes, .length = length};
  return length == 0 ? 0 : lck_access_run(region, put_bytes, &to);
}

int lck_persist_publish(lck_region *region, uint64_t offset, uint64_t word) {
  change to = {.region = region, .offset = offset, .word = word};
  return lck_access_run(region, put_word, &to);
}

int lck_persist_note(lck_region *region, uint64_t offset, const void *bytes, uint64_t length) {
  change to = {.region = region, .offset = offset, .bytes = bytes, .length = length};
  return lck_access_run(region, put_note, &to);
}

int lck_persist_touch(lck_region *region, uint64_t offset, uint64_t length) {
  change to = {.region = region, .offset = offset, .length = length};
  return lck_access_run(region, touch, &to);
}

/* ---- order -------------------------------------------------------------------------------- */

void lck_persist_fence(void) {
  fence(current_method());
  lck_trace(LCK_TRACE_FENCE, NULL, 0, 0);
}

/* After a failed sync the kernel may count dirty pages as clean: a retry that succeeds would
 * promise what never reached the medium. Nor does it report the failure twice: of two threads whose
 * pages were lost the second would hear of none, but for the latch. Under region->sync. */
static int sync_file(lck_region *region) {
  int rc = lck_region_previous(region);
  if (rc != 0)
    return rc;
  if (lck_call_fdatasync(region->fd) == 0)
    return 0;
  if (LCK_MUTANT(MUTANT_SYNC_RETRIED)) {
    lck_trace(LCK_TRACE_SYNC_FAILED, region, 0, 0);
    return 0;
  }
  return lck_region_latch(region, lck_fail_errno(LCK_E_IO, "fdatasync of the region's file"));
}

int lck_persist_sync(lck_region *region) {
  lck_persist_fence();
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
  change all = {.region = region,
                .length = region->super.journal_offset + region->super.journal_length};
  int touched = region->granularity == LCK_GRAN_LINE || region->granularity == LCK_GRAN_PAGE;
  int rc = 0;
  if (touched && !LCK_MUTANT(MUTANT_ADOPTED_CLEAN)) {
    rc = lck_persist_touch(region, 0, all.length);
    lck_trace(LCK_TRACE_TOUCH, region, 0, all.length);
  }
  if (rc == 0)
    rc = lck_access_run(region, flush_all, &all);
  return rc != 0 ? rc : lck_persist_sync(region);
}
