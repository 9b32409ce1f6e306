/* update_vector.h -- an update by whole vectors, and its stores to the region. The including file
 * defines for its instruction set:
 *   VECTOR_TARGET  function attributes
 *   vector, WIDTH  the type of WIDTH floats
 *   LOAD(from), SET(float), ADD, SUB, MUL, DIV(a, b), ROOT(a), FMA(a, b, c), XOR(a, b)
 *   LARGEST(a, b)  the larger one, or NaN if one is
 *   STORE(to, a), STREAM(to, a), the latter non-temporal and on its own size
 * and, of the CRC's state over lines of vectors,
 *   hash, hash_start(hash *, line, state), hash_more(hash *, line), hash_end(hash *). */

#define FUSED(a, b, c) fmaf(a, b, c)
#define SCALAR_TARGET VECTOR_TARGET
#include "update_scalar.h"

enum { LINE_FLOATS = LCK_LINE / 4, LINE_VECTORS = LINE_FLOATS / WIDTH };

/* Which columns of a span have a place in the region. */
enum { STREAM_NONE, STREAM_SOME, STREAM_ALL };

/* The distance at which reading and writing hid behind each other best, of 512 B to 4 KiB: less
 * than a copy's, because an update reads from four places at once. */
#define UPDATE_AHEAD 768
#define PREFETCH(from) __builtin_prefetch((const void *)((uintptr_t)(from) + UPDATE_AHEAD), 0, 2)

/* What a rule asks for; a constant where a case is compiled on its own. */
typedef struct way {
  int kind, columns, decays, maximize, nesterov, first_small;
} way;

/* The constants of a rule, in registers while lines are updated. */
typedef struct constants {
  vector keep, decay, first_weight, second, second_rest, back, root, eps; /* Adam, AdamW */
  vector rate, momentum, undamped, sign;
} constants;

typedef struct vectors {
  vector p, m, v, largest, g;
} vectors;

VECTOR_TARGET LCK_INLINE way way_of(const lck_update_factors *by) {
  int adam = by->kind != LCK_SGD, amsgrad = (by->flags & LCK_UPDATE_AMSGRAD) != 0;
  return (way){.kind = (int)by->kind,
               .columns = adam ? 3 + amsgrad : 1 + by->has_momentum,
               .decays = by->decays,
               .maximize = (by->flags & LCK_UPDATE_MAXIMIZE) != 0,
               .nesterov = (by->flags & LCK_UPDATE_NESTEROV) != 0,
               .first_small = by->first_small};
}

VECTOR_TARGET LCK_INLINE constants constants_of(const lck_update_factors *by) {
  return (constants){.keep = SET(by->keep),
                     .decay = SET(by->decay),
                     .first_weight = SET(by->first_weight),
                     .second = SET(by->second),
                     .second_rest = SET(by->second_rest),
                     .back = SET(-by->step),
                     .root = SET(by->root),
                     .eps = SET(by->eps),
                     .rate = SET(-by->rate),
                     .momentum = SET(by->momentum),
                     .undamped = SET(by->undamped),
                     .sign = SET(-0.0F)};
}

VECTOR_TARGET LCK_INLINE void update_adam(vectors *x, const way how, const constants *by) {
  if (how.maximize)
    x->g = XOR(x->g, by->sign);
  if (how.kind == LCK_ADAMW)
    x->p = MUL(x->p, by->keep);
  else if (how.decays)
    x->g = FMA(x->p, by->decay, x->g);
  vector difference = SUB(x->g, x->m);
  x->m = FMA(difference, by->first_weight, how.first_small ? x->m : x->g);
  x->v = FMA(x->g, MUL(by->second_rest, x->g), MUL(by->second, x->v));
  vector bound = x->v;
  if (how.columns == 4)
    bound = x->largest = LARGEST(x->largest, x->v);
  vector root = ADD(DIV(ROOT(bound), by->root), by->eps);
  x->p = ADD(DIV(MUL(by->back, x->m), root), x->p);
}

VECTOR_TARGET LCK_INLINE void update_sgd(vectors *x, const way how, const constants *by) {
  if (how.maximize)
    x->g = XOR(x->g, by->sign);
  if (how.decays)
    x->g = FMA(x->p, by->decay, x->g);
  if (how.columns == 2) {
    x->m = FMA(by->undamped, x->g, MUL(x->m, by->momentum));
    x->g = how.nesterov ? FMA(x->m, by->momentum, x->g) : x->m;
  }
  x->p = FMA(x->g, by->rate, x->p);
}

VECTOR_TARGET LCK_INLINE vector load(const float *from) {
  PREFETCH(from);
  return LOAD(from);
}

VECTOR_TARGET LCK_INLINE void update_vector(float *const *columns, const float *gradient,
                                            uint64_t i, const way how, const constants *by,
                                            vector *out) {
  vectors x = {.p = load(columns[0] + i), .g = load(gradient + i)};
  x.m = x.v = x.largest = x.p;
  if (how.columns > 1)
    x.m = load(columns[1] + i);
  if (how.columns > 2)
    x.v = load(columns[2] + i);
  if (how.columns > 3)
    x.largest = load(columns[3] + i);
  if (how.kind == LCK_SGD)
    update_sgd(&x, how, by);
  else
    update_adam(&x, how, by);
  out[0] = x.p;
  out[1] = x.m;
  out[2] = x.v;
  out[3] = x.largest;
}

