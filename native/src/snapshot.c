/* snapshot.c -- the life cycle of a snapshot, but for its seal. */
#include "snapshot.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"
#include "bus.h"
#include "drain.h"
#include "error.h"
#include "mutant.h"
#include "region.h"

int lck_snapshot_usable(const lck_snapshot *snapshot) {
  if (!snapshot)
    return lck_fail(LCK_E_INVALID, "no snapshot");
  return lck_pool_usable(snapshot->pool);
}

int lck_snapshot_failure(const lck_snapshot *snapshot) {
  int code = atomic_load(&snapshot->failure);
  return code ? lck_fail(code, "%s", atomic_load(&snapshot->text)) : 0;
}

static char no_text[] = "no memory for the error's text";

void lck_snapshot_fail(lck_snapshot *snapshot, int code) {
  char *text = strdup(lck_last_error()), *first = NULL;
  int healthy = 0;
  lck_region_latch(snapshot->region, code);
  if (!atomic_compare_exchange_strong(&snapshot->text, &first, text ? text : no_text))
    free(text);
  (void)atomic_compare_exchange_strong(&snapshot->failure, &healthy, code);
  atomic_store(&snapshot->halted, 1);
  lck_wait_queue_wake(&snapshot->pool->progress);
}

lck_batch *lck_snapshot_batch(const lck_snapshot *snapshot, uint32_t batch) {
  if (batch >= atomic_load(&snapshot->batch_count)) {
    lck_fail(LCK_E_INVALID, "no batch %u", batch);
    return NULL;
  }
  return snapshot->blocks[batch / LCK_BATCH_BLOCK][batch % LCK_BATCH_BLOCK];
}

/* ---- Begin and add --------------------------------------------------------------------------- */

static void enlist(lck_snapshot *snapshot) {
  lck_pool *pool = snapshot->pool;
  lck_pool_lock(pool);
  snapshot->claimed = 1;
  snapshot->invalidation_due = snapshot->paged;
  lck_drain_begins(snapshot);
  lck_contention_begin_snapshot(pool);
  if (pool->last)
    atomic_store(&pool->last->next, snapshot);
  else
    atomic_store(&pool->first, snapshot);
  pool->last = snapshot;
  lck_pool_unlock(pool);
  if (snapshot->paged)
    lck_wait_queue_wake(&pool->commit_work);
}

/* Direct media invalidate with a fence, which costs less than waking another thread; every other
 * medium may sync, so there the commit thread does it. */
LCK_API int lck_snapshot_begin(lck_pool *pool, lck_region *region, uint32_t slot,
                               lck_snapshot **out) {
  int rc = lck_pool_usable(pool);
  if (rc)
    return rc;
  if (!region || !out)
    return lck_fail(LCK_E_INVALID, "no region, or no place for the snapshot");
  rc = lck_region_writable(region);
  if (rc)
    return rc;
  lck_bus_install_again();
  lck_snapshot *snapshot = calloc(1, sizeof *snapshot);
  if (!snapshot)
    return lck_fail(LCK_E_NOMEM, "no memory for a snapshot");
  snapshot->pool = pool;
  snapshot->region = region;
  snapshot->base = region->base;
  snapshot->reserved_length = region->reserved_length;
  snapshot->slot = slot;
  snapshot->paged = region->granularity == LCK_GRAN_PAGE || region->medium == LCK_FILE;
  rc = lck_slot_claim(region, slot);
  if (rc) {
    free(snapshot);
    return rc;
  }
  if (!snapshot->paged) {
    lck_thread_trace_enter(&pool->threads[LCK_THREAD_CALLER], slot);
    rc = LCK_MUTANT(MUTANT_INVALIDATED_LATE) ? 0 : lck_slot_invalidate(region, slot);
    lck_thread_trace_stage(LCK_SPAN_INVALIDATE, 0);
    lck_thread_trace_leave();
    if (rc) {
      lck_region_latch(region, rc);
      lck_slot_unclaim(region, slot);
      free(snapshot);
      return rc;
    }
    atomic_store(&snapshot->invalidated, 1);
  }
  enlist(snapshot);
  *out = snapshot;
  return 0;
}

