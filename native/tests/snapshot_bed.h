/* snapshot_bed.h -- what the snapshot tests stand on: a region on a medium, sources with known
 * bytes, and a look inside. */
#ifndef LCK_SNAPSHOT_BED_H
#define LCK_SNAPSHOT_BED_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fault.h"
#include "guard.h"
#include "lightck.h"
#include "region.h"
#include "snapshot.h"

#define MS INT64_C(1000000)
#define MANIFEST "a manifest of 29 bytes, opaque"
#define LAYOUT "a layout table"

typedef struct bed {
  const char *name, *folder;
  char path[256];
  lck_region *region;
  lck_region_info info;
  int staged;
} bed;

static const uint8_t bed_run_id[16] = "run of the test";

static inline int bed_descriptor(const char *path, int flags) {
  int fd = open(path, flags | O_RDWR | O_CLOEXEC, 0600);
  CHECK(fd >= 0, "%s", path);
  return fd;
}

static inline void bed_create(bed *b, const char *tag) {
  snprintf(b->path, sizeof b->path, "%s/lck_%s_%d", b->folder, tag, (int)getpid());
  unlink(b->path);
  int fd = bed_descriptor(b->path, O_CREAT), lock_fd = bed_descriptor(b->path, 0);
  lck_region_spec spec = {
      .rank = 1, .world = 3, .slot_count = 3, .slot_bytes = UINT64_C(16) << 20, .numa_node = -1};
  memcpy(spec.run_id, bed_run_id, sizeof spec.run_id);
  CHECK(lck_region_create(fd, lock_fd, &spec, &b->region) == 0, "%s", lck_last_error());
  close(fd);
  close(lock_fd);
  CHECK(lck_region_describe(b->region, &b->info) == 0, "%s", lck_last_error());
  b->staged = b->info.medium == LCK_FILE;
}

static inline void bed_reopen(bed *b) {
  CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
  int fd = bed_descriptor(b->path, 0), lock_fd = bed_descriptor(b->path, 0);
  CHECK(lck_region_open(fd, lock_fd, 0, -1, &b->region) == 0, "%s", lck_last_error());
  close(fd);
  close(lock_fd);
}

static inline void bed_destroy(bed *b) {
  CHECK(lck_region_close(b->region) == 0, "%s", lck_last_error());
  unlink(b->path);
}

/* Nobody can reach the bytes, by either mapping, until they are given back. */
static inline void bed_withhold(const bed *b, uint64_t offset, uint64_t length) {
  CHECK(mprotect(lck_guard_store(b->region, offset), length, PROT_NONE) == 0, "mprotect");
  CHECK(mprotect(b->region->base + offset, length, PROT_NONE) == 0, "mprotect");
}

static inline void bed_give_back(const bed *b, uint64_t offset, uint64_t length) {
  CHECK(mprotect(b->region->base + offset, length, LCK_BASE_PROTECTION) == 0, "mprotect");
  CHECK(mprotect(lck_guard_store(b->region, offset), length, PROT_READ | PROT_WRITE) == 0,
        "mprotect");
}

/* Where a slot's space starts. The last 64 KiB of it are for layout and manifest. */
static inline uint64_t bed_slot(const bed *b, uint32_t slot) {
  return b->info.segments[0].offset + slot * b->info.segments[0].slot_bytes;
}

static inline uint64_t bed_blobs(const bed *b, uint32_t slot) {
  return bed_slot(b, slot) + b->info.segments[0].slot_bytes - 65536;
}

static inline lck_pool *bed_pool(uint32_t threads, uint32_t chunk_bytes) {
  lck_pool *pool;
  lck_pool_spec spec = {.threads = threads, .chunk_bytes = chunk_bytes, .idle = 1};
  CHECK(lck_pool_create(&spec, &pool) == 0, "%s", lck_last_error());
  return pool;
}

static inline uint64_t bed_random(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  return *state ^= *state << 17;
}

static inline void bed_fill(unsigned char *bytes, uint64_t length, uint64_t seed) {
  seed = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
  for (uint64_t i = 0; i < length; i++)
    bytes[i] = (unsigned char)(bed_random(&seed) >> 32);
}

/* Fill copies[0..count) with lengths drawn from 1..most, one behind the other from `offset` on,
 * with sources of their own at odd addresses; returns the block that holds the sources. */
static inline unsigned char *bed_copies(lck_copy *copies, uint32_t count, uint64_t offset,
                                        uint64_t most, uint64_t seed) {
  uint64_t state = seed | 1, total = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint64_t length = 1 + bed_random(&state) % most;
    copies[i] = (lck_copy){.offset = offset, .length = length, .layer = i / 5};
    offset += (length + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
    total += length + 3;
  }
  unsigned char *block = malloc(total);
  CHECK(block, "memory");
  bed_fill(block, total, seed);
  for (uint32_t i = 0, at = 1; i < count; i++) {
    copies[i].source = block + at;
    at += (uint32_t)copies[i].length + (i % 3);
  }
  return block;
}

static inline lck_snapshot *bed_begin(const bed *b, lck_pool *pool, uint32_t slot) {
  lck_snapshot *snapshot;
  CHECK(lck_snapshot_begin(pool, b->region, slot, &snapshot) == 0, "%s", lck_last_error());
  return snapshot;
}

static inline uint32_t bed_add(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count) {
  uint32_t batch;
  CHECK(lck_snapshot_add(snapshot, copies, count, &batch) == 0, "%s", lck_last_error());
  return batch;
}

