/* drain.c -- which drain is next, whether it is late, and how fast the medium takes it. */
#include "drain.h"

#include <errno.h>
#include <time.h>

/* ---- The limit ------------------------------------------------------------------------------- */

void lck_sleep_until(uint64_t end) {
  struct timespec until = {.tv_sec = (time_t)(end / UINT64_C(1000000000)),
                           .tv_nsec = (long)(end % UINT64_C(1000000000))};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
  }
}

uint64_t lck_pool_write_begins(const lck_pool *pool) {
  return atomic_load_explicit(&pool->limit, memory_order_relaxed) == 0 ? 0 : lck_now_ns();
}

/* Where a chunk takes longer than that, a sleep at each is short beside it. */
uint64_t lck_pool_copies_ahead(const lck_pool *pool) {
  double chunks_per_s =
      (double)atomic_load_explicit(&pool->limit, memory_order_relaxed) / (double)pool->chunk_bytes;
  return chunks_per_s * (double)LCK_COPIES_AHEAD_NS > 1e9 ? LCK_COPIES_AHEAD_NS : 0;
}

/* Each write books its time behind the one before, from when it began: the medium was at it
 * meanwhile. Half of what may run ahead is used up before the thread wakes again: in the other half
 * it can wait for a CPU while the medium goes on. */
uint64_t lck_pool_book(lck_pool *pool, uint64_t began, uint64_t bytes, uint64_t ahead) {
  uint64_t rate = atomic_load_explicit(&pool->limit, memory_order_relaxed);
  if (rate == 0)
    return 0;
  uint64_t now = lck_now_ns(), needed = (uint64_t)((double)bytes * 1e9 / (double)rate), end;
  uint64_t from = began != 0 && began < now ? began : now, booked = atomic_load(&pool->booked);
  do
    end = (booked > from ? booked : from) + needed;
  while (!atomic_compare_exchange_weak(&pool->booked, &booked, end));
  return end > now + ahead ? end - ahead / 2 : 0;
}

/* ---- Choosing -------------------------------------------------------------------------------- */

int lck_drain_find(lck_snapshot *snapshot, lck_pool_thread *thread, lck_task *out) {
  if (!atomic_load(&snapshot->staged) || !atomic_load(&snapshot->invalidated))
    return 0;
  uint32_t count = atomic_load(&snapshot->batch_count), from = atomic_load(&snapshot->drain_from);
  for (uint32_t i = from; i < count; i++) {
    lck_batch *batch = lck_snapshot_batch(snapshot, i);
    uint64_t chunk = lck_batch_claim_drain(snapshot, batch, thread);
    if (chunk != LCK_NO_CHUNK) {
      *out = (lck_task){.snapshot = snapshot, .batch = batch, .chunk = chunk, .drain = 1};
      return 1;
    }
    if (i == from && atomic_load(&batch->drain_next) == batch->chunk_count &&
        atomic_compare_exchange_strong(&snapshot->drain_from, &from, i + 1))
      from = i + 1;
  }
  return 0;
}

int lck_drain_seize(lck_snapshot *snapshot, lck_pool_thread *thread, lck_task *out) {
  uint32_t count = atomic_load(&snapshot->staged) ? atomic_load(&snapshot->batch_count) : 0;
  for (uint32_t i = 0; i < count; i++) {
    lck_batch *batch = lck_snapshot_batch(snapshot, i);
    uint64_t chunk = lck_batch_seize(snapshot, batch, thread, LCK_CHUNK_IN_DRAIN);
    if (chunk != LCK_NO_CHUNK) {
      *out = (lck_task){.snapshot = snapshot, .batch = batch, .chunk = chunk, .drain = 1};
      return 1;
    }
  }
  return 0;
}

/* ---- Late ------------------------------------------------------------------------------------ */

/* The shorter one of the last two intervals counts: one that a slip has stretched would let the
 * next snapshot slip, too. An eighth of it is left for what remains to be done. */
void lck_drain_begins(lck_snapshot *snapshot) {
  lck_pool *pool = snapshot->pool;
  uint64_t now = lck_now_ns(), last = pool->interval;
  pool->interval = pool->began ? now - pool->began : 0; /* 0: not known, so that it is late */
  pool->began = snapshot->began = now;
  uint64_t least = last > 0 && last < pool->interval ? last : pool->interval;
  snapshot->deadline = now + least / 8 * 7;
}

void lck_drain_sealed(lck_snapshot *snapshot) {
  snapshot->sealed_at = lck_now_ns();
  snapshot->sealed_left = snapshot->payload_bytes - atomic_load(&snapshot->drained_bytes);
}

uint64_t lck_drain_due(const lck_snapshot *snapshot) {
  uint64_t left = snapshot->payload_bytes - atomic_load(&snapshot->drained_bytes);
  if (snapshot->deadline <= snapshot->sealed_at || snapshot->sealed_left == 0)
    return snapshot->sealed_at;
  double done = (double)(snapshot->sealed_left - left) / (double)snapshot->sealed_left;
  return snapshot->sealed_at +
         (uint64_t)((double)(snapshot->deadline - snapshot->sealed_at) * done);
}

int lck_drain_late(lck_pool *pool, lck_pool_thread *thread, int late, lck_task *out,
                   uint64_t *again) {
  *again = LCK_ALL;
  if (!pool->idle || atomic_load(&pool->pace) != LCK_FULL_PACE)
    return 0; /* the workers are no slower than we are, or shall be */
  for (lck_snapshot *s = atomic_load(&pool->first); s; s = atomic_load(&s->next)) {
    if (atomic_load(&s->phase) != LCK_PHASE_SEALED || atomic_load(&s->halted) ||
        !atomic_load(&s->staged))
      continue;
    uint64_t now = lck_now_ns(), due = lck_drain_due(s);
    if (now + (late ? LCK_AHEAD_NS : 0) >= due) {
      if (lck_drain_find(s, thread, out) || lck_drain_seize(s, thread, out))
        return 1;
      due = now + LCK_RECHECK_NS; /* the last ones are claimed */
    }
    *again = due < *again ? due : *again;
  }
  return 0;
}
