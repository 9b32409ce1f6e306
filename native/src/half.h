/* half.h -- bfloat16 and float16 to float32 and back, rounded to nearest, ties to even; every NaN
 * becomes the same one. In integers but for two exact operations: nothing depends on the CPU. */
#ifndef LCK_HALF_H
#define LCK_HALF_H

#include <stdint.h>
#include <string.h>

static inline float lck_float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t lck_bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float lck_from_bfloat16(uint16_t half) {
  return lck_float_of_bits((uint32_t)half << 16);
}

static inline uint16_t lck_to_bfloat16(float value) {
  uint32_t bits = lck_bits_of_float(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000)
    return 0x7FC0;
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Its 15 bits at a float's place are the number over 2^112: denormals, too, and the product is
 * exact. */
static inline float lck_from_float16(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7FFFu) << 13;
  if (rest >= 0x0F800000) /* infinite, or NaN */
    return lck_float_of_bits(sign | 0x7F800000 | rest);
  float size = lck_float_of_bits(rest) * 0x1p112F;
  return lck_float_of_bits(sign | lck_bits_of_float(size));
}

/* Denormals are multiples of 2^-24, which is just what a float of 0.5 and more is rounded to. */
static inline uint16_t lck_to_float16(float value) {
  uint32_t bits = lck_bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000)
    return (uint16_t)(sign | 0x7E00);
  if (size >= 0x477FF000) /* 65520, halfway between the largest and the next */
    return (uint16_t)(sign | 0x7C00);
  if (size < 0x38800000) /* 2^-14 */
    size = lck_bits_of_float(lck_float_of_bits(size) + 0.5F) - 0x3F000000;
  else
    size = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
  return (uint16_t)(sign | size);
}

#endif
