/* update_vector.h -- an update by whole vectors, and its stores to the region. The including file
 * defines for its instruction set:
 *   VECTOR_TARGET  function attributes
 *   vector, WIDTH  the type of WIDTH floats
 *   LOAD(from), SET(float), ADD, SUB, MUL, DIV(a, b), ROOT(a), FMA(a, b, c), XOR(a, b)
 *   LARGEST(a, b)  the larger one, or NaN if one is
 *   STORE(to, a), STREAM(to, a), the latter non-temporal and on its own size
 *   widen(from, type)          WIDTH numbers of a half type as floats
 *   narrow(low, high, type)    floats rounded to 2 * WIDTH numbers of a half type, as one vector
 * and, of the CRC's state over lines of vectors,
 *   hash, hash_start(hash *, line, state), hash_more(hash *, line), hash_end(hash *). */

#define FUSED(a, b, c) fmaf(a, b, c)
#define SCALAR_TARGET VECTOR_TARGET
#include "update_scalar.h"

enum { VECTOR_BYTES = 4 * WIDTH, LINE_VECTORS = LCK_LINE / VECTOR_BYTES };

/* Which columns of a span have a place in the region. */
enum { STREAM_NONE, STREAM_SOME, STREAM_ALL };

/* The distance at which reading and writing hid behind each other best, of 512 B to 4 KiB: less
 * than a copy's, because an update reads from four places at once. */
#define UPDATE_AHEAD 768
#define PREFETCH(from) __builtin_prefetch((const void *)((uintptr_t)(from) + UPDATE_AHEAD), 0, 2)

/* What a rule asks for; a constant where a case is compiled on its own. */
typedef struct way {
  int kind, columns, decays, maximize, nesterov, first_small;
  uint32_t type;
} way;

/* The constants of a rule, in registers while lines are updated. */
typedef struct constants {
  vector keep, decay, first_weight, second, second_rest, back, root, eps; /* Adam, AdamW */
  vector rate, momentum, undamped, sign;
} constants;

typedef struct vectors {
  vector p, m, v, largest, g;
} vectors;

