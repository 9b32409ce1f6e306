/* test_statistics.c -- the statistics page: read whole or not at all, by whoever looks on, and in
 * nobody's way. */
#include <pthread.h>
#include <sys/mman.h>

#include "format.h"
#include "guard.h"
#include "snapshot_bed.h"

static int look(const lck_region *region, lck_statistics *out) {
  int owned;
  return lck_region_statistics(region, out, &owned);
}

static lck_region *reader(const bed *b) {
  int fd = open(b->path, O_RDONLY | O_CLOEXEC), lock_fd = open(b->path, O_RDONLY | O_CLOEXEC);
  CHECK(fd >= 0 && lock_fd >= 0, "%s", b->path);
  lck_region *region;
  CHECK(lck_region_open(fd, lock_fd, LCK_READ_ONLY, -1, &region) == 0, "%s", lck_last_error());
  close(fd);
  close(lock_fd);
  return region;
}

static lck_statistics said(uint64_t step) {
  lck_statistics it = {.process = 7, .step = step, .captured_step = 3 * step, .errors = 5 * step};
  snprintf(it.last_error, sizeof it.last_error, "of step %llu", (unsigned long long)step);
  snprintf(it.stalls[1].cause, sizeof it.stalls[1].cause, "fence");
  it.stalls[1].ns = 7 * step;
  return it;
}

