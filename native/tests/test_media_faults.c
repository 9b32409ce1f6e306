/* test_media_faults.c -- a region's memory goes away under every kind of access: an error that says
 * where and what to do, a latch, and the snapshots that lie elsewhere as they were. */
#include <errno.h>
#include <sys/stat.h>

#include "snapshot_bed.h"

static int says(const char *text) {
  return strstr(lck_last_error(), text) != NULL;
}

static void cut(const bed *b, uint64_t length) {
  CHECK(truncate(b->path, (off_t)length) == 0, "%s", b->path);
}

/* The text names the place, the region, the file as it is now, and a way out. */
static void check_words(const bed *b, uint64_t length) {
  char size[64];
  char now[64];
  snprintf(size, sizeof size, "region of %llu bytes", (unsigned long long)b->info.size);
  snprintf(now, sizeof now, "has %llu bytes now", (unsigned long long)length);
  CHECK(says(size) && says(now), "%s", lck_last_error());
  CHECK(says("was cut while it was open") && says("go on in another place"), "%s",
        lck_last_error());
}

static void check_latched(bed *b, lck_pool *pool) {
  lck_snapshot *snapshot;
  CHECK(lck_region_describe(b->region, &b->info) == 0 && b->info.latched == -LCK_E_IO, "latch");
  CHECK(lck_snapshot_begin(pool, b->region, 2, &snapshot) == LCK_E_PREVIOUS, "latch");
  CHECK(lck_region_branch(b->region, 9, NULL, 0) == LCK_E_PREVIOUS, "latch");
  CHECK(lck_region_grow(b->region, 1) == LCK_E_PREVIOUS, "latch");
}

/* The cut file is told from one that is a region, and a whole one is what it was. */
static void check_reopened(bed *b, uint64_t sequence) {
  uint64_t size = b->info.size;
  lck_region *none;
  CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
  int fd = bed_descriptor(b->path, 0);
  int lock_fd = bed_descriptor(b->path, 0);
  CHECK(lck_region_open(fd, lock_fd, 0, -1, &none) == LCK_E_FORMAT && says("truncated"), "%s",
        lck_last_error());
  cut(b, size);
  CHECK(lck_region_open(fd, lock_fd, 0, -1, &b->region) == 0, "%s", lck_last_error());
  close(fd);
  close(lock_fd);
  if (sequence > 0)
    bed_holds(b, 0, sequence);
  bed_empty(b, 1);
}

typedef struct flight {
  lck_pool *pool;
  lck_snapshot *snapshot;
  unsigned char *block;
  lck_copy copies[40];
  uint32_t batch;
} flight;

/* Slot 0 holds snapshot 1; a snapshot of 40 copies is open in slot 1, nothing of it released. */
static void take_off(bed *b, flight *f, uint32_t threads) {
  bed_create(b, "media");
  f->pool = bed_pool(threads, 4096);
  bed_snapshot(b, f->pool, 0, 1);
  f->block = bed_copies(f->copies, 40, bed_slot(b, 1), 30000, 3);
  f->snapshot = bed_begin(b, f->pool, 1);
  f->batch = bed_add(f->snapshot, f->copies, 40);
  if (b->staged)
    EVENTUALLY(f->snapshot->invalidated);
}

static void land(bed *b, flight *f, uint64_t length, uint64_t sequence) {
  int state = -1;
  int rc = lck_snapshot_wait(f->snapshot, -1, &state);
  CHECK(rc == LCK_E_IO && state == LCK_SNAP_FAILED, "%d %d", rc, state);
  check_words(b, length);
  CHECK(lck_snapshot_free(f->snapshot) == 0, "%s", lck_last_error());
  check_latched(b, f->pool);
  check_reopened(b, sequence);
  CHECK(lck_pool_destroy(f->pool) == 0, "%s", lck_last_error());
  free(f->block);
  bed_destroy(b);
}

/* ---- a writer's threads -------------------------------------------------------------------- */

/* A worker, or the thread that helps (the workers are paused), stores payload; on page media the
 * store is a drain, which only workers do. */
