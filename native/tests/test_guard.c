/* A region that is open for writing can be written by the primitives of persist.c only: a store
 * that passes them by faults at its own offset, and nothing but the second mapping is writable. */
#include <inttypes.h>
#include <signal.h>

#include "guard.h"
#include "region_fixture.h"

#ifdef LCK_GUARD

/* ---- a stray store ------------------------------------------------------------------------- */

static volatile unsigned char *volatile target; /* by the handler */

static void on_fault(int signal_number, siginfo_t *info, void *context) {
  (void)context;
  _exit(signal_number == SIGSEGV && info->si_addr == target ? 0 : 3);
}

typedef struct stray {
  const char *path;
  uint64_t offset;
} stray;

/* A child inherits no mapping, so it opens the region for itself. */
static void store_past_the_primitives(void *argument) {
  const stray *to = argument;
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  lck_region *region = must_open(to->path, 0);
  CHECK(sigaction(SIGSEGV, &action, NULL) == 0, "sigaction");
  target = region->base + to->offset;
  *target = 1;
  _exit(2); /* the store went through */
}

static void test_stray_store_faults(const char *path) {
  lck_region_info info;
  lck_region *region = must_open(path, 0);
  info = describe(region);
  must_close(region);
  const uint64_t offsets[] = {LCK_SUPERBLOCK_OFFSET(0), LCK_RECORD_OFFSET(1) + 40,
                              info.journal_offset,      info.segments[0].offset + 12345,
                              info.segments[1].offset,  info.size - 1};
  for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
    stray to = {path, offsets[i]};
    in_child(store_past_the_primitives, &to);
  }
}

/* ---- what the kernel says of the mappings --------------------------------------------------- */

/* Bytes of [start, +length) that are mapped with exactly these permissions. */
static uint64_t mapped(const unsigned char *start, uint64_t length, const char *permissions) {
  uint64_t from = (uint64_t)(uintptr_t)start, to = from + length, sum = 0, low, high;
  char line[512], found[8];
  FILE *maps = fopen("/proc/self/maps", "re");
  CHECK(maps != NULL, "/proc/self/maps");
  while (fgets(line, sizeof(line), maps) != NULL)
    if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s", &low, &high, found) == 3 && low < to &&
        high > from && strcmp(found, permissions) == 0)
      sum += (high < to ? high : to) - (low > from ? low : from);
  fclose(maps);
  return sum;
}

static void expect_guarded(const lck_region *region) {
  uint64_t size = describe(region).size;
  CHECK(describe(region).base == region->base, "the world is told of base");
  CHECK(mapped(region->base, size, "r--s") == size, "all of %lu bytes is read-only", size);
  CHECK(mapped(lck_guard_store(region, 0), size, "rw-s") == size, "the primitives write");
  uint64_t rest = region->reserved_length - size;
  CHECK(mapped(region->base + size, rest, "---p") == rest, "nothing beyond");
  CHECK(mapped(lck_guard_store(region, size), rest, "---p") == rest, "nothing beyond");
}

static void test_mappings(const char *path) {
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  expect_guarded(region);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  CHECK(lck_fault_arm(LCK_FAULT_ALLOCATE, 0, ENOSPC) == 0, "arm");
  CHECK(lck_region_grow(region, 300000) == LCK_E_FULL, "%s", lck_last_error());
  expect_guarded(region);
  CHECK(lck_region_grow(region, 300000) == 0, "%s", lck_last_error());
  expect_guarded(region);
  CHECK(write_snapshot(region, 1, 2) == 0, "%s", lck_last_error());
  must_close(region);
  region = must_open(path, 0);
  expect_guarded(region);
  CHECK(sequence_in(region, 0) == 1 && sequence_in(region, 1) == 2, "%s", lck_last_error());
  const unsigned char *base = region->base;
  uint64_t reserved = LCK_MAPPINGS * region->reserved_length;
  must_close(region);
  CHECK(mapped(base, reserved, "---p") < reserved, "the addresses are given back");
  region = must_open(path, LCK_READ_ONLY);
  uint64_t size = describe(region).size;
  CHECK(mapped(region->base, size, "r--s") == size, "a reader writes nothing");
  CHECK(mapped(lck_guard_store(region, 0), size, "rw-s") == 0, "in no way");
  must_close(region);
}

int main(void) {
  const char *disk = getenv("LCK_TEST_DISK") ? getenv("LCK_TEST_DISK") : "/var/tmp";
  const char *directories[] = {"/dev/shm", disk};
  for (int i = 0; i < 2; i++) {
    char *path = strdup(path_in(directories[i]));
    test_mappings(path);
    test_stray_store_faults(path);
    unlink(path);
    free(path);
  }
  return checks_end();
}

#else

int main(void) {
  printf("SKIPPED: this build has no guard: a sanitizer that knows memory by its address would see "
         "no race between two mappings\n");
  return checks_end();
}

#endif
