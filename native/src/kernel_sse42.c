/* kernel_sse42.c -- the crc32 instruction and 16-byte non-temporal stores. */
#if defined(__x86_64__)

#include <nmmintrin.h>

#include "kernel_impl.h"

#define LANES_TARGET __attribute__((target("sse4.2,crc32")))

LANES_TARGET LCK_INLINE void stream_pair(unsigned char *to, uint64_t low, uint64_t high) {
  _mm_stream_si128((__m128i *)(void *)to, _mm_set_epi64x((long long)high, (long long)low));
}

#define LANES_CRC64(state, word) (uint32_t)_mm_crc32_u64(state, word)
#define LANES_CRC8(state, byte) _mm_crc32_u8(state, byte)
#define LANES_STORE(to, low, high) stream_pair(to, low, high)
#include "kernel_lanes.h"

static int usable(void) {
  return lck_cpu_has(LCK_CPU_SSE42);
}

const lck_kernel_table lck_kernel_sse42 = {"sse42", lanes_copy, lanes_crc, 0, usable};

#endif
