/* kernel_x86.h -- carry-less multiply folding, 128 bits at a time, and the way back to a state.
 *
 * A register holds 128 message bits, its low qword first. To move it D bits further on, multiply
 * the low qword by x^(D+64) and the high one by x^D, mod P, and add both to what stands there. A
 * product of a reflected qword and a reflected 32-bit constant comes out x^33 too high, hence the
 * constants x^(D+31) (low) and x^(D-33) (high). */
#ifndef LCK_KERNEL_X86_H
#define LCK_KERNEL_X86_H

#include <immintrin.h>

#include "kernel_impl.h"

#define FOLD_128_LOW 0xF20C0DFE
#define FOLD_128_HIGH 0x493C7D27
#define FOLD_512_LOW 0x740EEF02
#define FOLD_512_HIGH 0x9E4ADDF8
#define FOLD_1024_LOW 0x6992CEA2
#define FOLD_1024_HIGH 0x0D3B6092
#define FOLD_2048_LOW 0xDCB17AA4
#define FOLD_2048_HIGH 0xB9E02B86

#define FOLD_TARGET __attribute__((target("pclmul,sse4.2,crc32")))

FOLD_TARGET LCK_INLINE __m128i fold(__m128i bits, __m128i constants, __m128i ahead) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(bits, constants, 0x00), ahead),
                       _mm_clmulepi64_si128(bits, constants, 0x11));
}

/* Join four neighbours into the last one. */
FOLD_TARGET LCK_INLINE __m128i fold_line(__m128i a, __m128i b, __m128i c, __m128i d) {
  const __m128i next = _mm_set_epi64x(FOLD_128_HIGH, FOLD_128_LOW);
  return fold(fold(fold(a, next, b), next, c), next, d);
}

/* The crc32 instruction multiplies by x^32 and reduces, which is just what is left to do. */
FOLD_TARGET LCK_INLINE uint32_t fold_state(__m128i bits) {
  uint64_t low = (uint64_t)_mm_cvtsi128_si64(bits), high = (uint64_t)_mm_extract_epi64(bits, 1);
  return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(0, low), high);
}

FOLD_TARGET LCK_INLINE uint32_t tail_state(uint32_t state, const unsigned char *bounce,
                                           uint64_t length) {
  uint64_t at = 0, word;
  for (; at + 8 <= length; at += 8) {
    memcpy(&word, bounce + at, 8);
    state = (uint32_t)_mm_crc32_u64(state, word);
  }
  for (; at < length; at++)
    state = _mm_crc32_u8(state, bounce[at]);
  return state;
}

#endif