static void test_payload(bed *b, int help) {
  flight f;
  if (b->staged && help)
    return;
  take_off(b, &f, 3);
  uint64_t length = bed_slot(b, 1);
  CHECK(lck_pool_pace(f.pool, help || b->staged ? 0 : 1000) == 0, "pace");
  cut(b, length);
  int rc = lck_snapshot_capture(f.snapshot, f.batch, -1, help);
  CHECK(rc == (b->staged ? 0 : LCK_E_IO), "%d %s", rc, lck_last_error());
  if (b->staged) {
    CHECK(bed_seal(b, f.snapshot, 1, 2) == 0, "%s", lck_last_error());
    CHECK(lck_pool_pace(f.pool, 1000) == 0, "pace");
  } else {
    CHECK(bed_seal(b, f.snapshot, 1, 2) == LCK_E_IO, "%s", lck_last_error());
  }
  land(b, &f, length, 1);
}

static void test_half_the_payload(bed *b) {
  flight f;
  take_off(b, &f, 3);
  uint64_t length = f.copies[20].offset / 4096 * 4096;
  cut(b, length);
  /* On page media drains run beside the capture, and may meet it first. */
  int rc = lck_snapshot_capture(f.snapshot, f.batch, -1, 1);
  if (rc == 0)
    rc = bed_seal(b, f.snapshot, 1, 2);
  CHECK(rc == LCK_E_IO || (b->staged && rc == 0), "%d %s", rc, lck_last_error());
  land(b, &f, length, 1);
}

static void capture(const bed *b, flight *f) {
  bed_capture(f->snapshot, f->batch, 1);
  if (b->staged)
    EVENTUALLY(lck_batch_drained(lck_snapshot_batch(f->snapshot, 0)));
}

/* Payload has arrived; the file ends before the tables, or only behind them, where no store goes.
 */
static void test_commit(bed *b, int in_tables) {
  flight f;
  take_off(b, &f, 2);
  capture(b, &f);
  uint64_t length = in_tables ? bed_blobs(b, 1) : b->info.size - 4096;
  cut(b, length);
  CHECK(bed_seal(b, f.snapshot, 1, 2) == 0, "%s", lck_last_error());
  land(b, &f, length, 1);
}

