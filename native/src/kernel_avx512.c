/* kernel_avx512.c -- whole-line non-temporal stores and 512-bit carry-less multiply. */
#if defined(__x86_64__)

#include "kernel_x86.h"

#define AVX512_TARGET                                                                              \
  __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2,crc32")))

enum { ACCUMULATORS = 4, BLOCK = ACCUMULATORS * LCK_LINE };

AVX512_TARGET LCK_INLINE __m512i take(unsigned char *to, const unsigned char *from, uint64_t at,
                                      int store) {
  LCK_PREFETCH(from + at);
  __m512i bytes = _mm512_loadu_si512(from + at);
  __asm__("" : "+v"(bytes));
  if (store)
    _mm512_stream_si512((__m512i *)(void *)(to + at), bytes);
  return bytes;
}

AVX512_TARGET LCK_INLINE __m512i fold_512(__m512i bits, __m512i constants, __m512i ahead) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(bits, constants, 0x00),
                                   _mm512_clmulepi64_epi128(bits, constants, 0x11), ahead, 0x96);
}

/* The state after `length` > 0 bytes of whole lines. */
AVX512_TARGET LCK_INLINE uint32_t fold_lines(unsigned char *to, const unsigned char *from,
                                             uint64_t length, uint32_t state, int store) {
  const __m512i by_line = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_512_HIGH, FOLD_512_LOW));
  const __m512i by_block = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_2048_HIGH, FOLD_2048_LOW));
  __m512i x[ACCUMULATORS];
  uint64_t at = LCK_LINE;
  x[0] = _mm512_xor_si512(take(to, from, 0, store),
                          _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
  if (length >= BLOCK) {
    for (int i = 1; i < ACCUMULATORS; i++, at += LCK_LINE)
      x[i] = take(to, from, at, store);
    for (; length - at >= BLOCK; at += BLOCK)
      for (int i = 0; i < ACCUMULATORS; i++)
        x[i] = fold_512(x[i], by_block, take(to, from, at + (uint64_t)i * LCK_LINE, store));
    for (int i = 1; i < ACCUMULATORS; i++)
      x[0] = fold_512(x[0], by_line, x[i]);
  }
  for (; at < length; at += LCK_LINE)
    x[0] = fold_512(x[0], by_line, take(to, from, at, store));
  return fold_state(fold_line(_mm512_castsi512_si128(x[0]), _mm512_extracti32x4_epi32(x[0], 1),
                              _mm512_extracti32x4_epi32(x[0], 2),
                              _mm512_extracti32x4_epi32(x[0], 3)));
}

AVX512_TARGET LCK_INLINE uint32_t run(unsigned char *to, const unsigned char *from, uint64_t length,
                                      uint32_t crc, int store) {
  const uint64_t tail = length % LCK_LINE, whole = length - tail;
  uint32_t state = ~crc;
  if (whole > 0)
    state = fold_lines(to, from, whole, state, store);
  if (tail > 0) {
    _Alignas(LCK_LINE) unsigned char bounce[LCK_LINE];
    lck_bounce(bounce, from + whole, tail);
    state = tail_state(state, bounce, tail);
    if (store)
      (void)take(to + whole, bounce, 0, 1);
  }
  return ~state;
}

AVX512_TARGET static uint32_t copy(void *line, const void *source, uint64_t length, uint32_t crc) {
  return run(line, source, length, crc, 1);
}

AVX512_TARGET static uint32_t only_crc(const void *bytes, uint64_t length, uint32_t crc) {
  return run(NULL, bytes, length, crc, 0);
}

static int usable(void) {
  return lck_cpu_has(LCK_CPU_AVX512F | LCK_CPU_AVX512VL | LCK_CPU_AVX512BW | LCK_CPU_VPCLMULQDQ |
                     LCK_CPU_PCLMUL | LCK_CPU_SSE42);
}

const lck_kernel_table lck_kernel_avx512 = {"avx512", copy, only_crc, 0, usable};

#endif
