/* commit.c -- the life of one slot's record: invalid before its first byte changes, valid after its
 * last. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "access.h"
#include "api.h"
#include "error.h"
#include "fault.h"
#include "kernel.h"
#include "mutant.h"
#include "persist.h"
#include "region.h"
#include "superblock.h"
#include "thread_trace.h"

#define READ_ATTEMPTS 16

static uint32_t record_crc(const record_disk *record) {
  return lck_crc32c(0, record, offsetof(record_disk, crc));
}

/* The commit thread commits while the handle's thread may write a superblock: whatever is needed of
 * it comes from a copy. */
static int check_slot(const lck_region *region, uint32_t slot) {
  superblock_disk super = lck_superblock_copy(region);
  if (slot < super.slot_count)
    return 0;
  return lck_fail(LCK_E_INVALID, "slot %u of %u", slot, super.slot_count);
}

/* ---- layout tables known to be whole ------------------------------------------------------ */

/* A snapshot may reuse the layout table that its slot holds. The table's CRC is kept from the last
 * time it was proven: computing it afresh from the medium would bless whatever is there. */
static void keep_layout(lck_region *region, uint32_t slot, uint64_t offset, uint64_t length,
                        uint32_t crc) {
  pthread_mutex_lock(&region->mutex);
  region->layouts[slot] = (lck_layout){offset, length, crc};
  pthread_mutex_unlock(&region->mutex);
}

static int layout_crc(lck_region *region, uint32_t slot, const lck_record *record,
                      const void *layout, uint32_t *crc) {
  *crc = layout == NULL ? 0 : lck_crc32c(0, layout, record->layout_length);
  if (layout != NULL || record->layout_length == 0)
    return 0;
  int rc = lck_access_sum(region, record->layout_offset, record->layout_length, crc);
  if (rc != 0)
    return rc;
  pthread_mutex_lock(&region->mutex);
  lck_layout known = region->layouts[slot];
  pthread_mutex_unlock(&region->mutex);
  if (known.length != record->layout_length || known.offset != record->layout_offset)
    return lck_fail(LCK_E_CORRUPT,
                    "slot %u: no layout table [%" PRIu64 ", +%" PRIu64
                    ") is known to be whole: write it again",
                    slot, record->layout_offset, record->layout_length);
  if (known.crc == *crc)
    return 0;
  return lck_fail(LCK_E_CORRUPT,
                  "slot %u: the layout table it holds has CRC %08x, expected %08x: write it again",
                  slot, *crc, known.crc);
}

/* ---- read --------------------------------------------------------------------------------- */

static int check_blob(const lck_region *region, uint32_t slot, const char *name, uint64_t offset,
                      uint64_t length, uint32_t expected) {
  if (length == 0 && expected == 0)
    return 0;
  if (!lck_slot_contains(region, slot, offset, length))
    return lck_fail(LCK_E_CORRUPT,
                    "slot %u: %s [%" PRIu64 ", +%" PRIu64
                    ") is outside the slot (known since generation %" PRIu64 ")",
                    slot, name, offset, length, lck_superblock_copy(region).generation);
  if (length > LCK_TABLE_LIMIT)
    return lck_fail(LCK_E_CORRUPT, "slot %u: %s has %" PRIu64 " bytes, at most %" PRIu64, slot,
                    name, length, LCK_TABLE_LIMIT);
  uint32_t found;
  int rc = lck_access_sum(region, offset, length, &found);
  if (rc != 0)
    return rc;
  if (found != expected)
    return lck_fail(LCK_E_CORRUPT, "slot %u: %s has CRC %08x, expected %08x", slot, name, found,
                    expected);
  return 0;
}

static int check_record(const lck_region *region, uint32_t slot, const record_disk *record) {
  if (record->crc != record_crc(record))
    return lck_fail(LCK_E_CORRUPT, "slot %u: record has CRC %08x, expected %08x", slot,
                    record_crc(record), record->crc);
  if (record->magic != LCK_RECORD_MAGIC || record->version != LCK_FORMAT_VERSION)
    return lck_fail(LCK_E_CORRUPT, "slot %u: record magic %08x version %u, expected %08x and %u",
                    slot, record->magic, record->version, LCK_RECORD_MAGIC, LCK_FORMAT_VERSION);
  superblock_disk super = lck_superblock_copy(region);
  if (memcmp(record->uuid, super.uuid, sizeof(record->uuid)) != 0)
    return lck_fail(LCK_E_CORRUPT, "slot %u: the record belongs to another region", slot);
  if (record->slot != slot)
    return lck_fail(LCK_E_CORRUPT, "slot %u: the record belongs to slot %u", slot, record->slot);
  uint64_t sequence = record->sequence ^ LCK_PUBLISHED; /* far too high without that bit */
  if (sequence == 0 || sequence > LCK_COUNT_LIMIT || record->step > LCK_COUNT_LIMIT)
    return lck_fail(LCK_E_CORRUPT,
                    "slot %u: sequence %" PRIu64 " and step %" PRIu64 ", expected up to %" PRIu64,
                    slot, sequence, record->step, LCK_COUNT_LIMIT);
  int rc = check_blob(region, slot, "layout table", record->layout_offset, record->layout_length,
                      record->layout_crc);
  return rc != 0 ? rc
                 : check_blob(region, slot, "manifest", record->manifest_offset,
                              record->manifest_length, record->manifest_crc);
}

