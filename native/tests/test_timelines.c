/* What counts in a region and what is suspect of it: marks, timelines, crashes and growth between.
 */
#include <pthread.h>

#include "region_fixture.h"

#define TIMELINE 7 /* of record_for */

static const char *path;

static uint32_t suspect_in(const lck_region *region, uint32_t slot) {
  lck_record record;
  CHECK(lck_slot_read(region, slot, &record) == 0, "%s", lck_last_error());
  CHECK(record.flags & LCK_RECORD_EARLY, "the record's own flags stay: 0x%x", record.flags);
  return record.flags & LCK_RECORD_SUSPECT;
}

static lck_region *with_two(uint32_t flags) {
  lck_region_spec spec = small_spec();
  spec.flags = flags;
  lck_region *region = must_create(path, &spec);
  CHECK(lck_region_suspect(region, 1) == LCK_E_INVALID, "no timeline yet");
  CHECK(lck_region_branch(region, TIMELINE, NULL, 0) == 0, "%s", lck_last_error());
  CHECK(write_snapshot(region, 0, 4) == 0 && write_snapshot(region, 1, 5) == 0, "%s",
        lck_last_error());
  return region;
}

/* Committed ones from there on, those to come, and none before. */
static void test_mark(uint32_t flags) {
  lck_region *region = with_two(flags);
  CHECK(describe(region).suspect == 0 && !suspect_in(region, 0) && !suspect_in(region, 1), "none");
  CHECK(lck_region_suspect(region, 0) == LCK_E_INVALID, "sequence 0");
  CHECK(lck_region_suspect(region, UINT64_MAX) == LCK_E_INVALID, "no count comes there");
  CHECK(lck_region_suspect(region, 5) == 0, "%s", lck_last_error());
  CHECK(describe(region).suspect == 5 && !suspect_in(region, 0) && suspect_in(region, 1), "from 5");
  CHECK(write_snapshot(region, 0, 6) == 0 && suspect_in(region, 0), "a later one is suspect");
  uint64_t generation = describe(region).generation;
  CHECK(lck_region_suspect(region, 6) == 0 && describe(region).suspect == 5, "the first one stays");
  CHECK(describe(region).generation == generation, "nothing is written for it");
  CHECK(lck_region_suspect(region, 3) == 0 && describe(region).suspect == 3, "an earlier one");
  must_close(region);
  region = must_open(path, LCK_READ_ONLY);
  CHECK(describe(region).suspect == 3 && suspect_in(region, 0) && suspect_in(region, 1), "kept");
  CHECK(lck_region_suspect(region, 1) == LCK_E_INVALID, "a reader marks nothing");
  must_close(region);
}

/* Whoever continues a suspect snapshot knows so; what is new is not suspect, and an id from
 * elsewhere has no mark. */
static void test_branches(uint32_t flags) {
  lck_region *region = with_two(flags);
  lck_branch lineage[] = {{TIMELINE, 5}, {3, 2}};
  lck_branch further[] = {{8, 6}, {TIMELINE, 5}};
  CHECK(lck_region_suspect(region, 5) == 0, "%s", lck_last_error());
  CHECK(lck_region_branch(region, 8, lineage, 2) == 0, "%s", lck_last_error());
  CHECK(describe(region).suspect == 0, "%lu", describe(region).suspect);
  CHECK(!suspect_in(region, 0) && suspect_in(region, 1), "the ancestor's mark stays");
  CHECK(lck_region_suspect(region, 9) == 0, "%s", lck_last_error());
  CHECK(lck_region_branch(region, 10, further, 2) == 0, "%s", lck_last_error());
  CHECK(region->super.suspect_before[0] == 9 && region->super.suspect_before[1] == 5, "in order");
  CHECK(suspect_in(region, 1), "two branches later");
  CHECK(lck_region_branch(region, 11, NULL, 0) == 0 && !suspect_in(region, 1), "left behind");
  must_close(region);
}

