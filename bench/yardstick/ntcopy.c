/* ntcopy.c -- the yardstick: plain copies with non-temporal stores, nothing else.
 *
 * Independent of lightck on purpose, so that what is measured and what it is measured with share no
 * code. `to` is on a 64-byte line; `from` has any alignment; a rest shorter than a line goes
 * through memcpy. Every variant ends with a store fence, so that the time includes the stores. */
#include <stddef.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef struct variant {
  const char *name;
  void (*copy)(unsigned char *to, const unsigned char *from, size_t bytes);
  int (*usable)(void);
} variant;

static int always(void) {
  return 1;
}

static void plain(unsigned char *to, const unsigned char *from, size_t bytes) {
  memcpy(to, from, bytes);
}

#if defined(__x86_64__)
#include <immintrin.h>

/* One function per instruction set and prefetch; the best one is found by trying. Which hint helps
 * differs by machine and day: on one Emerald Rapids NTA cost a third, T1 gave a tenth. */
#define NTCOPY(name, isa, vector, load, store, ahead, hint)                                        \
  __attribute__((target(isa))) static void copy_##name(unsigned char *to,                          \
                                                       const unsigned char *from, size_t bytes) {  \
    const size_t whole = bytes - bytes % 64;                                                       \
    for (size_t at = 0; at < whole; at += 64) {                                                    \
      if (ahead > 0)                                                                               \
        _mm_prefetch((const char *)from + at + ahead, hint);                                       \
      for (size_t part = 0; part < 64; part += sizeof(vector))                                     \
        store((void *)(to + at + part), load((const void *)(from + at + part)));                   \
    }                                                                                              \
    _mm_sfence();                                                                                  \
    memcpy(to + whole, from + whole, bytes - whole);                                               \
  }

#define ZMM "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512
#define YMM "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256
#define XMM "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128
#define WITH(...) NTCOPY(__VA_ARGS__)

WITH(avx512, ZMM, 0, _MM_HINT_T1)
WITH(avx512_nta, ZMM, 1024, _MM_HINT_NTA)
WITH(avx512_t1, ZMM, 4096, _MM_HINT_T1)
WITH(avx2, YMM, 0, _MM_HINT_T1)
WITH(avx2_nta, YMM, 1024, _MM_HINT_NTA)
WITH(avx2_t1, YMM, 4096, _MM_HINT_T1)
WITH(sse2_t1, XMM, 4096, _MM_HINT_T1)

static int has_avx512(void) {
  return __builtin_cpu_supports("avx512f");
}
static int has_avx2(void) {
  return __builtin_cpu_supports("avx2");
}
#endif

/* The last one is for machines without a variant of their own, and for comparison. */
static const variant variants[] = {
#if defined(__x86_64__)
    {"avx512, no prefetch", copy_avx512, has_avx512},
    {"avx512, prefetch NTA 1024", copy_avx512_nta, has_avx512},
    {"avx512, prefetch T1 4096", copy_avx512_t1, has_avx512},
    {"avx2, no prefetch", copy_avx2, has_avx2},
    {"avx2, prefetch NTA 1024", copy_avx2_nta, has_avx2},
    {"avx2, prefetch T1 4096", copy_avx2_t1, has_avx2},
    {"sse2, prefetch T1 4096", copy_sse2_t1, always},
#endif
    {"memcpy", plain, always},
};

/* Name of a variant; NULL past the last one. */
API const char *ntcopy_name(unsigned which) {
  return which < sizeof(variants) / sizeof(variants[0]) ? variants[which].name : NULL;
}

/* Whether this CPU can run a variant. */
API int ntcopy_usable(unsigned which) {
  return variants[which].usable();
}

/* Copy; the variant must be usable. */
API void ntcopy(unsigned which, void *to, const void *from, size_t bytes) {
  variants[which].copy(to, from, bytes);
}
