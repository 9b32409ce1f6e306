/* The life of a region on every medium that this machine has: identity, ownership, leases, forks,
 * commits, growth, fetches. */
#include <signal.h>

#include "region_fixture.h"

static place here; /* the medium under test */

/* ---- identity ------------------------------------------------------------------------------ */

static void test_create_and_reopen(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  spec.flags = here.flags;
  lck_region *region = must_create(path, &spec);
  lck_region_info made = describe(region);
  CHECK(made.medium == here.medium, "medium %u, expected %u", made.medium, here.medium);
  uint32_t expected = here.medium == LCK_FILE && !here.flags ? LCK_GRAN_PAGE : LCK_GRAN_NONE;
  if (here.medium == LCK_FSDAX)
    expected = getenv("LCK_TEST_EADR") ? LCK_GRAN_BYTE : LCK_GRAN_LINE;
  CHECK(made.granularity == expected, "granularity %u", made.granularity);
  CHECK(made.rank == 1 && made.world == 4 && made.slot_count == 2, "topology");
  CHECK(memcmp(made.run_id, "run", 4) == 0, "run id");
  CHECK(made.segment_count == 1 && made.segments[0].offset % LCK_GRANULE == 0, "segment");
  CHECK(made.segments[0].slot_bytes >= 300000, "%lu", made.segments[0].slot_bytes);
  CHECK(made.segments[0].slot_bytes % made.page_bytes == 0, "slots start on pages");
  CHECK(made.journal_offset == LCK_JOURNAL_OFFSET && made.journal_length == 15000, "journal");
  CHECK(made.size == file_length(path), "%lu", made.size);
  CHECK((uintptr_t)made.base % LCK_GRANULE == 0, "%p", made.base);
  lck_record record;
  for (uint32_t slot = 0; slot < 2; slot++)
    CHECK(lck_slot_read(region, slot, &record) == LCK_E_EMPTY, "%s", lck_last_error());
  CHECK(lck_slot_read(region, 2, &record) == LCK_E_INVALID, "%s", lck_last_error());
  lck_branch lineage[2] = {{1, 10}, {2, 20}};
  CHECK(lck_region_branch(region, 3, lineage, 2) == 0, "%s", lck_last_error());
  CHECK(lck_region_branch(region, 0, lineage, 2) == LCK_E_INVALID, "timeline 0");
  CHECK(lck_region_branch(region, 4, lineage, 17) == LCK_E_INVALID, "17 ancestors");
  must_close(region);

  region = must_open(path, LCK_READ_ONLY);
  lck_region_info read = describe(region);
  CHECK(memcmp(read.uuid, made.uuid, 16) == 0 && read.size == made.size, "identity");
  CHECK(read.granularity == expected, "a reader sees granularity %u", read.granularity);
  CHECK(read.timeline == 3 && read.lineage_count == 2, "%lu %u", read.timeline, read.lineage_count);
  CHECK(read.lineage[1].timeline == 2 && read.lineage[1].sequence == 20, "lineage");
  CHECK(read.generation == made.generation + 1, "%lu %lu", read.generation, made.generation);
  CHECK(lck_region_branch(region, 5, NULL, 0) == LCK_E_INVALID, "a reader changes nothing");
  CHECK(lck_slot_claim(region, 0) == LCK_E_INVALID, "a reader writes nothing");
  must_close(region);
  CHECK(lck_region_close(NULL) == 0, "NULL");
}