/* Either copy of the superblock has the mark. */
static void test_damage(void) {
  must_close(with_two(0));
  lck_region *region = must_open(path, 0);
  CHECK(lck_region_suspect(region, 5) == 0, "%s", lck_last_error());
  must_close(region);
  for (int copy = 0; copy < 2; copy++) {
    int fd = open_file(path, O_RDWR);
    CHECK(pwrite(fd, "?", 1, (off_t)LCK_SUPERBLOCK_OFFSET(copy) + 125) == 1, "damage");
    close(fd);
    region = must_open(path, LCK_READ_ONLY);
    CHECK(describe(region).suspect == 5 && suspect_in(region, 1), "copy %d", 1 - copy);
    must_close(region);
    must_close(must_open(path, 0)); /* repairs it */
  }
}

static void mark_and_die(void *argument) {
  (void)argument;
  lck_region *region = must_open(path, 0);
  CHECK(lck_region_suspect(region, 5) == 0, "%s", lck_last_error());
  (void)kill(getpid(), SIGKILL);
}

static void test_kill(void) {
  must_close(with_two(0));
  int status = 0;
  fflush(NULL);
  pid_t child = fork();
  if (child == 0)
    mark_and_die(NULL);
  CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "status 0x%x", status);
  lck_region *region = must_open(path, 0);
  CHECK(describe(region).suspect == 5 && !suspect_in(region, 0) && suspect_in(region, 1), "kept");
  must_close(region);
}

/* A failed sync: the mark or none, both snapshots in any case, and the region is latched. */
static void test_sync_errors(void) {
  int64_t failed = 0;
  for (int done = 0; !done; failed++) {
    lck_region *region = with_two(0);
    CHECK(lck_fault_arm(LCK_FAULT_SYNC, failed, EIO) == 0, "arm");
    int rc = lck_region_suspect(region, 5);
    CHECK(lck_fault_arm(LCK_FAULT_SYNC, -1, 0) == 0, "disarm");
    done = rc == 0;
    CHECK(done || rc == LCK_E_IO, "%d %s", rc, lck_last_error());
    CHECK(describe(region).latched == (done ? 0u : (uint32_t)-LCK_E_IO), "latched");
    must_close(region);
    region = must_open(path, 0);
    CHECK(!suspect_in(region, 0), "the good one stays good");
    CHECK(suspect_in(region, 1) == (describe(region).suspect ? LCK_RECORD_SUSPECT : 0),
          "one of both");
    CHECK(!done || describe(region).suspect == 5, "what was acknowledged is there");
    must_close(region);
  }
  CHECK(failed == 3, "%ld syncs in a mark, expected 2", failed - 1);
}

/* ---- beside growth -------------------------------------------------------------------------- */

#define ROUNDS 10u

static int marks_failed; /* read when the thread has ended */

static void *mark_down(void *argument) {
  for (uint64_t sequence = ROUNDS; sequence > 0; sequence--)
    marks_failed += lck_region_suspect(argument, sequence) != 0;
  return NULL;
}

static void test_beside_growth(void) {
  lck_region *region = with_two(LCK_PROCESS_DURABLE);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, mark_down, region) == 0, "thread");
  for (uint32_t i = 0; i < ROUNDS; i++)
    CHECK(lck_region_grow(region, 4096) == 0, "%s", lck_last_error());
  pthread_join(thread, NULL);
  CHECK(marks_failed == 0, "%d of %u marks", marks_failed, ROUNDS);
  for (int reopened = 0; reopened < 2; reopened++) {
    lck_region_info info = describe(region);
    CHECK(info.segment_count == 1 + ROUNDS && info.suspect == 1, "%u segments, suspect from %lu",
          info.segment_count, info.suspect);
    must_close(region);
    region = reopened ? NULL : must_open(path, LCK_READ_ONLY);
  }
}

int main(void) {
  const char *disk = getenv("LCK_TEST_DISK") ? getenv("LCK_TEST_DISK") : "/var/tmp";
  path = path_in(disk);
  test_mark(0);
  test_mark(LCK_PROCESS_DURABLE);
  test_branches(0);
  test_damage();
  test_kill();
  test_sync_errors();
  test_beside_growth();
  unlink(path);
  return checks_end();
}
