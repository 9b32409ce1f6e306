/* test_memory.c -- how much memory is left, by a proc and a sys that the test wrote. */
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

#define MIB (UINT64_C(1) << 20)

static char root[64] = "/tmp/lightck-memory-XXXXXX";

static void put(const char *name, const char *text) {
  char path[256];
  snprintf(path, sizeof(path), "%s%s", root, name);
  for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')) != NULL; *at++ = '/') {
    *at = '\0';
    (void)mkdir(path, 0700); /* it may be there */
  }
  FILE *file = fopen(path, "w");
  CHECK(file != NULL, "%s", path);
  fputs(text, file);
  fclose(file);
}

static void number(const char *name, uint64_t value) {
  char text[32];
  snprintf(text, sizeof(text), "%llu\n", (unsigned long long)value);
  put(name, text);
}

static void left(uint64_t mib, int swap) {
  uint64_t found = lck_memory_left(root, swap);
  CHECK(found == mib * MIB, "swap %d: %llu bytes, expected %llu MiB", swap,
        (unsigned long long)found, (unsigned long long)mib);
}

/* 1000 MiB of DRAM and 400 of swap. */
static void test_without_a_group_swap_counts_whole(void) {
  CHECK(lck_memory_left(root, 1) == LCK_MEMORY_UNKNOWN, "nobody says");
  CHECK(lck_memory_left(root, 0) == LCK_MEMORY_UNKNOWN, "nobody says of DRAM alone");
  put("/proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 1024000 kB\nSwapFree: 409600 kB\n");
  left(1400, 1);
  left(1000, 0);
}

static void test_a_group_has_its_own_limits_of_memory_and_of_swap(void) {
  put("/proc/self/cgroup", "0::/job\n");
  number("/sys/fs/cgroup/job/memory.current", 300 * MIB);
  put("/sys/fs/cgroup/job/memory.max", "max\n");
  put("/sys/fs/cgroup/job/memory.swap.max", "max\n");
  left(1400, 1);
  left(1000, 0);
  number("/sys/fs/cgroup/job/memory.max", 500 * MIB);
  put("/sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 104857600\n");
  left(300 + 400, 1);
  left(300, 0);
  number("/sys/fs/cgroup/job/memory.swap.current", 50 * MIB);
  number("/sys/fs/cgroup/job/memory.swap.max", 80 * MIB);
  left(300 + 30, 1);
  left(300, 0);
  number("/sys/fs/cgroup/job/memory.swap.max", 0);
  left(300, 1);
}

/* v1 limits memory, and memory with swap. */
static void test_the_older_groups_limit_both_together(void) {
  put("/proc/self/cgroup", "4:memory:/job\n0::/\n");
  number("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", 500 * MIB);
  number("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", 200 * MIB);
  left(300 + 400, 1); /* a kernel that does not account swap */
  left(300, 0);
  number("/sys/fs/cgroup/memory/job/memory.memsw.usage_in_bytes", 200 * MIB);
  number("/sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes", 600 * MIB);
  left(400, 1);
  left(300, 0);
  number("/sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes", 500 * MIB);
  left(300, 1);
  number("/sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes", 400 * MIB);
  left(200, 0); /* what is taken counts against both limits */
}

int main(void) {
  CHECK(mkdtemp(root) != NULL, "%s", root);
  test_without_a_group_swap_counts_whole();
  test_a_group_has_its_own_limits_of_memory_and_of_swap();
  test_the_older_groups_limit_both_together();
  char command[128];
  snprintf(command, sizeof(command), "rm -rf %s", root);
  CHECK(system(command) == 0, "%s", command);
  return checks_end();
}
