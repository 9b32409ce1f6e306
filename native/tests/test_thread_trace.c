/* test_thread_trace.c -- the trace says what every thread did, is bounded, and costs nothing
 * when off. */
#include <pthread.h>

#include "snapshot_bed.h"
#include "thread_trace.h"

#define COPIES 40

static lck_pool *recording_pool(uint32_t threads, uint32_t spans) {
  lck_pool *pool;
  lck_pool_spec spec = {.threads = threads, .chunk_bytes = 8192, .spans = spans};
  CHECK(lck_pool_create(&spec, &pool) == 0, "%s", lck_last_error());
  return pool;
}

static uint64_t read_all(lck_pool *pool, lck_span **out, uint64_t *lost) {
  uint64_t count;
  CHECK(lck_pool_trace(pool, NULL, 0, &count, lost) == 0, "%s", lck_last_error());
  *out = calloc(count + 1, sizeof **out);
  CHECK(*out, "memory");
  CHECK(lck_pool_trace(pool, *out, count, &count, lost) == 0, "%s", lck_last_error());
  return count;
}

static int by_start(const void *a, const void *b) {
  const lck_span *x = a, *y = b;
  return x->kind != y->kind ? (x->kind > y->kind) - (x->kind < y->kind)
                            : (x->start > y->start) - (x->start < y->start);
}

/* The chunks of `kind` tile the batch, each by somebody, and none before `from` or after now. */
static void check_tiles(const lck_span *spans, uint64_t count, uint32_t kind, uint64_t bytes,
                        uint64_t from) {
  uint64_t at = 0, sum = 0;
  for (uint64_t i = 0; i < count; i++) {
    const lck_span *m = &spans[i];
    if (m->kind != kind)
      continue;
    CHECK(m->start == at, "%llu, not %llu", (unsigned long long)m->start, (unsigned long long)at);
    CHECK(from <= m->begin_ns && m->begin_ns <= m->end_ns && m->end_ns <= lck_now_ns(), "times");
    CHECK(m->thread < 2 || m->thread == LCK_THREAD_CALLER, "thread %u", m->thread);
    CHECK(m->slot == 1 && m->batch == 0 && m->copies > 0 && m->copy + m->copies <= COPIES,
          "copies");
    at += m->bytes;
    sum += m->bytes;
  }
  CHECK(sum == bytes, "%llu of %llu bytes", (unsigned long long)sum, (unsigned long long)bytes);
}

static uint64_t how_many(const lck_span *spans, uint64_t count, uint32_t kind) {
  uint64_t found = 0;
  for (uint64_t i = 0; i < count; i++)
    found += spans[i].kind == kind;
  return found;
}

