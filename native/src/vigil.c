#include "vigil.h"

static uint64_t finished(const lck_vigil *v) {
  if (v->batch)
    return atomic_load(&v->batch->done);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < atomic_load(&v->snapshot->batch_count); i++) {
    const lck_batch *batch = lck_snapshot_batch(v->snapshot, i);
    sum += atomic_load(&batch->done) + atomic_load(&batch->drained);
  }
  return sum;
}

/* Whether a worker may have a part in what is waited for; else it is the keeper, who may sync for
 * long and whom nobody displaces for long. */
static int on_workers(const lck_vigil *v) {
  const lck_snapshot *snapshot = v->snapshot;
  if (v->batch || snapshot->phase != LCK_PHASE_SEALED)
    return v->batch || snapshot->users > 0;
  return atomic_load(&snapshot->staged) &&
         atomic_load(&snapshot->drained) < atomic_load(&snapshot->batch_count);
}

void lck_vigil_look(lck_vigil *v) {
  v->finished = finished(v);
}

void lck_vigil_keep(lck_vigil *v, uint64_t deadline) {
  lck_pool *pool = v->snapshot->pool;
  int workers = on_workers(v);
  uint64_t again = workers ? lck_now_ns() + LCK_LEND_AGAIN_NS : LCK_ALL;
  lck_pool_sleep(pool, &pool->progress, deadline < again ? deadline : again);
  uint64_t now = finished(v);
  if (workers && now == v->finished) {
    pthread_mutex_unlock(&pool->lock);
    v->lent |= lck_lanes_lend(pool, v->batch);
    lck_pool_lock(pool);
  }
  v->finished = now;
}

void lck_vigil_end(const lck_vigil *v) {
  lck_lanes_take_home(v->snapshot->pool, v->lent);
}

uint64_t lck_deadline_of(int64_t timeout_ns) {
  if (timeout_ns < 0)
    return LCK_ALL;
  uint64_t now = lck_now_ns();
  return (uint64_t)timeout_ns > LCK_ALL - 1 - now ? LCK_ALL : now + (uint64_t)timeout_ns;
}