static void test_refusals(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  must_close(region);
  int fd = open_file(path, O_RDWR);
  int other = open_file("/dev/null", O_RDWR);
  CHECK(lck_region_create(fd, fd, &spec, &region) == LCK_E_INVALID, "occupied");
  CHECK(strstr(lck_last_error(), "not empty") != NULL, "%s", lck_last_error());
  CHECK(lck_region_open(fd, other, 0, -1, &region) == LCK_E_INVALID, "%s", lck_last_error());
  CHECK(lck_region_open(other, other, 0, -1, &region) == LCK_E_INVALID, "%s", lck_last_error());
  CHECK(lck_region_open(-1, -1, 0, -1, &region) == LCK_E_INVALID, "%s", lck_last_error());
  CHECK(lck_region_open(fd, fd, 8, -1, &region) == LCK_E_INVALID, "%s", lck_last_error());
  CHECK(lck_region_open(fd, fd, 0, 900, &region) == LCK_E_INVALID, "node 900");
  CHECK(strstr(lck_last_error(), "900") != NULL, "%s", lck_last_error());
  close(fd);
  fd = open_file(path, O_RDONLY);
  CHECK(lck_region_open(fd, fd, 0, -1, &region) == LCK_E_INVALID, "%s", lck_last_error());
  close(fd);
  close(other);
  spec.slot_count = 1;
  CHECK(try_create(path, &spec, &region) == LCK_E_INVALID, "%s", lck_last_error());
  spec = small_spec();
  spec.slot_bytes = UINT64_C(1) << 60;
  CHECK(try_create(path, &spec, &region) == LCK_E_FULL, "%s", lck_last_error());
  if (UNDER_TSAN) /* which has too few addresses for it */
    return (void)printf("SKIPPED: a region beyond all media\n");
  spec.slot_bytes = UINT64_C(1) << 43; /* no file system here is that large */
  CHECK(try_create(path, &spec, &region) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), "17592188141568 bytes needed") != NULL, "%s", lck_last_error());
  CHECK(file_length(path) == 0, "%lu", file_length(path));
}

/* ---- ownership ----------------------------------------------------------------------------- */

static void test_two_owners(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  lck_region *second = NULL;
  CHECK(try_open(path, 0, &second) == LCK_E_BUSY, "%s", lck_last_error());
  lck_region *reader = must_open(path, LCK_READ_ONLY);
  must_close(region);
  region = must_open(path, 0);
  must_close(region);
  must_close(reader);
}

static void test_leases(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  lck_region *owner = must_create(path, &spec);
  lck_region *reader = must_open(path, LCK_READ_ONLY);
  CHECK(lck_slot_lease(reader, 0, 1) == 0, "%s", lck_last_error());
  CHECK(lck_slot_claim(owner, 0) == LCK_E_LEASED, "%s", lck_last_error());
  CHECK(lck_slot_claim(owner, 1) == 0, "%s", lck_last_error());
  CHECK(lck_slot_claim(owner, 1) == LCK_E_BUSY, "%s", lck_last_error());
  CHECK(lck_slot_lease(reader, 1, 1) == LCK_E_LEASED, "%s", lck_last_error());
  CHECK(lck_slot_lease(owner, 1, 1) == LCK_E_LEASED, "%s", lck_last_error());
  CHECK(lck_region_close(owner) == LCK_E_STATE, "%s", lck_last_error());
  lck_slot_unclaim(owner, 1);
  CHECK(lck_slot_lease(reader, 1, 1) == 0, "%s", lck_last_error());
  CHECK(lck_slot_lease(reader, 0, 0) == 0, "%s", lck_last_error());
  CHECK(lck_slot_claim(owner, 0) == 0, "%s", lck_last_error());
  lck_slot_unclaim(owner, 0);
  CHECK(lck_slot_lease(owner, 0, 1) == 0, "the owner's own lease");
  CHECK(lck_slot_claim(owner, 0) == LCK_E_LEASED, "%s", lck_last_error());
  CHECK(lck_slot_lease(owner, 0, 0) == 0, "%s", lck_last_error());
  CHECK(lck_slot_lease(reader, 2, 1) == LCK_E_INVALID, "%s", lck_last_error());
  must_close(reader); /* drops the lease on slot 1 */
  CHECK(lck_slot_claim(owner, 1) == 0, "%s", lck_last_error());
  lck_slot_unclaim(owner, 1);
  must_close(owner);
}

static void call_everything(void *argument) {
  lck_region *region = argument;
  lck_region_info info;
  lck_record record = {.sequence = 1};
  uint64_t bad;
  int codes[] = {
      lck_region_describe(region, &info),
      lck_region_grow(region, 1),
      lck_region_branch(region, 1, NULL, 0),
      lck_slot_read(region, 0, &record),
      lck_slot_lease(region, 0, 1),
      lck_slot_fetch(region, NULL, 0, 1, &bad),
      lck_slot_claim(region, 0),
      lck_slot_invalidate(region, 0),
      lck_slot_commit(region, 0, &record, "", ""),
      lck_region_close(region),
  };
  for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
    CHECK(codes[i] == LCK_E_FORKED, "call %zu: %d", i, codes[i]);
}

