/* timelines.c -- which snapshots count: the timelines of a region, and which sequences are suspect.
 */
#include <inttypes.h>
#include <string.h>

#include "api.h"
#include "error.h"
#include "region.h"
#include "superblock.h"

/* First suspect sequence of a timeline that the region knows; 0: none. */
static uint64_t suspect_from(const superblock_disk *super, uint64_t timeline) {
  if (timeline == super->timeline)
    return super->suspect;
  for (uint32_t i = 0; i < super->lineage_count; i++)
    if (super->lineage[i].timeline == timeline)
      return super->suspect_before[i];
  return 0;
}

int lck_region_suspects(const superblock_disk *super, uint64_t timeline, uint64_t sequence) {
  uint64_t first = suspect_from(super, timeline);
  return first != 0 && sequence >= first;
}

static int branch(lck_region *region, uint64_t timeline, const lck_branch *lineage,
                  uint32_t count) {
  superblock_disk next = region->super;
  next.timeline = timeline;
  next.suspect = 0;
  next.lineage_count = count;
  memset(next.lineage, 0, sizeof(next.lineage));
  memset(next.suspect_before, 0, sizeof(next.suspect_before));
  for (uint32_t i = 0; i < count; i++) {
    next.lineage[i] = (branch_disk){lineage[i].timeline, lineage[i].sequence};
    next.suspect_before[i] = suspect_from(&region->super, lineage[i].timeline);
  }
  return lck_superblock_write(region, &next);
}

LCK_API int lck_region_branch(lck_region *region, uint64_t timeline, const lck_branch *lineage,
                              uint32_t count) {
  int rc = lck_region_writable(region);
  if (rc != 0)
    return rc;
  if (timeline == 0 || count > LCK_MAX_LINEAGE || (count > 0 && lineage == NULL))
    return lck_fail(LCK_E_INVALID,
                    "timeline %" PRIu64
                    " with %u ancestors, expected a timeline > 0 and at most %u",
                    timeline, count, LCK_MAX_LINEAGE);
  pthread_mutex_lock(&region->changing);
  rc = branch(region, timeline, lineage, count);
  pthread_mutex_unlock(&region->changing);
  return rc;
}

/* The mark is a part of the superblock, whose two copies change one after the other: at any instant
 * one is whole, with the mark or without. Without it the snapshots are what they were before, none
 * is lost; on return no crash takes it back. */
static int suspect(lck_region *region, uint64_t sequence) {
  superblock_disk next = region->super;
  if (next.timeline == 0)
    return lck_fail(LCK_E_INVALID, "the region has no timeline yet: nothing of it can be suspect");
  if (next.suspect != 0 && next.suspect <= sequence)
    return 0;
  next.suspect = sequence;
  return lck_superblock_write(region, &next);
}

LCK_API int lck_region_suspect(lck_region *region, uint64_t sequence) {
  int rc = lck_region_writable(region);
  if (rc != 0)
    return rc;
  if (sequence == 0 || sequence > LCK_COUNT_LIMIT)
    return lck_fail(LCK_E_INVALID, "suspect from sequence %" PRIu64 ", expected 1..%" PRIu64,
                    sequence, LCK_COUNT_LIMIT);
  pthread_mutex_lock(&region->changing);
  rc = suspect(region, sequence);
  pthread_mutex_unlock(&region->changing);
  return rc == LCK_E_IO ? lck_region_latch(region, rc) : rc;
}
