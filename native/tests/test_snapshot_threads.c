/* test_snapshot_threads.c -- several regions, slow media, forks and races. */
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "snapshot_bed.h"

static void test_two_regions(bed *b) {
  bed other = *b;
  bed_create(b, "one");
  bed_create(&other, "two");
  bed *beds[2] = {b, &other};
  lck_pool *pool = bed_pool(2, 8192);
  lck_copy copies[2][20];
  uint32_t crcs[20];
  unsigned char *blocks[2];
  lck_snapshot *s[2];
  for (uint32_t i = 0; i < 2; i++) {
    blocks[i] = bed_copies(copies[i], 20, bed_slot(beds[i], i), 60000, 40 + i);
    s[i] = bed_begin(beds[i], pool, i);
    CHECK(bed_add(s[i], copies[i], 20) == 0, "batch");
    CHECK(lck_snapshot_release(s[i], 0, LCK_ALL) == 0, "%s", lck_last_error());
  }
  for (uint32_t i = 2; i-- > 0;) {
    bed_capture(s[i], 0, (int)i);
    CHECK(bed_seal(beds[i], s[i], i, 5 + i) == 0, "%s", lck_last_error());
  }
  for (uint32_t i = 0; i < 2; i++) {
    bed_digests(s[i], 0, crcs);
    bed_committed(s[i]);
    bed_holds(beds[i], i, 5 + i);
    bed_verify(beds[i], copies[i], crcs, 20);
    free(blocks[i]);
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(&other);
  bed_destroy(b);
}

/* While the medium syncs, a capture completes, with help or with the only worker. */
static void test_slow_sync(bed *b) {
  if (!b->staged)
    return;
  bed_create(b, "sync");
  lck_pool *pool = bed_pool(1, 4096);
  bed_snapshot(b, pool, 0, 1);
  for (int help = 0; help < 2; help++) {
    lck_copy copies[30];
    uint32_t crcs[30];
    unsigned char *block = bed_copies(copies, 30, bed_slot(b, 1), 30000, 9);
    CHECK(lck_fault_delay(LCK_FAULT_SYNC, 100000 * MS) == 0, "delay");
    lck_snapshot *s = bed_begin(b, pool, 1);
    uint32_t index = bed_add(s, copies, 30);
    /* Nobody who captures touches the region: it is out of reach. */
    uint64_t length = b->info.segments[0].length;
    bed_withhold(b, bed_slot(b, 0), length);
    bed_capture(s, index, help);
    bed_give_back(b, bed_slot(b, 0), length);
    CHECK(!s->invalidated, "the capture waited for the sync");
    CHECK(s->blocks[0][0]->drain_next == 0, "a payload byte changed before the invalidation");
    bed_digests(s, index, crcs);
    CHECK(bed_seal(b, s, 1, 2) == 0, "%s", lck_last_error());
    CHECK(!s->invalidated, "the seal waited for the sync");
    CHECK(lck_fault_delay(LCK_FAULT_SYNC, 0) == 0, "delay");
    bed_committed(s);
    bed_holds(b, 1, 2);
    bed_verify(b, copies, crcs, 30);
    free(block);
  }
  lck_stats before, after;
  CHECK(lck_pool_stats(pool, &before) == 0, "%s", lck_last_error());
  bed_snapshot(b, pool, 2, 3);
  CHECK(lck_pool_stats(pool, &after) == 0, "%s", lck_last_error());
  CHECK(after.staging_bytes == before.staging_bytes, "staging is not reused");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_fork(bed *b) {
  bed_create(b, "fork");
  lck_pool *pool = bed_pool(2, 4096);
  static unsigned char source[65536];
  lck_copy copy = {.offset = bed_slot(b, 1), .source = source, .length = sizeof source};
  lck_snapshot *s = bed_begin(b, pool, 1), *another;
  uint32_t index = bed_add(s, &copy, 1), crc;
  pid_t child = fork();
  if (child == 0) {
    int codes[] = {
        lck_snapshot_begin(pool, b->region, 2, &another),
        lck_snapshot_add(s, &copy, 1, &index),
        lck_snapshot_release(s, 0, 1),
        lck_snapshot_capture(s, 0, -1, 1),
        lck_snapshot_audit(s, 0, 1, 1, NULL),
        lck_snapshot_digests(s, 0, &crc),
        bed_seal(b, s, 1, 2),
        lck_snapshot_wait(s, -1, NULL),
        lck_snapshot_free(s),
        lck_pool_pace(pool, 1),
        lck_pool_stats(pool, &(lck_stats){0}),
        lck_pool_destroy(pool),
    };
    int wrong = 0;
    for (uint32_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
      wrong += codes[i] != LCK_E_FORKED;
    _exit(wrong);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%d", status);
  bed_capture(s, index, 1);
  CHECK(bed_seal(b, s, 1, 2) == 0, "%s", lck_last_error());
  bed_committed(s);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

typedef struct race {
  lck_pool *pool;
  lck_snapshot *snapshot;
  uint32_t batches;
  uint64_t seed;
  int failed; /* CHECK belongs to the main thread */
} race;

static void *race_main(void *argument) {
  race *r = argument;
  for (int i = 0; i < 60; i++) {
    uint64_t draw = bed_random(&r->seed);
    uint32_t batch = (uint32_t)(draw >> 8) % r->batches;
    int rc = 0;
    switch (draw % 8) {
    case 0:
      rc = lck_pool_pace(r->pool, (uint32_t)(draw >> 40) % 1001);
      break;
    case 1:
      rc = lck_snapshot_capture(r->snapshot, batch, (int64_t)(draw >> 40) % MS, (draw >> 33) & 1);
      break;
    default:
      rc = lck_snapshot_release(r->snapshot, batch, (draw >> 40) % 200000);
    }
    if (rc != 0 && rc != LCK_E_TIMEOUT)
      r->failed = rc;
  }
  return NULL;
}

static void test_race(bed *b) {
  enum { BATCHES = 12, COUNT = 25, RACERS = 4, ROUNDS = 12 };
  bed_create(b, "race");
  lck_pool *pool = bed_pool(4, 4096);
  static lck_copy copies[BATCHES][COUNT];
  static uint32_t crcs[BATCHES][COUNT];
  unsigned char *blocks[BATCHES];
  for (uint32_t round = 0; round < ROUNDS; round++) {
    uint32_t slot = round % 3;
    lck_snapshot *s = bed_begin(b, pool, slot);
    for (uint32_t i = 0; i < BATCHES; i++) {
      blocks[i] = bed_copies(copies[i], COUNT, bed_slot(b, slot) + i * UINT64_C(524288), 16000,
                             100 * round + i);
      CHECK(bed_add(s, copies[i], COUNT) == i, "%u", i);
    }
    race racers[RACERS];
    pthread_t threads[RACERS];
    for (uint32_t i = 0; i < RACERS; i++) {
      racers[i] = (race){pool, s, BATCHES, 1000 * round + i + 1, 0};
      CHECK(pthread_create(&threads[i], NULL, race_main, &racers[i]) == 0, "thread");
    }
    for (uint32_t i = 0; i < RACERS; i++)
      CHECK(pthread_join(threads[i], NULL) == 0 && racers[i].failed == 0, "%d", racers[i].failed);
    for (uint32_t i = 0; i < BATCHES; i++) {
      bed_capture(s, i, (int)(i % 2));
      bed_digests(s, i, crcs[i]);
    }
    if (round % 4 == 3) {
      CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
      bed_empty(b, slot);
    } else {
      CHECK(lck_pool_pace(pool, 1000) == 0, "pace");
      CHECK(bed_seal(b, s, slot, round + 1) == 0, "%s", lck_last_error());
      bed_committed(s);
      bed_holds(b, slot, round + 1);
    }
    for (uint32_t i = 0; i < BATCHES; i++) {
      if (round % 4 != 3)
        bed_verify(b, copies[i], crcs[i], COUNT);
      free(blocks[i]);
    }
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* A growth writes a superblock while the commit thread commits. */
static void test_growth_beside_commits(bed *b) {
  bed_create(b, "grow");
  lck_pool *pool = bed_pool(1, 4096);
  CHECK(lck_fault_delay(LCK_FAULT_RECORD, 10 * MS) == 0, "delay");
  for (uint32_t round = 0; round < 8; round++) {
    lck_snapshot *s = bed_begin(b, pool, round % 3);
    CHECK(bed_seal(b, s, round % 3, round + 1) == 0, "%s", lck_last_error());
    bed_nap(4 * MS);
    CHECK(lck_region_grow(b->region, 4096) == 0, "%s", lck_last_error());
    bed_committed(s);
    bed_holds(b, round % 3, round + 1);
  }
  CHECK(lck_fault_delay(LCK_FAULT_RECORD, 0) == 0, "delay");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

typedef struct reader {
  lck_region *region;
  _Atomic int stop;
  _Atomic uint64_t whole;
  uint64_t empty, wrong;
} reader;

static void *reader_main(void *argument) {
  reader *r = argument;
  lck_record record;
  while (!atomic_load(&r->stop)) {
    int rc = lck_slot_read(r->region, 0, &record);
    r->whole += rc == 0;
    r->empty += rc == LCK_E_EMPTY;
    r->wrong += rc != 0 && rc != LCK_E_EMPTY;
  }
  return NULL;
}

/* Without a lease a reader finds a slot whole or empty, never damaged, whatever the owner does. */
static void test_reader_beside_owner(bed *b) {
  static unsigned char manifest[32768];
  bed_create(b, "read");
  lck_pool *pool = bed_pool(1, 4096);
  reader r = {.region = NULL};
  pthread_t thread;
  int fd = bed_descriptor(b->path, 0);
  CHECK(lck_region_open(fd, fd, LCK_READ_ONLY, -1, &r.region) == 0, "%s", lck_last_error());
  CHECK(pthread_create(&thread, NULL, reader_main, &r) == 0, "thread");
  /* And further, until the scheduler has let the reader in between. */
  uint32_t rounds = b->staged || UNDER_TSAN ? 100 : 3000;
  for (uint32_t round = 1; round <= rounds || atomic_load(&r.whole) == 0; round++) {
    lck_record record = {.sequence = round,
                         .manifest_offset = bed_blobs(b, 0) + 4096,
                         .manifest_length = sizeof manifest};
    memset(manifest, (int)round, sizeof manifest);
    lck_snapshot *s = bed_begin(b, pool, 0);
    CHECK(lck_snapshot_seal(s, &record, NULL, manifest) == 0, "%s", lck_last_error());
    bed_committed(s);
  }
  atomic_store(&r.stop, 1);
  CHECK(pthread_join(thread, NULL) == 0, "thread");
  CHECK(r.wrong == 0, "%llu whole, %llu empty, %llu damaged", (unsigned long long)r.whole,
        (unsigned long long)r.empty, (unsigned long long)r.wrong);
  CHECK(lck_region_close(r.region) == 0, "%s", lck_last_error());
  close(fd);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void body(bed *b) {
  test_two_regions(b);
  test_slow_sync(b);
  test_fork(b);
  test_race(b);
  test_growth_beside_commits(b);
  test_reader_beside_owner(b);
}

int main(void) {
  return bed_main(body);
}
