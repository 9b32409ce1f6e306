/* superblock.c -- checking, choosing and rewriting the two copies of the superblock. */
#include "superblock.h"

#include <inttypes.h>
#include <sched.h>
#include <string.h>

#include "access.h"
#include "error.h"
#include "kernel.h"
#include "medium.h"
#include "mutant.h"
#include "persist.h"
#include "space.h"

#define COPY_BYTES sizeof(superblock_disk)
#define READ_ATTEMPTS 16

enum verdict { WHOLE, FOREIGN, BLANK, OTHER_VERSION, DAMAGED };

static uint32_t superblock_crc(const superblock_disk *super) {
  return lck_crc32c(0, super, offsetof(superblock_disk, crc));
}

static int is_blank(const superblock_disk *super) {
  static const superblock_disk blank;
  return memcmp(super, &blank, sizeof(blank)) == 0;
}

static enum verdict judge(const superblock_disk *super) {
  if (super->magic != LCK_SUPERBLOCK_MAGIC)
    return is_blank(super) ? BLANK : FOREIGN;
  if (super->version != LCK_FORMAT_VERSION)
    return OTHER_VERSION;
  return super->bytes == COPY_BYTES && super->crc == superblock_crc(super) ? WHOLE : DAMAGED;
}

/* ---- bounds ------------------------------------------------------------------------------- */

/* A right CRC does not make a length true: a bug or a forger may have written it. */
static int check_segments(const superblock_disk *super) {
  uint64_t end = super->journal_offset + super->journal_length;
  for (uint32_t i = 0; i < super->segment_count; i++) {
    const segment_disk *segment = &super->segments[i];
    if (segment->offset % LCK_GRANULE != 0 || segment->length % LCK_GRANULE != 0 ||
        segment->length == 0)
      return lck_fail(LCK_E_CORRUPT,
                      "segment %u: offset %" PRIu64 " and length %" PRIu64
                      " must be multiples of %" PRIu64,
                      i, segment->offset, segment->length, LCK_GRANULE);
    if (segment->offset < end || segment->offset > super->size ||
        segment->length > super->size - segment->offset)
      return lck_fail(LCK_E_CORRUPT,
                      "segment %u: [%" PRIu64 ", +%" PRIu64 ") is not within [%" PRIu64 ", %" PRIu64
                      ")",
                      i, segment->offset, segment->length, end, super->size);
    if (segment->slot_bytes == 0 || segment->slot_bytes % LCK_HEADER_PAGE != 0 ||
        segment->slot_bytes > segment->length / super->slot_count)
      return lck_fail(LCK_E_CORRUPT,
                      "segment %u: %u slots of %" PRIu64 " bytes do not fit in %" PRIu64, i,
                      super->slot_count, segment->slot_bytes, segment->length);
    end = segment->offset + segment->length;
  }
  return 0;
}

static int check_bounds(const superblock_disk *super) {
  if (super->slot_count < 2 || super->slot_count > LCK_MAX_SLOTS)
    return lck_fail(LCK_E_CORRUPT, "superblock: %u slots, expected 2..%u", super->slot_count,
                    LCK_MAX_SLOTS);
  if (super->segment_count < 1 || super->segment_count > LCK_MAX_SEGMENTS)
    return lck_fail(LCK_E_CORRUPT, "superblock: %u segments, expected 1..%u", super->segment_count,
                    LCK_MAX_SEGMENTS);
  if (super->lineage_count > LCK_MAX_LINEAGE)
    return lck_fail(LCK_E_CORRUPT, "superblock: %u ancestors, at most %u", super->lineage_count,
                    LCK_MAX_LINEAGE);
  for (uint32_t i = 0; i < super->lineage_count; i++)
    if (super->lineage[i].sequence > LCK_COUNT_LIMIT)
      return lck_fail(LCK_E_CORRUPT,
                      "superblock: ancestor %u up to sequence %" PRIu64 ", at most %" PRIu64, i,
                      super->lineage[i].sequence, LCK_COUNT_LIMIT);
  if (super->size > LCK_SPACE_LIMIT || super->size % LCK_GRANULE != 0)
    return lck_fail(LCK_E_CORRUPT,
                    "superblock: size %" PRIu64 ", expected a multiple of %" PRIu64
                    " up to %" PRIu64,
                    super->size, LCK_GRANULE, LCK_SPACE_LIMIT);
  if (super->journal_offset != LCK_JOURNAL_OFFSET || super->journal_length > super->size ||
      super->journal_offset > super->size - super->journal_length)
    return lck_fail(LCK_E_CORRUPT,
                    "superblock: journal [%" PRIu64 ", +%" PRIu64
                    ") does not fit a region of %" PRIu64 " bytes",
                    super->journal_offset, super->journal_length, super->size);
  return check_segments(super);
}

/* ---- read --------------------------------------------------------------------------------- */

/* Why none of the copies serves. A torn first write beside a blank page is a creation that a crash
 * cut short; nothing was ever promised for it. */
static int refuse(const superblock_disk copies[2], const enum verdict verdicts[2]) {
  for (int i = 0; i < 2; i++)
    if (verdicts[i] == OTHER_VERSION)
      return lck_fail(
          LCK_E_FORMAT,
          "region format version %u, expected %u: another lightck wrote it; read it with"
          " that one, or remove it (lightck rm)",
          copies[i].version, LCK_FORMAT_VERSION);
  for (int i = 0; i < 2; i++)
    if (verdicts[i] == DAMAGED && verdicts[1 - i] == BLANK)
      return lck_fail(LCK_E_FORMAT, "the region's creation was never finished");
  for (int i = 0; i < 2; i++)
    if (verdicts[i] == DAMAGED)
      return lck_fail(LCK_E_CORRUPT,
                      "both superblocks are damaged: copy %d has CRC %08x, expected %08x", i,
                      copies[i].crc, superblock_crc(&copies[i]));
  return lck_fail(LCK_E_FORMAT,
                  "not a region: magic %016" PRIx64 " and %016" PRIx64 ", expected %016" PRIx64,
                  copies[0].magic, copies[1].magic, LCK_SUPERBLOCK_MAGIC);
}