/* The owner may be another process: a record that changed under the copy is read again. */
typedef struct reading {
  const uint64_t *from;
  uint64_t words[sizeof(record_disk) / sizeof(uint64_t)];
} reading;

static void read_words(void *argument) {
  reading *of = argument;
  for (int attempt = 0; attempt < READ_ATTEMPTS; attempt++) {
    for (size_t i = 0; i < sizeof(of->words) / sizeof(of->words[0]); i++)
      of->words[i] = __atomic_load_n(&of->from[i], __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&of->from[0], __ATOMIC_ACQUIRE) == of->words[0])
      break;
  }
}

static int snapshot_record(const lck_region *region, uint32_t slot, record_disk *out) {
  reading of = {.from = (const uint64_t *)(const void *)(region->base + LCK_RECORD_OFFSET(slot))};
  int rc = lck_access_run(region, read_words, &of);
  if (rc != 0)
    return rc;
  memcpy(out, of.words, sizeof(of.words));
  if (out->sequence == 0)
    return lck_fail(LCK_E_EMPTY, "slot %u holds no committed snapshot", slot);
  return 0;
}

/* Without a lease the owner may reuse the slot meanwhile. What does not hold is damage only if the
 * word is still the one that was read: the owner clears it before it changes any other byte. */
static int read_record(const lck_region *region, uint32_t slot, record_disk *out) {
  for (int attempt = 1;; attempt++) {
    int rc = snapshot_record(region, slot, out);
    if (rc == 0)
      rc = check_record(region, slot, out);
    if (rc != LCK_E_CORRUPT || attempt == READ_ATTEMPTS)
      return rc;
    uint64_t word;
    int again = lck_access_word(region, LCK_RECORD_OFFSET(slot), &word);
    if (again != 0 || word == out->sequence)
      return again != 0 ? again : rc;
  }
}

LCK_API int lck_slot_read(const lck_region *region, uint32_t slot, lck_record *out) {
  record_disk record;
  int rc = lck_region_alive(region);
  if (rc == 0)
    rc = check_slot(region, slot);
  if (rc == 0)
    rc = read_record(region, slot, &record);
  if (rc != 0)
    return rc;
  superblock_disk super = lck_superblock_copy(region);
  uint64_t sequence = record.sequence & ~LCK_PUBLISHED;
  uint32_t since = lck_region_suspects(&super, record.timeline, sequence) ? LCK_RECORD_SUSPECT : 0;
  *out = (lck_record){
      .sequence = sequence,
      .step = record.step,
      .timeline = record.timeline,
      .parent = record.parent,
      .layout_offset = record.layout_offset,
      .layout_length = record.layout_length,
      .manifest_offset = record.manifest_offset,
      .manifest_length = record.manifest_length,
      .payload_bytes = record.payload_bytes,
      .wall_time_ns = record.wall_time_ns,
      .layout_crc = record.layout_crc,
      .manifest_crc = record.manifest_crc,
      .flags = record.flags | since,
      .slot = record.slot,
      .rank = record.rank,
      .world = record.world,
  };
  memcpy(out->run_id, record.run_id, sizeof(out->run_id));
  memcpy(out->share_digest, record.share_digest, sizeof(out->share_digest));
  return 0;
}

/* ---- write -------------------------------------------------------------------------------- */

static int visit(lck_region *region, uint32_t slot, enum lck_fault_point point, const char *where) {
  int error = lck_fault_visit(point);
  if (error == 0)
    return 0;
  errno = error;
  return lck_region_latch(region, lck_fail_errno(LCK_E_IO, "slot %u: %s", slot, where));
}