static int alive_pipe[2];
static int started_pipe[2];

/* An owner that dies without a word and leaves a running child of its own behind. */
static void own_and_die(void *argument) {
  char byte = 0;
  lck_region *region = must_open(argument, 0);
  CHECK(write_snapshot(region, 0, 5) == 0, "%s", lck_last_error());
  if (fork() == 0) {
    close(alive_pipe[1]);
    (void)!write(started_pipe[1], &byte, 1);
    (void)!read(alive_pipe[0], &byte, 1); /* until the test closes its end */
    _exit(0);
  }
  CHECK(read(started_pipe[0], &byte, 1) == 1, "read");
}

static void test_fork(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  in_child(call_everything, region);
  CHECK(write_snapshot(region, 1, 4) == 0, "the parent goes on: %s", lck_last_error());
  must_close(region);
  CHECK(pipe(alive_pipe) == 0 && pipe(started_pipe) == 0, "pipe");
  in_child(own_and_die, (void *)(uintptr_t)path);
  region = must_open(path, 0);
  CHECK(sequence_in(region, 0) == 5 && sequence_in(region, 1) == 4, "%s", lck_last_error());
  for (int i = 0; i < 2; i++) {
    close(alive_pipe[i]);
    close(started_pipe[i]);
  }
  must_close(region);
}

/* ---- commits ------------------------------------------------------------------------------- */

static void test_round_trip(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  spec.flags = here.flags;
  lck_region *region = must_create(path, &spec);
  for (uint64_t sequence = 1; sequence <= 4; sequence++)
    CHECK(write_snapshot(region, sequence % 2, sequence) == 0, "%s", lck_last_error());
  must_close(region);
  region = must_open(path, here.flags);
  lck_record record;
  CHECK(lck_slot_read(region, 1, &record) == 0, "%s", lck_last_error());
  CHECK(record.sequence == 3 && record.step == 30 && record.timeline == 7, "%lu", record.sequence);
  CHECK(record.slot == 1 && record.rank == 1 && record.world == 4, "filled in");
  CHECK(memcmp(record.run_id, "run", 4) == 0 && record.flags == LCK_RECORD_EARLY, "filled in");
  CHECK(memcmp(record.share_digest, "digest", 7) == 0, "digest");
  CHECK(record.payload_bytes == 5000 && record.wall_time_ns == 12345, "values");
  lck_region_info info = describe(region);
  const char *base = info.base;
  CHECK(strcmp(base + record.layout_offset, layout_text) == 0, "layout");
  CHECK(strcmp(base + record.manifest_offset, manifest_text) == 0, "manifest");
  CHECK(lck_slot_invalidate(region, 1) == 0, "%s", lck_last_error());
  CHECK(lck_slot_read(region, 1, &record) == LCK_E_EMPTY, "%s", lck_last_error());
  CHECK(sequence_in(region, 0) == 4, "the other slot");
  record = record_for(region, 1, 9);
  record.manifest_offset = slot_start(region, 0);
  CHECK(lck_slot_commit(region, 1, &record, layout_text, manifest_text) == LCK_E_INVALID, "bounds");
  record.manifest_offset = UINT64_MAX - 3;
  CHECK(lck_slot_commit(region, 1, &record, layout_text, manifest_text) == LCK_E_INVALID, "bounds");
  record.manifest_length = record.layout_length = 0;
  CHECK(lck_slot_commit(region, 1, &record, NULL, NULL) == 0, "empty blobs: %s", lck_last_error());
  CHECK(sequence_in(region, 1) == 9, "%s", lck_last_error());
  must_close(region);
}

/* No line medium is at hand: the flushes run where they are not needed, with stores past the cache
 * and through it. */
