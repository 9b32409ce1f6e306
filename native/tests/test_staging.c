/* test_staging.c -- copies that go through DRAM on any medium, and writes that are limited. */
#include "snapshot_bed.h"

enum { COUNT = 120 };

static uint64_t whole(uint64_t length) {
  return (length + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
}

/* Every third copy straight, the others staged; the sources change as soon as they are captured,
 * while a limit keeps the way to the region slow. */
static void test_part_of_a_batch_is_staged(bed *b) {
  bed_create(b, "part");
  lck_copy copies[COUNT];
  uint32_t crcs[COUNT];
  for (uint32_t round = 0; round < 6; round++) {
    lck_pool *pool = bed_pool(1 + round % 3, 8192);
    uint64_t staged = 0, total = 0;
    unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, 0), 30000, round + 1);
    uint64_t held = (uint64_t)((const unsigned char *)copies[COUNT - 1].source - block) +
                    copies[COUNT - 1].length;
    unsigned char *kept = malloc(held);
    CHECK(kept, "memory");
    memcpy(kept, block, held);
    for (uint32_t i = 0; i < COUNT; i++) {
      copies[i].flags = i % 3 ? LCK_COPY_STAGED : 0;
      staged += i % 3 || b->staged ? copies[i].length : 0;
      total += copies[i].length;
    }
    CHECK(lck_pool_limit(pool, UINT64_C(64) << 20) == 0, "%s", lck_last_error());
    lck_snapshot *s = bed_begin(b, pool, 0);
    uint32_t batch = bed_add(s, copies, COUNT);
    bed_capture(s, batch, 1);
    uint64_t bad;
    CHECK(lck_snapshot_audit(s, batch, round, round % 2, &bad) == 0, "%s", lck_last_error());
    bed_digests(s, batch, crcs);
    memset(block, 0, held);
    CHECK(bed_seal(b, s, 0, round + 1) == 0, "%s", lck_last_error());
    bed_committed(s);
    for (uint32_t i = 0; i < COUNT; i++)
      copies[i].source = kept + ((const unsigned char *)copies[i].source - block);
    bed_verify(b, copies, crcs, COUNT);
    bed_holds(b, 0, round + 1);
    lck_stats stats;
    CHECK(lck_pool_stats(pool, &stats) == 0, "%s", lck_last_error());
    CHECK(stats.bytes_copied == total, "%llu", (unsigned long long)stats.bytes_copied);
    CHECK(stats.bytes_drained == staged, "%llu", (unsigned long long)stats.bytes_drained);
    CHECK(stats.staging_bytes > 0, "no DRAM held");
    CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
    free(kept);
    free(block);
  }
  bed_destroy(b);
}

/* A batch without a staged copy beside one with: both must have left DRAM before the commit. */
static void test_batches_of_both_kinds(bed *b) {
  bed_create(b, "both");
  lck_copy copies[COUNT];
  uint32_t crcs[COUNT];
  unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, 1), 20000, 9);
  lck_pool *pool = bed_pool(2, 4096);
  lck_snapshot *s = bed_begin(b, pool, 1);
  uint32_t straight = bed_add(s, copies, COUNT / 2);
  bed_capture(s, straight, 1);
  for (uint32_t i = COUNT / 2; i < COUNT; i++)
    copies[i].flags = LCK_COPY_STAGED;
  uint32_t staged = bed_add(s, copies + COUNT / 2, COUNT - COUNT / 2);
  bed_capture(s, staged, 0);
  bed_digests(s, straight, crcs);
  bed_digests(s, staged, crcs + COUNT / 2);
  CHECK(bed_seal(b, s, 1, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  bed_verify(b, copies, crcs, COUNT);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(block);
}

/* What was mapped beforehand serves the snapshot: no more is mapped. */
static void test_mapped_beforehand(bed *b) {
  bed_create(b, "before");
  lck_copy copies[COUNT];
  unsigned char *block = bed_copies(copies, COUNT, bed_slot(b, 0), 60000, 4);
  uint64_t needed = 0;
  for (uint32_t i = 0; i < COUNT; i++) {
    copies[i].flags = LCK_COPY_STAGED;
    needed += whole(copies[i].length);
  }
  lck_pool *pool = bed_pool(1, 65536);
  lck_stats before, after;
  CHECK(lck_pool_stage(pool, needed) == 0, "%s", lck_last_error());
  CHECK(lck_pool_stats(pool, &before) == 0, "%s", lck_last_error());
  CHECK(before.staging_bytes >= needed, "%llu", (unsigned long long)before.staging_bytes);
  lck_snapshot *s = bed_begin(b, pool, 0);
  bed_capture(s, bed_add(s, copies, COUNT / 2), 1);
  bed_capture(s, bed_add(s, copies + COUNT / 2, COUNT / 2), 1);
  CHECK(lck_pool_stats(pool, &after) == 0, "%s", lck_last_error());
  CHECK(after.staging_bytes == before.staging_bytes, "%llu",
        (unsigned long long)after.staging_bytes);
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_pool_stage(pool, UINT64_C(1) << 50) == LCK_E_NOMEM, "mapped a petabyte");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(block);
}

/* No upper bound of time is asserted: the machine may be slow, the limit may not be fast. */
static void test_limit(bed *b) {
  bed_create(b, "limit");
  lck_copy copy = {.offset = bed_slot(b, 0), .length = UINT64_C(4) << 20};
  unsigned char *source = malloc(copy.length);
  CHECK(source, "memory");
  bed_fill(source, copy.length, 3);
  copy.source = source;
  lck_pool *pool = bed_pool(2, 65536);
  CHECK(lck_pool_limit(pool, UINT64_C(40) << 20) == 0, "%s", lck_last_error());
  uint64_t started = lck_now_ns();
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t batch = bed_add(s, &copy, 1);
  bed_capture(s, batch, 1);
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  uint64_t spent = lck_now_ns() - started;
  CHECK(spent >= UINT64_C(99000000), "4 MiB at 40 MiB/s in %llu ns", (unsigned long long)spent);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  free(source);
}

static void body(bed *b) {
  test_part_of_a_batch_is_staged(b);
  test_batches_of_both_kinds(b);
  test_mapped_beforehand(b);
  test_limit(b);
}

int main(void) {
  return bed_main(body);
}