static inline int bed_seal(const bed *b, lck_snapshot *snapshot, uint32_t slot, uint64_t sequence) {
  lck_record record = {.sequence = sequence,
                       .step = 10 * sequence,
                       .layout_offset = bed_blobs(b, slot),
                       .layout_length = sizeof LAYOUT,
                       .manifest_offset = bed_blobs(b, slot) + 4096,
                       .manifest_length = sizeof MANIFEST};
  return lck_snapshot_seal(snapshot, &record, LAYOUT, MANIFEST);
}

static inline void bed_committed(lck_snapshot *snapshot) {
  int state = -1;
  CHECK(lck_snapshot_wait(snapshot, -1, &state) == 0, "%s", lck_last_error());
  CHECK(state == LCK_SNAP_COMMITTED, "%d", state);
  CHECK(lck_snapshot_free(snapshot) == 0, "%s", lck_last_error());
}

/* The region holds the sources' present bytes, the digests are theirs, and a read says so too. */
static inline void bed_verify(const bed *b, const lck_copy *copies, const uint32_t *crcs,
                              uint32_t count) {
  lck_read *reads = calloc(count + 1, sizeof *reads);
  CHECK(reads, "memory");
  for (uint32_t i = 0; i < count; i++) {
    uint32_t crc = lck_crc32c(0, copies[i].source, copies[i].length);
    CHECK(crcs[i] == crc, "copy %u: 0x%08x, not 0x%08x", i, crcs[i], crc);
    CHECK(!memcmp(b->region->base + copies[i].offset, copies[i].source, copies[i].length),
          "copy %u", i);
    reads[i] = (lck_read){.offset = copies[i].offset, .length = copies[i].length, .crc = crc};
  }
  uint64_t bad;
  CHECK(lck_slot_fetch(b->region, reads, count, 2, &bad) == 0, "%s", lck_last_error());
  free(reads);
}

static inline void bed_digests(lck_snapshot *snapshot, uint32_t batch, uint32_t *crcs) {
  CHECK(lck_snapshot_digests(snapshot, batch, crcs) == 0, "%s", lck_last_error());
}

static inline void bed_capture(lck_snapshot *snapshot, uint32_t batch, int help) {
  CHECK(lck_snapshot_capture(snapshot, batch, -1, help) == 0, "%s", lck_last_error());
}

/* A snapshot of `sequence` with ten copies, committed in `slot`. */
static inline void bed_snapshot(const bed *b, lck_pool *pool, uint32_t slot, uint64_t sequence) {
  lck_copy copies[10];
  uint32_t crcs[10];
  unsigned char *block = bed_copies(copies, 10, bed_slot(b, slot), 30000, sequence);
  lck_snapshot *snapshot = bed_begin(b, pool, slot);
  uint32_t batch = bed_add(snapshot, copies, 10);
  bed_capture(snapshot, batch, 1);
  bed_digests(snapshot, batch, crcs);
  CHECK(bed_seal(b, snapshot, slot, sequence) == 0, "%s", lck_last_error());
  bed_committed(snapshot);
  bed_verify(b, copies, crcs, 10);
  free(block);
}

static inline void bed_holds(const bed *b, uint32_t slot, uint64_t sequence) {
  lck_record record;
  CHECK(lck_slot_read(b->region, slot, &record) == 0, "%s", lck_last_error());
  CHECK(record.sequence == sequence, "%llu", (unsigned long long)record.sequence);
}

static inline void bed_empty(const bed *b, uint32_t slot) {
  lck_record record;
  int rc = lck_slot_read(b->region, slot, &record);
  CHECK(rc == LCK_E_EMPTY, "%d", rc);
}

static inline void bed_nap(int64_t ns) {
  nanosleep(&(struct timespec){.tv_sec = ns / (1000 * MS), .tv_nsec = ns % (1000 * MS)}, NULL);
}

/* Until `condition`, for at most 20 s. */
#define EVENTUALLY(condition)                                                                      \
  do {                                                                                             \
    for (int tries_ = 0; tries_ < 20000 && !(condition); tries_++) {                               \
      bed_nap(MS);                                                                                 \
    }                                                                                              \
    CHECK(condition, "after 20 s");                                                                \
  } while (0)

/* All idle threads of the pool have started, and the reserve has looked once: later it looks when
 * it is woken. Its first look may come after a copy is released, and takes the machine for
 * contended. */
static inline void bed_started(lck_pool *pool) {
  for (uint32_t i = 0; pool->idle && i < pool->reserve_from; i++)
    EVENTUALLY(atomic_load(&pool->threads[i].id) != 0);
  if (pool->idle)
    EVENTUALLY(atomic_load(&pool->reserve.sleepers) == pool->workers - pool->reserve_from);
}

/* Run `body` on memory and, where there is one, on an ordinary file. */
static inline int bed_main(void (*body)(bed *)) {
  const char *folder = getenv("LCK_TEST_FOLDER");
  bed beds[] = {{.name = "shm", .folder = "/dev/shm"},
                {.name = "file", .folder = folder ? folder : "/var/tmp"}};
  for (int i = 0; i < 2; i++) {
    bed_create(&beds[i], "probe");
    int staged = beds[i].staged;
    bed_destroy(&beds[i]);
    if (i == 1 && !staged) {
      printf("%s is no ordinary file system: staged snapshots not tested\n", beds[i].folder);
      continue;
    }
    CHECK(staged == i, "%s", beds[i].folder);
    body(&beds[i]);
  }
  return checks_end();
}

#endif
