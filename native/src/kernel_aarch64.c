/* kernel_aarch64.c -- the crc32cx instruction and non-temporal store pairs. STNP only hints: the
 * line may stay in the cache, so it must be flushed like any other. */
#if defined(__aarch64__)

#include <arm_acle.h>
#include <sys/auxv.h>

#include "kernel_impl.h"

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

#define LANES_TARGET __attribute__((target("+crc")))

LANES_TARGET LCK_INLINE void stream_pair(unsigned char *to, uint64_t low, uint64_t high) {
  __asm__ volatile("stnp %1, %2, [%0]" : : "r"(to), "r"(low), "r"(high) : "memory");
}

#define LANES_CRC64(state, word) __crc32cd(state, word)
#define LANES_CRC8(state, byte) __crc32cb(state, byte)
#define LANES_STORE(to, low, high) stream_pair(to, low, high)
#include "kernel_lanes.h"

static int usable(void) {
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

const lck_kernel_table lck_kernel_aarch64 = {"aarch64", lanes_copy, lanes_crc, 1, usable};

#endif
