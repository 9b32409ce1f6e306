/* Copies that somebody else brings: from a ring, stored in their extents by a device, or written by
 * an optimizer's update. */
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

int bed_streamed(bed *b, lck_copy *copies) {
  int paged = b->medium == MEDIUM_FILE || b->medium == MEDIUM_EIO;
  int fit = !paged && draw_below(&b->random, 2) == 0;
  for (uint32_t i = 0; i < EXTENTS; i++)
    fit = fit && copies[i].length % sizeof(float) == 0;
  for (uint32_t i = 0; i < EXTENTS && fit; i++)
    copies[i].flags = 0;
  return fit;
}

/* SGD by 0: the payload stays what it is, but for NaNs, which become quiet ones. */
int bed_stream(bed *b, lck_snapshot *snapshot, uint32_t batch, truth *t, const lck_copy *copies) {
  static const float nothing[PAYLOAD_MOST / sizeof(float)];
  const lck_update_rule rule = {.kind = LCK_SGD, .lr = 0.5};
  lck_update_task tasks[EXTENTS];
  for (uint32_t i = 0, at = 0; i < EXTENTS; at += (uint32_t)copies[i++].length)
    tasks[i] = (lck_update_task){.parameter = (float *)(void *)(t->payload + at),
                                 .gradient = nothing,
                                 .length = copies[i].length / sizeof(float),
                                 .copies = {i}};
  int rc = lck_update(&rule, 1, tasks, EXTENTS, snapshot, batch,
                      1 + (uint32_t)draw_below(&b->random, 2), NULL);
  for (uint32_t i = 0, at = 0; i < EXTENTS; at += (uint32_t)copies[i++].length)
    t->manifest.extents[i].crc = lck_crc32c(0, t->payload + at, copies[i].length);
  return rc;
}
