/* The boundary journal under test: entries that the driver writes, and what recovery may find. */
#include <string.h>

#include "crash.h"

/* All of an entry but its timeline follows from its number, which stands in `step`. */
static uint64_t length_of(uint64_t number) {
  uint64_t random = number;
  uint64_t most = draw_below(&random, 4) == 0 ? ENTRY_MOST + 1 : 300;
  return draw_below(&random, most);
}

static uint32_t kind_of(uint64_t number) {
  static const uint32_t in_turn[] = {LCK_JOURNAL_FENCE, LCK_JOURNAL_STEP_END, LCK_JOURNAL_FORWARD};
  return in_turn[number % 3];
}

void entries_part(bed *b) {
  b->entry_timelines[++b->entries % ENTRIES] = 0;
}

void entries_write(bed *b, lck_region *region, uint64_t timeline, uint64_t most) {
  unsigned char blob[ENTRY_MOST];
  for (uint64_t count = draw_below(&b->random, most + 1); count > 0; count--) {
    uint64_t number = ++b->entries;
    lck_journal_entry entry = {
        .step = number, .timeline = timeline, .length = length_of(number), .kind = kind_of(number)};
    b->entry_timelines[number % ENTRIES] = timeline;
    fill(blob, entry.length, number);
    mark(MARK_JOURNALING, number);
    int rc = lck_journal_write(region, &entry, blob);
    if (failed(b, rc)) {
      b->now.entry_started = number;
      return;
    }
    mark(MARK_JOURNALED, number);
    b->now.entry_acked = b->now.entry_started = number;
  }
}

static int same_blob(uint64_t number, const unsigned char *blob, uint64_t length) {
  unsigned char wanted[ENTRY_MOST];
  if (length != length_of(number))
    return 0;
  fill(wanted, length, number);
  return memcmp(blob, wanted, length) == 0;
}

static const char *compare(const bed *b, const lck_journal_entry *entry, uint64_t timeline,
                           const unsigned char *blob) {
  if (entry->step == 0 || entry->step > b->entries || entry->kind != kind_of(entry->step))
    return "a journal entry that was never made is served";
  if (entry->timeline != timeline || b->entry_timelines[entry->step % ENTRIES] != timeline)
    return "a journal entry of another timeline is served";
  return same_blob(entry->step, blob, entry->length) ? NULL : "a torn journal entry is served";
}

/* What a reader that ignores checksums would take for whole. */
static const char *by_luck(const unsigned char *base) {
  for (uint32_t place = 0; place < LCK_JOURNAL_PLACES; place++) {
    const unsigned char *at =
        base + LCK_JOURNAL_OFFSET + place * LCK_JOURNAL_PLACE((uint64_t)JOURNAL_BYTES);
    journal_disk entry;
    memcpy(&entry, at, sizeof(entry));
    if (entry.sequence == 0)
      continue;
    if (entry.crc != lck_crc32c(0, &entry, offsetof(journal_disk, crc)))
      return "a published journal entry that does not hold";
    if (!same_blob(entry.step, at + sizeof(entry), entry.length))
      return "a torn blob under a valid journal entry";
  }
  return NULL;
}

void entries_recover(const lck_region *region, const bed *b, const lck_region_info *info,
                     outcome *out) {
  unsigned char blob[ENTRY_MOST];
  lck_journal_entry entry;
  out->entry_by_luck = by_luck(info->base);
  for (uint32_t i = 0, kind = 0; i < 2; i++, kind = kind_of(out->entry + 2)) {
    int rc = lck_journal_read(region, kind, &entry, blob, sizeof(blob));
    const char *wrong = rc == 0 ? compare(b, &entry, info->timeline, blob) : NULL;
    if (rc != 0 && rc != LCK_E_EMPTY && rc != LCK_E_CORRUPT)
      wrong = "the journal cannot be read";
    if (wrong != NULL)
      out->entry_wrong = wrong;
    else if (rc == 0)
      *(kind == 0 ? &out->entry : &out->before) = entry.step;
  }
}

const char *entries_judge(const bed *b, const outcome *out, const bounds *within, int may_be_lost) {
  int counts = within->entry_acked != 0 &&
               b->entry_timelines[within->entry_acked % ENTRIES] == out->timeline;
  if (out->entry_wrong != NULL)
    return out->entry_wrong;
  if (out->entry > within->entry_started)
    return "a journal entry that was never begun is served";
  if (counts && !may_be_lost && out->entry < within->entry_acked)
    return "an acknowledged journal entry is lost";
  int is_second = out->entry > 1 && b->entry_timelines[(out->entry - 1) % ENTRIES] == out->timeline;
  if (is_second && !may_be_lost && out->before != out->entry - 1)
    return "the entry before the journal's newest is lost";
  return NULL;
}