static void test_line_flushes(void) {
  const char *path = path_in(here.directory);
  const char *name;
  CHECK(lck_kernel(NULL, &name) == 0, "%s", lck_last_error());
  const char *kernels[] = {"portable", name};
  for (int i = 0; i < 2; i++) {
    lck_region_spec spec = small_spec();
    CHECK(lck_kernel(kernels[i], &name) == 0, "%s", lck_last_error());
    lck_region *region = must_create(path, &spec);
    region->granularity = LCK_GRAN_LINE;
    CHECK(write_snapshot(region, 0, 6) == 0, "%s", lck_last_error());
    CHECK(lck_region_branch(region, 6, NULL, 0) == 0, "%s", lck_last_error());
    CHECK(sequence_in(region, 0) == 6, "%s", lck_last_error());
    const char *payload = (const char *)describe(region).base + slot_start(region, 0) + 8192;
    CHECK(payload[0] == 6 && payload[4999] == 6 && payload[5000] == 0, "payload");
    must_close(region);
  }
}

/* The table is damaged on the medium while the process still knows its CRC. */
static void test_layout_reuse(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  must_close(region);
  region = must_open(path, 0);
  lck_record record = record_for(region, 0, 2);
  CHECK(lck_slot_invalidate(region, 0) == 0, "%s", lck_last_error());
  CHECK(lck_slot_commit(region, 0, &record, NULL, manifest_text) == 0, "%s", lck_last_error());
  CHECK(sequence_in(region, 0) == 2, "%s", lck_last_error());
  CHECK(lck_slot_invalidate(region, 0) == 0, "%s", lck_last_error());
  lck_persist_store(region, record.layout_offset + 3, "X", 1);
  CHECK(lck_slot_commit(region, 0, &record, NULL, manifest_text) == LCK_E_CORRUPT, "blessed");
  CHECK(lck_slot_commit(region, 0, &record, layout_text, manifest_text) == 0, "%s",
        lck_last_error());
  must_close(region);
}

/* ---- growth -------------------------------------------------------------------------------- */

static void test_growth(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  lck_region_info before = describe(region);
  CHECK(lck_region_grow(region, 0) == LCK_E_INVALID, "0 bytes");
  for (int i = 0; i < 15; i++)
    CHECK(lck_region_grow(region, 5000) == 0, "%s", lck_last_error());
  CHECK(lck_region_grow(region, 5000) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), "bytes needed") != NULL, "%s", lck_last_error());
  CHECK(lck_region_grow(region, UINT64_C(1) << 41) == LCK_E_FULL, "%s", lck_last_error());
  lck_region_info after = describe(region);
  CHECK(after.base == before.base && after.segment_count == 16, "%u", after.segment_count);
  CHECK(after.size == file_length(path) && after.generation == before.generation + 15, "sizes");
  CHECK(sequence_in(region, 0) == 1, "old content: %s", lck_last_error());
  uint64_t added = after.segments[15].offset + after.segments[15].slot_bytes;
  CHECK(lck_slot_contains(region, 1, added, 5000), "the new part");
  CHECK(!lck_slot_contains(region, 0, added, 5000), "another slot's");
  CHECK(!lck_slot_contains(region, 1, added, UINT64_MAX), "overflow");
  lck_record record = record_for(region, 1, 2);
  record.manifest_offset = added;
  CHECK(lck_slot_invalidate(region, 1) == 0, "%s", lck_last_error());
  CHECK(lck_slot_commit(region, 1, &record, layout_text, manifest_text) == 0, "%s",
        lck_last_error());
  must_close(region);
  region = must_open(path, LCK_READ_ONLY);
  CHECK(sequence_in(region, 0) == 1 && sequence_in(region, 1) == 2, "%s", lck_last_error());
  must_close(region);
}

/* ---- fetch --------------------------------------------------------------------------------- */

enum { EXTENTS = 40 };

static void fill_extents(lck_region *region, unsigned char *source, lck_read *reads) {
  uint64_t start = slot_start(region, 0);
  uint64_t at = start;
  for (int i = 0; i < EXTENTS; i++) {
    uint64_t length = i == 0 ? 0 : i == 7 ? 13000001 : (uint64_t)i * 997;
    uint32_t crc = 0;
    for (uint64_t k = 0; k < length; k++)
      source[at - start + k] = (unsigned char)(k * 31 + (uint64_t)i);
    if (length > 0)
      lck_persist_payload(region, at, source + (at - start), length, &crc);
    reads[i] = (lck_read){.offset = at, .length = length, .crc = crc};
    at += (length + 63) / 64 * 64;
  }
  lck_persist_fence();
}

