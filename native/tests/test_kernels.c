/* test_kernels.c -- every copy kernel that this CPU runs, against a bitwise CRC and memcmp. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "error.h"
#include "fault.h"
#include "kernel.h"

enum { LINE = LCK_LINE, LONGEST = 70 * 1024, CANARY = 0xA5 };

/* The fastest first. */
static const char *const names[] = {"avx512", "avx2", "sse42", "aarch64", "portable"};
enum { NAMES = sizeof(names) / sizeof(names[0]) };

/* One byte of the message at a time, one bit of the byte at a time. */
static uint32_t reference(uint32_t crc, const unsigned char *bytes, uint64_t length) {
  crc = ~crc;
  for (uint64_t i = 0; i < length; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++)
      crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82F63B78) : 0);
  }
  return ~crc;
}

static uint64_t random_state = 1;

static uint64_t random_word(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

/* `length` bytes that end where an inaccessible page begins. */
static unsigned char *guarded(size_t length) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (length + page - 1) / page * page;
  unsigned char *map =
      mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(map != MAP_FAILED, "errno %d", errno);
  CHECK(mprotect(map + whole, page, PROT_NONE) == 0, "errno %d", errno);
  return map + whole - length;
}

/* Lengths to leave out: they have nothing to do with threads. */
enum { STEP = UNDER_TSAN ? 13 : 1 };

static unsigned char *source, *target; /* source: LONGEST bytes up to a guard page */

static void check_copy(const lck_kernel_table *kernel, const unsigned char *from, uint64_t length) {
  const uint64_t padded = (length + LINE - 1) / LINE * LINE;
  const uint32_t start = (uint32_t)random_word();
  const uint32_t expected = reference(start, from, length);
  memset(target, CANARY, padded + 2 * LINE);
  const uint32_t crc = kernel->copy(target + LINE, from, length, start);
  CHECK(crc == expected, "%s: copy CRC of %lu bytes at %p", kernel->name, (unsigned long)length,
        (const void *)from);
  CHECK(kernel->crc(from, length, start) == expected, "%s: CRC of %lu bytes at %p", kernel->name,
        (unsigned long)length, (const void *)from);
  CHECK(memcmp(target + LINE, from, length) == 0, "%s: %lu bytes", kernel->name,
        (unsigned long)length);
  int padding = 1, canaries = 1;
  for (uint64_t i = length; i < padded; i++)
    padding &= target[LINE + i] == 0;
  for (uint64_t i = 0; i < LINE; i++)
    canaries &= target[i] == CANARY && target[LINE + padded + i] == CANARY;
  CHECK(padding, "%s: the last line is padded with zeros, %lu bytes", kernel->name,
        (unsigned long)length);
  CHECK(canaries, "%s: whole lines and nothing else, %lu bytes", kernel->name,
        (unsigned long)length);
}

/* Every length up to the guard page gives every alignment of the start; the second loop varies the
 * alignment with the length fixed. */
static void check_shapes(const lck_kernel_table *kernel) {
  for (uint64_t length = 1; length <= 1100; length += STEP)
    check_copy(kernel, source + LONGEST - length, length);
  for (uint64_t shift = 0; shift < LINE; shift++) {
    for (uint64_t length = 1; length <= 300; length += STEP)
      check_copy(kernel, source + LONGEST - length - shift, length);
    for (uint64_t lines = 2; lines <= 16; lines++)
      for (uint64_t length = lines * LINE - 1; length <= lines * LINE + 1; length++)
        check_copy(kernel, source + LONGEST - length - shift, length);
  }
  for (uint64_t unit = 1024; unit <= 65536; unit *= 2)
    for (uint64_t length = unit - 1; length <= unit + 1; length++)
      for (uint64_t shift = 0; shift < LINE; shift += 7 * STEP)
        check_copy(kernel, source + LONGEST - length - shift, length);
  for (uint64_t length = 3 * 1024 - 65; length < 3 * 1024 + 66; length += STEP)
    check_copy(kernel, source + LONGEST - length, length);
  for (int i = 0; i < 300; i += STEP) {
    const uint64_t shift = random_word() % LINE, length = 1 + random_word() % (LONGEST - LINE);
    check_copy(kernel, source + LONGEST - length - shift, length);
  }
}

static void check_vectors(const lck_kernel_table *kernel) {
  unsigned char bytes[32];
  memset(bytes, 0, sizeof(bytes));
  CHECK(lck_crc32c(0, "123456789", 9) == 0xE3069283, "%s", kernel->name);
  CHECK(lck_crc32c(0, bytes, 32) == 0x8A9136AA, "%s", kernel->name);
  memset(bytes, 0xFF, sizeof(bytes));
  CHECK(lck_crc32c(0, bytes, 32) == 0x62A8AB43, "%s", kernel->name);
  for (unsigned i = 0; i < 32; i++)
    bytes[i] = (unsigned char)i;
  CHECK(lck_crc32c(0, bytes, 32) == 0x46DD794E, "%s", kernel->name);
  CHECK(lck_crc32c(7, bytes, 0) == 7, "%s: nothing changes nothing", kernel->name);
}