/* `phase` changes from OPEN only by lck_snapshot_seal, from the thread that uses the handle. */
int lck_snapshot_open(lck_snapshot *snapshot) {
  int rc = lck_snapshot_usable(snapshot);
  if (rc == 0)
    rc = lck_snapshot_failure(snapshot);
  if (rc)
    return rc;
  return atomic_load(&snapshot->phase) == LCK_PHASE_OPEN
             ? 0
             : lck_fail(LCK_E_STATE, "the snapshot is sealed already");
}

LCK_API int lck_snapshot_add(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
                             uint32_t *batch) {
  int rc = lck_snapshot_open(snapshot);
  if (rc)
    return rc;
  uint32_t index = atomic_load(&snapshot->batch_count);
  if ((!copies && count > 0) || !batch || index == LCK_BATCHES) {
    return lck_fail(LCK_E_INVALID, "batch %u of %u: no copies or no place for its number", index,
                    LCK_BATCHES);
  }
  lck_batch ***block = &snapshot->blocks[index / LCK_BATCH_BLOCK];
  if (!*block) {
    *block = calloc(LCK_BATCH_BLOCK, sizeof **block);
    if (!*block)
      return lck_fail(LCK_E_NOMEM, "no memory for a table of batches");
  }
  lck_batch *added;
  rc = lck_batch_build(snapshot, copies, count, &added);
  if (rc)
    return rc;
  added->number = index;
  (*block)[index % LCK_BATCH_BLOCK] = added;
  snapshot->payload_bytes += added->bytes;
  atomic_store(&snapshot->batch_count, index + 1);
  *batch = index;
  return 0;
}

/* ---- Wait and free --------------------------------------------------------------------------- */

static int public_state(const lck_snapshot *snapshot) {
  if (atomic_load(&snapshot->failure))
    return LCK_SNAP_FAILED;
  int phase = atomic_load(&snapshot->phase);
  return phase == LCK_PHASE_COMMITTED ? LCK_SNAP_COMMITTED
         : phase == LCK_PHASE_SEALED  ? LCK_SNAP_SEALED
                                      : LCK_SNAP_OPEN;
}

/* Whether it is still to be committed, for whoever waits for that: an idle worker that has drained
 * the last chunk may lose its CPU before it wakes the commit thread. */
static int is_sealed(lck_snapshot *snapshot) {
  if (public_state(snapshot) != LCK_SNAP_SEALED)
    return 0;
  if (lck_snapshot_due(snapshot))
    lck_wait_queue_wake(&snapshot->pool->commit_work);
  return 1;
}

LCK_API int lck_snapshot_wait(lck_snapshot *snapshot, int64_t timeout_ns, int *state) {
  int rc = lck_snapshot_usable(snapshot);
  if (rc) {
    if (state)
      *state = LCK_SNAP_FAILED;
    return rc;
  }
  lck_pool *pool = snapshot->pool;
  int seen = public_state(snapshot);
  if (seen == LCK_SNAP_SEALED && timeout_ns != 0) {
    uint64_t deadline = lck_deadline_of(timeout_ns);
    atomic_fetch_add(&pool->waiters, 1);
    lck_pool_wake(pool);
    for (;;) {
      uint32_t count = lck_wait_queue_count(&pool->progress);
      if (!is_sealed(snapshot) || lck_now_ns() >= deadline)
        break;
      lck_wait_queue_sleep(&pool->progress, count, lck_pool_recheck_at(deadline));
    }
    seen = public_state(snapshot);
    atomic_fetch_sub(&pool->waiters, 1);
  }
  if (state)
    *state = seen;
  if (seen == LCK_SNAP_FAILED)
    return lck_snapshot_failure(snapshot);
  if (seen == LCK_SNAP_OPEN && timeout_ns != 0)
    return lck_fail(LCK_E_STATE, "the snapshot is not sealed: it would never be committed");
  return seen == LCK_SNAP_COMMITTED ? 0 : lck_fail(LCK_E_TIMEOUT, "the snapshot is not committed");
}

