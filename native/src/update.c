/* update.c -- an optimizer's update, in place and, of a due step, into the snapshot as well. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "access.h"
#include "api.h"
#include "error.h"
#include "fault.h"
#include "kernel.h"
#include "mutant.h"
#include "persist.h"
#include "snapshot.h"
#include "space.h"
#include "update.h"

#ifdef LCK_TRACE
#define BLOCK_BYTES                                                                                \
  UINT64_C(1024) /* small enough for threads to share what a crash test writes                     \
                  */
#else
#define BLOCK_BYTES UINT64_C(131072) /* of one column: what a thread claims at a time, at least */
#endif
#define PIECE_BYTES UINT64_C(262144) /* of an update that is not streamed; a multiple of a line */

/* What a thread does at a time: the elements of one piece of each of a task's copies. */
typedef struct update_item {
  uint64_t task, from, length; /* in elements */
} update_item;

typedef struct update_run {
  const lck_update_rule *rules;
  const lck_update_task *tasks;
  uint64_t count;
  lck_snapshot *snapshot; /* NULL: in place only */
  lck_batch *batch;
  uint64_t *first_pieces; /* of each of the batch's copies */
  lck_update_kernel *kernel;
  int streams; /* the kernel stores to the region itself; else its result is copied there */
  lck_update_factors *factors; /* of each task */
  update_item *items;
  uint64_t *blocks; /* of each block, its first item; and the end */
  uint64_t block_count;
  _Atomic uint64_t next; /* block */
  _Atomic int failed;    /* nothing more is stored in the region */
  _Atomic uint64_t streamed_bytes;
} update_run;

/* ---- Arguments ------------------------------------------------------------------------------- */

static int is_adam(const lck_update_rule *rule) {
  return rule->kind != LCK_SGD;
}

/* How many columns a rule has, from the first on. */
static uint32_t columns_of(const lck_update_rule *rule) {
  if (!is_adam(rule))
    return rule->momentum != 0.0 ? 2 : 1;
  return rule->flags & LCK_UPDATE_AMSGRAD ? 4 : 3;
}

static void *column_of(const lck_update_task *task, uint32_t column) {
  void *const columns[LCK_UPDATE_COLUMNS] = {task->parameter, task->first, task->second,
                                             task->largest};
  return columns[column];
}

static uint64_t size_of(const lck_update_task *task) {
  return lck_update_size(task->type);
}

static int check_task(const update_run *run, uint64_t i, uint64_t rule_count) {
  const lck_update_task *task = &run->tasks[i];
  int sound = task->rule < rule_count && task->gradient != NULL && task->length > 0 &&
              task->length <= INT64_MAX / 4 && task->type <= LCK_FLOAT16;
  if (sound) {
    const lck_update_rule *rule = &run->rules[task->rule];
    for (uint32_t c = 0; c < columns_of(rule); c++)
      sound = sound && column_of(task, c) != NULL;
    sound = sound && (is_adam(rule) ? task->step != NULL : task->type == LCK_FLOAT32);
  }
  return sound ? 0
               : lck_fail(LCK_E_INVALID,
                          "task %llu: no rule, length, type, gradient, count of steps, or column",
                          (unsigned long long)i);
}

static int check_rules(const lck_update_rule *rules, uint64_t count) {
  const uint32_t known =
      LCK_UPDATE_AMSGRAD | LCK_UPDATE_MAXIMIZE | LCK_UPDATE_NESTEROV | LCK_UPDATE_UNFUSED;
  for (uint64_t i = 0; i < count; i++) {
    if (rules[i].kind > LCK_SGD || (rules[i].flags & ~known) != 0 ||
        (rules[i].flags & LCK_UPDATE_UNFUSED) != (rules[0].flags & LCK_UPDATE_UNFUSED)) {
      return lck_fail(LCK_E_INVALID, "rule %llu: kind %u or flags 0x%x", (unsigned long long)i,
                      rules[i].kind, rules[i].flags);
    }
  }
  return 0;
}

