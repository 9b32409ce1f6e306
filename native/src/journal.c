/* The boundary journal: two halves with an entry each, of which the newer one is never touched. */
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

static uint64_t half_offset(const superblock_disk *super, uint32_t half) {
  return super->journal_offset + half * LCK_JOURNAL_HALF(super->journal_length);
}

/* Readers take as much memory as an entry says it has bytes: as of tables, there is a limit. */
static uint64_t capacity(const superblock_disk *super) {
  uint64_t half = LCK_JOURNAL_HALF(super->journal_length);
  uint64_t room = half == 0 ? 0 : half - sizeof(journal_disk);
  return room < LCK_TABLE_LIMIT ? room : LCK_TABLE_LIMIT;
}

static int is_kind(uint32_t kind) {
  return kind == LCK_JOURNAL_STEP_END || kind == LCK_JOURNAL_FORWARD;
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

static enum state judge(const superblock_disk *super, uint32_t half, const journal_disk *entry) {
  if (entry->sequence == 0)
    return ABSENT;
  if (entry->crc != entry_crc(entry)) {
    (void)lck_fail(LCK_E_CORRUPT, "journal half %u: entry has CRC %08x, expected %08x", half,
                   entry_crc(entry), entry->crc);
    return DAMAGED;
  }
  if (memcmp(entry->uuid, super->uuid, sizeof(entry->uuid)) != 0)
    return ABSENT;
  uint64_t sequence = entry->sequence ^ LCK_PUBLISHED; /* far too high without that bit */
  if (sequence == 0 || sequence > LCK_COUNT_LIMIT || entry->step > LCK_COUNT_LIMIT ||
      !is_kind(entry->kind)) {
    (void)lck_fail(LCK_E_CORRUPT,
                   "journal half %u: sequence %" PRIu64 ", step %" PRIu64 " (both at most %" PRIu64
                   "), kind %u",
                   half, sequence, entry->step, LCK_COUNT_LIMIT, entry->kind);
    return DAMAGED;
  }
  if (entry->magic == LCK_JOURNAL_MAGIC && entry->version == LCK_FORMAT_VERSION &&
      entry->half == half && entry->length <= capacity(super))
    return WHOLE;
  (void)lck_fail(LCK_E_CORRUPT,
                 "journal half %u: magic %08x version %u half %u length %" PRIu64
                 ", expected %08x, %u, %u and at most %" PRIu64,
                 half, entry->magic, entry->version, entry->half, entry->length, LCK_JOURNAL_MAGIC,
                 LCK_FORMAT_VERSION, half, capacity(super));
  return DAMAGED;
}

static int moved(const lck_region *region, const superblock_disk *super, uint32_t half,
                 uint64_t sequence) {
  uint64_t now;
  load_words(&now, region->base + half_offset(super, half), sizeof(now));
  return now != sequence;
}

static enum state read_entry(const lck_region *region, const superblock_disk *super, uint32_t half,
                             journal_disk *out) {
  load_words(out, region->base + half_offset(super, half), sizeof(*out));
  enum state state = judge(super, half, out);
  return state != ABSENT && moved(region, super, half, out->sequence) ? MOVED : state;
}

/* Sums what it gives, not what it finds: both could differ while the owner writes. */
static enum state read_blob(const lck_region *region, const superblock_disk *super, uint32_t half,
                            const journal_disk *entry, unsigned char *blob) {
  const unsigned char *from = region->base + half_offset(super, half) + sizeof(journal_disk);
  unsigned char piece[4096];
  uint32_t crc = 0;
  for (uint64_t at = 0, part; at < entry->length; at += part) {
    part = entry->length - at < sizeof(piece) ? entry->length - at : sizeof(piece);
    load_words(piece, from + at, part);
    crc = lck_crc32c(crc, piece, part);
    if (blob != NULL)
      memcpy(blob + at, piece, part);
  }
  if (moved(region, super, half, entry->sequence))
    return MOVED;
  if (crc == entry->blob_crc)
    return WHOLE;
  (void)lck_fail(LCK_E_CORRUPT,
                 "journal half %u: the blob of step %" PRIu64 " has CRC %08x, expected %08x", half,
                 entry->step, crc, entry->blob_crc);
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

/* Two words read as 0, one after the other, say that there is no entry only if they were 0 at once:
 * an owner may have finished the first half and begun the second in between. Without one both
 * headers stay as they are. Beside one, each look that finds both words 0 again is a write later in
 * either half, and a header lasts for one write: it can look the same twice, never three times. */
static int are_still(const lck_region *region, const superblock_disk *super,
                     const journal_disk seen[LCK_JOURNAL_HALVES]) {
  journal_disk now;
  for (uint32_t i = 0; i < 2 * LCK_JOURNAL_HALVES; i++) {
    uint32_t half = i % LCK_JOURNAL_HALVES;
    load_words(&now, region->base + half_offset(super, half), sizeof(now));
    if (memcmp(&now, &seen[half], sizeof(now)) != 0)
      return 0;
  }
  return 1;
}

/* The newest whole entry that serves; an older one where the newest is damaged. A blob that does
 * not fit is left alone and not verified. */
static enum state read_newest(const lck_region *region, const superblock_disk *super,
                              const request *wanted, journal_disk *out, uint32_t *half) {
  journal_disk entries[LCK_JOURNAL_HALVES];
  enum state states[LCK_JOURNAL_HALVES];
  int damaged = 0;
  for (uint32_t i = 0; i < LCK_JOURNAL_HALVES; i++) {
    states[i] = read_entry(region, super, i, &entries[i]);
    if (states[i] == MOVED)
      return MOVED;
    damaged |= states[i] == DAMAGED;
    if (states[i] == WHOLE && !serves(super, wanted, &entries[i]))
      states[i] = ABSENT;
  }
  if (entries[0].sequence == 0 && entries[1].sequence == 0)
    return are_still(region, super, entries) ? ABSENT : MOVED;
  uint32_t first =
      states[1] == WHOLE && (states[0] != WHOLE || entries[1].sequence > entries[0].sequence);
  for (uint32_t i = 0; i < LCK_JOURNAL_HALVES; i++) {
    *half = i == 0 ? first : 1 - first;
    *out = entries[*half];
    if (states[*half] != WHOLE)
      continue;
    if (wanted->blob != NULL && out->length > wanted->room)
      return WHOLE;
    enum state state = read_blob(region, super, *half, out, wanted->blob);
    if (state != DAMAGED)
      return state;
    damaged = 1;
  }
  return damaged ? DAMAGED : ABSENT;
}

typedef struct look {
  const lck_region *region;
  const superblock_disk *super;
  const request *wanted;
  journal_disk entry;
  uint32_t half;
  enum state state;
  uint64_t sequence;
} look;

static void look_for_newest(void *argument) {
  look *at = argument;
  at->state = read_newest(at->region, at->super, at->wanted, &at->entry, &at->half);
}

/* The owner of a region that is read only may have begun another timeline since it was opened. */
static int current_superblock(const lck_region *region, superblock_disk *super) {
  if (region->flags & LCK_READ_ONLY)
    return lck_superblock_read(region, super);
  *super = lck_superblock_copy(region);
  return 0;
}

static int read_attempt(const lck_region *region, const request *wanted, journal_disk *out,
                        enum state *state) {
  superblock_disk super;
  look at = {.region = region, .super = &super, .wanted = wanted, .state = ABSENT};
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
  if (rc == 0 && (out == NULL || kind > LCK_JOURNAL_FORWARD))
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
                    LCK_JOURNAL_HALVES * LCK_HEADER_PAGE, super->journal_length);
  if (entry->length > capacity(super))
    return lck_fail(LCK_E_FULL,
                    "%" PRIu64 " bytes needed for the journal entry of step %" PRIu64 ", %" PRIu64
                    " there",
                    entry->length, entry->step, capacity(super));
  return 0;
}

/* Once per handle: which half must stay, and the highest sequence, of any timeline. What a
 * predecessor left in caches is durable by now (lck_persist_adopt). */
static void look_for_highest(void *argument) {
  look *at = argument;
  journal_disk entry;
  look_for_newest(at);
  if (at->state != WHOLE)
    at->half = 1;
  for (uint32_t half = 0; half < LCK_JOURNAL_HALVES; half++)
    if (read_entry(at->region, at->super, half, &entry) == WHOLE &&
        (entry.sequence & ~LCK_PUBLISHED) > at->sequence)
      at->sequence = entry.sequence & ~LCK_PUBLISHED;
}

static int find_newest(lck_region *region, const superblock_disk *super) {
  request any = {.any_timeline = 1};
  look at = {.region = region, .super = super, .wanted = &any};
  int rc = lck_access_run(region, look_for_highest, &at);
  if (rc == 0)
    region->journal = (lck_journal){.sequence = at.sequence, .newest = at.half};
  return rc;
}

static journal_disk compose(const superblock_disk *super, const lck_journal_entry *entry,
                            const void *blob, uint32_t half, uint64_t sequence) {
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
      .flags = entry->flags | (entry->kind == LCK_JOURNAL_STEP_END ? LCK_RECORD_EARLY : 0),
      .blob_crc = lck_crc32c(0, blob, entry->length),
      .half = half,
      .wall_time_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec,
  };
  memcpy(block.uuid, super->uuid, sizeof(block.uuid));
  block.crc = entry_crc(&block);
  return block;
}

