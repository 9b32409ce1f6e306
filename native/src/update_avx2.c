/* update_avx2.c -- updates by 8 elements, as torch's kernels make them. */
#if defined(__x86_64__)

#include "kernel_x86.h"

#define VECTOR_TARGET __attribute__((target("avx2,fma,pclmul,sse4.2,crc32")))
#define WIDTH 8
#define LOAD(from) _mm256_loadu_ps(from)
#define SET(value) _mm256_set1_ps(value)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define DIV(a, b) _mm256_div_ps(a, b)
#define ROOT(a) _mm256_sqrt_ps(a)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define XOR(a, b) _mm256_xor_ps(a, b)
#define STORE(to, a) _mm256_storeu_ps(to, a)
#define STREAM(to, a) _mm256_stream_ps((float *)(void *)(to), a)
#define LARGEST(a, b) _mm256_or_ps(_mm256_max_ps(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q))
typedef __m256 vector;
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