static int is_streamed(const lck_update_task *task, uint32_t column) {
  return task->copies[column] != LCK_NOT_STREAMED;
}

/* The copy of one column: it is of that very column, whole. */
static int check_copy(const update_run *run, uint64_t i, uint32_t column) {
  const lck_update_task *task = &run->tasks[i];
  uint64_t copy = task->copies[column], length = 0;
  if (copy >= run->batch->copy_count)
    return lck_fail(LCK_E_INVALID, "task %llu: no copy %llu", (unsigned long long)i,
                    (unsigned long long)copy);
  int sound = run->batch->pieces[run->first_pieces[copy]].source == column_of(task, column);
  for (uint64_t k = run->first_pieces[copy]; k < run->first_pieces[copy + 1]; k++) {
    const lck_piece *piece = &run->batch->pieces[k];
    length += piece->length;
    sound = sound && piece->staged == NULL && (piece->flags & LCK_COPY_IF_CHANGED) == 0;
  }
  if (!sound || length != task->length * size_of(task)) {
    return lck_fail(LCK_E_INVALID,
                    "task %llu: copy %llu is of %llu bytes elsewhere, staged, or may be skipped",
                    (unsigned long long)i, (unsigned long long)copy, (unsigned long long)length);
  }
  return 0;
}

/* Every copy of the batch is some column's: they are of different places, so no other's. */
static int check_copies(const update_run *run, uint32_t number) {
  uint64_t streamed = 0;
  for (uint64_t i = 0; i < run->count; i++) {
    for (uint32_t c = 0; c < columns_of(&run->rules[run->tasks[i].rule]); c++) {
      int rc = is_streamed(&run->tasks[i], c) ? check_copy(run, i, c) : 0;
      if (rc)
        return rc;
      streamed += (uint64_t)is_streamed(&run->tasks[i], c);
    }
  }
  if (streamed == run->batch->copy_count)
    return 0;
  return lck_fail(LCK_E_INVALID, "batch %u has %llu copies, the tasks stream %llu", number,
                  (unsigned long long)run->batch->copy_count, (unsigned long long)streamed);
}

static int check_batch(update_run *run, uint32_t number) {
  int rc = lck_snapshot_open(run->snapshot);
  if (rc)
    return rc;
  lck_batch *batch = run->batch = lck_snapshot_batch(run->snapshot, number);
  if (!batch)
    return LCK_E_INVALID;
  if (batch->fed || run->snapshot->paged || atomic_load(&batch->released) > 0 ||
      lck_batch_captured(batch) > 0)
    return lck_fail(LCK_E_STATE, "batch %u is fed, staged, released or captured", number);
  run->first_pieces = malloc((batch->copy_count + 1) * sizeof *run->first_pieces);
  if (!run->first_pieces)
    return lck_fail(LCK_E_NOMEM, "no memory for an update's tables");
  for (uint64_t k = 0; k < batch->piece_count; k++)
    if (k == 0 || batch->pieces[k].copy != batch->pieces[k - 1].copy)
      run->first_pieces[batch->pieces[k].copy] = k;
  run->first_pieces[batch->copy_count] = batch->piece_count;
  return check_copies(run, number);
}

/* ---- Tables ---------------------------------------------------------------------------------- */

static void count_step(lck_update_factors *by, const lck_update_rule *rule, double step) {
  by->step = (float)(rule->lr / (1 - pow(rule->beta1, step)));
  by->root = (float)sqrt(1 - pow(rule->beta2, step));
}

