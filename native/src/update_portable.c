/* update_portable.c -- updates element by element, each operation rounded: torch's order where its
 * CPU has no fused multiply-add. */
#define FUSED(a, b, c) ((a) * (b) + (c))
#define SCALAR_TARGET
#include "update_scalar.h"

void lck_update_portable(lck_update_span *span) {
  uint64_t tail = span->length % (LCK_TORCH_BYTES / lck_update_size(span->type));
  for (uint64_t i = span->done; i < span->length; i++)
    update_element(span, i, i < span->length - tail);
  span->done = span->length;
}
