/* kernel.c -- choosing the copy kernel, and the tables and arithmetic of CRC32C. */
#include "kernel.h"

#include <stdatomic.h>
#include <string.h>

#include "api.h"
#include "error.h"
#include "kernel_impl.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define POLYNOMIAL UINT32_C(0x82F63B78)
#define POWER_PERIOD UINT64_C(0x7FFFFFFF) /* x^(2^31 - 1) = 1 mod P */

/* The fastest first; the last one runs everywhere. */
static const lck_kernel_table *const kernels[] = {
#if defined(__x86_64__)
    &lck_kernel_avx512,
    &lck_kernel_avx2,
    &lck_kernel_sse42,
#elif defined(__aarch64__)
    &lck_kernel_aarch64,
#endif
    &lck_kernel_portable,
};
enum { KERNELS = sizeof(kernels) / sizeof(kernels[0]) };

static _Atomic(const lck_kernel_table *) current = &lck_kernel_portable;

uint32_t lck_crc_table[8][256];
uint32_t lck_lane_table[4][256];

/* x^(2^k) mod P. */
static const uint32_t powers[31] = {
    0x40000000, 0x20000000, 0x08000000, 0x00800000, 0x00008000, 0x82F63B78, 0x6EA2D55C, 0x18B8EA18,
    0x510AC59A, 0xB82BE955, 0xB8FDB1E7, 0x88E56F72, 0x74C360A4, 0xE4172B16, 0x0D65762A, 0x35D73A62,
    0x28461564, 0xBF455269, 0xE2EA32DC, 0xFE7740E6, 0xF946610B, 0x3C204F8F, 0x538586E3, 0x59726915,
    0x734D5309, 0xBC1AC763, 0x7D0722CC, 0xD289CABE, 0xE94CA9BC, 0x05B74F3F, 0xA51E1F42,
};

/* a * b mod P. */
static uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 0; i < 32; i++) {
    product ^= b & -(a >> 31);
    a <<= 1;
    b = b >> 1 ^ (POLYNOMIAL & -(b & 1));
  }
  return product;
}

/* Zero bytes: state * x^(8 * length). */
static uint32_t advance(uint32_t state, uint64_t length) {
  uint64_t bits = length % POWER_PERIOD * 8 % POWER_PERIOD;
  for (int k = 0; bits != 0; k++, bits >>= 1)
    if (bits & 1)
      state = multiply(state, powers[k]);
  return state;
}

#if defined(__x86_64__)
/* By cpuid itself, not by __builtin_cpu_supports: that asks the compiler's library, and the one of
 * `zig cc` answers no to everything. */
static uint32_t cpu_features(void) {
  uint32_t eax, ebx, ecx, edx, saved = 0, found = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx))
    return 0;
  if (ecx >> 27 & 1) /* OSXSAVE: XCR0 can be read, which says whose registers are saved */
    __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
  int ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xE6) == 0xE6;
  found |= ecx >> 20 & 1 ? LCK_CPU_SSE42 : 0;
  found |= ecx >> 1 & 1 ? LCK_CPU_PCLMUL : 0;
  found |= ymm && ecx >> 29 & 1 ? LCK_CPU_F16C : 0;
  found |= ymm && ecx >> 12 & 1 ? LCK_CPU_FMA : 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
    return found;
  found |= ymm && ebx >> 5 & 1 ? LCK_CPU_AVX2 : 0;
  found |= ymm && ecx >> 10 & 1 ? LCK_CPU_VPCLMULQDQ : 0;
  found |= zmm && ebx >> 16 & 1 ? LCK_CPU_AVX512F : 0;
  found |= zmm && ebx >> 17 & 1 ? LCK_CPU_AVX512DQ : 0;
  found |= zmm && ebx >> 30 & 1 ? LCK_CPU_AVX512BW : 0;
  found |= zmm && ebx >> 31 & 1 ? LCK_CPU_AVX512VL : 0;
  return found;
}

static uint32_t features_here; /* asked once: in a virtual machine cpuid takes microseconds */

int lck_cpu_has(uint32_t features) {
  return (features_here & features) == features;
}
#endif

/* Before main, so that no call needs a check; the tables are never written again. */
__attribute__((constructor)) static void prepare(void) {
  for (uint32_t byte = 0; byte < 256; byte++) {
    for (uint32_t k = 0; k < 8; k++)
      lck_crc_table[k][byte] = advance(byte, k + 1);
    for (uint32_t k = 0; k < 4; k++)
      lck_lane_table[k][byte] = advance(byte << 8 * k, LCK_LANE_BYTES);
  }
#if defined(__x86_64__)
  features_here = cpu_features();
#endif
  int fastest = 0;
  while (!kernels[fastest]->usable())
    fastest++;
  atomic_store(&current, kernels[fastest]);
}

const lck_kernel_table *lck_kernel_current(void) {
  return atomic_load_explicit(&current, memory_order_relaxed);
}

LCK_API int lck_kernel(const char *select, const char **name) {
  if (select != NULL) {
    int found = 0;
    while (found < KERNELS && strcmp(kernels[found]->name, select) != 0)
      found++;
    if (found == KERNELS)
      return lck_fail(LCK_E_INVALID, "copy kernel \"%s\" is unknown on this architecture", select);
    if (!kernels[found]->usable())
      return lck_fail(LCK_E_INVALID, "this CPU cannot run the copy kernel \"%s\"", select);
    atomic_store(&current, kernels[found]);
  }
  if (name != NULL)
    *name = lck_kernel_current()->name;
  return 0;
}

LCK_API uint32_t lck_crc32c(uint32_t crc, const void *bytes, uint64_t length) {
  return lck_kernel_current()->crc(bytes, length, crc);
}

LCK_API uint32_t lck_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  return advance(crc_a, length_b) ^ crc_b;
}
