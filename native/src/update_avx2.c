/* update_avx2.c -- updates by 32 bytes, as torch's kernels make them. */
#if defined(__x86_64__)

#include "kernel_x86.h"

#define VECTOR_TARGET __attribute__((target("avx2,fma,f16c,pclmul,sse4.2,crc32")))
#define WIDTH 8
#define LOAD(from) _mm256_loadu_ps((const float *)(const void *)(from))
#define SET(value) _mm256_set1_ps(value)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define DIV(a, b) _mm256_div_ps(a, b)
#define ROOT(a) _mm256_sqrt_ps(a)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define XOR(a, b) _mm256_xor_ps(a, b)
#define STORE(to, a) _mm256_storeu_ps((float *)(void *)(to), a)
#define STREAM(to, a) _mm256_stream_ps((float *)(void *)(to), a)
#define LARGEST(a, b) _mm256_or_ps(_mm256_max_ps(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q))
typedef __m256 vector;

VECTOR_TARGET LCK_INLINE vector widen(const unsigned char *from, uint32_t type) {
  __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)from);
  if (type == LCK_FLOAT16)
    return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* To a bfloat16, in the lower half of each float: rounded to nearest, ties to even. */
VECTOR_TARGET LCK_INLINE __m256i round_bfloat16(vector from) {
  __m256i bits = _mm256_castps_si256(from);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(from, from, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_or_si256(rounded, nan), 16);
}

VECTOR_TARGET LCK_INLINE vector narrow(vector low, vector high, uint32_t type) {
  __m256i halves;
  if (type == LCK_FLOAT16) {
    halves = _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                              _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
  } else { /* what is packed comes by 8 bytes of each in turn */
    halves = _mm256_packus_epi32(round_bfloat16(low), round_bfloat16(high));
    halves = _mm256_permute4x64_epi64(halves, 0xD8);
  }
  return _mm256_castsi256_ps(halves);
}

typedef struct hash {
  __m128i parts[4]; /* of a line */
} hash;

VECTOR_TARGET LCK_INLINE void split(__m128i *parts, const vector *line) {
  for (int half = 0; half < 2; half++) {
    __m256i bytes = _mm256_castps_si256(line[half]);
    parts[2 * half] = _mm256_castsi256_si128(bytes);
    parts[2 * half + 1] = _mm256_extracti128_si256(bytes, 1);
  }
}

VECTOR_TARGET LCK_INLINE void hash_start(hash *x, const vector *line, uint32_t state) {
  split(x->parts, line);
  x->parts[0] = _mm_xor_si128(x->parts[0], _mm_cvtsi32_si128((int)state));
}

VECTOR_TARGET LCK_INLINE void hash_more(hash *x, const vector *line) {
  const __m128i by_line = _mm_set_epi64x(FOLD_512_HIGH, FOLD_512_LOW);
  __m128i ahead[4];
  split(ahead, line);
  for (int i = 0; i < 4; i++)
    x->parts[i] = fold(x->parts[i], by_line, ahead[i]);
}

VECTOR_TARGET LCK_INLINE uint32_t hash_end(const hash *x) {
  return fold_state(fold_line(x->parts[0], x->parts[1], x->parts[2], x->parts[3]));
}

#include "update_vector.h"

VECTOR_TARGET void lck_update_avx2(lck_update_span *span) {
  update_any(span);
}

#endif
