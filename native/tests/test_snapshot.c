/* test_snapshot.c -- snapshots and the pool, without failures. */
#include "snapshot_bed.h"

static void test_round_trip(bed *b) {
  enum { COUNT = 200 };
  static const struct {
    uint32_t threads, chunk_bytes;
    uint64_t most;
  } shapes[] = {{1, 4096, 60000}, {4, 65536, 70000}, {2, 1 << 20, 50}, {3, 8192, 9000}};
  bed_create(b, "round");
  lck_copy copies[COUNT];
  uint32_t crcs[COUNT];
  for (uint32_t i = 0; i < 4; i++) {
    lck_pool *pool = bed_pool(shapes[i].threads, shapes[i].chunk_bytes);
    uint32_t slot = i % 3;
    unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, slot), shapes[i].most, i + 1);
    lck_snapshot *s = bed_begin(b, pool, slot);
    uint32_t batch = bed_add(s, copies, COUNT);
    CHECK(batch == 0, "%u", batch);
    CHECK(lck_snapshot_release(s, batch, LCK_ALL) == 0, "%s", lck_last_error());
    bed_capture(s, batch, i % 2 == 0);
    uint64_t bad;
    CHECK(lck_snapshot_audit(s, batch, i, 0, &bad) == 0, "%s", lck_last_error());
    CHECK(lck_snapshot_audit(s, batch, i, 1, &bad) == 0, "%s", lck_last_error());
    bed_digests(s, batch, crcs);
    CHECK(bed_seal(b, s, slot, i + 1) == 0, "%s", lck_last_error());
    CHECK(bed_seal(b, s, slot, i + 1) == LCK_E_STATE, "sealed twice");
    CHECK(lck_snapshot_add(s, copies, COUNT, &batch) == LCK_E_STATE, "added after the seal");
    bed_committed(s);
    bed_verify(b, copies, crcs, COUNT);
    lck_record record;
    uint64_t total = 0;
    for (uint32_t k = 0; k < COUNT; k++)
      total += copies[k].length;
    CHECK(lck_slot_read(b->region, slot, &record) == 0, "%s", lck_last_error());
    CHECK(record.sequence == i + 1 && record.step == 10 * (i + 1), "record");
    CHECK(record.payload_bytes == total, "%llu", (unsigned long long)record.payload_bytes);
    CHECK(record.slot == slot && record.rank == 1 && record.world == 3, "record");
    CHECK(!memcmp(record.run_id, bed_run_id, 16), "run id");
    CHECK(record.layout_crc == lck_crc32c(0, LAYOUT, sizeof LAYOUT), "layout");
    CHECK(record.manifest_crc == lck_crc32c(0, MANIFEST, sizeof MANIFEST), "manifest");
    lck_stats stats;
    CHECK(lck_pool_stats(pool, &stats) == 0, "%s", lck_last_error());
    CHECK(stats.bytes_copied == total && stats.commits == 1, "statistics");
    CHECK((stats.staging_bytes > 0) == b->staged, "statistics");
    CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
    free(block);
  }
  bed_reopen(b);
  bed_holds(b, 0, 4);
  bed_holds(b, 1, 2);
  bed_destroy(b);
}

