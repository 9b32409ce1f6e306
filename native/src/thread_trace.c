/* thread_trace.c -- the rings of spans, and the stages of a commit in them. */
#include "thread_trace.h"

#include <string.h>
#include <sys/mman.h>

#include "api.h"
#include "error.h"
#include "pool.h"

_Static_assert(sizeof(lck_cell) == 64, "a cell is a cache line");

/* ---- rings -------------------------------------------------------------------------------- */

static int has_thread(const lck_pool *pool, uint32_t thread) {
  return thread < pool->workers || thread >= LCK_THREAD_COMMIT;
}

/* NULL: no memory. Every page is there already: a worker of the idle class that loses its CPU
 * inside a page fault would hold up whoever in the process maps or unmaps memory, the training for
 * one. For the same reason a fork leaves the pages alone. */
static lck_cell *map_cells(uint64_t cells) {
  size_t length = cells * sizeof(lck_cell);
  void *raw = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED)
    return NULL;
  madvise(raw, length, MADV_HUGEPAGE); /* both are wishes */
  madvise(raw, length, MADV_DONTFORK);
  return memset(raw, 0, length); /* zeros: no cell holds span 0 - 1 */
}

int lck_thread_trace_make(lck_pool *pool, uint32_t spans) {
  uint64_t cells = 1;
  while (cells < spans)
    cells *= 2;
  for (uint32_t i = 0; i < LCK_POOL_THREADS; i++) {
    lck_pool_thread *thread = &pool->threads[i];
    thread->mask = cells - 1;
    if (spans == 0 || !has_thread(pool, i))
      continue;
    thread->cells = map_cells(cells);
    if (!thread->cells)
      return lck_fail(LCK_E_NOMEM, "no memory for a trace of %llu spans per thread",
                      (unsigned long long)cells);
  }
  return 0;
}

void lck_thread_trace_free(lck_pool *pool) {
  for (uint32_t i = 0; i < LCK_POOL_THREADS; i++) {
    lck_pool_thread *thread = &pool->threads[i];
    if (thread->cells)
      munmap(thread->cells, (thread->mask + 1) * sizeof *thread->cells);
  }
}

/* The words are stored with release, so that a reader who sees one of them also sees that the stamp
 * was cleared; the stamp with release, so that one who sees it sees all of them. */
void lck_thread_trace_add(lck_pool_thread *thread, lck_span *span) {
  if (!thread->cells)
    return;
  uint64_t words[LCK_SPAN_WORDS];
  span->thread = thread->number;
  memcpy(words, span, sizeof words);
  uint64_t number = atomic_fetch_add_explicit(&thread->next, 1, memory_order_relaxed);
  lck_cell *cell = &thread->cells[number & thread->mask];
  atomic_store_explicit(&cell->stamp, 0, memory_order_relaxed);
  for (uint32_t i = 0; i < LCK_SPAN_WORDS; i++)
    atomic_store_explicit(&cell->words[i], words[i], memory_order_release);
  atomic_store_explicit(&cell->stamp, number + 1, memory_order_release);
}

/* 1 if the cell held that span from the first look to the last. */
static int read_cell(lck_cell *cell, uint64_t number, lck_span *out) {
  uint64_t words[LCK_SPAN_WORDS];
  if (atomic_load_explicit(&cell->stamp, memory_order_acquire) != number + 1)
    return 0;
  for (uint32_t i = 0; i < LCK_SPAN_WORDS; i++)
    words[i] = atomic_load_explicit(&cell->words[i], memory_order_acquire);
  if (atomic_load_explicit(&cell->stamp, memory_order_relaxed) != number + 1)
    return 0;
  memcpy(out, words, sizeof words);
  return 1;
}

LCK_API int lck_pool_trace(lck_pool *pool, lck_span *spans, uint64_t room, uint64_t *count,
                           uint64_t *lost) {
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  if (!count || !lost || (!spans && room > 0))
    return lck_fail(LCK_E_INVALID, "no place for the trace");
  uint64_t held = 0, gone = 0;
  for (uint32_t i = 0; i < LCK_POOL_THREADS; i++) {
    lck_pool_thread *thread = &pool->threads[i];
    uint64_t end = thread->cells ? atomic_load_explicit(&thread->next, memory_order_acquire) : 0;
    uint64_t first = end > thread->mask + 1 ? end - thread->mask - 1 : 0;
    gone += first;
    if (!spans && thread->cells)
      held += thread->mask + 1;
    for (uint64_t number = first; spans && number < end; number++) {
      if (held < room && read_cell(&thread->cells[number & thread->mask], number, &spans[held]))
        held++;
      else
        gone++;
    }
  }
  *count = held;
  *lost = gone;
  return 0;
}

/* ---- stages ------------------------------------------------------------------------------- */

static _Thread_local struct {
  lck_pool_thread *thread; /* NULL outside of enter and leave */
  uint64_t since;
  uint32_t slot;
} stage;

void lck_thread_trace_enter(lck_pool_thread *thread, uint32_t slot) {
  if (!thread->cells)
    return;
  stage.thread = thread;
  stage.slot = slot;
  stage.since = lck_now_ns();
}

void lck_thread_trace_stage(uint32_t kind, uint64_t bytes) {
  if (!stage.thread)
    return;
  lck_span span = {.begin_ns = stage.since,
                   .end_ns = lck_now_ns(),
                   .bytes = bytes,
                   .kind = kind,
                   .slot = stage.slot};
  lck_thread_trace_add(stage.thread, &span);
  stage.since = span.end_ns;
}

void lck_thread_trace_leave(void) {
  stage.thread = NULL;
}
