/* The real recovery on an image, and whether what it gives is what it may give. */
#include <string.h>

#include "crash.h"

/* What a reader does that verifies payload: extents and sums from the manifest on the medium. */
static int fetch(const lck_region *region, const manifest *listed, unsigned char *bytes) {
  lck_read reads[EXTENTS];
  uint64_t bad, at = 0;
  for (uint32_t i = 0; i < EXTENTS; i++) {
    reads[i] = listed->extents[i];
    reads[i].destination = bytes + at;
    at += reads[i].length;
    if (at > PAYLOAD_MOST)
      return LCK_E_CORRUPT;
  }
  return lck_slot_fetch(region, reads, EXTENTS, 1, &bad);
}

static int same_payload(const unsigned char *base, const truth *t) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < EXTENTS; i++) {
    const lck_read *extent = &t->manifest.extents[i];
    if (memcmp(base + extent->offset, t->payload + at, extent->length) != 0)
      return 0;
    at += extent->length;
  }
  return 1;
}

static const char *compare_tables(const unsigned char *base, const lck_record *r, const truth *t) {
  if (r->sequence != t->sequence)
    return "a snapshot that was never made is accepted";
  if (r->step != 10 * t->sequence || r->timeline != t->timeline || r->slot != t->slot ||
      memcmp(r->run_id, "crash", sizeof("crash")) != 0 ||
      r->manifest_length != sizeof(t->manifest) || r->layout_length != t->layout_length)
    return "a record with other fields is accepted";
  if (memcmp(base + r->layout_offset, t->layout, t->layout_length) != 0)
    return "another layout table is accepted";
  if (memcmp(base + r->manifest_offset, &t->manifest, sizeof(t->manifest)) != 0)
    return "another manifest is accepted";
  return NULL;
}

static void look_at_slot(const lck_region *region, const bed *b, const unsigned char *base,
                         const lck_record *record, outcome *out) {
  const truth *t = &b->truths[record->sequence % SEQUENCES];
  unsigned char bytes[PAYLOAD_MOST];
  const char *wrong = compare_tables(base, record, t);
  if (record->sequence > out->by_order)
    out->by_order = record->sequence;
  if (wrong != NULL) {
    out->wrong = out->by_luck = wrong;
    return;
  }
  int same = same_payload(base, t);
  if (!same)
    out->by_luck = "torn payload under a valid record";
  if (fetch(region, (const manifest *)(const void *)(base + record->manifest_offset), bytes) != 0) {
    out->torn++;
    return;
  }
  uint64_t length = 0;
  for (uint32_t i = 0; i < EXTENTS; i++)
    length += t->manifest.extents[i].length;
  if (!same || memcmp(bytes, t->payload, length) != 0)
    out->wrong = "other payload is accepted";
  if (record->sequence > out->by_checksum)
    out->by_checksum = record->sequence;
}

/* Of the newest timeline, or of the ancestor that it continues. */
static void look_at_mark(const lck_region_info *info, const lck_record *record, seen *slot) {
  if (record->timeline == info->timeline ||
      (info->lineage_count > 0 && record->timeline == info->lineage[0].timeline))
    *slot = (seen){record->sequence, record->timeline, (record->flags & LCK_RECORD_SUSPECT) != 0};
}

void recover(int fd, int lock_fd, uint32_t flags, const bed *b, outcome *out) {
  lck_region *region;
  lck_region_info info;
  memset(out, 0, sizeof(*out));
  out->opened = lck_region_open(fd, lock_fd, flags, -1, &region);
  if (out->opened != 0)
    return;
  if (lck_region_describe(region, &info) != 0)
    DIE("%s", lck_last_error());
  out->timeline = info.timeline;
  out->segments = info.segment_count;
  out->suspect = info.suspect;
  for (uint32_t slot = 0; slot < info.slot_count; slot++) {
    lck_record record;
    int rc = lck_slot_read(region, slot, &record);
    if (rc == 0) {
      look_at_slot(region, b, info.base, &record, out);
      look_at_mark(&info, &record, &out->slots[slot]);
    } else if (rc == LCK_E_CORRUPT) {
      out->rejected++;
    } else if (rc != LCK_E_EMPTY) {
      out->wrong = out->by_luck = "a slot cannot be read";
    }
  }
  entries_recover(region, b, &info, out);
  if (lck_region_close(region) != 0)
    DIE("%s", lck_last_error());
}

/* A mark covers what it was made for, and stays. */
static const char *judge_marks(const bed *b, const outcome *out, const bounds *within) {
  for (int slot = 0; slot < 2; slot++) {
    const seen *s = &out->slots[slot];
    uint64_t first = b->suspects[s->timeline % TIMELINES];
    int covered = s->timeline != 0 && first != 0 && s->sequence >= first;
    if (s->suspect && !(covered && s->timeline <= within->suspect_started))
      return "a snapshot is suspect that was never marked";
    if (covered && !s->suspect && s->timeline <= within->suspect_acked)
      return "an acknowledged mark is lost";
  }
  return NULL;
}

/* A dirty shutdown may lose what it has lost, as long as that is found out. */
static const char *judge_lost(const bed *b, const outcome *out, const bounds *within,
                              const losses *lost) {
  if (out->opened != 0) /* headers of remains may come back: no region, as before */
    return lost->superblocks || (within->segments_acked == 0 && out->opened == LCK_E_FORMAT)
               ? NULL
               : "the region does not open";
  if (out->wrong != NULL)
    return out->wrong;
  if (out->by_checksum > within->started)
    return "a snapshot that was never begun is recovered";
  int touched = within->acked && lost->slots >> b->truths[within->acked % SEQUENCES].slot & 1;
  if (out->by_checksum < within->acked && !touched && !lost->superblocks)
    return "an acknowledged snapshot is lost that lost no line";
  const char *wrong = lost->superblocks ? NULL : judge_marks(b, out, within);
  if (wrong != NULL)
    return wrong;
  return entries_judge(b, out, within, lost->journal || lost->superblocks);
}

const char *judge(const bed *b, const outcome *out, const bounds *within, const losses *lost,
                  int ignoring) {
  if (lost->lines > 0)
    return ignoring ? NULL : judge_lost(b, out, within, lost);
  if (out->opened != 0)
    return within->segments_acked == 0 && out->opened == LCK_E_FORMAT ? NULL
                                                                      : "the region does not open";
  if (ignoring && out->by_luck != NULL)
    return out->by_luck;
  if (ignoring && out->rejected > 0)
    return "a published record that does not hold";
  if (!ignoring && out->wrong != NULL)
    return out->wrong;
  uint64_t found = ignoring ? out->by_order : out->by_checksum;
  if (found < within->acked)
    return "an acknowledged snapshot is lost";
  if (found > within->started)
    return "a snapshot that was never begun is recovered";
  if (out->timeline < within->timeline_acked || out->timeline > within->timeline_started)
    return "another timeline than the last one begun";
  if (out->segments < within->segments_acked || out->segments > within->segments_started)
    return "another number of segments than the last one grown";
  const char *wrong = judge_marks(b, out, within);
  if (wrong != NULL)
    return wrong;
  if (ignoring)
    return on_pages(b->medium) ? NULL : out->entry_by_luck;
  return entries_judge(b, out, within, on_pages(b->medium));
}
