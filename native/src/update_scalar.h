/* update_scalar.h -- one element's update, as torch's kernels compute what is left behind the last
 * whole vector; `whole`: it is of a vector, which differs in what amsgrad makes of a NaN. The
 * including file defines SCALAR_TARGET (function attributes) and FUSED(a, b, c): a * b + c rounded
 * once, or, where torch has no such instruction, twice. */
#include <math.h>

#include "half.h"
#include "update.h"

SCALAR_TARGET static inline void update_adam_element(float *columns, float g,
                                                     const lck_update_factors *by, int whole) {
  float p = columns[0], m = columns[1], v = columns[2];
  if (by->flags & LCK_UPDATE_MAXIMIZE)
    g = -g;
  if (by->kind == LCK_ADAMW)
    p = p * by->keep;
  else if (by->decays)
    g = FUSED(p, by->decay, g);
  if (by->first_small)
    m = FUSED(by->first_rest, g - m, m);
  else
    m = FUSED(-(g - m), 1.0F - by->first_rest, g);
  v = FUSED(v, by->second, (by->second_rest * g) * g);
  float bound = v;
  if (by->flags & LCK_UPDATE_AMSGRAD)
    bound = columns[3] = columns[3] < v || (whole && isnan(v)) ? v : columns[3];
  float root = sqrtf(bound) / by->root + by->eps;
  columns[0] = p - by->step * m / root;
  columns[1] = m;
  columns[2] = v;
}

SCALAR_TARGET static inline void update_sgd_element(float *columns, float g,
                                                    const lck_update_factors *by) {
  float p = columns[0];
  if (by->flags & LCK_UPDATE_MAXIMIZE)
    g = -g;
  if (by->decays)
    g = FUSED(p, by->decay, g);
  if (by->has_momentum) {
    float m = FUSED(columns[1], by->momentum, g * by->undamped);
    columns[1] = m;
    g = by->flags & LCK_UPDATE_NESTEROV ? FUSED(m, by->momentum, g) : m;
  }
  columns[0] = FUSED(-g, by->rate, p);
}

SCALAR_TARGET static inline float load_element(const void *column, uint64_t i, uint32_t type) {
  if (type == LCK_FLOAT32)
    return ((const float *)column)[i];
  uint16_t half = ((const uint16_t *)column)[i];
  return type == LCK_BFLOAT16 ? lck_from_bfloat16(half) : lck_from_float16(half);
}

SCALAR_TARGET static inline void store_element(void *column, uint64_t i, uint32_t type,
                                               float value) {
  if (type == LCK_FLOAT32)
    ((float *)column)[i] = value;
  else
    ((uint16_t *)column)[i] = type == LCK_BFLOAT16 ? lck_to_bfloat16(value) : lck_to_float16(value);
}

SCALAR_TARGET static inline void update_element(const lck_update_span *span, uint64_t i,
                                                int whole) {
  float columns[LCK_UPDATE_COLUMNS] = {0}, g = load_element(span->gradient, i, span->type);
  for (int c = 0; c < LCK_UPDATE_COLUMNS && span->columns[c]; c++)
    columns[c] = load_element(span->columns[c], i, span->type);
  if (span->factors->kind == LCK_SGD)
    update_sgd_element(columns, g, span->factors);
  else
    update_adam_element(columns, g, span->factors, whole);
  for (int c = 0; c < LCK_UPDATE_COLUMNS && span->columns[c]; c++)
    store_element(span->columns[c], i, span->type, columns[c]);
}
