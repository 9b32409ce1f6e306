/* capture.c -- letting copies run, feeding those that the pool cannot read, and waiting for them.
 */
#include <string.h>

#include "api.h"
#include "error.h"
#include "snapshot.h"

/* ---- Release --------------------------------------------------------------------------------- */

/* Returns 1 if the watermark rose. */
static int raise_to(lck_batch *batch, uint64_t chunks) {
  uint64_t before = atomic_load(&batch->released);
  while (before < chunks)
    if (atomic_compare_exchange_weak(&batch->released, &before, chunks))
      return 1;
  return 0;
}

static int find(const lck_snapshot *snapshot, uint32_t batch, int fed, lck_batch **out) {
  int rc = lck_snapshot_usable(snapshot);
  if (rc)
    return rc;
  *out = lck_snapshot_batch(snapshot, batch);
  if (!*out)
    return LCK_E_INVALID;
  if ((*out)->fed != fed)
    return lck_fail(LCK_E_INVALID, "batch %u is %sfed", batch, fed ? "not " : "");
  return 0;
}

LCK_API int lck_snapshot_release(lck_snapshot *snapshot, uint32_t batch, uint64_t bytes) {
  lck_batch *released;
  int rc = find(snapshot, batch, 0, &released);
  if (rc)
    return rc;
  if (raise_to(released, lck_batch_chunks(released, bytes)))
    lck_pool_wake(snapshot->pool);
  return lck_snapshot_failure(snapshot);
}

/* ---- Feed ------------------------------------------------------------------------------------ */

LCK_API int lck_snapshot_cuts(const lck_snapshot *snapshot, uint32_t batch, uint64_t *starts,
                              uint64_t room, uint64_t *count) {
  lck_batch *cut;
  int rc = find(snapshot, batch, 1, &cut);
  if (rc)
    return rc;
  if (!count || (!starts && room > 0))
    return lck_fail(LCK_E_INVALID, "no place for the cuts of batch %u", batch);
  for (uint64_t i = 0; i < cut->chunk_count && i < room; i++)
    starts[i] = cut->chunks[i].start;
  *count = cut->chunk_count;
  return 0;
}

/* The sources are stored before the watermark rises: a worker that claims a chunk has seen both. */
LCK_API int lck_snapshot_feed(lck_snapshot *snapshot, uint32_t batch, uint64_t end,
                              const void *from) {
  lck_batch *fed;
  int rc = find(snapshot, batch, 1, &fed);
  if (rc)
    return rc;
  uint64_t first = atomic_load(&fed->released), last = lck_batch_chunks(fed, end);
  uint64_t begin = fed->chunks[first].start;
  if (end <= begin || fed->chunks[last].start != end) {
    return lck_fail(LCK_E_INVALID, "batch %u is fed up to byte %llu: %llu is no later cut", batch,
                    (unsigned long long)begin, (unsigned long long)end);
  }
  const unsigned char *at = from;
  for (uint64_t i = fed->chunks[first].first; i < fed->chunks[last].first; i++) {
    lck_piece *piece = &fed->pieces[i];
    if (!from && piece->staged)
      return lck_fail(LCK_E_INVALID, "copy %u of batch %u is staged: nothing is there yet",
                      piece->copy, batch);
    piece->source = at;
    at = at ? at + piece->length : NULL;
  }
  if (raise_to(fed, last))
    lck_pool_wake(snapshot->pool);
  return lck_snapshot_failure(snapshot);
}

/* ---- Wait ------------------------------------------------------------------------------------ */

/* Whether the first `chunks` are captured. After a failure the sources are free as soon as no chunk
 * is claimed (see claim in batch.c). */
static int is_over(const lck_snapshot *snapshot, lck_batch *batch, uint64_t chunks) {
  int halted = atomic_load(&snapshot->halted);
  return lck_batch_captured(batch) >= chunks || (halted && !lck_batch_busy(batch));
}