/* The record's own page is gone, when it shall be invalidated. */
static void test_invalidation(bed *b) {
  lck_snapshot *snapshot = NULL;
  uint64_t length = 8192;
  bed_create(b, "media");
  lck_pool *pool = bed_pool(1, 4096);
  bed_snapshot(b, pool, 1, 1);
  cut(b, length);
  int rc = lck_snapshot_begin(pool, b->region, 1, &snapshot);
  if (b->staged) {
    CHECK(rc == 0, "%s", lck_last_error());
    EVENTUALLY(snapshot->failure);
    int state;
    CHECK(lck_snapshot_wait(snapshot, -1, &state) == LCK_E_IO, "%s", lck_last_error());
    check_words(b, length);
    CHECK(lck_snapshot_free(snapshot) == 0, "%s", lck_last_error());
  } else {
    CHECK(rc == LCK_E_IO, "%d %s", rc, lck_last_error());
    check_words(b, length);
  }
  check_latched(b, pool);
  check_reopened(b, 0);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* The table of an earlier snapshot, which the next one refers to, cannot be read. */
static void test_old_table(bed *b) {
  flight f;
  take_off(b, &f, 1);
  lck_record record = {.sequence = 2,
                       .layout_offset = bed_blobs(b, 1),
                       .layout_length = sizeof LAYOUT,
                       .manifest_offset = bed_slot(b, 1),
                       .manifest_length = sizeof MANIFEST};
  capture(b, &f);
  cut(b, bed_blobs(b, 1));
  CHECK(lck_snapshot_seal(f.snapshot, &record, NULL, MANIFEST) == 0, "%s", lck_last_error());
  land(b, &f, bed_blobs(b, 1), 1);
}

static void test_audit(bed *b) {
  flight f;
  uint64_t bad;
  if (b->staged)
    return; /* compares DRAM with DRAM */
  take_off(b, &f, 2);
  capture(b, &f);
  uint64_t length = f.copies[0].offset;
  cut(b, length);
  CHECK(lck_snapshot_audit(f.snapshot, f.batch, 1, 0, &bad) == LCK_E_IO, "%s", lck_last_error());
  check_words(b, length);
  CHECK(lck_snapshot_free(f.snapshot) == 0, "%s", lck_last_error());
  check_latched(b, f.pool);
  check_reopened(b, 1);
  CHECK(lck_pool_destroy(f.pool) == 0, "%s", lck_last_error());
  free(f.block);
  bed_destroy(b);
}

static void test_growth(bed *b) {
  bed_create(b, "media");
  cut(b, b->info.size / 2);
  CHECK(lck_region_grow(b->region, 4096) == LCK_E_IO && says("was cut"), "%s", lck_last_error());
  CHECK(lck_region_describe(b->region, &b->info) == 0 && b->info.latched == -LCK_E_IO, "latch");
  struct stat file;
  CHECK(stat(b->path, &file) == 0 && (uint64_t)file.st_size == b->info.size / 2, "nothing done");
  bed_destroy(b);
}

static void test_branch(bed *b) {
  bed_create(b, "media");
  cut(b, 0);
  CHECK(lck_region_branch(b->region, 5, NULL, 0) == LCK_E_IO, "%s", lck_last_error());
  check_words(b, 0);
  CHECK(lck_region_describe(b->region, &b->info) == 0 && b->info.latched == -LCK_E_IO, "latch");
  bed_destroy(b);
}

/* ---- readers ------------------------------------------------------------------------------- */

static lck_region *reader(const bed *b) {
  lck_region *region;
  int fd = bed_descriptor(b->path, 0), lock_fd = bed_descriptor(b->path, 0);
  CHECK(lck_region_open(fd, lock_fd, LCK_READ_ONLY, -1, &region) == 0, "%s", lck_last_error());
  close(fd);
  close(lock_fd);
  return region;
}

/* Both slots hold a snapshot; the second one's end is cut off. What is before is still read, by the
 * same handle, and no reader latches anything. */
static void test_reading(bed *b, uint32_t threads) {
  lck_record record;
  bed_create(b, "media");
  lck_pool *pool = bed_pool(1, 4096);
  bed_snapshot(b, pool, 0, 1);
  bed_snapshot(b, pool, 1, 2);
  lck_region *region = reader(b);
  uint64_t start = bed_slot(b, 0), half = b->info.segments[0].slot_bytes;
  unsigned char *to = malloc(half + 4096), *apart = to + half; /* threads write both at once */
  CHECK(to, "memory");
  lck_read reads[] = {
      {.offset = start, .length = 1 << 20},
      {.offset = bed_slot(b, 1), .length = half, .destination = to},
      {.offset = start, .length = 100, .destination = apart},
  };
  reads[0].crc = lck_crc32c(0, b->region->base + start, 1 << 20);
  reads[2].crc = lck_crc32c(0, b->region->base + start, 100);
  uint64_t bad = 99, length = bed_slot(b, 1) + 4096;
  cut(b, length);
  for (int verify = 0; verify < 2; verify++) {
    reads[1].destination = verify ? NULL : to;
    CHECK(lck_slot_fetch(region, reads, 3, threads, &bad) == LCK_E_IO, "%s", lck_last_error());
    CHECK(bad == 1, "%llu", (unsigned long long)bad);
    check_words(b, length);
  }
  CHECK(lck_slot_read(region, 1, &record) == LCK_E_IO, "%s", lck_last_error());
  check_words(b, length);
  CHECK(lck_slot_read(region, 0, &record) == 0 && record.sequence == 1, "%s", lck_last_error());
  reads[1] = reads[2];
  reads[1].destination = to;
  CHECK(lck_slot_fetch(region, reads, 3, threads, &bad) == 0, "%s", lck_last_error());
  lck_region_info info;
  CHECK(lck_region_describe(region, &info) == 0 && info.latched == 0, "a reader has no latch");
  CHECK(lck_region_close(region) == 0, "%s", lck_last_error());
  /* The same met by the owner latches. */
  CHECK(lck_slot_read(b->region, 1, &record) == LCK_E_IO, "%s", lck_last_error());
  check_latched(b, pool);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(to);
  bed_destroy(b);
}

/* ---- poison, at every access there is ------------------------------------------------------ */

static int open_again(const char *path, uint32_t flags, lck_region **out) {
  int fd = bed_descriptor(path, 0), lock_fd = bed_descriptor(path, 0);
  int rc = lck_region_open(fd, lock_fd, flags, -1, out);
  close(fd);
  close(lock_fd);
  return rc;
}

/* Open for writing, begin a timeline, make a snapshot, read it back; the first error. */
static int whole_run(bed *b, lck_pool *pool, uint64_t sequence) {
  lck_copy copies[10];
  lck_snapshot *s = NULL;
  uint32_t index, crcs[10];
  int state;
  uint64_t bad;
  lck_record record;
  int rc = open_again(b->path, 0, &b->region);
  if (rc != 0)
    return rc;
  unsigned char *block = bed_copies(copies, 10, bed_slot(b, 1), 30000, sequence);
  rc = lck_region_branch(b->region, sequence, NULL, 0);
  rc = rc ? rc : lck_snapshot_begin(pool, b->region, 1, &s);
  rc = rc ? rc : lck_snapshot_add(s, copies, 10, &index);
  rc = rc ? rc : lck_snapshot_capture(s, index, -1, 1);
  rc = rc ? rc : lck_snapshot_audit(s, index, 1, 0, &bad);
  rc = rc ? rc : lck_snapshot_digests(s, index, crcs);
  rc = rc ? rc : bed_seal(b, s, 1, sequence);
  rc = rc ? rc : lck_snapshot_wait(s, -1, &state);
  lck_read read = {.offset = copies[0].offset, .length = copies[0].length, .crc = crcs[0]};
  rc = rc ? rc : lck_slot_read(b->region, 1, &record);
  rc = rc ? rc : lck_slot_fetch(b->region, &read, 1, 1, &bad);
  char *text = strdup(lck_last_error());
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_region_describe(b->region, &b->info) == 0 && (b->info.latched != 0) == (rc != 0),
        "latch %u after %d", b->info.latched, rc);
  if (rc != 0)
    CHECK(strstr(text, "poisoned") && strstr(text, "[0, +2097152)") && strstr(text, "ndctl"), "%s",
          text);
  free(text);
  free(block);
  CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
  return rc;
}

