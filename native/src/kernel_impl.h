/* kernel_impl.h -- shared by the copy kernels and their dispatch, and by nothing else.
 *
 * CRC32C is used bit-reflected: bit 31 of a word is x^0. Inside a kernel the *state* is the
 * complement of the CRC. */
#ifndef LCK_KERNEL_IMPL_H
#define LCK_KERNEL_IMPL_H

#include <string.h>

#include "kernel.h"
#include "lightck.h"

/* Makes a register opaque to the compiler, which could otherwise load the same source bytes again
 * for their second use, and see other bytes there. */
#define LCK_PIN_WORD(word) __asm__("" : "+r"(word))

#define LCK_INLINE static inline __attribute__((always_inline))

/* Ask the second-level cache for a line that the copy reaches later: the hardware prefetcher alone
 * leaves 10 to 40 % of the read rate unused. The distance is the best of 512 B .. 16 KiB on Emerald
 * Rapids. A hint past the source's end never faults. */
#define LCK_PREFETCH(from)                                                                         \
  __builtin_prefetch((const void *)((uintptr_t)(from) + LCK_PREFETCH_BYTES), 0, 2)
#define LCK_PREFETCH_BYTES 4096u

/* A CRC instruction takes 3 cycles but starts every cycle, and a table lookup chain waits likewise:
 * three lanes of this many bytes are in flight at once and are then joined. */
#define LCK_LANE_BYTES UINT64_C(1024)

extern const lck_kernel_table lck_kernel_portable;
#if defined(__x86_64__)
extern const lck_kernel_table lck_kernel_sse42, lck_kernel_avx2, lck_kernel_avx512;
#elif defined(__aarch64__)
extern const lck_kernel_table lck_kernel_aarch64;
#endif

extern uint32_t lck_crc_table[8][256];  /* [k][b]: byte b followed by k zero bytes */
extern uint32_t lck_lane_table[4][256]; /* [k][b]: byte k of a state, LCK_LANE_BYTES further on */

/* Take an unfinished last line. What is stored and what the CRC sees both come from `bounce`. */
LCK_INLINE void lck_bounce(unsigned char *bounce, const unsigned char *from, uint64_t length) {
  memset(bounce, 0, LCK_LINE);
  memcpy(bounce, from, length);
  __asm__ volatile("" : : "r"(bounce) : "memory");
}

LCK_INLINE uint32_t lck_lane_shift(uint32_t state) {
  return lck_lane_table[0][state & 0xff] ^ lck_lane_table[1][state >> 8 & 0xff] ^
         lck_lane_table[2][state >> 16 & 0xff] ^ lck_lane_table[3][state >> 24];
}

#endif
