/* update.h -- inside an optimizer's update: what its kernels are given.
 *
 * A kernel makes the update of a *span*, a run of elements of one parameter, in place, and where
 * the span has a place in the region it stores there what it stores in place: the same registers,
 * in the same pass, checksummed. Its arithmetic is that of torch's fused CPU kernels, operation for
 * operation; what remains of a tensor behind the last whole one of their vectors is computed in
 * another order. Half types are computed in float32 and rounded where they are stored. */
#ifndef LCK_UPDATE_H
#define LCK_UPDATE_H

#include <stdint.h>

#include "lightck.h"

enum { LCK_UPDATE_COLUMNS = 4 }; /* parameter, first, second, largest */
enum { LCK_TORCH_BYTES = 32 };   /* of a vector of torch's kernels */

/* What a rule and a count of steps make of an update. */
typedef struct lck_update_factors {
  uint32_t kind, flags;
  int decays;       /* weight_decay is not 0 */
  int has_momentum; /* of LCK_SGD */
  int first_small;  /* 1 - beta1 < 0.5: see update_first */
  float keep;       /* AdamW: what the decay leaves of a parameter */
  float decay;      /* Adam, SGD: of the parameter, added to the gradient */
  float first_rest, first_weight, second, second_rest; /* 1 - beta1, see update_first; beta2, 1 - */
  float step, root, eps;                               /* Adam: size of the step; sqrt of a bias */
  float rate, momentum, undamped;                      /* SGD */
} lck_update_factors;

typedef struct lck_update_span {
  void *columns[LCK_UPDATE_COLUMNS]; /* of its first element; NULL: the rule has no such column */
  const void *gradient;
  unsigned char *out[LCK_UPDATE_COLUMNS]; /* in the region, on lines; NULL: in place only */
  uint64_t length;                        /* elements */
  uint32_t type;                          /* of elements */
  const lck_update_factors *factors;
  uint32_t crc[LCK_UPDATE_COLUMNS]; /* of what was stored in the region */
  /* Elements below are updated, those from here on are not. The element's line is stored in the
   * region before anything of it is stored in place: a fault in the region leaves a span that can
   * be gone on with. */
  volatile uint64_t done;
} lck_update_span;

static inline uint64_t lck_update_size(uint32_t type) {
  return type == LCK_FLOAT32 ? 4 : 2;
}

/* Update from `done` to the end. */
typedef void lck_update_kernel(lck_update_span *span);

lck_update_kernel lck_update_portable; /* in place only; LCK_UPDATE_UNFUSED too */
#if defined(__x86_64__)
lck_update_kernel lck_update_avx2, lck_update_avx512;
#endif

#endif
