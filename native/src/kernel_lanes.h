/* kernel_lanes.h -- body of the kernels that feed a CRC 8 bytes at a time. The including file
 * defines LANES_TARGET (function attributes), LANES_CRC64(state, word), LANES_CRC8(state, byte) and
 * LANES_STORE(to, low, high), which stores 16 bytes on a multiple of 16. */
#include "kernel_impl.h"

/* Registers are few: a source word is stored and consumed before the next ones are loaded. */
LANES_TARGET LCK_INLINE uint32_t lanes_step(unsigned char *to, const unsigned char *from,
                                            uint64_t at, uint32_t state, int store) {
  uint64_t low, high;
  memcpy(&low, from + at, 8);
  memcpy(&high, from + at + 8, 8);
  LCK_PIN_WORD(low);
  LCK_PIN_WORD(high);
  if (store)
    LANES_STORE(to + at, low, high);
  return LANES_CRC64(LANES_CRC64(state, low), high);
}

LANES_TARGET LCK_INLINE uint32_t lanes_block(unsigned char *to, const unsigned char *from,
                                             uint64_t at, uint32_t state, int store) {
  uint32_t b = 0, c = 0;
  for (const uint64_t end = at + LCK_LANE_BYTES; at < end; at += LCK_LINE) {
    for (int lane = 0; lane < 3; lane++)
      LCK_PREFETCH(from + at + (uint64_t)lane * LCK_LANE_BYTES);
    for (uint64_t i = at; i < at + LCK_LINE; i += 16) {
      state = lanes_step(to, from, i, state, store);
      b = lanes_step(to, from, i + LCK_LANE_BYTES, b, store);
      c = lanes_step(to, from, i + 2 * LCK_LANE_BYTES, c, store);
    }
  }
  return lck_lane_shift(lck_lane_shift(state) ^ b) ^ c;
}

LANES_TARGET LCK_INLINE uint32_t lanes_run(unsigned char *to, const unsigned char *from,
                                           uint64_t length, uint32_t crc, int store) {
  const uint64_t tail = length % LCK_LINE, whole = length - tail;
  uint32_t state = ~crc;
  uint64_t at = 0;
  for (; whole - at >= 3 * LCK_LANE_BYTES; at += 3 * LCK_LANE_BYTES)
    state = lanes_block(to, from, at, state, store);
  for (; at < whole; at += 16)
    state = lanes_step(to, from, at, state, store);
  if (tail > 0) {
    _Alignas(LCK_LINE) unsigned char bounce[LCK_LINE];
    lck_bounce(bounce, from + whole, tail);
    for (uint64_t i = 0; store && i < LCK_LINE; i += 16)
      (void)lanes_step(to + whole, bounce, i, 0, 1);
    for (at = 0; at + 8 <= tail; at += 8) {
      uint64_t word;
      memcpy(&word, bounce + at, 8);
      state = LANES_CRC64(state, word);
    }
    for (; at < tail; at++)
      state = LANES_CRC8(state, bounce[at]);
  }
  return ~state;
}

LANES_TARGET static uint32_t lanes_copy(void *line, const void *source, uint64_t length,
                                        uint32_t crc) {
  return lanes_run(line, source, length, crc, 1);
}

LANES_TARGET static uint32_t lanes_crc(const void *bytes, uint64_t length, uint32_t crc) {
  return lanes_run(NULL, bytes, length, crc, 0);
}
