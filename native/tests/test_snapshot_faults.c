/* test_snapshot_faults.c -- snapshots that are refused, fail or are given up. */
#include <errno.h>
#include <sys/mman.h>

#include "snapshot_bed.h"

enum { HELP_ONLY, WORKERS_ONLY, BOTH };

/* After the failure: latched, said so in words, and in the same ones from then on; slot 0 intact,
 * slot 1 empty or (when it was never invalidated) as before. */
static void check_failed(bed *b, lck_pool *pool, lck_snapshot *s, const char *text) {
  int state = -1, rc = lck_snapshot_wait(s, -1, &state);
  CHECK(rc == LCK_E_IO && state == LCK_SNAP_FAILED, "%d %d", rc, state);
  CHECK(strstr(lck_last_error(), text), "'%s' not in '%s'", text, lck_last_error());
  char first[400];
  snprintf(first, sizeof(first), "%s", lck_last_error());
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_region_describe(b->region, &b->info) == 0 && b->info.latched == -LCK_E_IO, "latch");
  CHECK(lck_snapshot_begin(pool, b->region, 2, &s) == LCK_E_PREVIOUS, "latch");
  CHECK(strstr(lck_last_error(), first), "'%s' not in '%s'", first, lck_last_error());
  bed_holds(b, 0, 1);
  bed_reopen(b);
  CHECK(lck_region_describe(b->region, &b->info) == 0 && b->info.latched == 0, "latch");
  bed_holds(b, 0, 1);
  bed_empty(b, 1);
  bed_snapshot(b, pool, 1, 2);
}

