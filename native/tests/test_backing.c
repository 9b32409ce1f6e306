/* A region on a mapping that somebody else made: the same life, nothing moved. */
#include <sys/mman.h>

#include "region_fixture.h"

#define SKEW 12288 /* the region starts on a page inside the file, as in a pool */

static const char *memory_path, *disk_path;

static int says(const char *text) {
  return strstr(lck_last_error(), text) != NULL;
}

/* ---- a provider ---------------------------------------------------------------------------- */

typedef struct provider {
  const char *path;
  int fd, lock_fd;
  unsigned char *start;
  uint64_t file_bytes;
  lck_backing backing;
} provider;

static provider provide(const char *path, uint64_t skew, uint64_t length) {
  provider p = {.path = path, .file_bytes = skew + length};
  p.fd = open_file(path, O_RDWR | O_CREAT);
  p.lock_fd = open_file(path, O_RDWR);
  CHECK(posix_fallocate(p.fd, 0, (off_t)p.file_bytes) == 0, "%s", path);
  p.start = mmap(NULL, p.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p.fd, 0);
  CHECK(p.start != MAP_FAILED, "%s: %s", path, strerror(errno));
  p.backing = (lck_backing){.base = p.start + skew, .length = length};
  return p;
}

static void withdraw(provider *p) {
  CHECK(munmap(p->start, p->file_bytes) == 0, "%s", strerror(errno));
  close(p->fd);
  close(p->lock_fd);
}

static lck_region *create_on(const provider *p) {
  lck_region *region = NULL;
  lck_region_spec spec = small_spec();
  int rc = lck_region_create_on(&p->backing, p->fd, p->lock_fd, &spec, &region);
  CHECK(rc == 0, "%d %s", rc, lck_last_error());
  return region;
}

static lck_region *open_on(const provider *p, uint32_t flags) {
  lck_region *region = NULL;
  int rc = lck_region_open_on(&p->backing, p->fd, p->lock_fd, flags, &region);
  CHECK(rc == 0, "%d %s", rc, lck_last_error());
  return region;
}

static uint64_t measured(void) {
  uint64_t bytes = 0;
  lck_region_spec spec = small_spec();
  CHECK(lck_region_measure(&spec, &bytes) == 0, "%s", lck_last_error());
  return bytes;
}

/* ---- life ---------------------------------------------------------------------------------- */

static void test_lives_like_any_other(const char *path) {
  uint64_t bytes = measured();
  provider p = provide(path, SKEW, bytes + (3 << 20));
  memset(p.start, 0xa5, p.file_bytes); /* what was there before means nothing */
  lck_region *region = create_on(&p);
  lck_region_info info = describe(region);
  CHECK(info.base == p.backing.base && info.size == bytes, "%lu", info.size);
  uint32_t medium = path == disk_path ? LCK_GRAN_PAGE : LCK_GRAN_NONE;
  CHECK(info.granularity == medium, "%u", info.granularity);
  lck_record record;
  for (uint32_t slot = 0; slot < 2; slot++)
    CHECK(lck_slot_read(region, slot, &record) == LCK_E_EMPTY, "%s", lck_last_error());
  for (uint64_t sequence = 1; sequence <= 3; sequence++)
    CHECK(write_snapshot(region, sequence % 2, sequence) == 0, "%s", lck_last_error());
  CHECK(lck_region_grow(region, 1 << 20) == 0, "within the mapping: %s", lck_last_error());
  CHECK(lck_region_grow(region, 1 << 20) == LCK_E_FULL, "%s", lck_last_error());
  CHECK(says("2097152 bytes needed, 1048576 free in the mapping"), "%s", lck_last_error());
  CHECK(describe(region).segment_count == 2 && describe(region).latched == 0, "as before");
  must_close(region);
  CHECK(file_length(path) == p.file_bytes, "never cut or extended");
  CHECK(p.start[0] == 0xa5 && p.start[SKEW - 1] == 0xa5, "what lies before is not touched");
  withdraw(&p);

  p = provide(path, SKEW, bytes + (3 << 20));
  region = open_on(&p, 0);
  CHECK(sequence_in(region, 0) == 2 && sequence_in(region, 1) == 3, "both are there");
  lck_region *other = NULL;
  CHECK(lck_region_open_on(&p.backing, p.fd, p.fd, 0, &other) == LCK_E_BUSY, "%s",
        lck_last_error());
  other = open_on(&p, LCK_READ_ONLY);
  CHECK(sequence_in(other, 1) == 3, "%s", lck_last_error());
  must_close(other);
  CHECK(write_snapshot(region, 0, 4) == 0, "a reader's end unmaps nothing: %s", lck_last_error());
  lck_region_spec spec = small_spec();
  must_close(region);
  CHECK(lck_region_create_on(&p.backing, p.fd, p.lock_fd, &spec, &region) == LCK_E_INVALID &&
            says("holds a region"),
        "%s", lck_last_error());
  CHECK(lck_fault_arm(LCK_FAULT_POISON, 0, EIO) == 0, "arm");
  CHECK(lck_region_create_on(&p.backing, p.fd, p.lock_fd, &spec, &region) == LCK_E_IO,
        "its head cannot be read: %s", lck_last_error());
  CHECK(lck_fault_arm(LCK_FAULT_POISON, -1, 0) == 0, "disarm");
  region = open_on(&p, 0);
  CHECK(sequence_in(region, 0) == 4, "nothing of it is changed");
  must_close(region);
  withdraw(&p);
  unlink(path);
}

