/* What fails names its numbers, and leaves what was committed. */
#include <signal.h>
#include <sys/resource.h>

#include "region_fixture.h"

static const char *memory_path, *disk_path;

static int says(const char *text) {
  return strstr(lck_last_error(), text) != NULL;
}

/* ---- space --------------------------------------------------------------------------------- */

static void test_full_tmpfs(void) {
  char directory[] = "/tmp/lightck-small-XXXXXX";
  const char *mounted = mount_at(directory, "tmpfs", "size=8m");
  if (mounted == NULL)
    return;
  char path[300];
  snprintf(path, sizeof(path), "%s/region", mounted);
  lck_region_spec spec = small_spec();
  lck_region *region;
  spec.slot_bytes = 4 << 20;
  CHECK(try_create(path, &spec, &region) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("10485760 bytes needed, 8388608 free"), "%s", lck_last_error());
  CHECK(file_length(path) == 0, "cut back: %lu", file_length(path));
  spec.slot_bytes = 1 << 20;
  region = must_create(path, &spec);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  uint64_t size = describe(region).size;
  CHECK(lck_region_grow(region, 4 << 20) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("8388608 bytes needed, 4194304 free"), "%s", lck_last_error());
  CHECK(file_length(path) == size && describe(region).size == size, "as before");
  /* Found only while allocating: the same, and the pages got so far are given back. */
  CHECK(lck_fault_arm(LCK_FAULT_ALLOCATE, 0, ENOSPC) == 0, "arm");
  CHECK(lck_region_grow(region, 1 << 20) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("2097152 bytes needed, 4194304 free"), "%s", lck_last_error());
  CHECK(file_length(path) == size && describe(region).latched == 0, "as before");
  CHECK(write_snapshot(region, 1, 2) == 0, "usable: %s", lck_last_error());
  CHECK(lck_region_grow(region, 2 << 20) == 0, "what fits: %s", lck_last_error());
  CHECK(sequence_in(region, 0) == 1 && sequence_in(region, 1) == 2, "%s", lck_last_error());
  must_close(region);
  region = must_open(path, 0);
  must_close(region);
  unlink(path);
  unmount(mounted);
}

/* With the default action SIGXFSZ would end the child. */
static void grow_beyond_limit(void *argument) {
  lck_region *region = NULL;
  lck_region_spec spec = small_spec();
  struct rlimit limit = {.rlim_cur = 5 << 20, .rlim_max = RLIM_INFINITY};
  signal(SIGXFSZ, SIG_DFL);
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
  region = must_create(argument, &spec);
  CHECK(lck_region_grow(region, 300000) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("2097152 bytes needed") && says("5242880"), "%s", lck_last_error());
  CHECK(write_snapshot(region, 0, 1) == 0, "usable: %s", lck_last_error());
  must_close(region);
  spec.slot_bytes = 4 << 20;
  CHECK(try_create(argument, &spec, &region) == LCK_E_FULL, "%s", lck_last_error());
}

static void test_file_limit(void) {
  in_child(grow_beyond_limit, (void *)(uintptr_t)memory_path);
  in_child(grow_beyond_limit, (void *)(uintptr_t)disk_path);
}

static void test_allocation_error(void) {
  lck_region_spec spec = small_spec();
  lck_region *region = NULL;
  CHECK(lck_fault_arm(LCK_FAULT_ALLOCATE, 0, EIO) == 0, "arm");
  CHECK(try_create(disk_path, &spec, &region) == LCK_E_IO, "%s", lck_last_error());
  CHECK(file_length(disk_path) == 0, "cut back");
  region = must_create(disk_path, &spec);
  uint64_t size = file_length(disk_path);
  CHECK(lck_fault_arm(LCK_FAULT_ALLOCATE, 0, EFBIG) == 0, "arm");
  CHECK(lck_region_grow(region, 300000) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("bytes needed") && says("free"), "%s", lck_last_error());
  CHECK(lck_fault_arm(LCK_FAULT_ALLOCATE, 0, EIO) == 0, "arm");
  CHECK(lck_region_grow(region, 300000) == LCK_E_IO, "%s", lck_last_error());
  CHECK(file_length(disk_path) == size, "cut back");
  CHECK(lck_region_grow(region, 300000) == LCK_E_PREVIOUS, "latched: %s", lck_last_error());
  must_close(region);
}

/* An address space too small for the usual reservation still holds the region, but no growth. */
static void open_in_few_addresses(void *argument) {
  struct rlimit limit = {.rlim_cur = UINT64_C(2) << 30, .rlim_max = RLIM_INFINITY};
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit");
  lck_region *region = must_open(argument, 0);
  CHECK(lck_region_grow(region, UINT64_C(3) << 30) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("bytes of addresses free"), "%s", lck_last_error());
  CHECK(lck_region_grow(region, 300000) == 0, "%s", lck_last_error());
  must_close(region);
}

static void test_few_addresses(void) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  lck_region_spec spec = small_spec();
  must_close(must_create(memory_path, &spec));
  in_child(open_in_few_addresses, (void *)(uintptr_t)memory_path);
