/* test_drain.c -- drains that idle workers are late with are done by threads whose priority is the
 * training's; and what runs ahead of a limit is there before the commit is. */
#include <inttypes.h>
#include <sched.h>

#include "drain.h"
#include "snapshot_bed.h"

#define CHUNK 4096u
#define BYTES (UINT64_C(64) * CHUNK)
#define HOUR UINT64_C(3600000000000)

static lck_pool *make_pool(uint32_t idle) {
  lck_pool *pool;
  lck_pool_spec spec = {.threads = 1, .chunk_bytes = CHUNK, .idle = idle, .spans = 1024};
  CHECK(lck_pool_create(&spec, &pool) == 0, "%s", lck_last_error());
  return pool;
}

static unsigned char *make_source(void) {
  unsigned char *source = malloc(BYTES);
  CHECK(source, "memory");
  bed_fill(source, BYTES, 5);
  return source;
}

static uint32_t add_staged(const bed *b, lck_snapshot *s, uint32_t slot, const void *source) {
  lck_copy copy = {
      .offset = bed_slot(b, slot), .source = source, .length = BYTES, .flags = LCK_COPY_STAGED};
  return bed_add(s, &copy, 1);
}

/* ---- A worker that never gets to run -----------------------------------------------------------
 */

static _Atomic int at_gate, opened;

static int not_for_idle(void) {
  if (sched_getscheduler(0) != SCHED_IDLE)
    return 1;
  atomic_store(&at_gate, 1);
  return atomic_load(&opened);
}

/* Its bytes were stored by the commit thread or the reserve, and these are no idle threads. */
static void check_others_drained(lck_pool *pool) {
  lck_span spans[1024];
  uint64_t count, lost, drained = 0;
  CHECK(lck_pool_trace(pool, spans, 1024, &count, &lost) == 0, "%s", lck_last_error());
  for (uint64_t i = 0; i < count; i++) {
    if (spans[i].kind == LCK_SPAN_DRAIN) {
      CHECK(spans[i].thread != 0, "drained by thread %u", spans[i].thread);
      drained += spans[i].bytes;
    }
  }
  CHECK(drained == BYTES, "%llu bytes", (unsigned long long)drained);
  int policy, idle = 0, normal = 0;
  struct sched_param none;
  for (uint32_t i = 0; i < pool->started; i++) {
    CHECK(pthread_getschedparam(pool->members[i], &policy, &none) == 0, "thread %u", i);
    idle += policy == SCHED_IDLE;
    normal += policy == SCHED_OTHER;
  }
  CHECK(idle == 1 && normal == 2, "%d idle threads, %d normal ones", idle, normal);
}

/* The worker has a chunk of another snapshot in hand and does not come back. */
static void test_what_no_idle_worker_drains_others_do(bed *b) {
  bed_create(b, "late");
  lck_pool *pool = make_pool(1);
  unsigned char *source = make_source();
  bed_started(pool);
  lck_snapshot *held = bed_begin(b, pool, 1);
  lck_copy copy = {.offset = bed_slot(b, 1), .source = source, .length = CHUNK};
  uint32_t batch = bed_add(held, &copy, 1);
  atomic_store(&at_gate, 0);
  atomic_store(&opened, 0);
  atomic_store(&pool->contention.watched, 1); /* nobody else takes the chunk */
  lck_fault_gate(LCK_FAULT_COPY, not_for_idle);
  CHECK(lck_snapshot_release(held, batch, LCK_ALL) == 0, "%s", lck_last_error());
  EVENTUALLY(atomic_load(&at_gate));

  lck_snapshot *s = bed_begin(b, pool, 0);
  batch = add_staged(b, s, 0, source);
  bed_capture(s, batch, 1);
  s->deadline = 0; /* long ago */
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  alarm(60);
  bed_committed(s);
  alarm(0);
  bed_holds(b, 0, 1);
  check_others_drained(pool);
  CHECK(!memcmp(b->region->base + bed_slot(b, 0), source, BYTES), "what was drained");

  atomic_store(&opened, 1);
  CHECK(lck_snapshot_free(held) == 0, "%s", lck_last_error());
  lck_fault_gate(LCK_FAULT_COPY, NULL);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(source);
}

