/* staging.c -- the DRAM that staged snapshots go through. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "api.h"
#include "error.h"
#include "pool.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14; refused before */
#endif

#define HUGE_PAGE (UINT64_C(2) << 20)
#define AREA_LEAST (UINT64_C(16) << 20) /* so that many small batches share one mapping */

static uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

static lck_area *map_area(lck_pool *pool, uint64_t length) {
  length = round_up(length < AREA_LEAST ? AREA_LEAST : length, HUGE_PAGE);
  lck_area *area = calloc(1, sizeof *area);
  if (!area)
    return NULL;
  unsigned char *raw = mmap(NULL, length + HUGE_PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    free(area);
    return NULL;
  }
  uint64_t head = round_up((uintptr_t)raw, HUGE_PAGE) - (uintptr_t)raw;
  if (head > 0)
    munmap(raw, head);
  munmap(raw + head + length, HUGE_PAGE - head);
  area->base = raw + head;
  area->length = length;
  /* Both are wishes. A child must not get the area: the parent's next stores would copy every page
   * of it. */
  madvise(area->base, length, MADV_HUGEPAGE);
  madvise(area->base, length, MADV_DONTFORK);
  atomic_fetch_add_explicit(&pool->staging_bytes, length, memory_order_relaxed);
  return area;
}

void lck_staging_drop(lck_pool *pool, lck_area *areas) {
  while (areas) {
    lck_area *next = areas->next;
    munmap(areas->base, areas->length);
    atomic_fetch_sub_explicit(&pool->staging_bytes, areas->length, memory_order_relaxed);
    free(areas);
    areas = next;
  }
}

/* The smallest cached area that fits. When none does, the cache is emptied into *misfits: what is
 * needed has outgrown it, and DRAM that serves nobody is not kept. */
static lck_area *take_cached(lck_pool *pool, uint64_t length, lck_area **misfits) {
  lck_area **best = NULL;
  lck_pool_lock(pool);
  for (lck_area **at = &pool->cached; *at; at = &(*at)->next)
    if ((*at)->length >= length && (!best || (*at)->length < (*best)->length))
      best = at;
  lck_area *area = NULL;
  if (best) {
    area = *best;
    *best = area->next;
  } else {
    *misfits = pool->cached;
    pool->cached = NULL;
  }
  lck_pool_unlock(pool);
  return area;
}

unsigned char *lck_staging_take(lck_pool *pool, lck_area **held, uint64_t length) {
  length = round_up(length, LCK_LINE);
  lck_area *area = *held;
  while (area && area->length - area->used < length)
    area = area->next;
  if (!area) {
    lck_area *misfits = NULL;
    area = take_cached(pool, length, &misfits);
    lck_staging_drop(pool, misfits);
    if (!area)
      area = map_area(pool, length);
    if (!area)
      return NULL;
    area->used = 0;
    area->next = *held;
    *held = area;
  }
  unsigned char *taken = area->base + area->used;
  area->used += length;
  return taken;
}

void lck_staging_give(lck_pool *pool, lck_area **held) {
  lck_pool_lock(pool);
  while (*held) {
    lck_area *area = *held;
    *held = area->next;
    area->next = pool->cached;
    pool->cached = area;
  }
  lck_pool_unlock(pool);
}

LCK_API int lck_pool_stage(lck_pool *pool, uint64_t bytes) {
  int rc = lck_pool_usable(pool);
  if (rc || bytes == 0)
    return rc;
  lck_area *area = map_area(pool, bytes);
  if (!area)
    return lck_fail(LCK_E_NOMEM, "%llu bytes of DRAM for staging", (unsigned long long)bytes);
  if (madvise(area->base, area->length, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
    lck_staging_drop(pool, area);
    return lck_fail(LCK_E_NOMEM, "%llu bytes of DRAM for staging cannot be faulted in",
                    (unsigned long long)bytes);
  }
  lck_staging_give(pool, &area);
  return 0;
}