/* A layout that the slot holds already is not written again. */
static void test_kept_layout(bed *b) {
  bed_create(b, "layout");
  lck_pool *pool = bed_pool(2, 65536);
  bed_snapshot(b, pool, 0, 1);
  lck_snapshot *s = bed_begin(b, pool, 0);
  lck_record record = {.sequence = 2,
                       .layout_offset = bed_blobs(b, 0),
                       .layout_length = sizeof LAYOUT,
                       .manifest_offset = bed_blobs(b, 0) + 4096,
                       .manifest_length = sizeof MANIFEST};
  CHECK(lck_snapshot_seal(s, &record, NULL, MANIFEST) == 0, "%s", lck_last_error());
  bed_committed(s);
  CHECK(lck_slot_read(b->region, 0, &record) == 0, "%s", lck_last_error());
  CHECK(record.sequence == 2 && record.payload_bytes == 0, "record");
  CHECK(record.layout_crc == lck_crc32c(0, LAYOUT, sizeof LAYOUT), "layout");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_watermark(bed *b) {
  bed_create(b, "mark");
  lck_pool *pool = bed_pool(2, 4096);
  unsigned char *source = malloc(65536);
  bed_fill(source, 65536, 1);
  /* One large copy, then two layers of ten small ones: chunks end with the layer. */
  lck_copy copies[21] = {{.offset = bed_slot(b, 0), .source = source, .length = 40960}};
  for (uint32_t i = 1; i < 21; i++) {
    copies[i] = (lck_copy){.offset = bed_slot(b, 0) + 40960 + 64 * i,
                           .source = source + i,
                           .length = 60,
                           .layer = 1 + (i > 10)};
  }
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t index = bed_add(s, copies, 21);
  lck_batch *batch = s->blocks[0][index];
  CHECK(batch->chunk_count == 12, "%llu", (unsigned long long)batch->chunk_count);
  static const struct {
    uint64_t bytes, chunks;
  } marks[] = {{0, 0},      {1, 1},      {4096, 1},   {10000, 3},  {5, 3},
               {40960, 10}, {40961, 11}, {41560, 11}, {41561, 12}, {LCK_ALL, 12}};
  for (uint32_t i = 0; i < sizeof marks / sizeof marks[0]; i++) {
    CHECK(lck_snapshot_release(s, index, marks[i].bytes) == 0, "%s", lck_last_error());
    EVENTUALLY(lck_batch_captured(batch) == marks[i].chunks);
    CHECK(batch->next == marks[i].chunks, "%u", i);
    int rc = bed_seal(b, s, 0, 1);
    if (marks[i].chunks < 12) {
      CHECK(rc == LCK_E_STATE, "%d", rc);
      uint32_t crcs[21];
      CHECK(lck_snapshot_digests(s, index, crcs) == LCK_E_STATE, "digests too early");
      CHECK(lck_snapshot_audit(s, index, 1, 0, NULL) == LCK_E_STATE, "audit too early");
      int state = -1;
      CHECK(lck_snapshot_wait(s, 0, &state) == LCK_E_TIMEOUT, "not sealed");
      CHECK(state == LCK_SNAP_OPEN, "%d", state);
      CHECK(lck_snapshot_wait(s, -1, &state) == LCK_E_STATE, "not sealed");
    }
  }
  bed_committed(s);
  bed_holds(b, 0, 1);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(source);
  bed_destroy(b);
}

static void test_batches_are_independent(bed *b) {
  enum { BATCHES = 300, COUNT = 4 };
  bed_create(b, "batches");
  lck_pool *pool = bed_pool(3, 4096);
  static lck_copy copies[BATCHES][COUNT];
  unsigned char *blocks[BATCHES];
  lck_snapshot *s = bed_begin(b, pool, 2);
  for (uint32_t i = 0; i < BATCHES; i++) {
    blocks[i] = bed_copies(copies[i], COUNT, bed_slot(b, 2) + i * 40960, 9000, i + 1);
    CHECK(bed_add(s, copies[i], COUNT) == i, "%u", i);
  }
  CHECK(bed_add(s, NULL, 0) == BATCHES, "an empty batch");
  bed_capture(s, BATCHES, 0);
  for (uint32_t i = BATCHES; i-- > 1;)
    bed_capture(s, i, i % 2);
  CHECK(s->blocks[0][0]->next == 0, "batch 0 was held back");
  CHECK(bed_seal(b, s, 2, 9) == LCK_E_STATE, "batch 0 is not captured");
  CHECK(lck_snapshot_release(s, BATCHES + 1, LCK_ALL) == LCK_E_INVALID, "no such batch");
  CHECK(lck_snapshot_capture(s, BATCHES + 1, -1, 1) == LCK_E_INVALID, "no such batch");
  bed_capture(s, 0, 1);
  uint32_t crcs[BATCHES][COUNT];
  for (uint32_t i = 0; i < BATCHES; i++)
    bed_digests(s, i, crcs[i]);
  CHECK(bed_seal(b, s, 2, 9) == 0, "%s", lck_last_error());
  bed_committed(s);
  for (uint32_t i = 0; i < BATCHES; i++) {
    bed_verify(b, copies[i], crcs[i], COUNT);
    free(blocks[i]);
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_pace_and_help(bed *b) {
  bed_create(b, "pace");
  lck_pool *pool = bed_pool(2, 4096);
  unsigned char *source = malloc(1 << 20);
  bed_fill(source, 1 << 20, 3);
  lck_copy copy = {.offset = bed_slot(b, 0), .source = source, .length = 1 << 20};
  lck_stats stats;
  CHECK(lck_pool_pace(pool, 1001) == LCK_E_INVALID, "1001 per mille");
  CHECK(lck_pool_pace(pool, 0) == 0, "%s", lck_last_error());

  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t index = bed_add(s, &copy, 1);
  CHECK(lck_snapshot_release(s, index, LCK_ALL) == 0, "%s", lck_last_error());
  bed_nap(30 * MS);
  CHECK(s->blocks[0][0]->next == 0, "copied while paused");
  CHECK(lck_pool_stats(pool, &stats) == 0 && stats.bytes_copied == 0, "copied while paused");
  bed_capture(s, index, 1);
  CHECK(lck_pool_stats(pool, &stats) == 0 && stats.bytes_copied == 1 << 20, "help");
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  if (b->staged) {
    int state;
    EVENTUALLY(s->invalidated);
    CHECK(lck_snapshot_wait(s, 20 * MS, &state) == LCK_E_TIMEOUT, "drained while paused");
    CHECK(state == LCK_SNAP_SEALED, "%d", state);
    CHECK(lck_pool_pace(pool, 1000) == 0, "%s", lck_last_error());
  }
  bed_committed(s);

  /* A capture that waits without helping is not held up by a pause either. */
  CHECK(lck_pool_pace(pool, 0) == 0, "%s", lck_last_error());
  s = bed_begin(b, pool, 1);
  copy.offset = bed_slot(b, 1);
  index = bed_add(s, &copy, 1);
  bed_capture(s, index, 0);
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());

  /* At 1 per mille of one chunk's speed the rest would take seconds; a change of pace wakes. The
   * workers are new: on a busy machine an earlier chunk may make them rest for a minute. */
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  pool = bed_pool(2, 4096);
  CHECK(lck_fault_delay(LCK_FAULT_COPY, 5 * MS) == 0, "delay");
  CHECK(lck_pool_pace(pool, 1) == 0, "%s", lck_last_error());
  s = bed_begin(b, pool, 1);
  copy.length = 65536;
  index = bed_add(s, &copy, 1);
  CHECK(lck_snapshot_release(s, index, LCK_ALL) == 0, "%s", lck_last_error());
  EVENTUALLY(lck_batch_captured(s->blocks[0][0]) >= 1);
  bed_nap(50 * MS);
  CHECK(s->blocks[0][0]->next <= 2, "%llu", (unsigned long long)s->blocks[0][0]->next);
  CHECK(lck_fault_delay(LCK_FAULT_COPY, 0) == 0, "delay");
  CHECK(lck_pool_pace(pool, 1000) == 0, "%s", lck_last_error());
  EVENTUALLY(lck_batch_captured(s->blocks[0][0]) == 16);
  CHECK(lck_pool_destroy(pool) == LCK_E_STATE, "a snapshot is open");
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(source);
  bed_destroy(b);
}

/* Nobody is left who could raise the pace. */
static void test_free_while_paused(bed *b) {
  bed_create(b, "freed");
  lck_pool *pool = bed_pool(2, 4096);
  lck_copy copies[30];
  uint32_t crcs[30];
  unsigned char *block = bed_copies(copies, 30, bed_slot(b, 0), 30000, 19);
  CHECK(lck_pool_pace(pool, 0) == 0, "%s", lck_last_error());
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t index = bed_add(s, copies, 30);
  bed_capture(s, index, 1);
  bed_digests(s, index, crcs);
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  bed_holds(b, 0, 1);
  bed_verify(b, copies, crcs, 30);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(block);
  bed_destroy(b);
}

static void test_a_caller_alone_copies_everything_and_wakes_nobody(bed *b) {
  bed_create(b, "alone");
  lck_pool *pool = bed_pool(2, 4096);
  static unsigned char source[65536];
  memset(source, 7, sizeof source);
  lck_copy copy = {.offset = bed_slot(b, 0), .source = source, .length = sizeof source};
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t index = bed_add(s, &copy, 1), crc;
  /* One that is still awake, as all are when they start, may take what it finds. */
  bed_started(pool);
  EVENTUALLY(atomic_load(&pool->work.sleepers) == pool->reserve_from);
  bed_capture(s, index, LCK_HELP_ALONE);
  memset(source, 8, sizeof source); /* captured: it may change */
  lck_stats stats;
  CHECK(lck_pool_stats(pool, &stats) == 0, "%s", lck_last_error());
  /* Where copies are staged a chunk that is captured wakes workers for its drain: they may copy. */
  CHECK(stats.bytes_copied == sizeof source && (b->staged || stats.bytes_helped == sizeof source),
        "%llu of %llu bytes copied by the caller", (unsigned long long)stats.bytes_helped,
        (unsigned long long)stats.bytes_copied);
  bed_digests(s, index, &crc);
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  memset(source, 7, sizeof source);
  bed_verify(b, &copy, &crc, 1);
  uint64_t ns = 0;
  CHECK(lck_pool_wake_time(pool, 1000 * MS, &ns) == 0 && ns > 0 && ns < 1000 * MS, "%llu ns",
        (unsigned long long)ns);
  CHECK(lck_pool_wake_time(pool, 0, NULL) == LCK_E_INVALID, "no place");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_timeouts(bed *b) {
  bed_create(b, "time");
  lck_pool *pool = bed_pool(1, 4096);
  static unsigned char source[65536];
  lck_copy copy = {.offset = bed_slot(b, 0), .source = source, .length = sizeof source};
  for (int help = LCK_HELP_NONE; help <= LCK_HELP_ALONE; help++) {
    CHECK(lck_fault_delay(LCK_FAULT_COPY, 100 * MS) == 0, "delay");
    lck_snapshot *s = bed_begin(b, pool, 0);
    uint32_t index = bed_add(s, &copy, 1);
    CHECK(lck_snapshot_capture(s, index, 0, help) == LCK_E_TIMEOUT, "16 chunks of 100 ms");
    CHECK(lck_snapshot_capture(s, index, 20 * MS, help) == LCK_E_TIMEOUT, "16 chunks of 100 ms");
    CHECK(lck_fault_delay(LCK_FAULT_COPY, 0) == 0, "delay");
    bed_capture(s, index, help);
    CHECK(lck_snapshot_capture(s, index, 0, help) == 0, "%s", lck_last_error());
    int state = -1;
    if (b->staged) {
      CHECK(lck_fault_delay(LCK_FAULT_RECORD, 100000 * MS) == 0, "delay");
      CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
      CHECK(lck_snapshot_wait(s, 0, &state) == LCK_E_TIMEOUT, "the record is held");
      CHECK(state == LCK_SNAP_SEALED, "%d", state);
      CHECK(lck_snapshot_wait(s, 5 * MS, &state) == LCK_E_TIMEOUT, "the record is held");
      CHECK(lck_fault_delay(LCK_FAULT_RECORD, 0) == 0, "delay");
    } else { /* nothing to sync, nothing to wait for */
      CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
      CHECK(lck_snapshot_wait(s, 0, &state) == 0 && state == LCK_SNAP_COMMITTED, "%d", state);
    }
    CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error()); /* waits */
    bed_holds(b, 0, 1);
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_many_small_copies(bed *b) {
  enum { COUNT = 100000 };
  bed_create(b, "small");
  lck_pool *pool = bed_pool(2, 1 << 20);
  lck_copy *copies = calloc(COUNT, sizeof *copies);
  uint32_t *crcs = calloc(COUNT, sizeof *crcs);
  unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, 1), 100, 5);
  for (int round = 0; round < 2; round++) {
    lck_snapshot *s = bed_begin(b, pool, 1);
    uint32_t index = bed_add(s, copies, COUNT);
    bed_capture(s, index, 1);
    bed_digests(s, index, crcs);
    uint64_t bad;
    CHECK(lck_snapshot_audit(s, index, 7, 0, &bad) == 0, "%s", lck_last_error());
    CHECK(bed_seal(b, s, 1, 1) == 0, "%s", lck_last_error());
    bed_committed(s);
    bed_verify(b, copies, crcs, COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
      copies[i].layer = 0; /* the second time in chunks of 64 */
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(block);
  free(crcs);
  free(copies);
  bed_destroy(b);
}

static void test_unchanged_copies_are_skipped(bed *b) {
  enum { COUNT = 40 };
  bed_create(b, "same");
  lck_pool *pool = bed_pool(2, 8192);
  lck_copy copies[COUNT];
  uint32_t crcs[COUNT];
  unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, 0), 40000, 11);
  uint64_t skipped = 0, total = 0, bad;
  for (uint64_t round = 1; round <= 3; round++) {
    lck_snapshot *s = bed_begin(b, pool, 0);
    uint32_t index = bed_add(s, copies, COUNT);
    bed_capture(s, index, 1);
    CHECK(lck_snapshot_audit(s, index, round, 0, &bad) == 0, "%s", lck_last_error());
    CHECK(lck_snapshot_audit(s, index, round, 1, &bad) == 0, "%s", lck_last_error());
    bed_digests(s, index, crcs);
    block[1] ^= 1; /* of copy 0 */
    CHECK(lck_snapshot_audit(s, index, round, 1, &bad) == LCK_E_MISMATCH && bad == 0, "missed");
    block[1] ^= 1;
    CHECK(bed_seal(b, s, 0, round) == 0, "%s", lck_last_error());
    bed_committed(s);
    bed_verify(b, copies, crcs, COUNT);
    for (uint32_t i = 0; i < COUNT; i++) {
      copies[i].flags = LCK_COPY_IF_CHANGED;
      copies[i].crc = crcs[i];
      if (round == 3 || (round == 2 && i % 4 != 0))
        skipped += copies[i].length;
      total += copies[i].length;
      if (round == 1 && i % 4 == 0)
        *(unsigned char *)((uintptr_t)copies[i].source + copies[i].length / 2) ^= 0x10;
    }
    lck_stats stats;
    CHECK(lck_pool_stats(pool, &stats) == 0, "%s", lck_last_error());
    CHECK(stats.bytes_skipped == skipped, "%llu", (unsigned long long)stats.bytes_skipped);
    CHECK(stats.bytes_copied == total - skipped, "%llu", (unsigned long long)stats.bytes_copied);
    /* Other bytes into the cached staging: a skipped copy must not be drained from there. */
    bed_snapshot(b, pool, 1, 100 + round);
    uint64_t copied = stats.bytes_copied;
    CHECK(lck_pool_stats(pool, &stats) == 0, "%s", lck_last_error());
    total += stats.bytes_copied - copied;
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(block);
  bed_destroy(b);
}

static void test_audit_finds_a_flipped_byte(bed *b) {
  enum { COUNT = 60 };
  bed_create(b, "audit");
  lck_pool *pool = bed_pool(2, 4096);
  lck_copy copies[COUNT];
  unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, 0), 20000, 17);
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t index = bed_add(s, copies, COUNT);
  bed_capture(s, index, 1);
  uint64_t state = 23, found = 0, bad;
  for (uint32_t i = 0; i < COUNT; i++) {
    uint64_t at = bed_random(&state) % copies[i].length;
    unsigned char *byte = (unsigned char *)((uintptr_t)copies[i].source + at);
    *byte ^= 0x40;
    bad = LCK_ALL;
    CHECK(lck_snapshot_audit(s, index, i, 1, &bad) == LCK_E_MISMATCH, "copy %u", i);
    CHECK(bad == i, "%llu", (unsigned long long)bad);
    found += lck_snapshot_audit(s, index, i, 0, &bad) == LCK_E_MISMATCH;
    *byte ^= 0x40;
    CHECK(lck_snapshot_audit(s, index, i, 0, &bad) == 0, "%s", lck_last_error());
  }
  CHECK(found > 0 && found < COUNT, "%llu of 60 by sample", (unsigned long long)found);
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(block);
  bed_destroy(b);
}

static void body(bed *b) {
  test_round_trip(b);
  test_kept_layout(b);
  test_watermark(b);
  test_batches_are_independent(b);
  test_pace_and_help(b);
  test_free_while_paused(b);
  test_a_caller_alone_copies_everything_and_wakes_nobody(b);
  test_timeouts(b);
  test_many_small_copies(b);
  test_unchanged_copies_are_skipped(b);
  test_audit_finds_a_flipped_byte(b);
}

int main(void) {
  return bed_main(body);
}