static void test_fetch(void) {
  const char *path = path_in(here.directory);
  lck_region_spec spec = small_spec();
  spec.slot_bytes = 16 << 20;
  lck_region *region = must_create(path, &spec);
  unsigned char *source = calloc(1, 16 << 20);
  unsigned char *copy = calloc(1, 16 << 20);
  lck_read reads[EXTENTS];
  uint64_t bad = 99;
  fill_extents(region, source, reads);
  for (uint32_t threads = 1; threads <= 4; threads++) {
    memset(copy, 0, 16 << 20);
    for (int i = 0; i < EXTENTS; i++)
      reads[i].destination =
          i % 5 == 4 ? NULL : copy + 1 + (reads[i].offset - slot_start(region, 0));
    CHECK(lck_slot_fetch(region, reads, EXTENTS, threads, &bad) == 0, "%s", lck_last_error());
    for (int i = 0; i < EXTENTS; i++)
      CHECK(reads[i].destination == NULL ||
                memcmp(reads[i].destination, source + (reads[i].offset - slot_start(region, 0)),
                       reads[i].length) == 0,
            "extent %d", i);
    CHECK(bad == 99, "untouched on success");
  }
  lck_persist_store(region, reads[7].offset + 9000000, "\1\2\3\4", 4);
  reads[20].crc ^= 1;
  CHECK(lck_slot_fetch(region, reads, EXTENTS, 3, &bad) == LCK_E_CORRUPT && bad == 7, "%lu", bad);
  reads[33].offset = describe(region).size - 5;
  CHECK(lck_slot_fetch(region, reads, EXTENTS, 3, &bad) == LCK_E_CORRUPT && bad == 33, "%lu", bad);
  reads[32].length = UINT64_MAX;
  CHECK(lck_slot_fetch(region, reads, EXTENTS, 3, &bad) == LCK_E_CORRUPT && bad == 32, "%lu", bad);
  CHECK(lck_slot_fetch(region, reads, 0, 3, &bad) == 0, "%s", lck_last_error());
  CHECK(lck_slot_fetch(region, reads, 1, 0, &bad) == LCK_E_INVALID, "0 threads");
  free(source);
  free(copy);
  must_close(region);
}

/* ---- media --------------------------------------------------------------------------------- */

static void test_place(const char *name, const char *directory, uint32_t medium, uint32_t flags) {
  here = (place){name, directory, medium, flags};
  int before = checks_passed;
  test_create_and_reopen();
  test_refusals();
  test_two_owners();
  test_leases();
  test_fork();
  test_round_trip();
  test_line_flushes();
  test_layout_reuse();
  test_growth();
  test_fetch();
  unlink(path_in(directory));
  printf("%s: %d passed\n", name, checks_passed - before);
}

static void test_huge_pages(void) {
  static const char count_path[] = "/proc/sys/vm/nr_hugepages";
  char directory[] = "/tmp/lightck-huge-XXXXXX";
  int fd = open(count_path, O_RDWR | O_CLOEXEC);
  char old[32] = "";
  if (fd < 0 || read(fd, old, sizeof(old) - 1) <= 0 || pwrite(fd, "64", 2, 0) != 2) {
    printf("SKIPPED: hugetlbfs: %s: %s\n", count_path, strerror(errno));
    return;
  }
  const char *mounted = mount_at(directory, "hugetlbfs", "pagesize=2M");
  if (mounted != NULL) {
    test_place("hugetlbfs", mounted, LCK_HUGETLBFS, 0);
    unmount(mounted);
  }
  (void)!pwrite(fd, old, strlen(old), 0);
  close(fd);
}

int main(void) {
  const char *dax = getenv("LCK_TEST_DAX"); /* a directory on a DAX mount: that and nothing else */
  const char *disk = getenv("LCK_TEST_DISK") ? getenv("LCK_TEST_DISK") : "/var/tmp";
  if (dax != NULL) {
    test_place("fsdax", dax, LCK_FSDAX, 0);
    return checks_end();
  }
  test_place("tmpfs", "/dev/shm", LCK_TMPFS, 0);
  test_place("ordinary file", disk, LCK_FILE, 0);
  test_place("ordinary file, process-durable", disk, LCK_FILE, LCK_PROCESS_DURABLE);
  test_huge_pages();
  return checks_end();
}