/* Update and store whole lines, from `done` on. */
VECTOR_TARGET LCK_INLINE void update_lines(lck_update_span *span, const way how, int streamed,
                                           uint32_t *states) {
  const constants by = constants_of(span->factors);
  float *const columns[LCK_UPDATE_COLUMNS] = {span->columns[0], span->columns[1], span->columns[2],
                                              span->columns[3]};
  unsigned char *const out[LCK_UPDATE_COLUMNS] = {span->out[0], span->out[1], span->out[2],
                                                  span->out[3]};
  const float *gradient = span->gradient;
  hash hashes[LCK_UPDATE_COLUMNS];
  uint64_t first = span->done, end = span->length - span->length % LINE_FLOATS, i = first;
  for (; i < end; i += LINE_FLOATS) {
    vector line[LINE_VECTORS][LCK_UPDATE_COLUMNS];
    span->done = i;
    for (int k = 0; k < LINE_VECTORS; k++)
      update_vector(columns, gradient, i + (uint64_t)k * WIDTH, how, &by, line[k]);
    for (int c = 0; c < how.columns && streamed; c++) {
      if (streamed == STREAM_SOME && !out[c])
        continue;
      vector stored[LINE_VECTORS];
      for (int k = 0; k < LINE_VECTORS; k++) {
        stored[k] = line[k][c];
        STREAM(out[c] + i * 4 + (uint64_t)k * WIDTH * 4, stored[k]);
      }
      if (i == first)
        hash_start(&hashes[c], stored, states[c]);
      else
        hash_more(&hashes[c], stored);
    }
    /* Keeps stores to the region before those in place, see `done`. */
    __asm__ volatile("" ::: "memory");
    for (int c = 0; c < how.columns; c++)
      for (int k = 0; k < LINE_VECTORS; k++)
        STORE(columns[c] + i + (uint64_t)k * WIDTH, line[k][c]);
  }
  span->done = i;
  for (int c = 0; c < how.columns && i > first; c++)
    if (streamed == STREAM_ALL || (streamed && out[c]))
      states[c] = hash_end(&hashes[c]);
}

/* Update 8 elements, the width of torch's vectors, from memory that a vector may lie in. */
VECTOR_TARGET LCK_INLINE void update8(const lck_update_span *span, uint64_t i, const way how) {
  const constants by = constants_of(span->factors);
  float there[LCK_UPDATE_COLUMNS + 1][WIDTH];
  float *const columns[LCK_UPDATE_COLUMNS] = {there[0], there[1], there[2], there[3]};
  vector out[LCK_UPDATE_COLUMNS];
  memset(there, 0, sizeof there);
  memcpy(there[LCK_UPDATE_COLUMNS], span->gradient + i, 32);
  for (int c = 0; c < how.columns; c++)
    memcpy(there[c], span->columns[c] + i, 32);
  update_vector(columns, there[LCK_UPDATE_COLUMNS], 0, how, &by, out);
  for (int c = 0; c < how.columns; c++) {
    STORE(there[c], out[c]);
    memcpy(span->columns[c] + i, there[c], 32);
  }
}

/* Update what is left behind the last whole line, in place: 8 elements at once if there are, which
 * is torch's vector, then one by one. */
VECTOR_TARGET LCK_INLINE void update_rest(lck_update_span *span, const way how) {
  uint64_t i = span->done;
  if (span->length - i >= 8) {
    update8(span, i, how);
    i += 8;
  }
  for (; i < span->length; i++)
    update_element(span, i);
  span->done = i;
}

/* Store the last line, which is not whole, from what stands in place. */
VECTOR_TARGET LCK_INLINE void stream_rest(lck_update_span *span, uint64_t from, int column,
                                          uint32_t *state) {
  _Alignas(LCK_LINE) unsigned char bounce[LCK_LINE];
  uint64_t length = (span->length - from) * 4;
  lck_bounce(bounce, (const unsigned char *)(span->columns[column] + from), length);
  for (int k = 0; k < LINE_VECTORS; k++)
    STREAM(span->out[column] + from * 4 + (uint64_t)k * WIDTH * 4,
           LOAD((const float *)(const void *)bounce + (uint64_t)k * WIDTH));
  *state = tail_state(*state, bounce, length);
}

VECTOR_TARGET LCK_INLINE void update_span(lck_update_span *span, const way how, int streamed) {
  uint32_t states[LCK_UPDATE_COLUMNS] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
  update_lines(span, how, streamed, states);
  uint64_t from = span->done;
  update_rest(span, how);
  for (int c = 0; c < how.columns && streamed; c++) {
    if (from < span->length && span->out[c])
      stream_rest(span, from, c, &states[c]);
    span->crc[c] = ~states[c];
  }
}

VECTOR_TARGET LCK_INLINE int is_same(const way a, const way b) {
  return a.kind == b.kind && a.columns == b.columns && a.maximize == b.maximize &&
         a.first_small == b.first_small;
}

/* AdamW as most people use it is compiled on its own; there nothing depends on the other fields. */
VECTOR_TARGET LCK_INLINE void update_any(lck_update_span *span) {
  const way usual = {.kind = LCK_ADAMW, .columns = 3, .first_small = 1};
  const way how = way_of(span->factors);
  int streamed = 0;
  for (int c = 0; c < how.columns; c++)
    streamed += span->out[c] != NULL;
  if (is_same(how, usual) && streamed == usual.columns)
    update_span(span, usual, STREAM_ALL);
  else if (is_same(how, usual) && streamed == 0)
    update_span(span, usual, STREAM_NONE);
  else if (streamed == 0)
    update_span(span, how, STREAM_NONE);
  else
    update_span(span, how, STREAM_SOME);
}