/* The half that may go: never the one with the newest entry. */
static uint32_t expendable(const lck_region *region, const lck_journal_entry *entry) {
  if (LCK_MUTANT(MUTANT_JOURNAL_NEWEST))
    return region->journal.newest;
  if (LCK_MUTANT(MUTANT_JOURNAL_OVER_END) && entry->kind == LCK_JOURNAL_FORWARD)
    return region->journal.newest;
  (void)entry;
  return 1 - region->journal.newest;
}

/* As a commit, without syncs. The half's word is 0, durably where a fence makes durable, before
 * another byte of it changes; entry and blob are so before the word is published. Meanwhile the
 * other half stays. On page media nothing orders these on the medium, and the CRCs over entry and
 * blob find every mixture of old and new sectors; processes see the stores in this order anyway. */
LCK_API int lck_journal_write(lck_region *region, const lck_journal_entry *entry,
                              const void *blob) {
  int rc = lck_region_writable(region);
  if (rc != 0)
    return rc;
  superblock_disk super = lck_superblock_copy(region);
  rc = check_write(&super, entry, blob);
  if (rc != 0)
    return rc;
  if (region->journal.sequence == 0)
    rc = find_newest(region, &super);
  if (rc != 0)
    return rc;
  uint32_t half = expendable(region, entry);
  uint64_t at = half_offset(&super, half);
  journal_disk block = compose(&super, entry, blob, half, region->journal.sequence + 1);
  uint64_t word = block.sequence;

  if (!LCK_MUTANT(MUTANT_JOURNAL_KEPT_VALID)) {
    rc = lck_persist_publish(region, at, 0);
    lck_persist_fence(region);
  }
  if (rc == 0)
    rc = (LCK_MUTANT(MUTANT_JOURNAL_UNFLUSHED) ? lck_mutant_store : lck_persist_store)(
        region, at + sizeof(block), blob, entry->length);
  block.sequence = LCK_MUTANT(MUTANT_JOURNAL_KEPT_VALID) ? word : 0;
  if (rc == 0)
    rc = lck_persist_store(region, at, &block, sizeof(block));
  if (!LCK_MUTANT(MUTANT_JOURNAL_UNFENCED))
    lck_persist_fence(region);
  if (rc == 0)
    rc = lck_persist_publish(region, at, word);
  if (!LCK_MUTANT(MUTANT_JOURNAL_ACKED_EARLY))
    lck_persist_fence(region);
  if (rc == 0)
    region->journal = (lck_journal){.sequence = region->journal.sequence + 1, .newest = half};
  return rc;
}

/* ---- create ------------------------------------------------------------------------------- */

int lck_journal_blank(lck_region *region, const superblock_disk *super) {
  static const journal_disk blank;
  int rc = 0;
  for (uint32_t half = 0; half < LCK_JOURNAL_HALVES && capacity(super) > 0 && rc == 0; half++)
    rc = lck_persist_store(region, half_offset(super, half), &blank, sizeof(blank));
  lck_persist_fence(region); /* a half-blank one beside a superblock would look like damage */
  return rc;
}