/* ---- When it is late ---------------------------------------------------------------------------
 */

static void test_as_much_must_be_drained_as_time_has_gone(void) {
  lck_snapshot s = {
      .payload_bytes = 1000, .deadline = 10000, .sealed_at = 2000, .sealed_left = 800};
  static const uint64_t cases[][2] = {{200, 2000}, {400, 4000}, {600, 6000}, {1000, 10000}};
  for (uint32_t i = 0; i < 4; i++) {
    atomic_store(&s.drained_bytes, cases[i][0]);
    CHECK(lck_drain_due(&s) == cases[i][1], "%llu drained: due at %llu",
          (unsigned long long)cases[i][0], (unsigned long long)lck_drain_due(&s));
  }
  s.deadline = 1999;
  CHECK(lck_drain_due(&s) == 2000, "a deadline before the seal");
}

/* The shorter of the last two intervals counts, and nothing is known of the first. */
static void test_the_next_snapshot_is_the_deadline(bed *b) {
  bed_create(b, "interval");
  lck_pool *pool = make_pool(1);
  uint64_t now = lck_now_ns();
  lck_snapshot *first = bed_begin(b, pool, 0);
  CHECK(first->deadline <= lck_now_ns(), "nothing is known: late at once");
  pool->began = now - 16 * HOUR;
  pool->interval = 0;
  lck_snapshot *second = bed_begin(b, pool, 1);
  CHECK(second->deadline >= now + 14 * HOUR, "seven eighths of the interval");
  CHECK(second->deadline < lck_now_ns() + 15 * HOUR, "seven eighths of the interval");
  pool->began = lck_now_ns() - 24 * HOUR;
  lck_snapshot *third = bed_begin(b, pool, 2);
  CHECK(third->deadline < lck_now_ns() + 15 * HOUR, "a long interval after a short one");
  CHECK(lck_snapshot_free(first) == 0 && lck_snapshot_free(second) == 0, "%s", lck_last_error());
  CHECK(lck_snapshot_free(third) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static int late(lck_pool *pool, int behind, lck_task *todo, uint64_t *again) {
  lck_pool_thread thread = {.number = LCK_THREAD_COMMIT};
  lck_pool_lock(pool);
  int found = lck_drain_late(pool, &thread, behind, todo, again);
  pthread_mutex_unlock(&pool->lock);
  return found;
}

/* The pool is paused: its own threads drain nothing while this test puts the question. */
static void test_who_is_in_time_and_who_is_paused_is_left_alone(bed *b) {
  bed_create(b, "in time");
  unsigned char *source = make_source();
  lck_pool *pool = make_pool(1);
  CHECK(lck_pool_pace(pool, 0) == 0, "%s", lck_last_error());
  lck_snapshot *s = bed_begin(b, pool, 0);
  EVENTUALLY(atomic_load(&s->invalidated));
  bed_capture(s, add_staged(b, s, 0, source), 1);
  s->deadline = lck_now_ns() + HOUR;
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  lck_task todo;
  uint64_t again;
  CHECK(!late(pool, 0, &todo, &again) && again == LCK_ALL, "in a paused pool");
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());

  lck_pool_lock(pool);
  pool->idle = 0; /* so that the commit thread does not drain */
  pthread_mutex_unlock(&pool->lock);
  s = bed_begin(b, pool, 1);
  EVENTUALLY(atomic_load(&s->invalidated));
  bed_capture(s, add_staged(b, s, 1, source), 1);
  s->deadline = lck_now_ns() + HOUR;
  CHECK(bed_seal(b, s, 1, 2) == 0, "%s", lck_last_error());
  atomic_store(&s->drained_bytes, BYTES / 2); /* half an hour in hand */
  lck_pool asked = {.pace = LCK_FULL_PACE, .idle = 1, .first = s};
  pthread_mutex_init(&asked.lock, NULL);
  CHECK(!late(&asked, 1, &todo, &again), "half an hour in hand");
  CHECK(again == lck_drain_due(s), "when to look again");
  asked.idle = 0;
  s->deadline = 0;
  CHECK(!late(&asked, 0, &todo, &again), "workers of normal priority");
  asked.idle = 1;
  CHECK(late(&asked, 0, &todo, &again) && todo.snapshot == s && todo.drain, "an hour late");
  pthread_mutex_destroy(&asked.lock);
  lck_last_chunk last = {.thread = &pool->threads[LCK_THREAD_COMMIT]};
  lck_chunk_drain(s, todo.batch, todo.chunk, &last); /* as the commit thread has claimed it */
  CHECK(lck_pool_pace(pool, LCK_FULL_PACE) == 0, "%s", lck_last_error());
  bed_committed(s);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(source);
}

/* ---- The limit ---------------------------------------------------------------------------------
 */

/* Drains are booked ahead; what the last of them has booked is over before anybody sees a commit.
 */
static void test_no_commit_comes_before_the_medium_has_it_all(bed *b) {
  bed_create(b, "ahead");
  unsigned char *source = make_source();
  lck_pool *pool = make_pool(1);
  CHECK(lck_pool_limit(pool, UINT64_C(100) << 20) == 0, "%s", lck_last_error());
  lck_snapshot *s = bed_begin(b, pool, 0);
  bed_capture(s, add_staged(b, s, 0, source), 1);
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  CHECK(atomic_load(&pool->booked) > 0 && atomic_load(&pool->booked) <= lck_now_ns(),
        "committed ahead of the medium");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(source);
}

/* So are copies, where chunks are short: who was told that they are done changes their sources. */
static void test_copies_are_done_when_the_medium_has_them_all(bed *b) {
  bed_create(b, "direct");
  unsigned char *source = make_source();
  lck_pool *pool = make_pool(1);
  CHECK(lck_pool_limit(pool, UINT64_C(1) << 20) == 0, "%s", lck_last_error());
  CHECK(lck_pool_copies_ahead(pool) == 0, "a chunk of 4 ms");
  CHECK(lck_pool_limit(pool, UINT64_C(40) << 20) == 0, "%s", lck_last_error());
  CHECK(lck_pool_copies_ahead(pool) == LCK_COPIES_AHEAD_NS, "a chunk of 0.1 ms");
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint64_t began = lck_now_ns();
  lck_copy copy = {.offset = bed_slot(b, 0), .source = source, .length = BYTES};
  bed_capture(s, bed_add(s, &copy, 1), 1);
  uint64_t now = lck_now_ns(), booked = atomic_load(&pool->booked);
  if (!s->paged) { /* else all copies go to DRAM first */
    CHECK(booked <= now, "%" PRIu64 " ns ahead of the medium", booked - now);
    CHECK(now - began >= BYTES * UINT64_C(1000000000) / (UINT64_C(40) << 20),
          "faster than allowed");
  }
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(source);
}

static void body(bed *b) {
  if (lck_revoke_possible())
    test_what_no_idle_worker_drains_others_do(b);
  else
    printf("SKIPPED: no workers of the idle class here: none of them is late\n");
  test_the_next_snapshot_is_the_deadline(b);
  test_who_is_in_time_and_who_is_paused_is_left_alone(b);
  test_no_commit_comes_before_the_medium_has_it_all(b);
  test_copies_are_done_when_the_medium_has_them_all(b);
}

int main(void) {
  test_as_much_must_be_drained_as_time_has_gone();
  return bed_main(body);
}