#else
  (void)open_in_few_addresses;
  printf("SKIPPED: RLIMIT_AS: sanitizers need their shadow\n");
#endif
}

static void test_numa(void) {
  lck_region_spec spec = small_spec();
  lck_region *region = NULL;
  spec.numa_node = 1023;
  CHECK(try_create(memory_path, &spec, &region) == LCK_E_INVALID, "%s", lck_last_error());
  CHECK(says("node 1023"), "%s", lck_last_error());
  CHECK(file_length(memory_path) == 0, "cut back");
  spec.numa_node = 0;
  CHECK(try_create(disk_path, &spec, &region) == LCK_E_INVALID, "%s", lck_last_error());
  int rc = try_create(memory_path, &spec, &region);
  if (rc != 0)
    printf("SKIPPED: NUMA: %s\n", lck_last_error());
  else
    must_close(region);
}

/* ---- sync ---------------------------------------------------------------------------------- */

/* Fail the n-th sync of a commit on page media, for every n there is. */
static void test_sync_errors(void) {
  int failed = 0;
  for (int64_t after = 0;; after++, failed++) {
    lck_region_spec spec = small_spec();
    lck_region *region = must_create(disk_path, &spec);
    CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
    CHECK(lck_fault_arm(LCK_FAULT_SYNC, after, EIO) == 0, "arm");
    int rc = write_snapshot(region, 1, 2);
    (void)lck_fault_arm(LCK_FAULT_SYNC, -1, 0);
    if (rc == 0) {
      must_close(region);
      break;
    }
    CHECK(rc == LCK_E_IO && says("Input/output error"), "%d %s", rc, lck_last_error());
    char first[400];
    snprintf(first, sizeof(first), "%s", lck_last_error());
    CHECK(describe(region).latched == (uint32_t)-LCK_E_IO, "%u", describe(region).latched);
    CHECK(write_snapshot(region, 1, 3) == LCK_E_PREVIOUS && says(first), "%s", lck_last_error());
    CHECK(lck_region_grow(region, 1) == LCK_E_PREVIOUS && says(first), "%s", lck_last_error());
    CHECK(lck_region_branch(region, 1, NULL, 0) == LCK_E_PREVIOUS && says(first), "%s",
          lck_last_error());
    CHECK(sequence_in(region, 0) == 1, "reading goes on: %s", lck_last_error());
    /* The next owner would protect a record that is in the page cache only, and overwrite slot 0.
     */
    CHECK(sequence_in(region, 1) == 0, "sync %ld failed: nothing is committed", after);
    /* Of two threads that sync, the kernel tells one. */
    CHECK(lck_persist_sync(region) == LCK_E_PREVIOUS, "sync %ld is forgotten", after);
    must_close(region);
    region = must_open(disk_path, 0);
    CHECK(sequence_in(region, 0) == 1 && sequence_in(region, 1) == 0, "%s", lck_last_error());
    CHECK(write_snapshot(region, 1, 4) == 0, "a new owner writes again: %s", lck_last_error());
    must_close(region);
  }
  CHECK(failed == 3, "%d syncs in invalidation and commit, expected 3", failed);
}

/* The same for creation, growth and branching: old or new, never neither. */
static void test_superblock_sync_errors(void) {
  lck_region_spec spec = small_spec();
  lck_region *region = NULL;
  int64_t after = 0;
  for (; lck_fault_arm(LCK_FAULT_SYNC, after, EIO), try_create(disk_path, &spec, &region) != 0;
       after++)
    CHECK(says("Input/output error") && file_length(disk_path) == 0, "%s", lck_last_error());
  CHECK(after == 3, "%ld syncs in a creation, expected 3", after);
  (void)lck_fault_arm(LCK_FAULT_SYNC, -1, 0);
  must_close(region);
  for (after = 0; after < 5; after++) {
    region = must_open(disk_path, 0);
    lck_region_info before = describe(region);
    CHECK(lck_fault_arm(LCK_FAULT_SYNC, after, EIO) == 0, "arm");
    int rc = lck_region_grow(region, 300000);
    if (rc == 0)
      rc = lck_region_branch(region, (uint64_t)after + 1, NULL, 0);
    CHECK(rc == LCK_E_IO, "sync %ld: %d %s", after, rc, lck_last_error());
    CHECK(describe(region).latched == (uint32_t)-LCK_E_IO, "latched");
    (void)lck_fault_arm(LCK_FAULT_SYNC, -1, 0);
    must_close(region);
    region = must_open(disk_path, 0);
    lck_region_info found = describe(region);
    uint32_t grown = found.segment_count - before.segment_count;
    CHECK(grown == (after > 0), "sync %ld: %u segments", after, found.segment_count);
    CHECK(found.size <= file_length(disk_path), "space for all that is named");
    must_close(region);
  }
}

