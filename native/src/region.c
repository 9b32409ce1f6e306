/* region.c -- making, opening, growing, describing and closing a region. */
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "api.h"
#include "backing.h"
#include "error.h"
#include "guard.h"
#include "journal.h"
#include "lock.h"
#include "medium.h"
#include "mutant.h"
#include "persist.h"
#include "space.h"
#include "superblock.h"

static uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

/* ---- state -------------------------------------------------------------------------------- */

int lck_region_alive(const lck_region *region) {
  if (region == NULL)
    return lck_fail(LCK_E_INVALID, "region is NULL");
  /* The handler marks a forked child; the process id also catches clones that bypass it. */
  pid_t owner = atomic_load(&region->owner);
  if (owner != getpid())
    return lck_fail(LCK_E_FORKED, "the region was opened before a fork; this is process %d",
                    (int)getpid());
  return 0;
}

int lck_region_writable(const lck_region *region) {
  int rc = lck_region_alive(region);
  if (rc != 0)
    return rc;
  if (region->flags & LCK_READ_ONLY)
    return lck_fail(LCK_E_INVALID, "the region is open read-only");
  return lck_region_previous(region);
}

int lck_region_previous(const lck_region *region) {
  int latched = atomic_load(&region->latched);
  if (latched != 0)
    return lck_fail(LCK_E_PREVIOUS, "the region is latched by an earlier failure, code %d: %s",
                    latched, atomic_load(&region->explained) ? region->why : "");
  return 0;
}

int lck_region_latch(lck_region *region, int code) {
  int healthy = 0;
  if (atomic_compare_exchange_strong(&region->latched, &healthy, code)) {
    snprintf(region->why, sizeof(region->why), "%s", lck_last_error());
    atomic_store(&region->explained, 1);
  }
  return code;
}

/* ---- making and freeing a handle ---------------------------------------------------------- */

static void forget(lck_region *region) {
  pthread_mutex_destroy(&region->changing);
  pthread_mutex_destroy(&region->sync);
  pthread_mutex_destroy(&region->mutex);
  free(region);
}

/* Also after a failure half-way: releases what there is. */
static void discard(lck_region *region) {
  lck_space_release(region);
  lck_lock_release(region);
  forget(region);
}

static int check_descriptors(int fd, int lock_fd, uint32_t flags) {
  struct stat file;
  struct stat lock;
  int mode = fcntl(fd, F_GETFL);
  if (mode < 0 || fstat(fd, &file) != 0 || fstat(lock_fd, &lock) != 0)
    return lck_fail_errno(LCK_E_INVALID, "descriptors %d and %d", fd, lock_fd);
  if (file.st_dev != lock.st_dev || file.st_ino != lock.st_ino)
    return lck_fail(LCK_E_INVALID, "descriptors %d and %d are of different files", fd, lock_fd);
  if (!(flags & LCK_READ_ONLY) && (mode & O_ACCMODE) != O_RDWR)
    return lck_fail(LCK_E_INVALID, "descriptor %d is not open for reading and writing", fd);
  return 0;
}

/* A handle with descriptors, owner lock and medium, and nothing mapped but a backing. */
static int acquire(const lck_backing *backing, int fd, int lock_fd, uint32_t flags,
                   int32_t numa_node, lck_region **out) {
  int rc = check_descriptors(fd, lock_fd, flags);
  if (rc != 0)
    return rc;
  lck_region *region = calloc(1, sizeof(*region));
  if (region == NULL)
    return lck_fail(LCK_E_NOMEM, "%zu bytes for a region handle", sizeof(*region));
  region->flags = flags;
  region->numa_node = numa_node;
  pthread_mutex_init(&region->mutex, NULL);
  pthread_mutex_init(&region->sync, NULL);
  pthread_mutex_init(&region->changing, NULL);
  rc = lck_lock_adopt(region, fd, lock_fd);
  if (rc != 0) {
    forget(region);
    return rc;
  }
  if (!(flags & LCK_READ_ONLY))
    rc = lck_lock_own(region);
  if (rc == 0)
    rc = lck_medium_detect(region);
  if (rc == 0 && backing != NULL)
    rc = lck_backing_adopt(region, backing);
  if (rc != 0) {
    discard(region);
    return rc;
  }
  *out = region;
  return 0;
}

LCK_API int lck_region_close(lck_region *region) {
  if (region == NULL)
    return 0;
  int rc = lck_region_alive(region);
  if (rc != 0)
    return rc;
  uint32_t writing = atomic_load(&region->writing);
  if (writing != 0)
    return lck_fail(LCK_E_STATE, "snapshots are open: slot mask 0x%x", writing);
  discard(region);
  return 0;
}

