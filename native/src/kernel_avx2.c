/* kernel_avx2.c -- 32-byte non-temporal stores and 128-bit carry-less multiply. */
#if defined(__x86_64__)

#include "kernel_x86.h"

#define AVX2_TARGET __attribute__((target("avx2,pclmul,sse4.2,crc32")))

enum { BLOCK = 2 * LCK_LINE };

/* Load a line, store it, and split it into 128-bit parts. */
AVX2_TARGET LCK_INLINE void take(__m128i *x, unsigned char *to, const unsigned char *from,
                                 uint64_t at, int store) {
  LCK_PREFETCH(from + at);
  for (int half = 0; half < 2; half++, at += 32) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(from + at));
    __asm__("" : "+x"(bytes));
    if (store)
      _mm256_stream_si256((__m256i *)(void *)(to + at), bytes);
    x[2 * half] = _mm256_castsi256_si128(bytes);
    x[2 * half + 1] = _mm256_extracti128_si256(bytes, 1);
  }
}

AVX2_TARGET LCK_INLINE void fold_parts(__m128i *x, __m128i constants, const __m128i *ahead) {
  for (int i = 0; i < 4; i++)
    x[i] = fold(x[i], constants, ahead[i]);
}

/* The state after `length` > 0 bytes of whole lines. */
AVX2_TARGET LCK_INLINE uint32_t fold_lines(unsigned char *to, const unsigned char *from,
                                           uint64_t length, uint32_t state, int store) {
  const __m128i by_line = _mm_set_epi64x(FOLD_512_HIGH, FOLD_512_LOW);
  const __m128i by_block = _mm_set_epi64x(FOLD_1024_HIGH, FOLD_1024_LOW);
  __m128i x[4], y[4], ahead[4];
  uint64_t at = LCK_LINE;
  take(x, to, from, 0, store);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)state));
  if (length >= BLOCK) {
    take(y, to, from, at, store);
    for (at = BLOCK; length - at >= BLOCK; at += BLOCK) {
      take(ahead, to, from, at, store);
      fold_parts(x, by_block, ahead);
      take(ahead, to, from, at + LCK_LINE, store);
      fold_parts(y, by_block, ahead);
    }
    fold_parts(x, by_line, y);
  }
  if (at < length) {
    take(ahead, to, from, at, store);
    fold_parts(x, by_line, ahead);
  }
  return fold_state(fold_line(x[0], x[1], x[2], x[3]));
}

AVX2_TARGET LCK_INLINE uint32_t run(unsigned char *to, const unsigned char *from, uint64_t length,
                                    uint32_t crc, int store) {
  const uint64_t tail = length % LCK_LINE, whole = length - tail;
  uint32_t state = ~crc;
  if (whole > 0)
    state = fold_lines(to, from, whole, state, store);
  if (tail > 0) {
    _Alignas(LCK_LINE) unsigned char bounce[LCK_LINE];
    __m128i unused[4];
    lck_bounce(bounce, from + whole, tail);
    state = tail_state(state, bounce, tail);
    if (store)
      take(unused, to + whole, bounce, 0, 1);
  }
  return ~state;
}

AVX2_TARGET static uint32_t copy(void *line, const void *source, uint64_t length, uint32_t crc) {
  return run(line, source, length, crc, 1);
}

AVX2_TARGET static uint32_t only_crc(const void *bytes, uint64_t length, uint32_t crc) {
  return run(NULL, bytes, length, crc, 0);
}

static int usable(void) {
  return lck_cpu_has(LCK_CPU_AVX2 | LCK_CPU_PCLMUL | LCK_CPU_SSE42);
}

const lck_kernel_table lck_kernel_avx2 = {"avx2", copy, only_crc, 0, usable};

#endif