/* A predecessor that was killed leaves what it never synced, a record among it. */
static void test_new_owner_syncs(void) {
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(disk_path, &spec);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  must_close(region);
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 0, EIO) == 0, "arm");
  must_close(must_open(disk_path, LCK_READ_ONLY));
  CHECK(try_open(disk_path, 0, &region) == LCK_E_IO, "%s", lck_last_error());
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, -1, 0) == 0, "disarm");
  region = must_open(disk_path, 0);
  CHECK(sequence_in(region, 0) == 1, "%s", lck_last_error());
  region->granularity = LCK_GRAN_LINE; /* what a line medium would flush is flushed */
  CHECK(lck_persist_adopt(region) == 0 && sequence_in(region, 0) == 1, "%s", lck_last_error());
  must_close(region);
}

static void test_unproven_layout(void) {
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(memory_path, &spec);
  lck_record record = record_for(region, 0, 1);
  CHECK(lck_slot_commit(region, 0, &record, NULL, manifest_text) == LCK_E_CORRUPT, "none there");
  CHECK(says("write it again") && sequence_in(region, 0) == 0, "%s", lck_last_error());
  CHECK(write_snapshot(region, 0, 2) == 0, "%s", lck_last_error());
  CHECK(lck_slot_invalidate(region, 0) == 0, "%s", lck_last_error());
  record.layout_offset += LCK_LINE;
  CHECK(lck_slot_commit(region, 0, &record, NULL, manifest_text) == LCK_E_CORRUPT, "elsewhere");
  must_close(region);
}

/* Page faults of reading one byte per page; a sanitizer would add its shadow's. */
__attribute__((no_sanitize_address, no_sanitize_thread)) static long faults(const void *base,
                                                                            uint64_t size) {
  const volatile unsigned char *bytes = base;
  struct rusage before;
  struct rusage after;
  getrusage(RUSAGE_SELF, &before);
  for (uint64_t at = 0; at < size; at += 4096)
    (void)bytes[at];
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

/* More than one slice for more than one thread, and no page is missing. */
static void test_faulted_in(void) {
  lck_region_spec spec = small_spec();
  spec.slot_bytes = UINT64_C(50) << 20;
  lck_region *region = must_create(memory_path, &spec);
  lck_region_info info = describe(region);
  long count = faults(info.base, info.size);
  CHECK(count < 50, "%ld faults", count);
  must_close(region);
}

static void test_process_durable_never_syncs(void) {
  lck_region_spec spec = small_spec();
  spec.flags = LCK_PROCESS_DURABLE;
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 0, EIO) == 0, "arm");
  lck_region *region = must_create(disk_path, &spec);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  CHECK(lck_region_grow(region, 1) == 0, "%s", lck_last_error());
  must_close(region);
  (void)lck_fault_arm(LCK_FAULT_SYNC, -1, 0);
  region = must_open(disk_path, 0);
  CHECK(describe(region).granularity == LCK_GRAN_PAGE, "the new owner wants syncs");
  must_close(region);
  region = must_open(disk_path, LCK_READ_ONLY);
  CHECK(describe(region).granularity == LCK_GRAN_PAGE, "and readers are told");
  must_close(region);
}

/* ---- between the steps of a commit --------------------------------------------------------- */

static void test_commit_faults(const char *path) {
  static const enum lck_fault_point points[] = {LCK_FAULT_INVALIDATE, LCK_FAULT_COMMIT,
                                                LCK_FAULT_RECORD};
  for (int i = 0; i < 3; i++) {
    lck_region_spec spec = small_spec();
    lck_record record;
    lck_region *region = must_create(path, &spec);
    CHECK(write_snapshot(region, 0, 1) == 0 && write_snapshot(region, 1, 2) == 0, "%s",
          lck_last_error());
    CHECK(lck_fault_arm(points[i], 0, EIO) == 0, "arm");
    CHECK(write_snapshot(region, 0, 3) == LCK_E_IO, "%s", lck_last_error());
    CHECK(describe(region).latched == (uint32_t)-LCK_E_IO, "latched");
    CHECK(write_snapshot(region, 1, 4) == LCK_E_PREVIOUS, "%s", lck_last_error());
    must_close(region);
    region = must_open(path, 0);
    CHECK(sequence_in(region, 1) == 2, "the protected slot: %s", lck_last_error());
    int rc = lck_slot_read(region, 0, &record);
    if (points[i] == LCK_FAULT_INVALIDATE)
      CHECK(rc == 0 && record.sequence == 1, "nothing was touched: %s", lck_last_error());
    else
      CHECK(rc == LCK_E_EMPTY, "point %d: %d %s", points[i], rc, lck_last_error());
    must_close(region);
  }
}

int main(void) {
  const char *disk = getenv("LCK_TEST_DISK") ? getenv("LCK_TEST_DISK") : "/var/tmp";
  memory_path = strdup(path_in("/dev/shm"));
  disk_path = strdup(path_in(disk));
  test_full_tmpfs();
  test_file_limit();
  test_allocation_error();
  test_few_addresses();
  test_numa();
  test_sync_errors();
  test_superblock_sync_errors();
  test_new_owner_syncs();
  test_unproven_layout();
  test_faulted_in();
  test_process_durable_never_syncs();
  test_commit_faults(memory_path);
  test_commit_faults(disk_path);
  unlink(memory_path);
  unlink(disk_path);
  free((void *)(uintptr_t)memory_path);
  free((void *)(uintptr_t)disk_path);
  return checks_end();
}