/* Constants are computed in double and rounded once, as torch does. */
static lck_update_factors factors_of(const lck_update_rule *rule) {
  lck_update_factors by = {.kind = rule->kind,
                           .flags = rule->flags,
                           .decays = rule->weight_decay != 0.0,
                           .has_momentum = rule->momentum != 0.0};
  int fused = (rule->flags & LCK_UPDATE_UNFUSED) == 0;
  double decayed = rule->lr * rule->weight_decay;
  by.keep = (float)(fused ? fma(-rule->lr, rule->weight_decay, 1.0) : 1.0 - decayed);
  by.decay = (float)rule->weight_decay;
  by.first_rest = (float)(1 - rule->beta1);
  by.first_small = fabsf(by.first_rest) < 0.5F;
  by.first_weight = by.first_small ? by.first_rest : by.first_rest - 1.0F;
  by.second = (float)rule->beta2;
  by.second_rest = (float)(1 - rule->beta2);
  by.eps = (float)rule->eps;
  by.rate = (float)rule->lr;
  by.momentum = (float)rule->momentum;
  by.undamped = (float)(1 - rule->dampening);
  return by;
}

/* Raise the counts of steps, and compute what each task needs of its rule. */
static void count_steps(update_run *run) {
  for (uint64_t i = 0; i < run->count; i++) {
    const lck_update_task *task = &run->tasks[i];
    const lck_update_rule *rule = &run->rules[task->rule];
    lck_update_factors *by = &run->factors[i];
    if (is_adam(rule))
      *task->step += 1.0F;
    if (i > 0 && task[-1].rule == task->rule && (!is_adam(rule) || *task[-1].step == *task->step)) {
      *by = run->factors[i - 1];
      continue;
    }
    *by = factors_of(rule);
    if (is_adam(rule))
      count_step(by, rule, *task->step);
  }
}

/* Cut the tasks into items, each within one piece, and items into blocks. */
static int cut(update_run *run) {
  uint64_t piece_bytes = run->snapshot ? run->snapshot->pool->chunk_bytes : PIECE_BYTES, items = 0;
  for (uint64_t i = 0; i < run->count; i++)
    items += (run->tasks[i].length * size_of(&run->tasks[i]) + piece_bytes - 1) / piece_bytes;
  run->factors = malloc(run->count * sizeof *run->factors);
  run->items = malloc(items * sizeof *run->items);
  run->blocks = malloc((items + 1) * sizeof *run->blocks);
  if (!run->factors || !run->items || !run->blocks)
    return lck_fail(LCK_E_NOMEM, "no memory for an update of %llu tasks",
                    (unsigned long long)run->count);
  uint64_t bytes = BLOCK_BYTES, at = 0;
  for (uint64_t i = 0; i < run->count; i++) {
    uint64_t size = size_of(&run->tasks[i]), piece = piece_bytes / size;
    for (uint64_t from = 0; from < run->tasks[i].length; from += piece, at++) {
      uint64_t left = run->tasks[i].length - from;
      run->items[at] = (update_item){i, from, left < piece ? left : piece};
      if (bytes >= BLOCK_BYTES) {
        run->blocks[run->block_count++] = at;
        bytes = 0;
      }
      bytes += run->items[at].length * size;
    }
  }
  run->blocks[run->block_count] = at;
  return 0;
}

/* ---- Threads --------------------------------------------------------------------------------- */

static lck_piece *piece_of(const update_run *run, const update_item *item, uint32_t column) {
  const lck_update_task *task = &run->tasks[item->task];
  uint64_t within = item->from * size_of(task) / run->snapshot->pool->chunk_bytes;
  return &run->batch->pieces[run->first_pieces[task->copies[column]] + within];
}

static lck_update_span span_of(const update_run *run, const update_item *item) {
  const lck_update_task *task = &run->tasks[item->task];
  uint64_t from = item->from * size_of(task);
  lck_update_span span = {.gradient = (const char *)task->gradient + from,
                          .length = item->length,
                          .type = task->type,
                          .factors = &run->factors[item->task]};
  for (uint32_t c = 0; c < columns_of(&run->rules[task->rule]); c++)
    span.columns[c] = (char *)column_of(task, c) + from;
  return span;
}

