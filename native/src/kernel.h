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

/* The kernel in use. Never NULL. */
const lck_kernel_table *lck_kernel_current(void);

#endif
