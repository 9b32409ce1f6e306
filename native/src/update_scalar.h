/* update_scalar.h -- one element's update, as torch's kernels compute what is left behind the last
 * whole vector. The including file defines SCALAR_TARGET (function attributes) and FUSED(a, b, c):
 * a * b + c rounded once, or, where torch has no such instruction, twice. */
#include <math.h>

#include "update.h"

SCALAR_TARGET static inline void update_adam_element(float *const *columns, float gradient,
                                                     uint64_t i, const lck_update_factors *by) {
  float p = columns[0][i], m = columns[1][i], v = columns[2][i], g = gradient;
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
  if (by->flags & LCK_UPDATE_AMSGRAD) {
    float largest = columns[3][i];
    bound = columns[3][i] = largest < v ? v : largest;
  }
  float root = sqrtf(bound) / by->root + by->eps;
  columns[0][i] = p - by->step * m / root;
  columns[1][i] = m;
  columns[2][i] = v;
}

SCALAR_TARGET static inline void update_sgd_element(float *const *columns, float gradient,
                                                    uint64_t i, const lck_update_factors *by) {
  float p = columns[0][i], g = gradient;
  if (by->flags & LCK_UPDATE_MAXIMIZE)
    g = -g;
  if (by->decays)
    g = FUSED(p, by->decay, g);
  if (by->has_momentum) {
    float m = FUSED(columns[1][i], by->momentum, g * by->undamped);
    columns[1][i] = m;
    g = by->flags & LCK_UPDATE_NESTEROV ? FUSED(m, by->momentum, g) : m;
  }
  columns[0][i] = FUSED(-g, by->rate, p);
}

SCALAR_TARGET static inline void update_element(const lck_update_span *span, uint64_t i) {
  if (span->factors->kind == LCK_SGD)
    update_sgd_element(span->columns, span->gradient[i], i, span->factors);
  else
    update_adam_element(span->columns, span->gradient[i], i, span->factors);
}
