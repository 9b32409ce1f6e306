/* journal.c -- the boundary journal: three places with an entry each; the two newer ones are never
 * touched. */
#include "journal.h"

#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "access.h"
#include "api.h"
#include "error.h"
#include "kernel.h"
#include "mutant.h"
#include "persist.h"
#include "superblock.h"

#define READ_ATTEMPTS 64

enum state {
  WHOLE,
  ABSENT,  /* empty, or of another region, timeline or kind */
  DAMAGED, /* with error text */
  MOVED,   /* rewritten while it was read */
};

static uint64_t place_offset(const superblock_disk *super, uint32_t place) {
  return super->journal_offset + place * LCK_JOURNAL_PLACE(super->journal_length);
}

/* Readers take as much memory as an entry says it has bytes: as of tables, there is a limit. */
static uint64_t capacity(const superblock_disk *super) {
  uint64_t place = LCK_JOURNAL_PLACE(super->journal_length);
  uint64_t room = place == 0 ? 0 : place - sizeof(journal_disk);
  return room < LCK_TABLE_LIMIT ? room : LCK_TABLE_LIMIT;
}

static int is_kind(uint32_t kind) {
  return kind >= LCK_JOURNAL_STEP_END && kind <= LCK_JOURNAL_FENCE;
}

static uint32_t entry_crc(const journal_disk *entry) {
  return lck_crc32c(0, entry, offsetof(journal_disk, crc));
}

/* ---- read --------------------------------------------------------------------------------- */

/* The owner may be another process that stores meanwhile. Loads that acquire keep their order, so
 * that a sequence word that has not changed afterwards vouches for all that came before it. */
static void load_words(void *to, const unsigned char *from, uint64_t length) {
  for (uint64_t at = 0; at < length; at += sizeof(uint64_t)) {
    uint64_t word = __atomic_load_n((const uint64_t *)(const void *)(from + at), __ATOMIC_ACQUIRE);
    uint64_t left = length - at;
    memcpy((unsigned char *)to + at, &word, left < sizeof(word) ? left : sizeof(word));
  }
}

static enum state judge(const superblock_disk *super, uint32_t place, const journal_disk *entry) {
  if (entry->sequence == 0)
    return ABSENT;
  if (entry->crc != entry_crc(entry)) {
    (void)lck_fail(LCK_E_CORRUPT, "journal place %u: entry has CRC %08x, expected %08x", place,
                   entry_crc(entry), entry->crc);
    return DAMAGED;
  }
  if (memcmp(entry->uuid, super->uuid, sizeof(entry->uuid)) != 0)
    return ABSENT;
  uint64_t sequence = entry->sequence ^ LCK_PUBLISHED; /* far too high without that bit */
  if (sequence == 0 || sequence > LCK_COUNT_LIMIT || entry->step > LCK_COUNT_LIMIT ||
      !is_kind(entry->kind)) {
    (void)lck_fail(LCK_E_CORRUPT,
                   "journal place %u: sequence %" PRIu64 ", step %" PRIu64 " (both at most %" PRIu64
                   "), kind %u",
                   place, sequence, entry->step, LCK_COUNT_LIMIT, entry->kind);
    return DAMAGED;
  }
  if (entry->magic == LCK_JOURNAL_MAGIC && entry->version == LCK_FORMAT_VERSION &&
      entry->place == place && entry->length <= capacity(super))
    return WHOLE;
  (void)lck_fail(LCK_E_CORRUPT,
                 "journal place %u: magic %08x version %u place %u length %" PRIu64
                 ", expected %08x, %u, %u and at most %" PRIu64,
                 place, entry->magic, entry->version, entry->place, entry->length,
                 LCK_JOURNAL_MAGIC, LCK_FORMAT_VERSION, place, capacity(super));
  return DAMAGED;
}

static int moved(const lck_region *region, const superblock_disk *super, uint32_t place,
                 uint64_t sequence) {
  uint64_t now;
  load_words(&now, region->base + place_offset(super, place), sizeof(now));
  return now != sequence;
}

static enum state read_entry(const lck_region *region, const superblock_disk *super, uint32_t place,
                             journal_disk *out) {
  load_words(out, region->base + place_offset(super, place), sizeof(*out));
  enum state state = judge(super, place, out);
  return state != ABSENT && moved(region, super, place, out->sequence) ? MOVED : state;
}