/* Whether a thread still uses the snapshot. Chunks that idle workers have claimed are seized: what
 * would be copied is given up. */
static int is_in_use(lck_snapshot *snapshot) {
  lck_pool *pool = snapshot->pool;
  lck_snapshot_seize_all(snapshot);
  lck_pool_lock(pool);
  int used = snapshot->users > 0 || snapshot->invalidation_due;
  lck_pool_unlock(pool);
  return used || lck_snapshot_busy(snapshot);
}

static void wait_while(lck_snapshot *snapshot, int (*condition)(lck_snapshot *)) {
  lck_pool *pool = snapshot->pool;
  for (;;) {
    uint32_t count = lck_wait_queue_count(&pool->progress);
    if (!condition(snapshot))
      return;
    lck_wait_queue_sleep(&pool->progress, count, lck_pool_recheck_at(LCK_ALL));
  }
}

static void delist(lck_snapshot *snapshot) {
  lck_pool *pool = snapshot->pool;
  lck_snapshot *before = NULL, *next = atomic_load(&snapshot->next);
  for (lck_snapshot *at = atomic_load(&pool->first); at != snapshot; at = atomic_load(&at->next))
    before = at;
  if (before)
    atomic_store(&before->next, next);
  else
    atomic_store(&pool->first, next);
  if (pool->last == snapshot)
    pool->last = before;
}

/* A sealed snapshot ends by itself, now unpaced. One that was given up still owes its invalidation,
 * because the caller takes the slot for empty. Neither is freed before the last thread is done with
 * it. */
static void finish(lck_snapshot *snapshot) {
  lck_pool *pool = snapshot->pool;
  int committed = public_state(snapshot) == LCK_SNAP_COMMITTED;
  if (!committed) {
    atomic_fetch_add(&snapshot->urgent, 1);
    atomic_fetch_add(&pool->urgent, 1);
    lck_pool_wake(pool);
    wait_while(snapshot, is_sealed);
    atomic_fetch_sub(&pool->urgent, 1);
    atomic_store(&snapshot->halted, 1);
    lck_wait_queue_wake(&pool->commit_work);
    wait_while(snapshot, is_in_use);
  }
  atomic_store(&snapshot->halted, 1);
  lck_pool_lock(pool);
  while (snapshot->users > 0) { /* of a committed one: at its last instructions */
    lck_pool_unlock(pool);
    sched_yield();
    lck_pool_lock(pool);
  }
  delist(snapshot);
  lck_pool_unlock(pool);
}

LCK_API int lck_snapshot_free(lck_snapshot *snapshot) {
  if (!snapshot)
    return 0;
  int rc = lck_snapshot_usable(snapshot);
  if (rc)
    return rc;
  finish(snapshot);
  if (snapshot->claimed)
    lck_slot_unclaim(snapshot->region, snapshot->slot);
  lck_staging_give(snapshot->pool, &snapshot->areas);
  lck_pool_free_later(snapshot->pool, snapshot);
  return 0;
}

void lck_snapshot_discard(lck_snapshot *snapshot) {
  for (uint32_t i = 0; i < atomic_load(&snapshot->batch_count); i++)
    lck_batch_free(lck_snapshot_batch(snapshot, i));
  for (uint32_t i = 0; i < LCK_BATCHES / LCK_BATCH_BLOCK; i++)
    free(snapshot->blocks[i]);
  free(snapshot->layout);
  free(snapshot->manifest);
  if (atomic_load(&snapshot->text) != no_text)
    free(atomic_load(&snapshot->text));
  free(snapshot);
}
