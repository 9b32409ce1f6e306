#include <stdatomic.h>
#include <string.h>

#include "api.h"
#include "error.h"
#include "guard.h"
#include "region.h"
#include "superblock.h"

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
