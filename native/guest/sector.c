/* Where a part of the newest snapshot lies on its block device, for whoever damages it there. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format.h"
#include "guest.h"

#define SECTOR_BYTES 512

static uint64_t offset_of(const char *part, const lck_region *region, const lck_record *record) {
  lck_region_info info;
  manifest listed;
  must(lck_region_describe(region, &info), "describe the region");
  memcpy(&listed, (const char *)info.base + record->manifest_offset, sizeof(listed));
  if (strcmp(part, "record") == 0)
    return LCK_RECORD_OFFSET(record->slot);
  return strcmp(part, "manifest") == 0 ? record->manifest_offset : listed.extents[3].offset;
}

void say_sector(const options *o) {
  lck_region *region;
  struct stat file;
  must(region_open(o, LCK_READ_ONLY, &region), "open the region");
  found newest = recover(region);
  must(newest.number == 0 ? LCK_E_EMPTY : 0, "find a snapshot");
  uint64_t offset = offset_of(o->part, region, &newest.record);
  must(lck_region_close(region), "close the region");
  int fd = open(o->path, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || fstat(fd, &file) != 0) {
    say("FAILED open %s: %s", o->path, strerror(errno));
    exit(1);
  }
  int block = (int)(offset / (uint64_t)file.st_blksize);
  if (ioctl(fd, FIBMAP, &block) != 0 || block == 0) {
    say("FAILED find offset %" PRIu64 " of %s on its device: %s", offset, o->path, strerror(errno));
    exit(1);
  }
  close(fd);
  say("SECTOR %" PRIu64, (uint64_t)block * (uint64_t)file.st_blksize / SECTOR_BYTES);
}