static void check_splits(const lck_kernel_table *kernel) {
  const uint32_t whole = reference(0, source, LONGEST);
  for (int i = 0; i < 500; i += STEP) {
    uint32_t copied = 0, crc = 0, combined = 0;
    for (uint64_t at = 0, length; at < LONGEST; at += length) {
      length = 1 + random_word() % (i % 2 ? 40000 : 4000);
      if (length > LONGEST - at)
        length = LONGEST - at;
      copied = kernel->copy(target, source + at, length, copied);
      crc = kernel->crc(source + at, length, crc);
      combined = lck_crc32c_combine(combined, kernel->crc(source + at, length, 0), length);
    }
    CHECK(copied == whole, "%s", kernel->name);
    CHECK(crc == whole, "%s", kernel->name);
    CHECK(combined == whole, "%s", kernel->name);
  }
}

/* Lengths that no buffer could hold, by doubling: the CRC of 2n zero bytes from that of n. */
static void check_combine(void) {
  CHECK(lck_crc32c_combine(0x12345678, 0, 0) == 0x12345678);
  CHECK(lck_crc32c_combine(0, 0x12345678, 1000) == 0x12345678);
  unsigned char zeros[2] = {0};
  uint32_t crc = reference(0, zeros, 1), next = reference(0, zeros, 2), by_halves;
  for (int k = 0; k < 62; k++) {
    CHECK(lck_crc32c_combine(crc, crc, UINT64_C(1) << k) == next, "2^%d", k);
    crc = next;
    next = lck_crc32c_combine(crc, crc, UINT64_C(2) << k);
    const uint64_t odd = random_word() >> 2, half = odd / 3;
    by_halves = lck_crc32c_combine(lck_crc32c_combine(crc, 5, half), 0, odd - half);
    CHECK(by_halves == lck_crc32c_combine(crc, lck_crc32c_combine(5, 0, odd - half), odd));
  }
}

static _Atomic int mutating;

static void *mutate(void *unused) {
  (void)unused;
  volatile uint64_t *words = (volatile uint64_t *)(void *)source;
  for (uint64_t value = 1; atomic_load_explicit(&mutating, memory_order_relaxed); value++)
    for (uint64_t i = 0; i < LONGEST / 8; i++)
      words[i] = value * UINT64_C(0x9E3779B97F4A7C15);
  return NULL;
}

static void check_mutation(const lck_kernel_table *kernel) {
  const uint64_t lengths[] = {13, 63, 64, 200, 777, 4096 + 51, LONGEST};
  pthread_t thread;
  atomic_store(&mutating, 1);
  CHECK(pthread_create(&thread, NULL, mutate, NULL) == 0);
  for (int i = 0; i < 7000; i++) {
    const uint64_t length = lengths[i % 7], shift = random_word() % LINE;
    const unsigned char *from = source + (length + shift > LONGEST ? 0 : shift);
    const uint32_t crc = kernel->copy(target, from, length, 0);
    CHECK(crc == kernel->crc(target, length, 0), "%s: %lu bytes", kernel->name,
          (unsigned long)length);
  }
  atomic_store(&mutating, 0);
  CHECK(pthread_join(thread, NULL) == 0);
}

#if defined(__x86_64__)
/* What gcc's own library says is what is found without it; that of `zig cc` says no to everything.
 */
#define SAME(feature, name)                                                                        \
  CHECK(lck_cpu_has(feature) == (__builtin_cpu_supports(name) != 0), "%s", name)
static void check_cpu(void) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse2"))
    return;
  SAME(LCK_CPU_SSE42, "sse4.2");
  SAME(LCK_CPU_PCLMUL, "pclmul");
  SAME(LCK_CPU_FMA, "fma");
  SAME(LCK_CPU_AVX2, "avx2");
  SAME(LCK_CPU_VPCLMULQDQ, "vpclmulqdq");
  SAME(LCK_CPU_AVX512F, "avx512f");
  SAME(LCK_CPU_AVX512DQ, "avx512dq");
  SAME(LCK_CPU_AVX512BW, "avx512bw");
  SAME(LCK_CPU_AVX512VL, "avx512vl");
  CHECK(lck_cpu_has(0) && !lck_cpu_has(UINT32_C(1) << 31), "all that are asked for must be there");
}
#endif