static void test_what_is_said_is_read(bed *b) {
  bed_create(b, "said");
  lck_pool *pool = bed_pool(1, 4096);
  lck_region *other = reader(b);
  lck_statistics found;
  CHECK(look(other, &found) == LCK_E_EMPTY, "nothing was published");
  bed_snapshot(b, pool, 1, 1);
  lck_statistics wanted = said(4);
  CHECK(lck_pool_publish(pool, b->region, &wanted) == 0, "%s", lck_last_error());
  EVENTUALLY(look(other, &found) == 0);
  lck_stats stats;
  CHECK(lck_pool_stats(pool, &stats) == 0, "%s", lck_last_error());
  CHECK(found.bytes_copied == stats.bytes_copied && stats.bytes_copied > 0, "pool's counters");
  CHECK(found.bytes_drained == stats.bytes_drained && found.drain_ns == stats.drain_ns &&
            (found.bytes_drained > 0) == b->staged,
        "%llu bytes drained, the pool says %llu", (unsigned long long)found.bytes_drained,
        (unsigned long long)stats.bytes_drained);
  CHECK(found.step == 4 && found.captured_step == 12 && found.stalls[1].ns == 28, "numbers");
  CHECK(!strcmp(found.last_error, "of step 4") && !strcmp(found.stalls[1].cause, "fence"), "texts");
  bed_holds(b, 1, 1);
  CHECK(lck_region_close(other) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* The last page is stored before the pool ends; the owner lock tells who is still there. */
static void test_the_last_word_stays(bed *b) {
  bed_create(b, "last");
  lck_pool *pool = bed_pool(1, 4096);
  lck_region *other = reader(b);
  lck_statistics found, wanted = said(1);
  for (uint64_t step = 1; step <= 100; step++) {
    wanted = said(step);
    CHECK(lck_pool_publish(pool, b->region, &wanted) == 0, "%s", lck_last_error());
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  int owned = 0;
  CHECK(lck_region_statistics(other, &found, &owned) == 0, "%s", lck_last_error());
  CHECK(found.step == 100 && owned == 1, "step %llu", (unsigned long long)found.step);
  CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
  CHECK(lck_region_statistics(other, &found, &owned) == 0, "%s", lck_last_error());
  CHECK(found.step == 100 && owned == 0, "nobody owns it any more");
  CHECK(lck_region_close(other) == 0, "%s", lck_last_error());
  unlink(b->path);
}

/* A training thread never waits for a sync, nor is it refused because the region is latched. */
static void test_publishing_is_in_nobodys_way(bed *b) {
  bed_create(b, "way");
  lck_pool *pool = bed_pool(1, 4096);
  lck_statistics wanted = said(9);
  lck_region *other = reader(b);
  unsigned char *page = lck_guard_store(b->region, LCK_STATISTICS_OFFSET);
  bed_snapshot(b, pool, 0, 1);
  if (b->staged) { /* out of reach for whoever publishes, while the commit thread is in a sync */
    CHECK(lck_fault_delay(LCK_FAULT_SYNC, 300 * MS) == 0, "delay");
    lck_snapshot *s = bed_begin(b, pool, 1);
    bed_nap(50 * MS);
    CHECK(mprotect(page, LCK_HEADER_PAGE, PROT_NONE) == 0, "mprotect");
    CHECK(lck_pool_publish(pool, b->region, &wanted) == 0, "%s", lck_last_error());
    CHECK(mprotect(page, LCK_HEADER_PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    CHECK(lck_fault_delay(LCK_FAULT_SYNC, 0) == 0, "delay");
    CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  }
  lck_region_latch(b->region, LCK_E_IO);
  CHECK(lck_pool_publish(pool, b->region, &wanted) == 0, "%s", lck_last_error());
  lck_statistics found;
  EVENTUALLY(look(other, &found) == 0 && found.step == 9);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  pool = bed_pool(1, 4096);
  CHECK(lck_pool_publish(pool, other, &wanted) == LCK_E_INVALID, "a reader says nothing");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  CHECK(lck_region_close(other) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* Every flipped bit of the page is seen, and none of them hurts a snapshot. */
static void test_damage_is_seen(bed *b) {
  bed_create(b, "damage");
  lck_pool *pool = bed_pool(1, 4096);
  lck_region *other = reader(b); /* a mapping of its own, as another process has */
  lck_statistics found, wanted = said(2);
  bed_snapshot(b, pool, 2, 8);
  CHECK(lck_pool_publish(pool, b->region, &wanted) == 0, "%s", lck_last_error());
  EVENTUALLY(look(other, &found) == 0);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error()); /* its thread has left the page */
  unsigned char *page = lck_guard_store(b->region, LCK_STATISTICS_OFFSET);
  for (uint64_t byte = offsetof(statistics_disk, magic); byte < sizeof(statistics_disk); byte++) {
    page[byte] ^= (unsigned char)(1 << byte % 8);
    int rc = look(other, &found);
    CHECK(rc == LCK_E_CORRUPT, "byte %llu: %d", (unsigned long long)byte, rc);
    page[byte] ^= (unsigned char)(1 << byte % 8);
  }
  memset(page, 0x5a, LCK_HEADER_PAGE);
  CHECK(look(other, &found) == LCK_E_CORRUPT, "nonsense");
  CHECK(lck_region_close(other) == 0, "%s", lck_last_error());
  bed_reopen(b);
  bed_holds(b, 2, 8);
  bed_destroy(b);
}

static _Atomic int going;

static void *publish_many(void *argument) {
  bed *b = argument;
  lck_pool *pool = bed_pool(1, 4096);
  for (uint64_t step = 1; step == 1 || going; step++) { /* once where it starts behind all looks */
    lck_statistics wanted = said(step);
    if (lck_pool_publish(pool, b->region, &wanted) != 0)
      break;
  }
  lck_pool_destroy(pool);
  return NULL;
}

/* The writer and its page are in this process only so that the test has no need of another one. */
static void test_no_page_is_torn(bed *b) {
  if (UNDER_TSAN) /* reader and writer race for the page by design; the checksum decides */
    return;
  bed_create(b, "torn");
  going = 1;
  pthread_t writer;
  CHECK(pthread_create(&writer, NULL, publish_many, b) == 0, "go");
  lck_region *other = reader(b);
  uint64_t last = 0;
  lck_statistics end;
  for (int i = 0; i < 20000; i++) {
    lck_statistics found;
    if (look(other, &found) != 0)
      continue;
    CHECK(found.captured_step == 3 * found.step && found.errors == 5 * found.step, "torn");
    CHECK(found.stalls[1].ns == 7 * found.step && found.step >= last, "back to an older page");
    last = found.step;
  }
  going = 0;
  pthread_join(writer, NULL);
  CHECK(look(other, &end) == 0 && end.step >= last, "the last one is not whole");
  CHECK(lck_region_close(other) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void body(bed *b) {
  test_what_is_said_is_read(b);
  test_the_last_word_stays(b);
  test_publishing_is_in_nobodys_way(b);
  test_damage_is_seen(b);
  test_no_page_is_torn(b);
}

int main(void) {
  return bed_main(body);
}