static void test_everything_is_told(bed *b) {
  bed_create(b, "told");
  lck_pool *pool = recording_pool(2, 4096);
  lck_copy copies[COPIES];
  unsigned char *block = bed_copies(copies, COPIES, bed_slot(b, 1), 60000, 3);
  uint64_t bytes = 0, from = lck_now_ns(), lost;
  for (uint32_t i = 0; i < COPIES; i++)
    bytes += copies[i].length;
  lck_snapshot *s = bed_begin(b, pool, 1);
  uint32_t batch = bed_add(s, copies, COPIES);
  bed_capture(s, batch, 1);
  lck_span *spans;
  uint64_t count = read_all(pool, &spans, &lost);
  qsort(spans, count, sizeof *spans, by_start);
  check_tiles(spans, count, LCK_SPAN_COPY, bytes, from);
  free(spans);
  CHECK(bed_seal(b, s, 1, 7) == 0, "%s", lck_last_error());
  bed_committed(s);
  count = read_all(pool, &spans, &lost);
  CHECK(lost == 0, "%llu lost", (unsigned long long)lost);
  qsort(spans, count, sizeof *spans, by_start);
  if (b->staged)
    check_tiles(spans, count, LCK_SPAN_DRAIN, bytes, from);
  CHECK((how_many(spans, count, LCK_SPAN_DRAIN) > 0) == b->staged, "drains");
  CHECK(how_many(spans, count, LCK_SPAN_INVALIDATE) == 1, "invalidation");
  CHECK(how_many(spans, count, LCK_SPAN_TABLES) == 1, "tables");
  CHECK(how_many(spans, count, LCK_SPAN_SYNC) == 2, "syncs");
  CHECK(how_many(spans, count, LCK_SPAN_RECORD) == 1, "record");
  free(spans);
  free(block);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_off_there_is_nothing(bed *b) {
  bed_create(b, "off");
  lck_pool *pool = recording_pool(2, 0);
  bed_snapshot(b, pool, 1, 1);
  for (uint32_t i = 0; i < LCK_POOL_THREADS; i++)
    CHECK(!pool->threads[i].cells && pool->threads[i].next == 0, "thread %u keeps something", i);
  uint64_t count = 9, lost = 9;
  CHECK(lck_pool_trace(pool, NULL, 0, &count, &lost) == 0, "%s", lck_last_error());
  CHECK(count == 0 && lost == 0, "%llu", (unsigned long long)count);
  CHECK(lck_pool_trace(pool, NULL, 1, &count, &lost) == LCK_E_INVALID, "no place");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_the_newest_stay(bed *b) {
  (void)b;
  lck_pool *pool = recording_pool(1, 5);
  lck_pool_thread *thread = &pool->threads[0];
  CHECK(thread->mask == 7, "rounded up to 8, not %llu", (unsigned long long)thread->mask + 1);
  lck_span *spans;
  uint64_t lost;
  for (uint64_t i = 0; i < 21; i++)
    lck_thread_trace_add(thread, &(lck_span){.bytes = i, .kind = LCK_SPAN_COPY});
  uint64_t count = read_all(pool, &spans, &lost);
  CHECK(count == 8 && lost == 13, "%llu and %llu", (unsigned long long)count,
        (unsigned long long)lost);
  for (uint64_t i = 0; i < count; i++)
    CHECK(spans[i].bytes == 13 + i && spans[i].thread == 0, "%llu",
          (unsigned long long)spans[i].bytes);
  free(spans);
  atomic_store(&thread->cells[20 & 7].stamp, 0); /* as if its writer were in the middle of it */
  count = read_all(pool, &spans, &lost);
  CHECK(count == 7 && lost == 14 && spans[6].bytes == 19, "%llu", (unsigned long long)count);
  free(spans);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  lck_pool_spec spec = {.threads = 1, .chunk_bytes = 8192, .spans = (1u << 24) + 1};
  CHECK(lck_pool_create(&spec, &pool) == LCK_E_INVALID, "too many");
}

enum { ROUNDS = UNDER_TSAN ? 20000 : 100000 };

static void *note_many(void *thread) {
  for (uint64_t i = 1; i <= ROUNDS; i++)
    lck_thread_trace_add(thread, &(lck_span){.begin_ns = i, .end_ns = 3 * i, .bytes = 5 * i});
  return NULL;
}

static void check_whole(const lck_span *spans, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    uint64_t number = spans[i].begin_ns;
    CHECK(spans[i].end_ns == 3 * number && spans[i].bytes == 5 * number, "%llu",
          (unsigned long long)number);
  }
}

/* Whoever reads while others write gets whole spans or none, never the halves of two. */
static void test_no_moment_is_torn(bed *b) {
  (void)b;
  lck_pool *pool = recording_pool(1, 1); /* of one cell: every read meets a write */
  pthread_t writers[2];
  for (uint32_t i = 0; i < 2; i++)
    CHECK(pthread_create(&writers[i], NULL, note_many, &pool->threads[LCK_THREAD_COMMIT * i]) == 0,
          "go");
  for (uint64_t count, lost = 0; lost < 2 * (ROUNDS - 1);) {
    lck_span spans[2];
    CHECK(lck_pool_trace(pool, spans, 2, &count, &lost) == 0, "%s", lck_last_error());
    check_whole(spans, count);
  }
  for (int i = 0; i < 2; i++)
    pthread_join(writers[i], NULL);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
}

/* Callers share a ring. */
static void test_two_writers_lose_nothing(bed *b) {
  (void)b;
  lck_pool *pool = recording_pool(1, 2 * ROUNDS);
  pthread_t writers[2];
  for (int i = 0; i < 2; i++)
    CHECK(pthread_create(&writers[i], NULL, note_many, &pool->threads[LCK_THREAD_CALLER]) == 0,
          "go");
  for (int i = 0; i < 2; i++)
    pthread_join(writers[i], NULL);
  lck_span *spans;
  uint64_t lost, sum = 0, count = read_all(pool, &spans, &lost);
  CHECK(count == 2 * ROUNDS && lost == 0, "%llu", (unsigned long long)count);
  check_whole(spans, count);
  for (uint64_t i = 0; i < count; i++)
    sum += spans[i].begin_ns;
  CHECK(sum == UINT64_C(1) * ROUNDS * (ROUNDS + 1), "%llu", (unsigned long long)sum);
  free(spans);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
}

static void body(bed *b) {
  test_everything_is_told(b);
  test_off_there_is_nothing(b);
  test_the_newest_stay(b);
  test_no_moment_is_torn(b);
  test_two_writers_lose_nothing(b);
}

int main(void) {
  return bed_main(body);
}