static void check_kernels(void) {
  const char *fastest = NULL, *name = NULL;
  int usable = 0;
  CHECK(lck_kernel(NULL, &fastest) == 0 && fastest != NULL);
  for (int i = 0; i < NAMES; i++) {
    const int code = lck_kernel(names[i], &name);
    if (code != 0) {
      CHECK(code == LCK_E_INVALID, "%d", code);
      CHECK(strstr(lck_last_error(), names[i]) != NULL, "%s", lck_last_error());
      printf("%s: skipped: %s\n", names[i], lck_last_error());
      continue;
    }
    CHECK(strcmp(name, names[i]) == 0, "%s", name);
    CHECK(usable++ > 0 || strcmp(name, fastest) == 0, "%s is not the default %s", name, fastest);
    const lck_kernel_table *kernel = lck_kernel_current();
    CHECK(strcmp(kernel->name, name) == 0, "%s", kernel->name);
    check_vectors(kernel);
    check_shapes(kernel);
    check_splits(kernel);
    if (!UNDER_TSAN)
      check_mutation(kernel);
    printf("%s: ok\n", name);
  }
  if (UNDER_TSAN)
    printf("SKIPPED: sources that change under a copy: a race on purpose, and 12 of 13 lengths\n");
  CHECK(usable >= 1);
  CHECK(lck_kernel(fastest, &name) == 0);
  const char *const wrong[] = {"", "AVX2", "avx", "portable "};
  for (int i = 0; i < 4; i++) {
    const char *before = name;
    CHECK(lck_kernel(wrong[i], &name) == LCK_E_INVALID, "\"%s\"", wrong[i]);
    CHECK(name == before, "written only on success");
    CHECK(strcmp(lck_kernel_current()->name, fastest) == 0, "kept the present kernel");
  }
}

static void *other_thread_error(void *unused) {
  (void)unused;
  return (void *)(uintptr_t)(lck_last_error()[0] == '\0');
}

static void check_errors(void) {
  CHECK(lck_abi_version() == LCK_ABI);
  CHECK(lck_last_error() != NULL && lck_last_error()[0] == '\0');
  errno = ENOSPC;
  CHECK(lck_fail_errno(LCK_E_FULL, "need %d bytes", 42) == LCK_E_FULL);
  CHECK(strstr(lck_last_error(), "need 42 bytes: ") == lck_last_error(), "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), strerror(ENOSPC)) != NULL, "%s", lck_last_error());
  CHECK(errno == ENOSPC);
  CHECK(lck_fail(LCK_E_IO, "a; %s", lck_last_error()) == LCK_E_IO);
  CHECK(strstr(lck_last_error(), "a; need 42") == lck_last_error(), "%s", lck_last_error());
  pthread_t thread;
  void *empty = NULL;
  CHECK(pthread_create(&thread, NULL, other_thread_error, NULL) == 0);
  CHECK(pthread_join(thread, &empty) == 0 && empty != NULL, "the text is the thread's own");
  char text[2000];
  memset(text, 'x', sizeof(text) - 1);
  text[sizeof(text) - 1] = '\0';
  CHECK(lck_fail_errno(LCK_E_IO, "%s", text) == LCK_E_IO);
  CHECK(strlen(lck_last_error()) < sizeof(text) - 1);
}

#ifdef LCK_TESTING
static void *visit_many(void *failed) {
  for (int i = 0; i < 10000; i++)
    if (lck_fault_visit(LCK_FAULT_COPY) != 0)
      atomic_fetch_add((_Atomic int *)failed, 1);
  return NULL;
}

static void check_faults(void) {
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == 0);
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 2, EIO) == 0);
  CHECK(lck_fault_visit(LCK_FAULT_ALLOCATE) == 0);
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == 0);
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == 0);
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == EIO);
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == 0, "disarmed by failing");
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 0, ENOSPC) == 0);
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == ENOSPC);
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 0, EIO) == 0);
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, -1, 0) == 0);
  CHECK(lck_fault_visit(LCK_FAULT_SYNC) == 0, "disarmed at once");
  CHECK(lck_fault_arm(LCK_FAULT_POINTS, 0, EIO) == LCK_E_INVALID);
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 0, 0) == LCK_E_INVALID);
  CHECK(lck_fault_delay(LCK_FAULT_POINTS, 1) == LCK_E_INVALID);

  _Atomic int failed = 0;
  pthread_t threads[4];
  CHECK(lck_fault_arm(LCK_FAULT_COPY, 25000, EIO) == 0);
  for (int i = 0; i < 4; i++)
    CHECK(pthread_create(&threads[i], NULL, visit_many, &failed) == 0);
  for (int i = 0; i < 4; i++)
    CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(failed == 1, "%d threads failed", failed);

  struct timespec before, after;
  CHECK(lck_fault_delay(LCK_FAULT_RECORD, 20000000) == 0);
  clock_gettime(CLOCK_MONOTONIC, &before);
  CHECK(lck_fault_visit(LCK_FAULT_RECORD) == 0);
  clock_gettime(CLOCK_MONOTONIC, &after);
  CHECK((after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec >= 20000000);
  CHECK(lck_fault_delay(LCK_FAULT_RECORD, 0) == 0);
}
#endif

int main(void) {
  source = guarded(LONGEST);
  target = aligned_alloc(LINE, (LONGEST + LINE - 1) / LINE * LINE + 2 * LINE);
  CHECK(target != NULL);
  for (uint64_t i = 0; i < LONGEST; i++)
    source[i] = (unsigned char)(random_word() >> 32);
  check_errors();
  check_combine();
#if defined(__x86_64__)
  check_cpu();
#endif
  check_kernels();
#ifdef LCK_TESTING
  check_faults();
#endif
  free(target);
  return checks_end();
}