/* Sums what it gives, not what it finds: both could differ while the owner writes. */
static enum state read_blob(const lck_region *region, const superblock_disk *super, uint32_t place,
                            const journal_disk *entry, unsigned char *blob) {
  const unsigned char *from = region->base + place_offset(super, place) + sizeof(journal_disk);
  unsigned char piece[4096];
  uint32_t crc = 0;
  for (uint64_t at = 0, part; at < entry->length; at += part) {
    part = entry->length - at < sizeof(piece) ? entry->length - at : sizeof(piece);
    load_words(piece, from + at, part);
    crc = lck_crc32c(crc, piece, part);
    if (blob != NULL)
      memcpy(blob + at, piece, part);
  }
  if (moved(region, super, place, entry->sequence))
    return MOVED;
  if (crc == entry->blob_crc)
    return WHOLE;
  (void)lck_fail(LCK_E_CORRUPT,
                 "journal place %u: the blob of step %" PRIu64 " has CRC %08x, expected %08x",
                 place, entry->step, crc, entry->blob_crc);
  return DAMAGED;
}

typedef struct request {
  uint32_t kind; /* 0: any */
  int any_timeline;
  unsigned char *blob;
  uint64_t room;
} request;

static int serves(const superblock_disk *super, const request *wanted, const journal_disk *entry) {
  return (wanted->kind == 0 || wanted->kind == entry->kind) &&
         (wanted->any_timeline || entry->timeline == super->timeline);
}

/* Words read as 0, one after the other, say that there is no entry only if they were 0 at once: an
 * owner may have finished the first place and begun the second in between. Without one all headers
 * stay as they are. Beside one, each look that finds all words 0 again is a write later in every
 * place, and a header lasts for one write: it can look the same twice, never three times. */
static int are_still(const lck_region *region, const superblock_disk *super,
                     const journal_disk seen[LCK_JOURNAL_PLACES]) {
  journal_disk now;
  for (uint32_t i = 0; i < 2 * LCK_JOURNAL_PLACES; i++) {
    uint32_t place = i % LCK_JOURNAL_PLACES;
    load_words(&now, region->base + place_offset(super, place), sizeof(now));
    if (memcmp(&now, &seen[place], sizeof(now)) != 0)
      return 0;
  }
  return 1;
}

/* LCK_JOURNAL_PLACES if none is whole. */
static uint32_t newest_of(const journal_disk *entries, const enum state *states) {
  uint32_t newest = LCK_JOURNAL_PLACES;
  for (uint32_t i = 0; i < LCK_JOURNAL_PLACES; i++)
    if (states[i] == WHOLE &&
        (newest == LCK_JOURNAL_PLACES || entries[i].sequence > entries[newest].sequence))
      newest = i;
  return newest;
}

/* The newest whole entry that serves; an older one where the newest is damaged. A blob that does
 * not fit is left alone and not verified. */
static enum state read_newest(const lck_region *region, const superblock_disk *super,
                              const request *wanted, journal_disk *out, uint32_t *place) {
  journal_disk entries[LCK_JOURNAL_PLACES];
  enum state states[LCK_JOURNAL_PLACES];
  int damaged = 0, empty = 1;
  for (uint32_t i = 0; i < LCK_JOURNAL_PLACES; i++) {
    states[i] = read_entry(region, super, i, &entries[i]);
    if (states[i] == MOVED)
      return MOVED;
    damaged |= states[i] == DAMAGED;
    empty &= entries[i].sequence == 0;
    if (states[i] == WHOLE && !serves(super, wanted, &entries[i]))
      states[i] = ABSENT;
  }
  if (empty && !are_still(region, super, entries))
    return MOVED;
  while ((*place = newest_of(entries, states)) < LCK_JOURNAL_PLACES) {
    *out = entries[*place];
    if (wanted->blob != NULL && out->length > wanted->room)
      return WHOLE;
    enum state state = read_blob(region, super, *place, out, wanted->blob);
    if (state != DAMAGED)
      return state;
    states[*place] = DAMAGED;
    damaged = 1;
  }
  return damaged ? DAMAGED : ABSENT;
}

typedef struct search {
  const lck_region *region;
  const superblock_disk *super;
  const request *wanted;
  journal_disk entry;
  uint32_t place;
  enum state state;
  uint64_t sequence;
} search;

static void look_for_newest(void *argument) {
  search *at = argument;
  at->state = read_newest(at->region, at->super, at->wanted, &at->entry, &at->place);
}

/* The owner of a region that is read only may have begun another timeline since it was opened; or
 * there is another region on the device, whose journal may be longer than what is mapped here. */
static int current_superblock(const lck_region *region, superblock_disk *super) {
  const superblock_disk opened = lck_superblock_copy(region);
  *super = opened;
  int rc = region->flags & LCK_READ_ONLY ? lck_superblock_read(region, super) : 0;
  if (rc == 0 && (memcmp(super->uuid, opened.uuid, sizeof(super->uuid)) != 0 ||
                  super->journal_length != opened.journal_length))
    return lck_fail(LCK_E_CORRUPT, "another region was made there since this one was opened");
  return rc;
}