/* Slot 0 is never lost, and the next run, with good memory, is whole again. */
static void test_poison(bed *b) {
  bed_create(b, "media");
  lck_pool *pool = bed_pool(1, 65536);
  bed_snapshot(b, pool, 0, 1);
  CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
  int64_t after = 0;
  /* Three runs without an error are past the last access: in one, a worker whose chunk was seized
   * may have met the fault, which is nobody's then. */
  for (uint64_t sequence = 2, quiet = 0; quiet < 3; after++, sequence++) {
    CHECK(lck_fault_arm(LCK_FAULT_POISON, after, EIO) == 0, "arm");
    int rc = whole_run(b, pool, sequence);
    CHECK(lck_fault_arm(LCK_FAULT_POISON, -1, 0) == 0, "disarm");
    CHECK(rc == 0 || rc == LCK_E_IO, "access %lld: %d %s", (long long)after, rc, lck_last_error());
    CHECK(open_again(b->path, LCK_READ_ONLY, &b->region) == 0, "%s", lck_last_error());
    bed_holds(b, 0, 1);
    lck_record record;
    int found = lck_slot_read(b->region, 1, &record);
    CHECK(found == 0 || found == LCK_E_EMPTY, "access %lld: %s", (long long)after,
          lck_last_error());
    CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
    quiet = rc == 0 ? quiet + 1 : 0;
  }
  printf("%s: SIGBUS at each of %lld accesses: an error every time\n", b->name, (long long)after);
  CHECK(after > 30, "%lld accesses", (long long)after);
  CHECK(open_again(b->path, 0, &b->region) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void body(bed *b) {
  test_payload(b, 0);
  test_payload(b, 1);
  test_half_the_payload(b);
  test_commit(b, 1);
  test_commit(b, 0);
  test_invalidation(b);
  test_old_table(b);
  test_audit(b);
  test_growth(b);
  test_branch(b);
  test_reading(b, 1);
  test_reading(b, 4);
  test_poison(b);
}

int main(void) {
  return bed_main(body);
}
