/* kernel_portable.c -- slicing-by-8 table CRC and ordinary stores; little-endian. */
#include "kernel_impl.h"

LCK_INLINE uint32_t table_crc64(uint32_t state, uint64_t word) {
  word ^= state;
  uint32_t result = 0;
  for (int i = 0; i < 8; i++)
    result ^= lck_crc_table[7 - i][word >> 8 * i & 0xff];
  return result;
}

LCK_INLINE uint32_t table_crc8(uint32_t state, unsigned char byte) {
  return lck_crc_table[0][(state ^ byte) & 0xff] ^ state >> 8;
}

LCK_INLINE void store_pair(unsigned char *to, uint64_t low, uint64_t high) {
  memcpy(to, &low, 8);
  memcpy(to + 8, &high, 8);
}

#define LANES_TARGET
#define LANES_CRC64(state, word) table_crc64(state, word)
#define LANES_CRC8(state, byte) table_crc8(state, byte)
#define LANES_STORE(to, low, high) store_pair(to, low, high)
#include "kernel_lanes.h"

static int always(void) {
  return 1;
}

const lck_kernel_table lck_kernel_portable = {"portable", lanes_copy, lanes_crc, 1, always};