static void see_nothing(void *argument) {
  lck_region **held = argument;
  lck_region_info info;
  char line[512];
  FILE *maps = fopen("/proc/self/maps", "re");
  CHECK(lck_region_describe(*held, &info) == LCK_E_FORKED, "%s", lck_last_error());
  CHECK(maps != NULL, "%s", strerror(errno));
  while (fgets(line, sizeof(line), maps) != NULL)
    CHECK(strstr(line, memory_path) == NULL, "mapped in the child: %s", line);
  fclose(maps);
}

static void test_forked_children_have_nothing_of_it(const char *path) {
  provider p = provide(path, 0, measured());
  lck_region *region = create_on(&p);
  in_child(see_nothing, &region);
  must_close(region);
  withdraw(&p);
  unlink(path);
}

static void test_a_failed_creation_gives_its_file_back_whole(const char *path) {
  provider p = provide(path, 0, measured());
  lck_region_spec spec = small_spec();
  lck_region *region = NULL;
  CHECK(lck_fault_arm(LCK_FAULT_SYNC, 0, EIO) == 0, "arm");
  CHECK(lck_region_create_on(&p.backing, p.fd, p.lock_fd, &spec, &region) == LCK_E_IO, "%s",
        lck_last_error());
  CHECK(file_length(path) == p.file_bytes && p.start[0] == 0, "as it was");
  must_close(create_on(&p));
  withdraw(&p);
  unlink(path);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void test_what_cannot_hold_a_region_is_refused(const char *path) {
  uint64_t bytes = measured();
  provider p = provide(path, 0, bytes);
  lck_region_spec spec = small_spec();
  lck_region *region = NULL;
  lck_backing given = p.backing;
#define REFUSED(code, text)                                                                        \
  CHECK(lck_region_create_on(&given, p.fd, p.lock_fd, &spec, &region) == (code) && says(text),     \
        "%s", lck_last_error());                                                                   \
  given = p.backing;                                                                               \
  spec = small_spec()
  given.base = p.start + 64;
  REFUSED(LCK_E_INVALID, "expected a multiple of 4096");
  given.base = NULL;
  REFUSED(LCK_E_INVALID, "the mapping starts at");
  given.length = 4096;
  REFUSED(LCK_E_INVALID, "a mapping of 4096 bytes");
  spec.numa_node = 0;
  REFUSED(LCK_E_INVALID, "NUMA node 0");
  given.length = bytes - 4096;
  REFUSED(LCK_E_FULL, "bytes needed");
  spec.slot_bytes = bytes;
  REFUSED(LCK_E_FULL, "free in the mapping, which cannot grow");
#undef REFUSED
  CHECK(region == NULL, "nothing was made");
  CHECK(lck_region_open_on(&given, p.fd, p.lock_fd, 0, &region) == LCK_E_FORMAT, "%s",
        lck_last_error());
  region = create_on(&p);
  must_close(region);
  given.length -= 4096;
  CHECK(lck_region_open_on(&given, p.fd, p.lock_fd, 0, &region) == LCK_E_FORMAT &&
            says("truncated"),
        "%s", lck_last_error());
  withdraw(&p);
  unlink(path);
}

int main(void) {
  char memory[256], disk[256];
  memory_path = strcpy(memory, path_in("/dev/shm"));
  const char *folder = getenv("LCK_TEST_DISK");
  disk_path = strcpy(disk, path_in(folder != NULL ? folder : "/var/tmp"));
  test_lives_like_any_other(memory_path);
  test_lives_like_any_other(disk_path);
  test_forked_children_have_nothing_of_it(memory_path);
  test_a_failed_creation_gives_its_file_back_whole(disk_path);
  test_what_cannot_hold_a_region_is_refused(memory_path);
  return checks_end();
}