static int read_attempt(const lck_region *region, const request *wanted, journal_disk *out,
                        enum state *state) {
  superblock_disk super;
  search at = {.region = region, .super = &super, .wanted = wanted, .state = ABSENT};
  int rc = current_superblock(region, &super);
  if (rc == 0 && capacity(&super) > 0)
    rc = lck_access_run(region, look_for_newest, &at);
  if (rc != 0)
    return rc;
  *state = at.state;
  *out = at.entry;
  if (*state == ABSENT)
    return lck_fail(LCK_E_EMPTY, "the journal holds no entry of timeline %" PRIu64, super.timeline);
  return *state == DAMAGED ? LCK_E_CORRUPT : 0;
}

LCK_API int lck_journal_read(const lck_region *region, uint32_t kind, lck_journal_entry *out,
                             void *blob, uint64_t room) {
  journal_disk entry = {0};
  request wanted = {.kind = kind, .blob = blob, .room = room};
  enum state state = MOVED;
  int rc = lck_region_alive(region);
  if (rc == 0 && (out == NULL || kind > LCK_JOURNAL_FENCE))
    rc = lck_fail(LCK_E_INVALID, "out is NULL or kind %u is unknown", kind);
  for (int attempt = 0; rc == 0 && state == MOVED; attempt++) {
    if (attempt == READ_ATTEMPTS)
      return lck_fail(LCK_E_LEASED, "the journal was rewritten during each of %d attempts to read",
                      READ_ATTEMPTS);
    if (attempt > 0)
      sched_yield();
    rc = read_attempt(region, &wanted, &entry, &state);
  }
  if (rc != 0)
    return rc;
  *out = (lck_journal_entry){.step = entry.step,
                             .timeline = entry.timeline,
                             .length = entry.length,
                             .sequence = entry.sequence & ~LCK_PUBLISHED,
                             .wall_time_ns = entry.wall_time_ns,
                             .kind = entry.kind,
                             .flags = entry.flags};
  if (blob != NULL && entry.length > room)
    return lck_fail(LCK_E_FULL, "%" PRIu64 " bytes needed for the entry, %" PRIu64 " given",
                    entry.length, room);
  return 0;
}

/* ---- write -------------------------------------------------------------------------------- */

static int check_write(const superblock_disk *super, const lck_journal_entry *entry,
                       const void *blob) {
  if (entry == NULL || (blob == NULL && entry->length > 0))
    return lck_fail(LCK_E_INVALID, "entry or blob is NULL");
  if (!is_kind(entry->kind))
    return lck_fail(LCK_E_INVALID, "journal entry of unknown kind %u", entry->kind);
  if (entry->step > LCK_COUNT_LIMIT)
    return lck_fail(LCK_E_INVALID, "journal entry of step %" PRIu64 ", at most %" PRIu64,
                    entry->step, LCK_COUNT_LIMIT);
  if (entry->timeline != super->timeline)
    return lck_fail(LCK_E_INVALID,
                    "journal entry of timeline %" PRIu64 ", the region is in %" PRIu64,
                    entry->timeline, super->timeline);
  if (capacity(super) == 0)
    return lck_fail(LCK_E_FULL,
                    "the region has no journal: %" PRIu64 " bytes needed, %" PRIu64
                    " reserved when it was made",
                    LCK_JOURNAL_PLACES * LCK_HEADER_PAGE, super->journal_length);
  if (entry->length > capacity(super))
    return lck_fail(LCK_E_FULL,
                    "%" PRIu64 " bytes needed for the journal entry of step %" PRIu64 ", %" PRIu64
                    " there",
                    entry->length, entry->step, capacity(super));
  return 0;
}

/* Once per handle: where the newest entry is, and the highest sequence, of any timeline. What a
 * predecessor left in caches is durable by now (lck_persist_adopt). */
static void look_for_highest(void *argument) {
  search *at = argument;
  journal_disk entry;
  look_for_newest(at);
  if (at->state != WHOLE)
    at->place = LCK_JOURNAL_PLACES - 1;
  for (uint32_t place = 0; place < LCK_JOURNAL_PLACES; place++)
    if (read_entry(at->region, at->super, place, &entry) == WHOLE &&
        (entry.sequence & ~LCK_PUBLISHED) > at->sequence)
      at->sequence = entry.sequence & ~LCK_PUBLISHED;
}