static void test_failed_chunk(bed *b, int who, int64_t after) {
  bed_create(b, "chunk");
  lck_pool *pool = bed_pool(3, 4096);
  bed_snapshot(b, pool, 0, 1);
  uint64_t length = 40 * 4096;
  unsigned char *source =
      mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(source != MAP_FAILED, "memory");
  lck_copy copy = {.offset = bed_slot(b, 1), .source = source, .length = length};
  lck_snapshot *s = bed_begin(b, pool, 1);
  uint32_t held = bed_add(s, &copy, 1);
  copy.offset += length;
  uint32_t index = bed_add(s, &copy, 1);
  if (b->staged)
    EVENTUALLY(s->invalidated);
  CHECK(lck_pool_pace(pool, who == HELP_ONLY ? 0 : 1000) == 0, "pace");
  CHECK(lck_fault_delay(LCK_FAULT_COPY, MS / 2) == 0, "delay");
  CHECK(lck_fault_arm(LCK_FAULT_COPY, after, EIO) == 0, "arm");
  /* Whether a worker has met the fault already is up to the scheduler. */
  int rc = who == HELP_ONLY ? 0 : lck_snapshot_release(s, index, LCK_ALL);
  CHECK(rc == 0 || rc == LCK_E_IO, "%d %s", rc, lck_last_error());
  rc = lck_snapshot_capture(s, index, -1, who != WORKERS_ONLY);
  CHECK(rc == LCK_E_IO, "%d", rc);
  CHECK(strstr(lck_last_error(), "chunk"), "%s", lck_last_error());
  /* No thread reads the source any more. */
  munmap(source, length);
  CHECK(lck_fault_delay(LCK_FAULT_COPY, 0) == 0, "delay");
  CHECK(lck_snapshot_capture(s, held, -1, 1) == LCK_E_IO, "failed");
  CHECK(lck_snapshot_release(s, held, 1) == LCK_E_IO, "failed");
  CHECK(lck_snapshot_add(s, &copy, 1, &held) == LCK_E_IO, "failed");
  CHECK(bed_seal(b, s, 1, 2) == LCK_E_IO, "failed");
  CHECK(lck_pool_pace(pool, 1000) == 0, "pace");
  check_failed(b, pool, s, "chunk");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_failed_commit(bed *b, uint32_t point) {
  if (point == LCK_FAULT_SYNC && !b->staged)
    return;
  bed_create(b, "commit");
  lck_pool *pool = bed_pool(1, 65536);
  bed_snapshot(b, pool, 0, 1);
  lck_copy copies[10];
  unsigned char *block = bed_copies(copies, 10, bed_slot(b, 1), 30000, 4);
  lck_snapshot *s = bed_begin(b, pool, 1);
  uint32_t index = bed_add(s, copies, 10);
  bed_capture(s, index, 1);
  if (b->staged)
    EVENTUALLY(s->invalidated);
  CHECK(lck_fault_arm(point, 0, EIO) == 0, "arm");
  CHECK(bed_seal(b, s, 1, 2) == 0, "%s", lck_last_error());
  free(block);
  check_failed(b, pool, s, "");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_failed_invalidation(bed *b) {
  bed_create(b, "erase");
  lck_pool *pool = bed_pool(2, 65536);
  bed_snapshot(b, pool, 0, 1);
  lck_copy copies[10];
  unsigned char *block = bed_copies(copies, 10, bed_slot(b, 1), 30000, 4);
  lck_snapshot *s = NULL;
  CHECK(lck_fault_arm(LCK_FAULT_INVALIDATE, 0, EIO) == 0, "arm");
  int rc = lck_snapshot_begin(pool, b->region, 1, &s);
  if (b->staged) {
    CHECK(rc == 0, "%s", lck_last_error());
    EVENTUALLY(s->failure);
    uint32_t index;
    CHECK(lck_snapshot_add(s, copies, 10, &index) == LCK_E_IO, "failed");
    check_failed(b, pool, s, "");
  } else {
    CHECK(rc == LCK_E_IO && !s, "%d", rc);
    CHECK(lck_snapshot_begin(pool, b->region, 1, &s) == LCK_E_PREVIOUS, "latch");
    bed_reopen(b);
    bed_holds(b, 0, 1);
    bed_snapshot(b, pool, 1, 2);
  }
  free(block);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_given_up(bed *b) {
  bed_create(b, "given");
  lck_pool *pool = bed_pool(3, 4096);
  bed_snapshot(b, pool, 0, 1);
  bed_snapshot(b, pool, 1, 2);
  static unsigned char source[1 << 20];
  lck_copy copy = {.offset = bed_slot(b, 1), .source = source, .length = sizeof source};
  for (int round = 0; round < 20; round++) {
    lck_snapshot *s = bed_begin(b, pool, 1), *twice;
    CHECK(lck_snapshot_begin(pool, b->region, 1, &twice) == LCK_E_BUSY, "open");
    uint32_t index = bed_add(s, &copy, 1);
    CHECK(lck_snapshot_release(s, index, LCK_ALL) == 0, "%s", lck_last_error());
    if (round % 4 == 1)
      bed_capture(s, index, 1);
    else if (round % 4 == 2)
      bed_nap(MS / 5);
    CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
    bed_empty(b, 1);
  }
  bed_holds(b, 0, 1);
  bed_snapshot(b, pool, 1, 3);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_flip_in_dram(bed *b) {
  if (!b->staged)
    return;
  bed_create(b, "flip");
  lck_pool *pool = bed_pool(2, 4096);
  lck_copy copies[30];
  unsigned char *block = bed_copies(copies, 30, bed_slot(b, 1), 30000, 9);
  CHECK(lck_pool_pace(pool, 0) == 0, "pace");
  lck_snapshot *s = bed_begin(b, pool, 1);
  uint32_t index = bed_add(s, copies, 30);
  bed_capture(s, index, 1);
  uint64_t bad;
  *s->blocks[0][0]->pieces[7].staged ^= 4;
  CHECK(lck_snapshot_audit(s, index, 1, 1, &bad) == 0 || bad == s->blocks[0][0]->pieces[7].copy,
        "%llu", (unsigned long long)bad);
  CHECK(bed_seal(b, s, 1, 2) == 0, "%s", lck_last_error());
  CHECK(lck_pool_pace(pool, 1000) == 0, "pace");
  int state;
  CHECK(lck_snapshot_wait(s, -1, &state) == LCK_E_CORRUPT, "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), "changed in DRAM"), "%s", lck_last_error());
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  bed_reopen(b);
  bed_empty(b, 1);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(block);
  bed_destroy(b);
}

static void test_arguments(bed *b) {
  bed_create(b, "bad");
  lck_pool *pool = bed_pool(1, 4096), *none;
  static const lck_pool_spec specs[] = {
      {0, 4096, 0, 0}, {65, 4096, 0, 0}, {1, 0, 0, 0}, {1, 4095, 0, 0}, {1, 4096, 2, 0}};
  for (uint32_t i = 0; i < 5; i++)
    CHECK(lck_pool_create(&specs[i], &none) == LCK_E_INVALID, "%u", i);
  lck_snapshot *s;
  CHECK(lck_snapshot_begin(pool, b->region, 3, &s) == LCK_E_INVALID, "slot 3 of 3");
  CHECK(lck_snapshot_begin(pool, NULL, 0, &s) == LCK_E_INVALID, "no region");
  CHECK(lck_snapshot_free(NULL) == 0 && lck_pool_destroy(NULL) == 0, "NULL");
  CHECK(lck_snapshot_wait(NULL, 0, NULL) == LCK_E_INVALID, "NULL");
  s = bed_begin(b, pool, 1);
  uint64_t first = bed_slot(b, 1), end = bed_slot(b, 2);
  const lck_copy copies[] = {
      {.offset = first, .source = b, .length = 0},
      {.offset = first, .source = NULL, .length = 1},
      {.offset = first + 1, .source = b, .length = 1},
      {.offset = first - 64, .source = b, .length = 1},
      {.offset = end - 64, .source = b, .length = 65},
      {.offset = end, .source = b, .length = 1},
      {.offset = first, .source = b, .length = UINT64_MAX},
      {.offset = first, .source = b, .length = 1, .flags = 4},
  };
  uint32_t index;
  for (uint32_t i = 0; i < sizeof copies / sizeof copies[0]; i++)
    CHECK(lck_snapshot_add(s, &copies[i], 1, &index) == LCK_E_INVALID, "%u", i);
  lck_record record = {.sequence = 0};
  CHECK(lck_snapshot_seal(s, &record, NULL, NULL) == LCK_E_INVALID, "sequence 0");
  record.sequence = UINT64_C(1) << 63;
  CHECK(lck_snapshot_seal(s, &record, NULL, NULL) == LCK_E_INVALID, "the mark of a published one");
  record.sequence = 1;
  record.manifest_length = 1;
  record.manifest_offset = end;
  CHECK(lck_snapshot_seal(s, &record, NULL, "x") == LCK_E_INVALID, "outside");
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void body(bed *b) {
  test_arguments(b);
  for (int who = HELP_ONLY; who <= BOTH; who++) {
    test_failed_chunk(b, who, 0);
    test_failed_chunk(b, who, 17);
    test_failed_chunk(b, who, 39);
  }
  test_failed_invalidation(b);
  test_failed_commit(b, LCK_FAULT_SYNC);
  test_failed_commit(b, LCK_FAULT_COMMIT);
  test_failed_commit(b, LCK_FAULT_RECORD);
  test_given_up(b);
  test_flip_in_dram(b);
}

int main(void) {
  return bed_main(body);
}