static int read_once(const lck_region *region, superblock_disk *out, int *torn) {
  unsigned char pages[2 * LCK_HEADER_PAGE] = {0};
  superblock_disk copies[2];
  enum verdict verdicts[2];
  uint64_t got;
  int rc = lck_medium_read_head(region, pages, sizeof(pages), &got);
  if (rc != 0)
    return rc;
  for (int i = 0; i < 2; i++) {
    memcpy(&copies[i], pages + LCK_SUPERBLOCK_OFFSET(i), COPY_BYTES);
    verdicts[i] = judge(&copies[i]);
  }
  if (verdicts[0] != WHOLE && verdicts[1] != WHOLE) {
    *torn = verdicts[0] == DAMAGED && verdicts[1] == DAMAGED;
    if (got < sizeof(pages))
      return lck_fail(LCK_E_FORMAT, "not a region: %" PRIu64 " bytes, expected at least %" PRIu64,
                      got, LCK_JOURNAL_OFFSET + 2 * LCK_GRANULE);
    return refuse(copies, verdicts);
  }
  int best = verdicts[0] == WHOLE ? 0 : 1;
  if (verdicts[1] == WHOLE && copies[1].generation > copies[best].generation)
    best = 1;
  rc = check_bounds(&copies[best]);
  if (rc != 0 && verdicts[1 - best] == WHOLE && check_bounds(&copies[1 - best]) == 0) {
    best = 1 - best;
    rc = 0;
  }
  if (rc == 0)
    *out = copies[best];
  return rc;
}

int lck_superblock_read(const lck_region *region, superblock_disk *out) {
  int rc = LCK_E_IO;
  /* A reader beside an updating owner may meet copy 0, then copy 1, while each is being written. */
  int torn = 1;
  for (int attempt = 0; torn && attempt < READ_ATTEMPTS; attempt++) {
    torn = 0;
    rc = read_once(region, out, &torn);
    if (torn)
      sched_yield();
  }
  return rc;
}

/* ---- write -------------------------------------------------------------------------------- */

static int load_copies(const lck_region *region, superblock_disk copies[2]) {
  int rc = lck_access_load(region, LCK_SUPERBLOCK_OFFSET(0), &copies[0], COPY_BYTES);
  return rc != 0 ? rc : lck_access_load(region, LCK_SUPERBLOCK_OFFSET(1), &copies[1], COPY_BYTES);
}

int lck_superblock_twin(const lck_region *region, int *twin) {
  superblock_disk copies[2];
  int rc = load_copies(region, copies);
  if (rc == 0)
    *twin = judge(&copies[0]) == WHOLE && memcmp(&copies[0], &copies[1], COPY_BYTES) == 0;
  return rc;
}

/* The copy that would not be missed: a damaged one, else the older. */
static int expendable(const superblock_disk copies[2]) {
  if (judge(&copies[0]) != WHOLE || judge(&copies[1]) != WHOLE)
    return judge(&copies[0]) != WHOLE ? 0 : 1;
  return copies[0].generation <= copies[1].generation ? 0 : 1;
}

/* A torn copy may be all but one line of an update that recovery has given up, with the generation
 * that the next block gets: the first line of that one could complete it. So nothing is left of it,
 * durably, before another block goes there. Not zeros: a blank copy says that the region's creation
 * was never finished. */
static int wipe_torn(lck_region *region, int copy, enum verdict verdict) {
  unsigned char nothing[COPY_BYTES];
  if (verdict == WHOLE || verdict == BLANK || LCK_MUTANT(MUTANT_TORN_COPY_KEPT))
    return 0;
  memset(nothing, 0xff, sizeof(nothing));
  int rc = lck_persist_store(region, LCK_SUPERBLOCK_OFFSET(copy), nothing, sizeof(nothing));
  return rc != 0 ? rc : lck_persist_sync(region);
}

int lck_superblock_write(lck_region *region, const superblock_disk *next) {
  superblock_disk super = *next;
  superblock_disk present[2];
  int rc = load_copies(region, present);
  if (rc != 0)
    return rc;
  super.generation = region->super.generation + 1;
  super.crc = superblock_crc(&super);
  int copy =
      LCK_MUTANT(MUTANT_SUPERBLOCK_NEWER_FIRST) ? 1 - expendable(present) : expendable(present);
  for (int i = 0; i < 2; i++, copy = 1 - copy) {
    rc = wipe_torn(region, copy, judge(&present[copy]));
    if (rc == 0)
      rc = lck_persist_store(region, LCK_SUPERBLOCK_OFFSET(copy), &super, COPY_BYTES);
    if (rc != 0)
      return rc;
    if (LCK_MUTANT(MUTANT_SUPERBLOCKS_AT_ONCE) && i == 0)
      continue;
    rc = lck_persist_sync(region);
    if (rc != 0)
      return rc;
  }
  pthread_mutex_lock(&region->mutex);
  region->super = super;
  pthread_mutex_unlock(&region->mutex);
  return 0;
}

superblock_disk lck_superblock_copy(const lck_region *region) {
  /* The lock is no part of what the caller sees as const. */
  pthread_mutex_t *mutex = (pthread_mutex_t *)&region->mutex;
  pthread_mutex_lock(mutex);
  superblock_disk super = region->super;
  pthread_mutex_unlock(mutex);
  return super;
}
