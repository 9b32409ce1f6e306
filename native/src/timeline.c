#include "timeline.h"

#include <string.h>
#include <sys/mman.h>

#include "api.h"
#include "error.h"
#include "pool.h"

_Static_assert(sizeof(lck_cell) == 64, "a cell is a cache line");

/* ---- rings -------------------------------------------------------------------------------- */

static int has_lane(const lck_pool *pool, uint32_t thread) {
  return thread < pool->workers || thread >= LCK_THREAD_KEEPER;
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
  return memset(raw, 0, length); /* zeros: no cell holds moment 0 - 1 */
}

int lck_timeline_make(lck_pool *pool, uint32_t moments) {
  uint64_t cells = 1;
  while (cells < moments)
    cells *= 2;
  for (uint32_t i = 0; i < LCK_LANES; i++) {
    lck_lane *lane = &pool->lanes[i];
    lane->mask = cells - 1;
    if (moments == 0 || !has_lane(pool, i))
      continue;
    lane->cells = map_cells(cells);
    if (!lane->cells)
      return lck_fail(LCK_E_NOMEM, "no memory for a timeline of %llu moments per thread",
                      (unsigned long long)cells);
  }
  return 0;
}

void lck_timeline_free(lck_pool *pool) {
  for (uint32_t i = 0; i < LCK_LANES; i++) {
    lck_lane *lane = &pool->lanes[i];
    if (lane->cells)
      munmap(lane->cells, (lane->mask + 1) * sizeof *lane->cells);
  }
}

/* The words are stored with release, so that a reader who sees one of them also sees that the stamp
 * was cleared; the stamp with release, so that one who sees it sees all of them. */
void lck_timeline_note(lck_lane *lane, lck_moment *moment) {
  if (!lane->cells)
    return;
  uint64_t words[LCK_MOMENT_WORDS];
  moment->thread = lane->thread;
  memcpy(words, moment, sizeof words);
  uint64_t number = atomic_fetch_add_explicit(&lane->next, 1, memory_order_relaxed);
  lck_cell *cell = &lane->cells[number & lane->mask];
  atomic_store_explicit(&cell->stamp, 0, memory_order_relaxed);
  for (uint32_t i = 0; i < LCK_MOMENT_WORDS; i++)
    atomic_store_explicit(&cell->words[i], words[i], memory_order_release);
  atomic_store_explicit(&cell->stamp, number + 1, memory_order_release);
}

/* 1 if the cell held that moment from the first look to the last. */
static int read_cell(lck_cell *cell, uint64_t number, lck_moment *out) {
  uint64_t words[LCK_MOMENT_WORDS];
  if (atomic_load_explicit(&cell->stamp, memory_order_acquire) != number + 1)
    return 0;
  for (uint32_t i = 0; i < LCK_MOMENT_WORDS; i++)
    words[i] = atomic_load_explicit(&cell->words[i], memory_order_acquire);
  if (atomic_load_explicit(&cell->stamp, memory_order_relaxed) != number + 1)
    return 0;
  memcpy(out, words, sizeof words);
  return 1;
}

LCK_API int lck_pool_timeline(lck_pool *pool, lck_moment *moments, uint64_t room, uint64_t *count,
                              uint64_t *lost) {
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  if (!count || !lost || (!moments && room > 0))
    return lck_fail(LCK_E_INVALID, "no place for the timeline");
  uint64_t held = 0, gone = 0;
  for (uint32_t i = 0; i < LCK_LANES; i++) {
    lck_lane *lane = &pool->lanes[i];
    uint64_t end = lane->cells ? atomic_load_explicit(&lane->next, memory_order_acquire) : 0;
    uint64_t first = end > lane->mask + 1 ? end - lane->mask - 1 : 0;
    gone += first;
    if (!moments && lane->cells)
      held += lane->mask + 1;
    for (uint64_t number = first; moments && number < end; number++) {
      if (held < room && read_cell(&lane->cells[number & lane->mask], number, &moments[held]))
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
  lck_lane *lane; /* NULL outside of enter and leave */
  uint64_t since;
  uint32_t slot;
} stage;

void lck_timeline_enter(lck_lane *lane, uint32_t slot) {
  if (!lane->cells)
    return;
  stage.lane = lane;
  stage.slot = slot;
  stage.since = lck_now_ns();
}

void lck_timeline_stage(uint32_t did, uint64_t bytes) {
  if (!stage.lane)
    return;
  lck_moment moment = {.begin_ns = stage.since,
                       .end_ns = lck_now_ns(),
                       .bytes = bytes,
                       .did = did,
                       .slot = stage.slot};
  lck_timeline_note(stage.lane, &moment);
  stage.since = moment.end_ns;
}

void lck_timeline_leave(void) {
  stage.lane = NULL;
}
