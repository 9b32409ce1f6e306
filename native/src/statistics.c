/* statistics.c -- the statistics page: what a trainer says of itself, for whoever looks on from
 * another process.
 *
 * It vouches for nothing and survives nothing: no recovery reads it, no commit waits for it, and a
 * torn one is only a page that cannot be read. */
#include "statistics.h"

#include <sched.h>
#include <string.h>

#include "access.h"
#include "api.h"
#include "error.h"
#include "lock.h"
#include "persist.h"
#include "pool.h"
#include "region.h"

#define READ_ATTEMPTS 64

static uint32_t page_crc(const statistics_disk *page) {
  const unsigned char *first = (const unsigned char *)&page->magic;
  return lck_crc32c(0, first, offsetof(statistics_disk, crc) - offsetof(statistics_disk, magic));
}

/* ---- write -------------------------------------------------------------------------------- */

static uint64_t counter(const _Atomic uint64_t *of) {
  return atomic_load_explicit(of, memory_order_relaxed);
}

static statistics_disk compose(const lck_pool *pool, const lck_statistics *values) {
  statistics_disk page = {.magic = LCK_STATISTICS_MAGIC,
                          .version = LCK_FORMAT_VERSION,
                          .bytes = sizeof(page),
                          .values = *values};
  page.values.bytes_copied = counter(&pool->bytes_copied);
  page.values.bytes_skipped = counter(&pool->bytes_skipped);
  page.values.bytes_helped = counter(&pool->bytes_helped);
  page.values.copy_ns = counter(&pool->copy_ns);
  page.values.commit_ns = counter(&pool->commit_ns);
  page.values.staging_bytes = counter(&pool->staging_bytes);
  page.values.bytes_drained = counter(&pool->bytes_drained);
  page.values.drain_ns = counter(&pool->drain_ns);
  page.crc = page_crc(&page);
  return page;
}

/* A store into a file's mapping can wait for the file system, which may be in the middle of a sync;
 * there the commit thread stores. Only the newest page counts. */
LCK_API int lck_pool_publish(lck_pool *pool, lck_region *region, const lck_statistics *values) {
  int rc = lck_pool_usable(pool);
  if (rc == 0)
    rc = lck_region_alive(region);
  if (rc)
    return rc;
  if (!values || region->flags & LCK_READ_ONLY)
    return lck_fail(LCK_E_INVALID, "no statistics, or the region is open read-only");
  statistics_disk page = compose(pool, values);
  if (region->granularity != LCK_GRAN_PAGE && region->medium != LCK_FILE) {
    return lck_persist_note(region, LCK_STATISTICS_OFFSET, &page, sizeof(page));
  }
  lck_pool_lock(pool);
  pool->pending_page = (lck_pending_page){.region = region, .page = page};
  lck_pool_unlock(pool);
  lck_wait_queue_wake(&pool->commit_work);
  return 0;
}

int lck_statistics_store(lck_pool *pool) {
  lck_pending_page pending_page = pool->pending_page;
  if (!pending_page.region)
    return 0;
  pool->pending_page.region = NULL;
  lck_pool_unlock(pool);
  /* What fails has latched the region, which is where the trainer hears of it. */
  (void)lck_persist_note(pending_page.region, LCK_STATISTICS_OFFSET, &pending_page.page,
                         sizeof(pending_page.page));
  lck_pool_lock(pool);
  return 1;
}

/* ---- read --------------------------------------------------------------------------------- */

/* Check a copy of the page: 0, or an error with the reason why it does not serve. */
static int judge(const statistics_disk *page) {
  if (page->magic == 0)
    return lck_fail(LCK_E_EMPTY, "no statistics: no trainer has published any here");
  if (page->magic != LCK_STATISTICS_MAGIC || page->bytes != sizeof(*page) ||
      page->version != LCK_FORMAT_VERSION)
    return lck_fail(LCK_E_CORRUPT,
                    "statistics: magic %08x, version %u, %u bytes, expected %08x, %u, %zu",
                    page->magic, page->version, page->bytes, LCK_STATISTICS_MAGIC,
                    LCK_FORMAT_VERSION, sizeof(*page));
  if (page->crc != page_crc(page))
    return lck_fail(LCK_E_CORRUPT, "statistics: CRC %08x, expected %08x (torn?)", page_crc(page),
                    page->crc);
  return 0;
}

/* The checksum alone makes a copy whole; the turn only spares the ones that cannot be. */
LCK_API int lck_region_statistics(const lck_region *region, lck_statistics *out, int *owned) {
  int rc = lck_region_alive(region);
  if (rc)
    return rc;
  if (!out || !owned)
    return lck_fail(LCK_E_INVALID, "no place for the statistics");
  rc = lck_lock_owned(region, owned);
  statistics_disk page;
  for (int attempt = 0, again = rc == 0; again && attempt < READ_ATTEMPTS; attempt++) {
    uint64_t turn = 0;
    rc = lck_access_word(region, LCK_STATISTICS_OFFSET, &turn);
    if (rc == 0)
      rc = lck_access_load(region, LCK_STATISTICS_OFFSET, &page, sizeof(page));
    if (rc)
      return rc;
    rc = judge(&page);
    again = turn & 1 || rc == LCK_E_CORRUPT;
    if (again)
      sched_yield();
  }
  if (rc == 0)
    *out = page.values;
  return rc;
}
