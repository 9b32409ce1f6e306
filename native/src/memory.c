#include "memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "medium.h"

/* The value behind a word at the start of a line. */
static int find_number(const char *path, const char *word, uint64_t *value) {
  FILE *file = fopen(path, "re");
  char line[512];
  size_t length = strlen(word);
  int found = 0;
  if (file == NULL)
    return 0;
  while (!found && fgets(line, sizeof(line), file) != NULL)
    found = strncmp(line, word, length) == 0 && sscanf(line + length, "%" SCNu64, value) == 1;
  fclose(file);
  return found;
}

/* Its file caches give way when memory runs short. Without a limit v2 says "max", no number. */
static uint64_t left_in_group(const char *root, const char *group, const char *limit_name,
                              const char *usage_name, const char *cache_word) {
  char path[700];
  uint64_t limit, usage, cache = 0;
  snprintf(path, sizeof(path), "%s%s/%s", root, group, limit_name);
  if (lck_medium_number(path, &limit) != 0)
    return LCK_MEMORY_UNKNOWN;
  snprintf(path, sizeof(path), "%s%s/%s", root, group, usage_name);
  if (lck_medium_number(path, &usage) != 0)
    return LCK_MEMORY_UNKNOWN;
  snprintf(path, sizeof(path), "%s%s/memory.stat", root, group);
  (void)find_number(path, cache_word, &cache);
  uint64_t used = usage > cache ? usage - cache : 0;
  return limit > used ? limit - used : 0;
}

/* Of the group that this process is in; v1 has a hierarchy per resource. */
static uint64_t left_to_us(void) {
  FILE *file = fopen("/proc/self/cgroup", "re");
  uint64_t least = LCK_MEMORY_UNKNOWN;
  char line[512];
  while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
    uint64_t left = LCK_MEMORY_UNKNOWN;
    char *group = strchr(line, '/');
    line[strcspn(line, "\n")] = '\0';
    if (group != NULL && strstr(line, ":memory:/") != NULL)
      left = left_in_group("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                           "memory.usage_in_bytes", "total_inactive_file ");
    else if (group != NULL && strncmp(line, "0::", 3) == 0)
      left =
          left_in_group("/sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file ");
    least = left < least ? left : least;
  }
  if (file != NULL)
    fclose(file);
  return least;
}

uint64_t lck_memory_available(void) {
  uint64_t machine, swap = 0, ours = left_to_us();
  int known = find_number("/proc/meminfo", "MemAvailable:", &machine);
  (void)find_number("/proc/meminfo", "SwapFree:", &swap);
  uint64_t left = known ? machine * 1024 : LCK_MEMORY_UNKNOWN;
  left = ours < left ? ours : left;
  return left == LCK_MEMORY_UNKNOWN ? left : left + swap * 1024;
}