VECTOR_TARGET LCK_INLINE way way_of(const lck_update_span *span) {
  const lck_update_factors *by = span->factors;
  int adam = by->kind != LCK_SGD, amsgrad = (by->flags & LCK_UPDATE_AMSGRAD) != 0;
  return (way){.kind = (int)by->kind,
               .columns = adam ? 3 + amsgrad : 1 + by->has_momentum,
               .decays = by->decays,
               .maximize = (by->flags & LCK_UPDATE_MAXIMIZE) != 0,
               .nesterov = (by->flags & LCK_UPDATE_NESTEROV) != 0,
               .first_small = by->first_small,
               .type = span->type};
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

VECTOR_TARGET LCK_INLINE vector load(const unsigned char *from, uint32_t type) {
  PREFETCH(from);
  return type == LCK_FLOAT32 ? LOAD(from) : widen(from, type);
}

/* Update WIDTH elements, in floats; `at` is in bytes here and below. */
VECTOR_TARGET LCK_INLINE void update_floats(unsigned char *const *columns,
                                            const unsigned char *gradient, uint64_t at,
                                            const way how, const constants *by, vector *out) {
  vectors x = {.p = load(columns[0] + at, how.type), .g = load(gradient + at, how.type)};
  x.m = x.v = x.largest = x.p;
  if (how.columns > 1)
    x.m = load(columns[1] + at, how.type);
  if (how.columns > 2)
    x.v = load(columns[2] + at, how.type);
  if (how.columns > 3)
    x.largest = load(columns[3] + at, how.type);
  if (how.kind == LCK_SGD)
    update_sgd(&x, how, by);
  else
    update_adam(&x, how, by);
  out[0] = x.p;
  out[1] = x.m;
  out[2] = x.v;
  out[3] = x.largest;
}

/* Update what fills a vector of the elements' type. */
VECTOR_TARGET LCK_INLINE void update_vector(unsigned char *const *columns,
                                            const unsigned char *gradient, uint64_t at,
                                            const way how, const constants *by, vector *out) {
  update_floats(columns, gradient, at, how, by, out);
  if (how.type == LCK_FLOAT32)
    return;
  vector high[LCK_UPDATE_COLUMNS];
  update_floats(columns, gradient, at + VECTOR_BYTES / 2, how, by, high);
  for (int c = 0; c < how.columns; c++)
    out[c] = narrow(out[c], high[c], how.type);
}

/* Update and store whole lines, from `done` on. */
VECTOR_TARGET LCK_INLINE void update_lines(lck_update_span *span, const way how, int streamed,
                                           uint32_t *states) {
  const constants by = constants_of(span->factors);
  unsigned char *const columns[LCK_UPDATE_COLUMNS] = {span->columns[0], span->columns[1],
                                                      span->columns[2], span->columns[3]};
  unsigned char *const out[LCK_UPDATE_COLUMNS] = {span->out[0], span->out[1], span->out[2],
                                                  span->out[3]};
  const unsigned char *gradient = span->gradient;
  hash hashes[LCK_UPDATE_COLUMNS];
  const uint64_t size = lck_update_size(how.type), first = span->done * size;
  uint64_t end = span->length * size / LCK_LINE * LCK_LINE, at = first;
  for (; at < end; at += LCK_LINE) {
    vector line[LINE_VECTORS][LCK_UPDATE_COLUMNS];
    span->done = at / size;
    for (int k = 0; k < LINE_VECTORS; k++)
      update_vector(columns, gradient, at + (uint64_t)k * VECTOR_BYTES, how, &by, line[k]);
    for (int c = 0; c < how.columns && streamed; c++) {
      if (streamed == STREAM_SOME && !out[c])
        continue;
      vector stored[LINE_VECTORS];
      for (int k = 0; k < LINE_VECTORS; k++) {
        stored[k] = line[k][c];
        STREAM(out[c] + at + (uint64_t)k * VECTOR_BYTES, stored[k]);
      }
      if (at == first)
        hash_start(&hashes[c], stored, states[c]);
      else
        hash_more(&hashes[c], stored);
    }
    /* Keeps stores to the region before those in place, see `done`. */
    __asm__ volatile("" ::: "memory");
    for (int c = 0; c < how.columns; c++)
      for (int k = 0; k < LINE_VECTORS; k++)
        STORE(columns[c] + at + (uint64_t)k * VECTOR_BYTES, line[k][c]);
  }
  span->done = at / size;
  for (int c = 0; c < how.columns && at > first; c++)
    if (streamed == STREAM_ALL || (streamed && out[c]))
      states[c] = hash_end(&hashes[c]);
}

/* Update one of torch's vectors, from memory that one of this file's may lie in. */
VECTOR_TARGET LCK_INLINE void update_torch_vector(const lck_update_span *span, uint64_t at,
                                                  const way how) {
  const constants by = constants_of(span->factors);
  unsigned char there[LCK_UPDATE_COLUMNS + 1][VECTOR_BYTES];
  unsigned char *const columns[LCK_UPDATE_COLUMNS] = {there[0], there[1], there[2], there[3]};
  vector out[LCK_UPDATE_COLUMNS];
  memset(there, 0, sizeof there);
  memcpy(there[LCK_UPDATE_COLUMNS], (const unsigned char *)span->gradient + at, LCK_TORCH_BYTES);
  for (int c = 0; c < how.columns; c++)
    memcpy(there[c], (const unsigned char *)span->columns[c] + at, LCK_TORCH_BYTES);
  update_vector(columns, there[LCK_UPDATE_COLUMNS], 0, how, &by, out);
  for (int c = 0; c < how.columns; c++) {
    STORE(there[c], out[c]);
    memcpy((unsigned char *)span->columns[c] + at, there[c], LCK_TORCH_BYTES);
  }
}

/* Update what is left behind the last whole line, in place: torch's vector of it at once if there
 * is one, the others one by one. */
VECTOR_TARGET LCK_INLINE void update_rest(lck_update_span *span, const way how) {
  const uint64_t size = lck_update_size(how.type), half = LCK_TORCH_BYTES / size;
  uint64_t i = span->done;
  if (span->length - i >= half) {
    update_torch_vector(span, i * size, how);
    i += half;
  }
  for (; i < span->length; i++)
    update_element(span, i, 0);
  span->done = i;
}

/* Store the last line, which is not whole, from what stands in place. */
VECTOR_TARGET LCK_INLINE void stream_rest(lck_update_span *span, uint64_t from, uint64_t length,
                                          int column, uint32_t *state) {
  _Alignas(LCK_LINE) unsigned char bounce[LCK_LINE];
  lck_bounce(bounce, (const unsigned char *)span->columns[column] + from, length);
  for (int k = 0; k < LINE_VECTORS; k++)
    STREAM(span->out[column] + from + (uint64_t)k * VECTOR_BYTES,
           LOAD(bounce + (uint64_t)k * VECTOR_BYTES));
  *state = tail_state(*state, bounce, length);
}

VECTOR_TARGET LCK_INLINE void update_span(lck_update_span *span, const way how, int streamed) {
  uint32_t states[LCK_UPDATE_COLUMNS] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
  update_lines(span, how, streamed, states);
  const uint64_t size = lck_update_size(how.type), from = span->done * size;
  const uint64_t left = span->length * size - from;
  update_rest(span, how);
  for (int c = 0; c < how.columns && streamed; c++) {
    if (left > 0 && span->out[c])
      stream_rest(span, from, left, c, &states[c]);
    span->crc[c] = ~states[c];
  }
}

VECTOR_TARGET LCK_INLINE int is_same(const way a, const way b) {
  return a.kind == b.kind && a.columns == b.columns && a.maximize == b.maximize &&
         a.first_small == b.first_small && a.type == b.type;
}

/* AdamW as most people use it is compiled on its own; there nothing depends on the other fields. */
VECTOR_TARGET LCK_INLINE int update_usual(lck_update_span *span, const way how, int streamed,
                                          uint32_t type) {
  const way usual = {.kind = LCK_ADAMW, .columns = 3, .first_small = 1, .type = type};
  if (!is_same(how, usual) || (streamed != 0 && streamed != usual.columns))
    return 0;
  if (streamed == 0)
    update_span(span, usual, STREAM_NONE);
  else
    update_span(span, usual, STREAM_ALL);
  return 1;
}

VECTOR_TARGET LCK_INLINE void update_any(lck_update_span *span) {
  const way how = way_of(span);
  int streamed = 0;
  for (int c = 0; c < how.columns; c++)
    streamed += span->out[c] != NULL;
  if (update_usual(span, how, streamed, LCK_FLOAT32) ||
      update_usual(span, how, streamed, LCK_BFLOAT16) ||
      update_usual(span, how, streamed, LCK_FLOAT16))
    return;
  if (streamed == 0)
    update_span(span, how, STREAM_NONE);
  else
    update_span(span, how, STREAM_SOME);
}