static int find_newest(lck_region *region, const superblock_disk *super) {
  request any = {.any_timeline = 1};
  search at = {.region = region, .super = super, .wanted = &any};
  int rc = lck_access_run(region, look_for_highest, &at);
  if (rc == 0)
    region->journal = (lck_journal){.sequence = at.sequence, .newest = at.place};
  return rc;
}

static journal_disk compose(const superblock_disk *super, const lck_journal_entry *entry,
                            const void *blob, uint32_t place, uint64_t sequence) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  journal_disk block = {
      .sequence = sequence | LCK_PUBLISHED,
      .magic = LCK_JOURNAL_MAGIC,
      .version = LCK_FORMAT_VERSION,
      .step = entry->step,
      .timeline = entry->timeline,
      .length = entry->length,
      .kind = entry->kind,
      .flags = entry->flags | (entry->kind == LCK_JOURNAL_FORWARD ? 0 : LCK_RECORD_EARLY),
      .blob_crc = lck_crc32c(0, blob, entry->length),
      .place = place,
      .wall_time_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec,
  };
  memcpy(block.uuid, super->uuid, sizeof(block.uuid));
  block.crc = entry_crc(&block);
  return block;
}

/* The oldest; a fence's that is written again goes over itself: the step before keeps its two. */
static uint32_t expendable(const lck_region *region, const lck_journal_entry *entry) {
  const lck_journal *last = &region->journal;
  if (LCK_MUTANT(MUTANT_JOURNAL_NEWEST))
    return region->journal.newest;
  if (LCK_MUTANT(MUTANT_JOURNAL_OVER_END) && entry->kind == LCK_JOURNAL_FORWARD)
    return region->journal.newest;
  if (LCK_MUTANT(MUTANT_JOURNAL_SECOND))
    return region->journal.newest == 0; /* two places only */
  if (entry->kind == LCK_JOURNAL_FENCE && last->kind == entry->kind && last->step == entry->step)
    return last->newest;
  return (region->journal.newest + 1) % LCK_JOURNAL_PLACES;
}

/* Written in the order of a commit, without syncs. The place's word is 0, durably where a fence
 * makes durable, before another byte of it changes; entry and blob are so before the word is
 * published. Meanwhile the other places stay. On page media nothing orders these on the medium, and
 * the CRCs over entry and blob find every mixture of old and new sectors; processes see the stores
 * in this order anyway. */
LCK_API int lck_journal_write(lck_region *region, const lck_journal_entry *entry,
                              const void *blob) {
  int rc = lck_region_writable(region);
  if (rc != 0)
    return rc;
  superblock_disk super = lck_superblock_copy(region);
  rc = check_write(&super, entry, blob);
  if (rc == 0 && region->journal.sequence == 0)
    rc = find_newest(region, &super);
  if (rc != 0)
    return rc;
  uint32_t place = expendable(region, entry);
  uint64_t at = place_offset(&super, place);
  journal_disk block = compose(&super, entry, blob, place, region->journal.sequence + 1);
  uint64_t word = block.sequence;

  if (!LCK_MUTANT(MUTANT_JOURNAL_KEPT_VALID)) {
    rc = lck_persist_publish(region, at, 0);
    lck_persist_fence();
  }
  if (rc == 0)
    rc = (LCK_MUTANT(MUTANT_JOURNAL_UNFLUSHED) ? lck_mutant_store : lck_persist_store)(
        region, at + sizeof(block), blob, entry->length);
  block.sequence = LCK_MUTANT(MUTANT_JOURNAL_KEPT_VALID) ? word : 0;
  if (rc == 0)
    rc = lck_persist_store(region, at, &block, sizeof(block));
  if (!LCK_MUTANT(MUTANT_JOURNAL_UNFENCED))
    lck_persist_fence();
  if (rc == 0)
    rc = lck_persist_publish(region, at, word);
  if (!LCK_MUTANT(MUTANT_JOURNAL_ACKED_EARLY))
    lck_persist_fence();
  if (rc == 0)
    region->journal = (lck_journal){region->journal.sequence + 1, entry->step, place, entry->kind};
  return rc;
}

/* ---- create ------------------------------------------------------------------------------- */

int lck_journal_blank(lck_region *region, const superblock_disk *super) {
  static const journal_disk blank;
  int rc = 0;
  for (uint32_t place = 0; place < LCK_JOURNAL_PLACES && capacity(super) > 0 && rc == 0; place++)
    rc = lck_persist_store(region, place_offset(super, place), &blank, sizeof(blank));
  lck_persist_fence(); /* a half-blank one beside a superblock would look like damage */
  return rc;
}
