/* memory.c -- reading how much memory the machine and its control groups leave. */
#include "memory.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "api.h"
#include "medium.h"

/* Bytes that are left of DRAM, of swap, and (v1) of both together. */
typedef struct room {
  uint64_t memory, swap, both;
} room;

typedef struct rules {
  const char *folder, *limit, *usage;
  const char *swap_limit, *swap_usage; /* v1: of memory and swap together */
  const char *cache;                   /* files' pages, which give way when memory runs short */
  int together;
} rules;

static const rules V1 = {.folder = "/sys/fs/cgroup/memory",
                         .limit = "memory.limit_in_bytes",
                         .usage = "memory.usage_in_bytes",
                         .swap_limit = "memory.memsw.limit_in_bytes",
                         .swap_usage = "memory.memsw.usage_in_bytes",
                         .cache = "total_inactive_file ",
                         .together = 1};
static const rules V2 = {.folder = "/sys/fs/cgroup",
                         .limit = "memory.max",
                         .usage = "memory.current",
                         .swap_limit = "memory.swap.max",
                         .swap_usage = "memory.swap.current",
                         .cache = "inactive_file "};

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

static void bound(uint64_t *left, uint64_t by) {
  *left = by < *left ? by : *left;
}

/* Without a limit v2 says "max", no number. */
static uint64_t left_of(const char *group, const char *limit_name, const char *usage_name,
                        uint64_t cache) {
  char path[3 * PATH_MAX];
  uint64_t limit, usage;
  snprintf(path, sizeof(path), "%s/%s", group, limit_name);
  if (lck_medium_number(path, &limit) != 0)
    return LCK_MEMORY_UNKNOWN;
  snprintf(path, sizeof(path), "%s/%s", group, usage_name);
  if (lck_medium_number(path, &usage) != 0)
    return LCK_MEMORY_UNKNOWN;
  uint64_t used = usage > cache ? usage - cache : 0;
  return limit > used ? limit - used : 0;
}

static void bound_by_group(room *left, const rules *of, const char *group) {
  char path[3 * PATH_MAX];
  uint64_t cache = 0;
  snprintf(path, sizeof(path), "%s/memory.stat", group);
  (void)find_number(path, of->cache, &cache);
  bound(&left->memory, left_of(group, of->limit, of->usage, cache));
  bound(of->together ? &left->both : &left->swap,
        left_of(group, of->swap_limit, of->swap_usage, of->together ? cache : 0));
}

/* By the group that this process is in; v1 has a hierarchy per resource. */
static void bound_by_groups(room *left, const char *root) {
  char path[PATH_MAX], line[PATH_MAX];
  snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
  FILE *file = fopen(path, "re");
  while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
    const rules *of = NULL;
    const char *group = strchr(line, '/');
    line[strcspn(line, "\n")] = '\0';
    if (group != NULL && strstr(line, ":memory:/") != NULL)
      of = &V1;
    else if (group != NULL && strncmp(line, "0::", 3) == 0)
      of = &V2;
    if (of == NULL)
      continue;
    char where[2 * PATH_MAX];
    snprintf(where, sizeof(where), "%s%s%s", root, of->folder, group);
    bound_by_group(left, of, where);
  }
  if (file != NULL)
    fclose(file);
}

uint64_t lck_memory_left(const char *root, int with_swap) {
  char path[PATH_MAX];
  uint64_t machine, swap = 0;
  room left = {LCK_MEMORY_UNKNOWN, LCK_MEMORY_UNKNOWN, LCK_MEMORY_UNKNOWN};
  snprintf(path, sizeof(path), "%s/proc/meminfo", root);
  if (find_number(path, "MemAvailable:", &machine))
    left.memory = machine * 1024;
  (void)find_number(path, "SwapFree:", &swap);
  left.swap = swap * 1024;
  bound_by_groups(&left, root);
  if (left.memory == LCK_MEMORY_UNKNOWN)
    return left.both;
  uint64_t all = left.memory + (with_swap ? left.swap : 0);
  bound(&all, left.both);
  return all;
}

LCK_API uint64_t lck_memory_available(int swap) {
  return lck_memory_left("", swap);
}