/* ---- create ------------------------------------------------------------------------------- */

static int check_spec(const lck_region_spec *spec) {
  if (spec->slot_count < 2 || spec->slot_count > LCK_MAX_SLOTS)
    return lck_fail(LCK_E_INVALID, "%u slots, expected 2..%u", spec->slot_count, LCK_MAX_SLOTS);
  if (spec->flags & ~(uint32_t)LCK_PROCESS_DURABLE)
    return lck_fail(LCK_E_INVALID, "flags 0x%x, expected 0 or 0x%x", spec->flags,
                    (unsigned)LCK_PROCESS_DURABLE);
  if (spec->slot_bytes == 0)
    return lck_fail(LCK_E_INVALID, "slot_bytes is 0");
  return 0;
}

/* The segment that gives each slot at least `slot_bytes`, behind `end`. */
static int place_segment(const lck_region *region, uint64_t end, uint32_t slot_count,
                         uint64_t slot_bytes, segment_disk *segment) {
  uint64_t unit = region->page_bytes > LCK_HEADER_PAGE ? region->page_bytes : LCK_HEADER_PAGE;
  if (slot_bytes > LCK_SPACE_LIMIT || end > LCK_SPACE_LIMIT ||
      round_up(slot_bytes, unit) * slot_count > LCK_SPACE_LIMIT - end)
    return lck_fail(LCK_E_FULL,
                    "%u slots of %" PRIu64 " bytes needed, a region may have %" PRIu64 " bytes",
                    slot_count, slot_bytes, LCK_SPACE_LIMIT);
  segment->offset = round_up(end, region->granule);
  segment->slot_bytes = round_up(slot_bytes, unit);
  segment->length = round_up(segment->slot_bytes * slot_count, region->granule);
  return 0;
}

static int identify(superblock_disk *super, const lck_region_spec *spec) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  super->magic = LCK_SUPERBLOCK_MAGIC;
  super->version = LCK_FORMAT_VERSION;
  super->bytes = sizeof(*super);
  memcpy(super->run_id, spec->run_id, sizeof(super->run_id));
  super->rank = spec->rank;
  super->world = spec->world;
  super->slot_count = spec->slot_count;
  super->created_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
  super->journal_offset = LCK_JOURNAL_OFFSET;
  super->journal_length = spec->journal_bytes;
  if (getrandom(super->uuid, sizeof(super->uuid), 0) != sizeof(super->uuid))
    return lck_fail_errno(LCK_E_IO, "getrandom of %zu bytes", sizeof(super->uuid));
  super->uuid[6] = (uint8_t)((super->uuid[6] & 0x0f) | 0x40); /* RFC 9562: version 4, variant 1 */
  super->uuid[8] = (uint8_t)((super->uuid[8] & 0x3f) | 0x80);
  return 0;
}

static int refuse_occupied(const lck_region *region) {
  superblock_disk present;
  uint64_t length;
  int rc = lck_medium_length(region, &length);
  if (rc != 0)
    return rc;
  if (!lck_medium_fixed(region) && length != 0)
    return lck_fail(LCK_E_INVALID, "the file is not empty: %" PRIu64 " bytes", length);
  rc = lck_medium_fixed(region) ? lck_superblock_read(region, &present) : LCK_E_FORMAT;
  if (rc == 0)
    return lck_fail(LCK_E_INVALID, "the space holds a region of %" PRIu64 " bytes", present.size);
  return rc == LCK_E_IO ? rc : 0; /* a head that cannot be read may be a region's */
}

/* The superblocks come last: whatever a crash leaves before is no region. Fixed space may hold
 * anything, so its headers are blanked first, superblocks before records and the journal's. The new
 * UUID keeps remains from being served, not from being taken for damage: of a snapshot of this
 * region, or, beside a superblock that a crash tore, of a region that was never finished. */
static int fill(lck_region *region, const superblock_disk *super) {
  static const unsigned char zeros[LCK_HEADER_PAGE];
  int rc = 0;
  for (uint64_t at = 0; lck_medium_fixed(region) && at < LCK_JOURNAL_OFFSET && rc == 0;
       at += LCK_HEADER_PAGE) {
    if (at < LCK_RECORD_OFFSET(0) ? LCK_MUTANT(MUTANT_OLD_SUPERBLOCKS_KEPT)
                                  : LCK_MUTANT(MUTANT_OLD_RECORDS_KEPT))
      continue;
    rc = lck_persist_store(region, at, zeros, sizeof(zeros));
    lck_persist_fence();
  }
  if (rc == 0 && lck_medium_fixed(region) && !LCK_MUTANT(MUTANT_OLD_JOURNAL_KEPT))
    rc = lck_journal_blank(region, super);
  return rc != 0 ? rc : lck_superblock_write(region, super);
}

