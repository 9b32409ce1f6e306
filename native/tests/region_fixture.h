/* region_fixture.h -- region files on the media that this machine has, for the region tests. */
#ifndef LCK_REGION_FIXTURE_H
#define LCK_REGION_FIXTURE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fault.h"
#include "kernel.h"
#include "lightck.h"
#include "persist.h"
#include "region.h"

typedef struct place {
  const char *name;
  const char *directory;
  uint32_t medium, flags;
} place;

static char place_path[256];

static inline const char *path_in(const char *directory) {
  snprintf(place_path, sizeof(place_path), "%s/lightck-test-%d", directory, (int)getpid());
  return place_path;
}

static inline int open_file(const char *path, int flags) {
  int fd = open(path, flags | O_CLOEXEC, 0600);
  CHECK(fd >= 0, "%s: %s", path, strerror(errno));
  return fd;
}

static inline lck_region_spec small_spec(void) {
  lck_region_spec spec = {.run_id = "run",
                          .rank = 1,
                          .world = 4,
                          .slot_count = 2,
                          .slot_bytes = 300000,
                          .journal_bytes = 15000,
                          .numa_node = -1};
  return spec;
}

static inline int try_create(const char *path, const lck_region_spec *spec, lck_region **out) {
  int fd = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  int lock_fd = open_file(path, O_RDWR);
  int rc = lck_region_create(fd, lock_fd, spec, out);
  close(fd);
  close(lock_fd);
  return rc;
}

static inline int try_open(const char *path, uint32_t flags, lck_region **out) {
  int mode = flags & LCK_READ_ONLY ? O_RDONLY : O_RDWR;
  int fd = open_file(path, mode);
  int lock_fd = open_file(path, mode);
  int rc = lck_region_open(fd, lock_fd, flags, -1, out);
  close(fd);
  close(lock_fd);
  return rc;
}

static inline lck_region *must_create(const char *path, const lck_region_spec *spec) {
  lck_region *region = NULL;
  int rc = try_create(path, spec, &region);
  CHECK(rc == 0, "%d %s", rc, lck_last_error());
  return region;
}

static inline lck_region *must_open(const char *path, uint32_t flags) {
  lck_region *region = NULL;
  int rc = try_open(path, flags, &region);
  CHECK(rc == 0, "%d %s", rc, lck_last_error());
  return region;
}

static inline void must_close(lck_region *region) {
  CHECK(lck_region_close(region) == 0, "%s", lck_last_error());
}

static inline lck_region_info describe(const lck_region *region) {
  lck_region_info info;
  CHECK(lck_region_describe(region, &info) == 0, "%s", lck_last_error());
  return info;
}

static const char layout_text[] = "layout: names, dtypes, shapes";
static const char manifest_text[] = "manifest: checksums";

/* Where the slot's layout table lies; manifest and payload follow. */
static inline uint64_t slot_start(const lck_region *region, uint32_t slot) {
  lck_region_info info = describe(region);
  return info.segments[0].offset + slot * info.segments[0].slot_bytes;
}

static inline lck_record record_for(const lck_region *region, uint32_t slot, uint64_t sequence) {
  uint64_t start = slot_start(region, slot);
  lck_record record = {.sequence = sequence,
                       .step = sequence * 10,
                       .timeline = 7,
                       .parent = 6,
                       .layout_offset = start,
                       .layout_length = sizeof(layout_text),
                       .manifest_offset = start + 4096,
                       .manifest_length = sizeof(manifest_text),
                       .payload_bytes = 5000,
                       .wall_time_ns = 12345,
                       .share_digest = "digest",
                       .flags = LCK_RECORD_EARLY};
  return record;
}

/* Claim, invalidate, store 5,000 bytes of payload, commit, unclaim; the first failure's code. */
static inline int write_snapshot(lck_region *region, uint32_t slot, uint64_t sequence) {
  unsigned char payload[5000];
  uint32_t crc = 0;
  memset(payload, (int)sequence, sizeof(payload));
  lck_record record = record_for(region, slot, sequence);
  int rc = lck_slot_claim(region, slot);
  if (rc != 0)
    return rc;
  rc = lck_slot_invalidate(region, slot);
  if (rc == 0) {
    rc = lck_persist_payload(region, slot_start(region, slot) + 8192, payload, sizeof(payload),
                             &crc);
    lck_persist_fence();
    if (rc == 0)
      rc = lck_slot_commit(region, slot, &record, layout_text, manifest_text);
  }
  lck_slot_unclaim(region, slot);
  return rc;
}

static inline uint64_t sequence_in(const lck_region *region, uint32_t slot) {
  lck_record record;
  return lck_slot_read(region, slot, &record) == 0 ? record.sequence : 0;
}

static inline uint64_t file_length(const char *path) {
  struct stat file;
  CHECK(stat(path, &file) == 0, "%s", path);
  return (uint64_t)file.st_size;
}

/* Run `body` in a child; its exit status must be 0. */
static inline void in_child(void (*body)(void *), void *argument) {
  int status = 0;
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0, "fork: %s", strerror(errno));
  if (child == 0) {
    body(argument);
    _exit(0);
  }
  CHECK(waitpid(child, &status, 0) == child, "waitpid");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child status 0x%x", status);
}

/* A mount of its own, or NULL where that is not allowed; said aloud. */
static inline const char *mount_at(char *directory, const char *type, const char *options) {
  CHECK(mkdtemp(directory) != NULL, "%s", directory);
  if (mount("none", directory, type, 0, options) == 0)
    return directory;
  printf("SKIPPED: mount -t %s -o %s: %s\n", type, options, strerror(errno));
  rmdir(directory);
  return NULL;
}

static inline void unmount(const char *directory) {
  CHECK(umount(directory) == 0, "%s: %s", directory, strerror(errno));
  rmdir(directory);
}

#endif
