/* seal.c -- the end of a snapshot: its seal, its commit, and the invalidation of its slot. */
#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "drain.h"
#include "error.h"
#include "region.h"
#include "snapshot.h"
#include "space.h"

static int check_captured(const lck_snapshot *snapshot) {
  uint32_t count = atomic_load(&snapshot->batch_count);
  for (uint32_t i = 0; i < count; i++) {
    lck_batch *batch = lck_snapshot_batch(snapshot, i);
    uint64_t done = lck_batch_captured(batch);
    if (done < batch->chunk_count) {
      return lck_fail(LCK_E_STATE, "batch %u: %llu of %llu chunks captured", i,
                      (unsigned long long)done, (unsigned long long)batch->chunk_count);
    }
  }
  /* A failure is stored while its chunk is claimed. */
  return lck_snapshot_failure(snapshot);
}

static int check_blob(const lck_snapshot *snapshot, const char *name, uint64_t offset,
                      uint64_t length) {
  if (length > 0 && !lck_slot_contains(snapshot->region, snapshot->slot, offset, length)) {
    return lck_fail(LCK_E_INVALID, "%s [%llu, +%llu) is not in the space of slot %u", name,
                    (unsigned long long)offset, (unsigned long long)length, snapshot->slot);
  }
  return 0;
}

static int check_record(const lck_snapshot *snapshot, const lck_record *record,
                        const void *manifest) {
  if (!record || (!manifest && record->manifest_length > 0))
    return lck_fail(LCK_E_INVALID, "no record or no manifest");
  if (record->sequence == 0 || record->sequence >= LCK_PUBLISHED) {
    return lck_fail(LCK_E_INVALID, "sequence %llu cannot be committed",
                    (unsigned long long)record->sequence);
  }
  int rc = check_blob(snapshot, "layout", record->layout_offset, record->layout_length);
  return rc ? rc
            : check_blob(snapshot, "manifest", record->manifest_offset, record->manifest_length);
}

/* *copy stays NULL without a blob. */
static int copy_blob(const void *blob, uint64_t length, void **copy) {
  *copy = NULL;
  if (!blob)
    return 0;
  *copy = malloc(length + 1);
  if (!*copy)
    return lck_fail(LCK_E_NOMEM, "no memory for a blob of %llu bytes", (unsigned long long)length);
  memcpy(*copy, blob, length);
  return 0;
}

/* The CRCs and the region's identity are filled in by lck_slot_commit. Where no sync is needed the
 * caller commits, so that the slot is free at once, whatever else wants the CPUs; else the
 * commit thread does. */
LCK_API int lck_snapshot_seal(lck_snapshot *snapshot, const lck_record *record, const void *layout,
                              const void *manifest) {
  int rc = lck_snapshot_open(snapshot);
  if (rc == 0)
    rc = check_record(snapshot, record, manifest);
  if (rc == 0)
    rc = check_captured(snapshot);
  if (rc)
    return rc;
  void *layout_copy, *manifest_copy = NULL;
  rc = copy_blob(layout, record->layout_length, &layout_copy);
  if (rc == 0)
    rc = copy_blob(manifest, record->manifest_length, &manifest_copy);
  if (rc) {
    free(layout_copy);
    return rc;
  }
  lck_pool *pool = snapshot->pool;
  lck_pool_lock(pool);
  snapshot->record = *record;
  snapshot->record.slot = snapshot->slot;
  snapshot->record.payload_bytes = snapshot->payload_bytes;
  snapshot->layout = layout_copy;
  snapshot->manifest = manifest_copy;
  lck_drain_sealed(snapshot);
  atomic_store(&snapshot->phase, LCK_PHASE_SEALED);
  lck_pool_unlock(pool);
  lck_snapshot_try_commit(snapshot, 0, &pool->threads[LCK_THREAD_CALLER]);
  if (atomic_load(&snapshot->phase) == LCK_PHASE_SEALED) {
    lck_wait_queue_wake(&pool->commit_work);
    if (atomic_load(&snapshot->staged))
      lck_pool_wake(pool); /* the reserve may take drains away from others from now on */
  }
  return 0;
}

int lck_snapshot_due(const lck_snapshot *snapshot) {
  if (atomic_load(&snapshot->phase) != LCK_PHASE_SEALED || atomic_load(&snapshot->failure))
    return 0;
  uint32_t count = atomic_load(&snapshot->staged) ? atomic_load(&snapshot->batch_count) : 0;
  for (uint32_t i = 0; i < count; i++)
    if (!lck_batch_drained(lck_snapshot_batch(snapshot, i)))
      return 0;
  return 1;
}

/* After a failure the slot need not be invalidated: no drain will run. */
void lck_snapshot_invalidate(lck_snapshot *snapshot) {
  lck_pool *pool = snapshot->pool;
  if (!atomic_load(&snapshot->failure)) {
    lck_thread_trace_enter(&pool->threads[LCK_THREAD_COMMIT], snapshot->slot);
    int rc = lck_slot_invalidate(snapshot->region, snapshot->slot);
    lck_thread_trace_stage(LCK_SPAN_INVALIDATE, 0);
    lck_thread_trace_leave();
    if (rc)
      lck_snapshot_fail(snapshot, rc);
    else
      atomic_store(&snapshot->invalidated, 1);
  }
  lck_pool_lock(pool);
  snapshot->invalidation_due = 0;
  lck_pool_unlock(pool);
  lck_pool_wake(pool);
}

/* The slot is given back before anybody can see the commit, so that whoever has waited for it can
 * open the slot again. */
static void commit(lck_snapshot *snapshot, lck_pool_thread *thread) {
  lck_pool *pool = snapshot->pool;
  uint64_t started = lck_now_ns();
  lck_thread_trace_enter(thread, snapshot->slot);
  int rc = lck_slot_commit(snapshot->region, snapshot->slot, &snapshot->record, snapshot->layout,
                           snapshot->manifest);
  lck_thread_trace_leave();
  if (rc) {
    lck_snapshot_fail(snapshot, rc);
    return;
  }
  lck_space_touched(snapshot->region, snapshot->slot);
  lck_slot_unclaim(snapshot->region, snapshot->slot);
  atomic_fetch_add_explicit(&pool->commits, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&pool->commit_ns, lck_now_ns() - started, memory_order_relaxed);
  snapshot->claimed = 0;
  atomic_store(&snapshot->phase, LCK_PHASE_COMMITTED);
}

void lck_snapshot_try_commit(lck_snapshot *snapshot, int may_sync, lck_pool_thread *thread) {
  lck_pool *pool = snapshot->pool;
  if (snapshot->paged && !may_sync)
    return;
  lck_pool_lock(pool);
  int ours = !snapshot->committing && lck_snapshot_due(snapshot);
  snapshot->committing |= ours;
  snapshot->users += (uint32_t)ours;
  lck_pool_unlock(pool);
  if (!ours)
    return;
  commit(snapshot, thread);
  lck_pool_lock(pool);
  snapshot->users--;
  lck_pool_unlock(pool);
  lck_wait_queue_wake(&pool->progress);
}