static int place_first(const lck_region *region, const lck_region_spec *spec,
                       segment_disk *segment) {
  if (spec->journal_bytes > LCK_SPACE_LIMIT)
    return lck_fail(LCK_E_FULL, "%" PRIu64 " journal bytes needed, a region may have %" PRIu64,
                    spec->journal_bytes, LCK_SPACE_LIMIT);
  return place_segment(region, LCK_JOURNAL_OFFSET + spec->journal_bytes, spec->slot_count,
                       spec->slot_bytes, segment);
}

static int create(lck_region *region, const lck_region_spec *spec) {
  superblock_disk super = {0};
  int rc = place_first(region, spec, &super.segments[0]);
  if (rc == 0)
    rc = refuse_occupied(region);
  if (rc == 0)
    rc = identify(&super, spec);
  super.flags = region->flags & LCK_PROCESS_DURABLE;
  super.segment_count = 1;
  super.size = super.segments[0].offset + super.segments[0].length;
  if (rc == 0)
    rc = lck_space_reserve(region, super.size);
  if (rc == 0)
    rc = lck_space_extend(region, 0, super.size);
  if (rc != 0)
    return rc;
  rc = fill(region, &super);
  if (rc != 0)
    lck_space_retract(region, 0, super.size);
  return rc;
}

LCK_API int lck_region_create_on(const lck_backing *backing, int fd, int lock_fd,
                                 const lck_region_spec *spec, lck_region **out) {
  if (spec == NULL || out == NULL)
    return lck_fail(LCK_E_INVALID, "spec or out is NULL");
  lck_region *region = NULL;
  int rc = check_spec(spec);
  if (rc == 0)
    rc = acquire(backing, fd, lock_fd, spec->flags, spec->numa_node, &region);
  if (rc == 0)
    rc = create(region, spec);
  if (rc == 0)
    *out = region;
  else if (region != NULL)
    discard(region);
  return rc;
}

LCK_API int lck_region_create(int fd, int lock_fd, const lck_region_spec *spec, lck_region **out) {
  return lck_region_create_on(NULL, fd, lock_fd, spec, out);
}

LCK_API int lck_region_measure(const lck_region_spec *spec, uint64_t *bytes) {
  if (spec == NULL || bytes == NULL)
    return lck_fail(LCK_E_INVALID, "spec or bytes is NULL");
  const lck_region region = {.page_bytes = LCK_HEADER_PAGE, .granule = LCK_GRANULE};
  segment_disk segment = {0};
  int rc = check_spec(spec);
  if (rc == 0)
    rc = place_first(&region, spec, &segment);
  if (rc == 0)
    *bytes = segment.offset + segment.length;
  return rc;
}

/* ---- open --------------------------------------------------------------------------------- */

static int check_length(const lck_region *region, uint64_t mapped) {
  uint64_t length;
  int rc = lck_medium_length(region, &length);
  if (rc == 0 && length < mapped)
    rc = lck_fail(LCK_E_FORMAT, "truncated: expected %" PRIu64 " bytes, found %" PRIu64, mapped,
                  length);
  return rc;
}

/* A reader learns from the superblock how the present owner makes commits durable. */
static int take_over(lck_region *region) {
  superblock_disk next = region->super;
  int rc = LCK_MUTANT(MUTANT_NOT_ADOPTED) ? 0 : lck_persist_adopt(region);
  int twin = 0;
  if (rc == 0)
    rc = lck_superblock_twin(region, &twin);
  if (rc != 0)
    return rc;
  next.flags = region->flags & LCK_PROCESS_DURABLE;
  return twin && next.flags == region->super.flags ? 0 : lck_superblock_write(region, &next);
}

static int open_existing(lck_region *region) {
  int rc = lck_superblock_read(region, &region->super);
  if (rc != 0)
    return rc;
  if (region->flags & LCK_READ_ONLY && region->medium == LCK_FILE &&
      region->super.flags & LCK_PROCESS_DURABLE)
    region->granularity = LCK_GRAN_NONE;
  uint64_t mapped = round_up(region->super.size, region->page_bytes);
  rc = check_length(region, mapped);
  if (rc == 0)
    rc = lck_space_reserve(region, mapped);
  if (rc == 0)
    rc = lck_space_map(region, mapped);
  if (rc == 0 && !(region->flags & LCK_READ_ONLY))
    rc = take_over(region);
  return rc;
}