/* A thread and the item that it is at. */
typedef struct streaming {
  update_run *run;
  const update_item *item;
  lck_update_span span;
  int fault;      /* an errno that a test has injected */
  uint64_t bytes; /* stored in the region */
} streaming;

/* Within the region's section, which a fault leaves: `span.done` says where. */
static void stream_item(void *argument) {
  streaming *at = argument;
  const update_run *run = at->run;
  lck_region *region = run->snapshot->region;
  const lck_update_task *task = &run->tasks[at->item->task];
  uint32_t columns = columns_of(&run->rules[task->rule]);
  at->fault = lck_fault_visit(LCK_FAULT_COPY);
  if (at->fault)
    return;
  for (uint32_t c = 0; c < columns; c++) {
    if (!is_streamed(task, c))
      continue;
    const lck_piece *piece = piece_of(run, at->item, c);
    lck_space_touch(region, run->snapshot->slot, piece->offset, piece->length);
    if (run->streams)
      at->span.out[c] = lck_persist_stream_to(region, piece->offset);
  }
  run->kernel(&at->span);
  for (uint32_t c = 0; c < columns; c++) {
    if (!is_streamed(task, c))
      continue;
    lck_piece *piece = piece_of(run, at->item, c);
    piece->crc = 0;
    if (run->streams) {
      piece->crc = at->span.crc[c];
      lck_persist_streamed(region, piece->offset, piece->length);
    } else {
      (void)lck_persist_payload(region, piece->offset, piece->source, piece->length, &piece->crc);
    }
    at->bytes += piece->length;
  }
}

/* The snapshot fails; the update goes on without it. */
static void give_up_streaming(update_run *run, const update_item *item, int rc, int fault) {
  if (rc == 0) {
    errno = fault;
    rc = lck_fail_errno(LCK_E_IO, "update of task %llu into slot %u",
                        (unsigned long long)item->task, run->snapshot->slot);
  }
  lck_snapshot_fail(run->snapshot, rc);
  atomic_store(&run->failed, 1);
}

static int has_place(const update_run *run, const update_item *item) {
  const lck_update_task *task = &run->tasks[item->task];
  int streamed = 0;
  for (uint32_t c = 0; c < columns_of(&run->rules[task->rule]); c++)
    streamed |= is_streamed(task, c);
  return streamed && run->snapshot && !atomic_load(&run->failed) &&
         !atomic_load(&run->snapshot->halted);
}

static void run_item(update_run *run, const update_item *item) {
  streaming at = {.run = run, .item = item, .span = span_of(run, item)};
  if (has_place(run, item)) {
    lck_region *region = run->snapshot->region;
    lck_bus_fault fault;
    int lost = lck_access_try(run->snapshot->base, run->snapshot->reserved_length, stream_item, &at,
                              &fault);
    if (!lost && !at.fault) {
      atomic_fetch_add_explicit(&run->streamed_bytes, at.bytes, memory_order_relaxed);
      return;
    }
    give_up_streaming(run, item, lost ? lck_access_failed(region, &fault) : 0, at.fault);
    memset(at.span.out, 0, sizeof at.span.out);
  }
  run->kernel(&at.span);
}

/* Each thread's own: a fence drains its stores only. */
static void work(void *argument) {
  update_run *run = argument;
  for (uint64_t k; (k = atomic_fetch_add(&run->next, 1)) < run->block_count;)
    for (uint64_t i = run->blocks[k]; i < run->blocks[k + 1]; i++)
      run_item(run, &run->items[i]);
  if (run->snapshot && !LCK_MUTANT(MUTANT_UPDATE_NOT_FENCED))
    lck_persist_fence();
}

static void *work_here(void *argument) {
  work(argument);
  return NULL;
}

