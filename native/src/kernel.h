/* kernel.h -- copy kernels: one table per instruction set, chosen once by cpuid. */
#ifndef LCK_KERNEL_H
#define LCK_KERNEL_H

#include <stdint.h>

typedef struct lck_kernel_table {
  const char *name;
  /* Copy `length` > 0 bytes to `line` (64-byte aligned) and return the CRC32C of exactly those
   * bytes, continuing from `crc`. Every source byte is loaded once, so the CRC describes what was
   * stored even while the source changes. Whole lines are written: the last one is padded with
   * zeros. `source` has any alignment and is not read beyond its length. */
  uint32_t (*copy)(void *line, const void *source, uint64_t length, uint32_t crc);
  uint32_t (*crc)(const void *bytes, uint64_t length, uint32_t crc);
  int cached; /* 1: stores go through the cache, so the lines must be flushed; 0: non-temporal */
  int (*usable)(void);
} lck_kernel_table;

#if defined(__x86_64__)
/* Instructions that this CPU has and the operating system saves the registers of. */
enum {
  LCK_CPU_SSE42 = 1 << 0,
  LCK_CPU_PCLMUL = 1 << 1,
  LCK_CPU_F16C = 1 << 2,
  LCK_CPU_FMA = 1 << 3,
  LCK_CPU_AVX2 = 1 << 4,
  LCK_CPU_VPCLMULQDQ = 1 << 5,
  LCK_CPU_AVX512F = 1 << 6,
  LCK_CPU_AVX512DQ = 1 << 7,
  LCK_CPU_AVX512BW = 1 << 8,
  LCK_CPU_AVX512VL = 1 << 9,
};

/* Whether all of these are there. */
int lck_cpu_has(uint32_t features);
#endif

/* The kernel in use. Never NULL. */
const lck_kernel_table *lck_kernel_current(void);

#endif
