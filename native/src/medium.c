/* medium.c -- finding out which medium a file is on, its granularity and its page size. */
#include "medium.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "access.h"
#include "bus.h"
#include "calls.h"
#include "error.h"
#include "trace.h"

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
/* ---- what it is --------------------------------------------------------------------------- */

int lck_medium_number(const char *path, uint64_t *value) {
  FILE *file = fopen(path, "re");
  if (file == NULL)
    return -1;
  int found = fscanf(file, "%" SCNu64, value);
  fclose(file);
  return found == 1 ? 0 : -1;
}

/* BYTE where the platform says that caches survive a power failure; what is unknown is flushed. */
static uint32_t persistent_granularity(const char *kind, dev_t device) {
  char path[PATH_MAX];
  char link[64];
  snprintf(link, sizeof(link), "/sys/dev/%s/%u:%u", kind, major(device), minor(device));
  if (realpath(link, path) == NULL)
    return LCK_GRAN_LINE;
  for (char *end; (end = strrchr(path, '/')) != NULL && end != path; *end = '\0') {
    char name[PATH_MAX + 32];
    char domain[32] = "";
    snprintf(name, sizeof(name), "%s/persistence_domain", path);
    FILE *file = fopen(name, "re");
    if (file == NULL)
      continue;
    int found = fscanf(file, "%31s", domain);
    fclose(file);
    return found == 1 && strcmp(domain, "cpu_cache") == 0 ? LCK_GRAN_BYTE : LCK_GRAN_LINE;
  }
  return LCK_GRAN_LINE;
}

static int device_number(dev_t device, const char *name, uint64_t *value) {
  char path[96];
  snprintf(path, sizeof(path), "/sys/dev/char/%u:%u/%s", major(device), minor(device), name);
  return lck_medium_number(path, value);
}

static int is_dax(dev_t device) {
  char path[96];
  char target[PATH_MAX] = "";
  snprintf(path, sizeof(path), "/sys/dev/char/%u:%u/subsystem", major(device), minor(device));
  ssize_t got = readlink(path, target, sizeof(target) - 1);
  const char *name = got > 0 ? strrchr(target, '/') : NULL;
  return name != NULL && strcmp(name, "/dax") == 0;
}

static int detect_device(lck_region *region, dev_t device) {
  uint64_t align = 0;
  if (!is_dax(device))
    return lck_fail(LCK_E_INVALID, "character device %u:%u is no DAX device", major(device),
                    minor(device));
  region->medium = LCK_DEVDAX;
  region->granularity = persistent_granularity("char", device);
  region->page_bytes = LCK_GRANULE;
  if (device_number(device, "align", &align) == 0 && align > LCK_GRANULE)
    region->page_bytes = align;
  return 0;
}

/* Whether MAP_SYNC is granted decides: mount options and statx promise less than they say. */
static int detect_disk(lck_region *region, dev_t device) {
  void *page = lck_call_mmap(NULL, LCK_HEADER_PAGE, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC,
                             region->fd, 0);
  if (page != MAP_FAILED) {
    munmap(page, LCK_HEADER_PAGE);
    region->medium = LCK_FSDAX;
    region->granularity = persistent_granularity("block", device);
    return 0;
  }
  if (errno != EOPNOTSUPP && errno != EINVAL)
    return lck_fail_errno(LCK_E_IO, "map the region's file");
  region->medium = LCK_FILE;
  region->granularity = region->flags & LCK_PROCESS_DURABLE ? LCK_GRAN_NONE : LCK_GRAN_PAGE;
  return 0;
}

int lck_medium_detect(lck_region *region) {
  struct stat file;
  struct statfs fs;
  if (lck_call_fstat(region->fd, &file) != 0 || fstatfs(region->fd, &fs) != 0)
    return lck_fail_errno(LCK_E_IO, "stat the region's file");
  int rc = 0;
  region->page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
  region->granularity = LCK_GRAN_NONE;
  if (S_ISCHR(file.st_mode)) {
    rc = detect_device(region, file.st_rdev);
  } else if (!S_ISREG(file.st_mode)) {
    rc = lck_fail(LCK_E_INVALID, "neither a regular file nor a DAX device: mode 0%o", file.st_mode);
  } else if (fs.f_type == HUGETLBFS_MAGIC) {
    region->medium = LCK_HUGETLBFS;
    region->page_bytes = (uint64_t)fs.f_bsize;
  } else if (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC) {
    region->medium = LCK_TMPFS;
    if ((uint64_t)file.st_blksize == LCK_GRANULE)
      region->page_bytes = LCK_GRANULE; /* mounted with huge pages */
  } else {
    rc = detect_disk(region, file.st_dev);
  }
  region->granularity = lck_trace_granularity(region->granularity);
  region->granule = region->page_bytes > LCK_GRANULE ? region->page_bytes : LCK_GRANULE;
  return rc;
}

int lck_medium_length(const lck_region *region, uint64_t *length) {
  struct stat file;
  *length = region->reserved_length;
  if (region->backed)
    return 0;
  if (lck_call_fstat(region->fd, &file) != 0)
    return lck_fail_errno(LCK_E_IO, "stat the region's file");
  *length = (uint64_t)file.st_size;
  if (region->medium != LCK_DEVDAX)
    return 0;
  if (device_number(file.st_rdev, "size", length) != 0)
    return lck_fail_errno(LCK_E_IO, "size of DAX device %u:%u", major(file.st_rdev),
                          minor(file.st_rdev));
  *length -= *length % region->page_bytes;
  return 0;
}

typedef struct peek {
  void *to;
  const void *from;
  uint64_t length;
} peek;

static void copy_out(void *argument) {
  const peek *from = argument;
  memcpy(from->to, from->from, from->length);
}

int lck_medium_read_head(const lck_region *region, void *bytes, uint64_t length, uint64_t *got) {
  *got = 0;
  if (region->backed) {
    *got = length;
    return lck_access_load(region, 0, bytes, length);
  }
  if (region->medium == LCK_DEVDAX) {
    void *map = lck_call_mmap(NULL, region->granule, PROT_READ, MAP_SHARED, region->fd, 0);
    if (map == MAP_FAILED)
      return lck_fail_errno(LCK_E_IO, "map %" PRIu64 " bytes of the device", region->granule);
    peek from = {bytes, map, length};
    lck_bus_fault fault;
    int gone = lck_bus_run(map, region->granule, copy_out, &from, &fault);
    munmap(map, region->granule);
    if (gone)
      return lck_fail(LCK_E_IO, "SIGBUS at offset %" PRIu64 " of the device: it cannot be read",
                      (uint64_t)(fault.address - (uintptr_t)map));
    *got = length;
    return 0;
  }
  while (*got < length) {
    ssize_t count =
        lck_call_pread(region->fd, (char *)bytes + *got, (size_t)(length - *got), (off_t)*got);
    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      return lck_fail_errno(LCK_E_IO, "read %" PRIu64 " bytes at the region's start", length);
    if (count == 0)
      break;
    *got += (uint64_t)count;
  }
  return 0;
}