/* All of the batch is in the region: what workers would say of its chunks. */
static void take_as_captured(update_run *run) {
  lck_pool *pool = run->snapshot->pool;
  for (uint64_t i = 0; i < run->batch->chunk_count; i++)
    atomic_store(&run->batch->chunks[i].word, LCK_CHUNK_CAPTURED);
  atomic_store(&run->batch->counted, run->batch->chunk_count);
  atomic_fetch_add_explicit(&pool->bytes_copied, run->streamed_bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&pool->bytes_helped, run->streamed_bytes, memory_order_relaxed);
}

/* ---- The call -------------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* Fused multiply-adds, and conversions of halves. */
static int has_fused(void) {
  return lck_cpu_has(LCK_CPU_AVX2 | LCK_CPU_FMA | LCK_CPU_F16C);
}
#endif

/* Choose by the copy kernel in use, so that both are of the same instruction set. */
static int choose_kernel(update_run *run, int unfused) {
  run->kernel = lck_update_portable;
  if (unfused)
    return 0;
#if defined(__x86_64__)
  const char *name = lck_kernel_current()->name;
  if (has_fused()) {
    int wide = strcmp(name, "avx512") == 0 && lck_cpu_has(LCK_CPU_AVX512DQ);
    run->streams = wide || strcmp(name, "avx2") == 0 || strcmp(name, "avx512") == 0;
    run->kernel = wide ? lck_update_avx512 : lck_update_avx2;
    return 0;
  }
#endif
  return lck_fail(LCK_E_INVALID, "this CPU has no fused multiply-add");
}

#if defined(__x86_64__)
#include <xmmintrin.h>
LCK_API int lck_flushes_denormals(void) {
  return (_mm_getcsr() & 0x8040u) != 0;
}
#else
LCK_API int lck_flushes_denormals(void) {
  return 0;
}
#endif

static int prepare(update_run *run, uint64_t rule_count, uint32_t batch) {
  if (!run->rules || rule_count == 0 || !run->tasks || run->count == 0)
    return lck_fail(LCK_E_INVALID, "no rules or no tasks");
  if (lck_flushes_denormals())
    return lck_fail(LCK_E_STATE, "the thread flushes denormals: others may not");
  int rc = check_rules(run->rules, rule_count);
  for (uint64_t i = 0; i < run->count && rc == 0; i++)
    rc = check_task(run, i, rule_count);
  if (rc == 0)
    rc = choose_kernel(run, (run->rules[0].flags & LCK_UPDATE_UNFUSED) != 0);
  if (rc == 0 && run->snapshot)
    rc = check_batch(run, batch);
  return rc == 0 ? cut(run) : rc;
}

/* While it is used nobody frees the snapshot: whoever gives it up waits, and stops its stores. */
static void use(lck_snapshot *snapshot, int begins) {
  if (!snapshot)
    return;
  lck_pool *pool = snapshot->pool;
  lck_pool_lock(pool);
  snapshot->users += begins ? 1 : UINT32_MAX;
  lck_pool_unlock(pool);
  if (!begins) /* the snapshot may be gone */
    lck_wait_queue_wake(&pool->progress);
}

LCK_API int lck_update(const lck_update_rule *rules, uint64_t rule_count,
                       const lck_update_task *tasks, uint64_t count, lck_snapshot *snapshot,
                       uint32_t batch, uint32_t threads, lck_parallel parallel) {
  update_run run = {.rules = rules, .tasks = tasks, .count = count, .snapshot = snapshot};
  int rc = prepare(&run, rule_count, batch);
  if (rc == 0) {
    use(snapshot, 1);
    count_steps(&run);
    uint64_t wanted = threads < run.block_count ? threads : run.block_count;
    if (wanted <= 1)
      work(&run);
    else if (parallel)
      parallel(work, &run, (unsigned)wanted, 0);
    else
      lck_threads_run(work_here, &run, wanted);
    if (snapshot && !atomic_load(&run.failed) && !atomic_load(&snapshot->halted))
      take_as_captured(&run);
    use(snapshot, 0);
  }
  free(run.first_pieces);
  free(run.factors);
  free(run.items);
  free(run.blocks);
  return rc;
}