int lck_slot_invalidate(lck_region *region, uint32_t slot) {
  static const record_disk blank;
  int rc = lck_region_writable(region);
  if (rc == 0)
    rc = check_slot(region, slot);
  if (rc == 0)
    rc = visit(region, slot, LCK_FAULT_INVALIDATE, "before it is invalidated");
  if (rc != 0 || LCK_MUTANT(MUTANT_NEVER_INVALIDATED))
    return rc;
  record_disk old;
  rc = lck_access_load(region, LCK_RECORD_OFFSET(slot), &old, sizeof(old));
  if (rc != 0)
    return rc;
  if (old.sequence != 0 && old.crc == record_crc(&old))
    keep_layout(region, slot, old.layout_offset, old.layout_length, old.layout_crc);
  /* The word alone makes the record invalid. The rest is blanked so that no single flipped bit of
   * the word makes an overwritten snapshot valid again; in whatever order the two reach the medium,
   * a record with its word but without its body fails its CRC. Readers, though, must see the word
   * change first: they would take the rest for damage. */
  rc = lck_persist_publish(region, LCK_RECORD_OFFSET(slot), 0);
  if (!LCK_MUTANT(MUTANT_BLANK_OVERTAKES_WORD) && !LCK_MUTANT(MUTANT_INVALIDATION_UNSYNCED))
    lck_persist_fence();
  if (rc == 0)
    rc = lck_persist_store(region, LCK_RECORD_OFFSET(slot) + sizeof(uint64_t),
                           (const unsigned char *)&blank + sizeof(uint64_t),
                           sizeof(blank) - sizeof(uint64_t));
  return rc != 0 || LCK_MUTANT(MUTANT_INVALIDATION_UNSYNCED) ? rc : lck_persist_sync(region);
}

/* Everything of the block; run id, rank and identity are the region's, so is a world of 0. */
static record_disk compose(const lck_region *region, uint32_t slot, const lck_record *record,
                           uint32_t layout, uint32_t manifest) {
  superblock_disk super = lck_superblock_copy(region);
  record_disk block = {
      .sequence = record->sequence | LCK_PUBLISHED,
      .magic = LCK_RECORD_MAGIC,
      .version = LCK_FORMAT_VERSION,
      .step = record->step,
      .timeline = record->timeline,
      .parent = record->parent,
      .flags = record->flags,
      .slot = slot,
      .layout_offset = record->layout_offset,
      .layout_length = record->layout_length,
      .manifest_offset = record->manifest_offset,
      .manifest_length = record->manifest_length,
      .layout_crc = layout,
      .manifest_crc = manifest,
      .payload_bytes = record->payload_bytes,
      .wall_time_ns = record->wall_time_ns,
      .rank = super.rank,
      .world = record->world ? record->world : super.world,
  };
  memcpy(block.run_id, super.run_id, sizeof(block.run_id));
  memcpy(block.share_digest, record->share_digest, sizeof(block.share_digest));
  memcpy(block.uuid, super.uuid, sizeof(block.uuid));
  block.crc = record_crc(&block);
  return block;
}

static int check_commit(const lck_region *region, uint32_t slot, const lck_record *record,
                        const void *manifest) {
  int rc = lck_region_writable(region);
  if (rc == 0)
    rc = check_slot(region, slot);
  if (rc != 0)
    return rc;
  if (record->sequence == 0 || record->sequence > LCK_COUNT_LIMIT || record->step > LCK_COUNT_LIMIT)
    return lck_fail(LCK_E_INVALID,
                    "slot %u: sequence %" PRIu64 " with step %" PRIu64 " cannot be committed", slot,
                    record->sequence, record->step);
  if (record->manifest_length > 0 && manifest == NULL)
    return lck_fail(LCK_E_INVALID, "slot %u: manifest is NULL", slot);
  if (record->layout_length > LCK_TABLE_LIMIT || record->manifest_length > LCK_TABLE_LIMIT)
    return lck_fail(LCK_E_INVALID,
                    "slot %u: layout table of %" PRIu64 " bytes, manifest of %" PRIu64
                    ", at most %" PRIu64 " each",
                    slot, record->layout_length, record->manifest_length, LCK_TABLE_LIMIT);
  if ((record->layout_length > 0 &&
       !lck_slot_contains(region, slot, record->layout_offset, record->layout_length)) ||
      (record->manifest_length > 0 &&
       !lck_slot_contains(region, slot, record->manifest_offset, record->manifest_length)))
    return lck_fail(LCK_E_INVALID,
                    "slot %u: layout table [%" PRIu64 ", +%" PRIu64 ") or manifest [%" PRIu64
                    ", +%" PRIu64 ") is outside the slot",
                    slot, record->layout_offset, record->layout_length, record->manifest_offset,
                    record->manifest_length);
  return 0;
}

/* The text of what went wrong before is kept. */
static void take_back(lck_region *region, uint32_t slot) {
  lck_first_error failure = {0};
  lck_error_record(&failure, LCK_E_IO);
  (void)lck_persist_publish(region, LCK_RECORD_OFFSET(slot), 0);
  (void)lck_error_report(&failure);
}