/* Copy the chunks that nobody has claimed. */
static void help_batch(lck_snapshot *snapshot, lck_batch *batch, uint64_t deadline) {
  lck_last_chunk last = {.thread = &snapshot->pool->threads[LCK_THREAD_CALLER]};
  while (deadline == LCK_ALL || lck_now_ns() < deadline) {
    uint64_t chunk = lck_batch_claim(snapshot, batch, last.thread);
    if (chunk == LCK_NO_CHUNK)
      return;
    lck_chunk_capture(snapshot, batch, chunk, 1, &last);
  }
}

/* Nothing is left to claim: copy what idle workers have claimed for longer than a chunk takes. */
static void seize_late(lck_snapshot *snapshot, lck_batch *batch, uint64_t chunks,
                       uint64_t deadline) {
  lck_last_chunk last = {.thread = &snapshot->pool->threads[LCK_THREAD_CALLER]};
  uint64_t until = lck_now_ns() + 2 * LCK_SEIZE_AFTER_NS;
  while (!is_over(snapshot, batch, chunks) && lck_now_ns() < deadline) {
    uint64_t chunk = lck_batch_seize(snapshot, batch, last.thread, LCK_CHUNK_IN_CAPTURE);
    if (chunk != LCK_NO_CHUNK)
      lck_chunk_capture(snapshot, batch, chunk, 1, &last);
    else if (lck_now_ns() >= until)
      return;
    else
      lck_pause();
  }
}

/* Wait until the batch's first `chunks` are captured. */
static int await(lck_snapshot *snapshot, lck_batch *wanted, uint64_t chunks, int64_t timeout_ns,
                 int help) {
  uint64_t deadline = lck_deadline_of(timeout_ns);
  lck_pool *pool = snapshot->pool;
  int done = is_over(snapshot, wanted, chunks);
  if (!done && help == LCK_HELP_ALONE && !wanted->fed) {
    raise_to(wanted, wanted->chunk_count);
    help_batch(snapshot, wanted, deadline);
    done = is_over(snapshot, wanted, chunks);
  }
  if (!done) {
    lck_contention_begin_wait(snapshot);
    atomic_fetch_add(&wanted->waiting, 1);
    atomic_fetch_add(&snapshot->urgent, 1);
    atomic_fetch_add(&pool->urgent, 1);
    if (!wanted->fed)
      raise_to(wanted, wanted->chunk_count);
    lck_pool_wake(pool);
    for (;;) {
      uint32_t count = lck_wait_queue_count(&pool->progress);
      if (help) {
        help_batch(snapshot, wanted, deadline);
        seize_late(snapshot, wanted, chunks, deadline);
      }
      done = is_over(snapshot, wanted, chunks);
      if (done || lck_now_ns() >= deadline)
        break;
      lck_wait_queue_sleep(&pool->progress, count, lck_pool_recheck_at(deadline));
    }
    atomic_fetch_sub(&pool->urgent, 1);
    atomic_fetch_sub(&snapshot->urgent, 1);
    atomic_fetch_sub(&wanted->waiting, 1);
  }
  if (!done) {
    return lck_fail(LCK_E_TIMEOUT, "batch %u: %llu of %llu chunks captured in time", wanted->number,
                    (unsigned long long)lck_batch_captured(wanted), (unsigned long long)chunks);
  }
  return lck_snapshot_failure(snapshot);
}

LCK_API int lck_snapshot_capture(lck_snapshot *snapshot, uint32_t batch, int64_t timeout_ns,
                                 int help) {
  int rc = lck_snapshot_usable(snapshot);
  if (rc)
    return rc;
  lck_batch *wanted = lck_snapshot_batch(snapshot, batch);
  return wanted ? await(snapshot, wanted, wanted->chunk_count, timeout_ns, help) : LCK_E_INVALID;
}

LCK_API int lck_snapshot_taken(lck_snapshot *snapshot, uint32_t batch, uint64_t end,
                               int64_t timeout_ns, int help) {
  lck_batch *wanted;
  int rc = find(snapshot, batch, 1, &wanted);
  return rc ? rc : await(snapshot, wanted, lck_batch_chunks(wanted, end), timeout_ns, help);
}
