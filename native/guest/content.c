/* What snapshot n holds: a function of n, so that whoever recovers it knows every byte. */
#include <string.h>

#include "guest.h"

/* Extents keep their lengths for some snapshots, then the layout table changes. */
static uint64_t version(uint64_t number) {
  return number / 8;
}

static uint64_t mix(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

/* Never 0, which is what was never written. */
static void fill(uint64_t seed, unsigned char *bytes, uint64_t length) {
  for (uint64_t at = 0; at < length; at += sizeof(uint64_t)) {
    uint64_t word = mix(&seed) | UINT64_C(0x0101010101010101);
    memcpy(bytes + at, &word, length - at < sizeof(word) ? length - at : sizeof(word));
  }
}

uint32_t content_layout(uint64_t number, unsigned char *table) {
  uint32_t length = LAYOUT_MOST - (uint32_t)(version(number) % 50);
  fill(~version(number), table, length);
  return length;
}

uint64_t content_length(uint64_t number, uint32_t extent) {
  static const uint64_t least[EXTENTS] = {40, 5000, 65536, 100000, 4096, 90000};
  return least[extent] + version(number) % 100 * (extent + 1);
}

void content_fill(uint64_t number, uint32_t extent, unsigned char *bytes) {
  fill(number * EXTENTS + extent, bytes, content_length(number, extent));
}