/* A record that is found valid describes content that is whole, at whatever instant the machine or
 * the process stops:
 *
 * 1. The slot's record was made invalid durably before the slot's first byte changed, and its
 *    sequence word stays 0 until step 5. Until then the slot is EMPTY, and the protected slot, a
 *    different one, is untouched.
 * 2. Every thread that stored payload fenced its own stores before it reported them done (a fence
 *    drains no other CPU's). So payload is durable on line and byte media here, and in the page
 *    cache on page media.
 * 3. Layout table and manifest are stored, and made durable by the sync: a fence, or on page media
 *    one fdatasync, which also covers the payload of step 2, since all of it is in the page cache.
 *    Only the sync's success lets the commit go on: a failed one latches the region.
 * 4. The record's body is stored, its word still 0, and fenced: the word below cannot overtake it.
 *    On page media nothing orders the two on the medium, and nothing needs to: body and word lie in
 *    one 512-byte sector, and were a sector to tear, the CRC over both would not hold.
 * 5. The word is published by one aligned 8-byte store, which no medium tears, and made durable.
 *    Content and body were durable before it existed, hence it is never durable without them. If
 *    its sync fails, it is taken back: the next owner would find it in the page cache, take it for
 *    durable, and overwrite the snapshot that is.
 *
 * A store that meets memory which is gone ends the commit where it is. A file that somebody cuts
 * takes stored bytes away without a fault: it is whole after the last sync, or nothing is said.
 *
 * The CRC is computed over the block with its final word, so that it holds from step 5 on only. */
int lck_slot_commit(lck_region *region, uint32_t slot, const lck_record *record, const void *layout,
                    const void *manifest) {
  uint32_t layout_sum;
  int rc = check_commit(region, slot, record, manifest);
  if (rc == 0)
    rc = layout_crc(region, slot, record, layout, &layout_sum);
  if (rc == 0)
    rc = visit(region, slot, LCK_FAULT_COMMIT, "between payload and manifest");
  if (rc != 0)
    return rc;
  uint32_t manifest_sum = lck_crc32c(0, manifest, record->manifest_length);
  record_disk block = compose(region, slot, record, layout_sum, manifest_sum);
  uint64_t word = block.sequence;

  if (layout != NULL)
    rc = (LCK_MUTANT(MUTANT_LAYOUT_NOT_FLUSHED) ? lck_mutant_store : lck_persist_store)(
        region, record->layout_offset, layout, record->layout_length);
  if (rc == 0)
    rc = (LCK_MUTANT(MUTANT_MANIFEST_NOT_FLUSHED) ? lck_mutant_store : lck_persist_store)(
        region, record->manifest_offset, manifest, record->manifest_length);
  lck_thread_trace_stage(LCK_SPAN_TABLES,
                         record->manifest_length + (layout != NULL ? record->layout_length : 0));
  if (rc == 0 && !LCK_MUTANT(MUTANT_TABLES_NOT_SYNCED) &&
      !LCK_MUTANT(MUTANT_NO_FENCE_BEFORE_RECORD))
    rc = lck_persist_sync(region);
  lck_thread_trace_stage(LCK_SPAN_SYNC, 0);
  if (rc == 0)
    rc = visit(region, slot, LCK_FAULT_RECORD, "between manifest and record");
  if (rc != 0)
    return rc;

  if (LCK_MUTANT(MUTANT_WORD_BEFORE_BODY))
    (void)lck_persist_publish(region, LCK_RECORD_OFFSET(slot), word);
  block.sequence = LCK_MUTANT(MUTANT_WORD_BEFORE_BODY) ? word : 0;
  rc = lck_persist_store(region, LCK_RECORD_OFFSET(slot), &block, sizeof(block));
  if (!LCK_MUTANT(MUTANT_BODY_NOT_FENCED) && !LCK_MUTANT(MUTANT_NO_FENCE_BEFORE_RECORD))
    lck_persist_fence();
  if (rc == 0)
    rc = lck_persist_publish(region, LCK_RECORD_OFFSET(slot), word);
  lck_thread_trace_stage(LCK_SPAN_RECORD, sizeof(block));
  if (rc == 0 && !LCK_MUTANT(MUTANT_ACKNOWLEDGED_EARLY))
    rc = lck_persist_sync(region);
  lck_thread_trace_stage(LCK_SPAN_SYNC, 0);
  if (rc == 0)
    rc = lck_access_whole(region);
  if (rc == 0)
    keep_layout(region, slot, record->layout_offset, record->layout_length, layout_sum);
  else
    take_back(region, slot);
  return rc;
}