static int open_at(const lck_backing *backing, int fd, int lock_fd, uint32_t flags,
                   int32_t numa_node, lck_region **out) {
  if (out == NULL || flags & ~(uint32_t)(LCK_READ_ONLY | LCK_PROCESS_DURABLE))
    return lck_fail(LCK_E_INVALID, "out is NULL or flags 0x%x are unknown", flags);
  lck_region *region = NULL;
  int rc = acquire(backing, fd, lock_fd, flags, numa_node, &region);
  if (rc == 0)
    rc = open_existing(region);
  if (rc == 0)
    *out = region;
  else if (region != NULL)
    discard(region);
  return rc;
}

LCK_API int lck_region_open(int fd, int lock_fd, uint32_t flags, int32_t numa_node,
                            lck_region **out) {
  return open_at(NULL, fd, lock_fd, flags, numa_node, out);
}

LCK_API int lck_region_open_on(const lck_backing *backing, int fd, int lock_fd, uint32_t flags,
                               lck_region **out) {
  return open_at(backing, fd, lock_fd, flags, -1, out);
}

/* ---- change ------------------------------------------------------------------------------- */

static int grow(lck_region *region, uint64_t slot_bytes) {
  superblock_disk next = region->super;
  segment_disk added;
  int rc = place_segment(region, next.size, next.slot_count, slot_bytes, &added);
  if (rc != 0)
    return rc;
  if (next.segment_count == LCK_MAX_SEGMENTS)
    return lck_fail(LCK_E_FULL, "%" PRIu64 " bytes needed, but all %u segments are in use",
                    added.length, LCK_MAX_SEGMENTS);
  next.segments[next.segment_count++] = added;
  next.size = added.offset + added.length;
  rc = lck_space_extend(region, round_up(region->super.size, region->page_bytes), next.size);
  /* Once a superblock may name the segment, its space is never given back. */
  return rc != 0 ? rc : lck_superblock_write(region, &next);
}

LCK_API int lck_region_grow(lck_region *region, uint64_t slot_bytes) {
  int rc = lck_region_writable(region);
  if (rc != 0)
    return rc;
  if (slot_bytes == 0)
    return lck_fail(LCK_E_INVALID, "slot_bytes is 0");
  pthread_mutex_lock(&region->changing);
  rc = grow(region, slot_bytes);
  pthread_mutex_unlock(&region->changing);
  return rc == LCK_E_IO ? lck_region_latch(region, rc) : rc;
}

/* ---- describe ------------------------------------------------------------------------------ */

LCK_API int lck_region_describe(const lck_region *region, lck_region_info *out) {
  int rc = lck_region_alive(region);
  if (rc != 0)
    return rc;
  if (out == NULL)
    return lck_fail(LCK_E_INVALID, "out is NULL");
  superblock_disk super = lck_superblock_copy(region);
  lck_region_info info = {
      .format_version = super.version,
      .rank = super.rank,
      .world = super.world,
      .slot_count = super.slot_count,
      .medium = region->medium,
      .granularity = region->granularity,
      .page_bytes = (uint32_t)region->page_bytes,
      .latched = (uint32_t)-atomic_load(&region->latched),
      .size = super.size,
      .generation = super.generation,
      .created_ns = super.created_ns,
      .journal_offset = super.journal_offset,
      .journal_length = super.journal_length,
      .timeline = super.timeline,
      .suspect = super.suspect,
      .base = region->base,
      .device = lck_guard_store(region, 0),
      .segment_count = super.segment_count,
      .lineage_count = super.lineage_count,
  };
  memcpy(info.uuid, super.uuid, sizeof(info.uuid));
  memcpy(info.run_id, super.run_id, sizeof(info.run_id));
  for (uint32_t i = 0; i < super.segment_count; i++)
    info.segments[i] = (lck_segment){super.segments[i].offset, super.segments[i].length,
                                     super.segments[i].slot_bytes};
  for (uint32_t i = 0; i < super.lineage_count; i++)
    info.lineage[i] = (lck_branch){super.lineage[i].timeline, super.lineage[i].sequence};
  *out = info;
  return 0;
}

int lck_slot_contains(const lck_region *region, uint32_t slot, uint64_t offset, uint64_t length) {
  int inside = 0;
  pthread_mutex_t *mutex = (pthread_mutex_t *)&region->mutex; /* not const to the caller */
  pthread_mutex_lock(mutex);
  uint32_t count = slot < region->super.slot_count ? region->super.segment_count : 0;
  for (uint32_t i = 0; i < count && !inside; i++) {
    uint64_t bytes = region->super.segments[i].slot_bytes;
    uint64_t start = region->super.segments[i].offset + slot * bytes;
    inside = offset >= start && offset - start <= bytes && length <= bytes - (offset - start);
  }
  pthread_mutex_unlock(mutex);
  return inside;
}
