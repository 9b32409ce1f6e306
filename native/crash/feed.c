/* Copies that somebody else brings: from a ring, or stored in their extents by a device. */
#include <string.h>

#include "crash.h"

int bed_fed(bed *b, lck_copy *copies) {
  if (!b->device || draw_below(&b->random, 2) == 0)
    return 0;
  for (uint32_t i = 0; i < EXTENTS; i++) {
    copies[i].source = NULL;
    copies[i].flags = LCK_COPY_FED;
  }
  return 1;
}

int bed_feed(bed *b, const lck_region *region, lck_snapshot *snapshot, uint32_t batch,
             const truth *t, const lck_copy *copies) {
  uint64_t starts[EXTENTS + 1], count = 0, total = 0;
  int paged = b->medium == MEDIUM_FILE || b->medium == MEDIUM_EIO;
  int in_place = draw_below(&b->random, 2) == 0 && !paged;
  lck_region_info info;
  if (lck_region_describe(region, &info) != 0)
    DIE("%s", lck_last_error());
  for (uint32_t i = 0; i < EXTENTS; total += copies[i++].length)
    if (in_place) /* the trace hears of these bytes when they are settled */
      memcpy((char *)info.device + copies[i].offset, t->payload + total, copies[i].length);
  if (lck_snapshot_cuts(snapshot, batch, starts, EXTENTS, &count) != 0 || count > EXTENTS)
    DIE("%lu cuts: %s", (unsigned long)count, lck_last_error());
  starts[count] = total;
  for (uint64_t i = 0; i < count; i++) {
    int rc =
        lck_snapshot_feed(snapshot, batch, starts[i + 1], in_place ? NULL : t->payload + starts[i]);
    if (failed(b, rc))
      return rc;
  }
  return 0;
}
