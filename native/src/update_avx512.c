/* update_avx512.c -- updates by 64 bytes, and by 32 where torch's kernels do. */
#if defined(__x86_64__)

#include "kernel_x86.h"

#define VECTOR_TARGET                                                                              \
  __attribute__((                                                                                  \
      target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,vpclmulqdq,pclmul,sse4.2,crc32")))
#define WIDTH 16
#define LOAD(from) _mm512_loadu_ps((const void *)(from))
#define SET(value) _mm512_set1_ps(value)
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUB(a, b) _mm512_sub_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define DIV(a, b) _mm512_div_ps(a, b)
#define ROOT(a) _mm512_sqrt_ps(a)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define XOR(a, b) _mm512_xor_ps(a, b)
#define STORE(to, a) _mm512_storeu_ps((void *)(to), a)
#define STREAM(to, a) _mm512_stream_ps((float *)(void *)(to), a)
#define LARGEST(a, b)                                                                              \
  _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q),                  \
                     _mm512_castsi512_ps(_mm512_set1_epi32(-1)))
typedef __m512 vector;
typedef __m512i hash;

VECTOR_TARGET LCK_INLINE vector widen(const unsigned char *from, uint32_t type) {
  __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)from);
  if (type == LCK_FLOAT16)
    return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* To a bfloat16, in the lower half of each float: rounded to nearest, ties to even. Instructions of
 * AVX512_BF16 would take denormals for zeros. */
VECTOR_TARGET LCK_INLINE __m512i round_bfloat16(vector from) {
  __m512i bits = _mm512_castps_si512(from);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  __m512i whole = _mm512_mask_set1_epi32(rounded, _mm512_cmp_ps_mask(from, from, _CMP_UNORD_Q), -1);
  return _mm512_srli_epi32(whole, 16);
}

VECTOR_TARGET LCK_INLINE vector narrow(vector low, vector high, uint32_t type) {
  __m256i halves[2];
  if (type == LCK_FLOAT16) {
    halves[0] = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT);
    halves[1] = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
  } else {
    halves[0] = _mm512_cvtepi32_epi16(round_bfloat16(low));
    halves[1] = _mm512_cvtepi32_epi16(round_bfloat16(high));
  }
  return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1));
}

VECTOR_TARGET LCK_INLINE void hash_start(hash *x, const vector *line, uint32_t state) {
  *x = _mm512_xor_si512(_mm512_castps_si512(*line),
                        _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
}

VECTOR_TARGET LCK_INLINE void hash_more(hash *x, const vector *line) {
  const __m512i by_line = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_512_HIGH, FOLD_512_LOW));
  *x = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(*x, by_line, 0x00),
                                 _mm512_clmulepi64_epi128(*x, by_line, 0x11),
                                 _mm512_castps_si512(*line), 0x96);
}

VECTOR_TARGET LCK_INLINE uint32_t hash_end(const hash *x) {
  return fold_state(fold_line(_mm512_castsi512_si128(*x), _mm512_extracti32x4_epi32(*x, 1),
                              _mm512_extracti32x4_epi32(*x, 2), _mm512_extracti32x4_epi32(*x, 3)));
}

#include "update_vector.h"

VECTOR_TARGET void lck_update_avx512(lck_update_span *span) {
  update_any(span);
}

#endif
