/* What a crash left: lightck's own checks choose the snapshot, then every byte is compared. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "guest.h"

static int counts(const lck_region_info *info, const lck_record *record) {
  if (record->timeline == info->timeline)
    return 1;
  for (uint32_t i = 0; i < info->lineage_count; i++)
    if (record->timeline == info->lineage[i].timeline &&
        record->sequence <= info->lineage[i].sequence)
      return 1;
  return 0;
}

/* Its checksum held: whatever differs from what was written is a lie that lightck would tell. */
static void expect(int holds, uint64_t number, const char *what) {
  if (holds)
    return;
  say("WRONG snapshot %" PRIu64 ": another %s than was written is taken for whole", number, what);
  exit(1);
}

static void compare_extent(uint64_t number, uint32_t extent, const unsigned char *bytes) {
  uint64_t length = content_length(number, extent);
  unsigned char *wanted = malloc(length);
  expect(wanted != NULL, number, "amount of memory");
  content_fill(number, extent, wanted);
  expect(memcmp(bytes, wanted, length) == 0, number, "payload");
  free(wanted);
}

static int fetch_and_compare(const lck_region *region, const lck_region_info *info,
                             const lck_record *record) {
  const unsigned char *base = info->base;
  uint64_t number = record->step;
  unsigned char table[LAYOUT_MOST];
  manifest listed;
  expect(record->manifest_length == sizeof(listed), number, "manifest");
  memcpy(&listed, base + record->manifest_offset, sizeof(listed));
  expect(listed.number == number && listed.count == EXTENTS, number, "manifest");
  expect(record->layout_length == content_layout(number, table), number, "layout table");
  expect(memcmp(base + record->layout_offset, table, record->layout_length) == 0, number,
         "layout table");
  for (uint32_t i = 0; i < EXTENTS; i++) {
    expect(listed.extents[i].length == content_length(number, i), number, "extent");
    listed.extents[i].destination = malloc(listed.extents[i].length);
    expect(listed.extents[i].destination != NULL, number, "amount of memory");
  }
  uint64_t bad;
  int code = lck_slot_fetch(region, listed.extents, EXTENTS, 2, &bad);
  for (uint32_t i = 0; i < EXTENTS; i++) {
    if (code == 0)
      compare_extent(number, i, listed.extents[i].destination);
    free(listed.extents[i].destination);
  }
  return code;
}

static int by_sequence(const void *left, const void *right) {
  uint64_t a = ((const lck_record *)left)->sequence, b = ((const lck_record *)right)->sequence;
  return a < b ? 1 : a > b ? -1 : 0;
}

found recover(const lck_region *region) {
  lck_region_info info;
  lck_record records[LCK_MAX_SLOTS];
  found result = {0};
  uint32_t count = 0;
  must(lck_region_describe(region, &info), "describe the region");
  for (uint32_t slot = 0; slot < info.slot_count; slot++) {
    int code = lck_slot_read(region, slot, &records[count]);
    if (code == LCK_E_EMPTY)
      continue;
    if (code != 0) {
      say("FELLBACK slot %u: %d %s", slot, code, lck_last_error());
      continue;
    }
    if (records[count].sequence > result.last_sequence)
      result.last_sequence = records[count].sequence;
    if (counts(&info, &records[count]))
      count++;
  }
  qsort(records, count, sizeof(records[0]), by_sequence);
  for (uint32_t i = 0; i < count && result.number == 0; i++) {
    int code = fetch_and_compare(region, &info, &records[i]);
    if (code != 0) {
      say("FELLBACK %" PRIu64 ": %d %s", records[i].step, code, lck_last_error());
      continue;
    }
    result.number = records[i].step;
    result.record = records[i];
  }
  return result;
}
