/* Any bytes at all as a region: an error code with a reason, or a region whose every answer is in
 * bounds, true to the bytes, and fit to be written. Built with -fsanitize=fuzzer,address,undefined.
 *
 * FUZZ_COUNT=<file> receives how many inputs ran, FUZZ_SEEDS=<folder> is filled with sound ones. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "image.h"
#include "kernel.h"
#include "persist.h"
#include "region.h"

#define DIE(...)                                                                                   \
  do {                                                                                             \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                \
    fprintf(stderr, __VA_ARGS__);                                                                  \
    fprintf(stderr, ": %s\n", lck_last_error());                                                   \
    abort();                                                                                       \
  } while (0)

#define EXTENTS 6u
#define TIMELINE (UINT64_MAX / 3)        /* of the owner: no mutant comes by it */
#define READ_AT_MOST (UINT64_C(1) << 22) /* of what the file really holds */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);

static int file = -1, lock_file = -1;
static uint64_t executions;

/* ---- what must hold -------------------------------------------------------------------------- */

static uint32_t file_crc(uint64_t offset, uint64_t length) {
  static unsigned char bytes[READ_AT_MOST];
  if (length > sizeof(bytes) || pread(file, bytes, length, (off_t)offset) != (ssize_t)length)
    DIE("read %lu bytes at %lu", length, offset);
  return lck_crc32c(0, bytes, length);
}

static void check_info(const lck_region_info *info) {
  uint64_t length = (uint64_t)lseek(file, 0, SEEK_END);
  if (info->size > length || info->slot_count < 2 || info->slot_count > LCK_MAX_SLOTS)
    DIE("%lu bytes of %lu, %u slots", info->size, length, info->slot_count);
  uint64_t end = info->journal_offset + info->journal_length;
  for (uint32_t i = 0; i < info->segment_count; i++) {
    const lck_segment *each = &info->segments[i];
    if (each->offset < end || each->length > info->size - each->offset ||
        each->slot_bytes > each->length / info->slot_count)
      DIE("segment %u [%lu, +%lu) with slots of %lu", i, each->offset, each->length,
          each->slot_bytes);
    end = each->offset + each->length;
  }
  for (uint32_t i = 0; i < info->lineage_count; i++)
    if (info->lineage[i].sequence > LCK_COUNT_LIMIT)
      DIE("ancestor %u up to %lu", i, info->lineage[i].sequence);
}

static void check_blob(const lck_region_info *info, uint32_t slot, uint64_t offset, uint64_t length,
                       uint32_t crc) {
  int inside = 0;
  if (length == 0 && crc == 0)
    return;
  for (uint32_t i = 0; i < info->segment_count; i++) {
    uint64_t bytes = info->segments[i].slot_bytes;
    uint64_t at = offset - (info->segments[i].offset + slot * bytes);
    inside = inside || (at <= bytes && length <= bytes - at);
  }
  if (!inside)
    DIE("slot %u: [%lu, +%lu) is not in it", slot, offset, length);
  if (length <= READ_AT_MOST && file_crc(offset, length) != crc)
    DIE("slot %u: [%lu, +%lu) has not the CRC %08x", slot, offset, length, crc);
}

/* Mask of the slots that hold a snapshot. */
static uint32_t check_slots(const lck_region *region, const lck_region_info *info) {
  uint32_t whole = 0;
  for (uint32_t slot = 0; slot < info->slot_count; slot++) {
    lck_record record;
    int rc = lck_slot_read(region, slot, &record);
    if (rc != 0 && rc != LCK_E_EMPTY && rc != LCK_E_CORRUPT)
      DIE("read slot %u: %d", slot, rc);
    if (rc != 0)
      continue;
    whole |= 1u << slot;
    if (record.sequence == 0 || record.sequence > LCK_COUNT_LIMIT || record.step > LCK_COUNT_LIMIT)
      DIE("slot %u: sequence %lu, step %lu", slot, record.sequence, record.step);
    check_blob(info, slot, record.layout_offset, record.layout_length, record.layout_crc);
    check_blob(info, slot, record.manifest_offset, record.manifest_length, record.manifest_crc);
  }
  return whole;
}

/* The newest entry of a kind: what is read is in the file, of this timeline, and fits. */
static int check_entry(const lck_region *region, const lck_region_info *info, uint32_t kind,
                       lck_journal_entry *out) {
  static unsigned char blob[READ_AT_MOST + 1], bytes[READ_AT_MOST];
  uint64_t place = LCK_JOURNAL_PLACE(info->journal_length);
  uint64_t room = 0;
  int rc = lck_journal_read(region, kind, out, NULL, 0), found = 0;
  if (rc != 0 && rc != LCK_E_EMPTY && rc != LCK_E_CORRUPT)
    DIE("read the journal: %d", rc);
  if (rc != 0)
    return rc;
  if (out->timeline != info->timeline || (kind != 0 && out->kind != kind) ||
      out->length > place - sizeof(journal_disk) || out->length > LCK_TABLE_LIMIT ||
      out->sequence == 0 || out->sequence > LCK_COUNT_LIMIT || out->step > LCK_COUNT_LIMIT)
    DIE("kind %u: entry %lu of step %lu, timeline %lu, kind %u, %lu bytes", kind, out->sequence,
        out->step, out->timeline, out->kind, out->length);
  uint64_t sequence = out->sequence;
  rc = LCK_E_FULL;
  out->length = 0;
  /* A damaged newer entry that does not fit is not looked at, and may ask for room as well. */
  for (uint32_t ask = 0; rc == LCK_E_FULL && ask <= LCK_JOURNAL_PLACES; ask++) {
    room = out->length;
    blob[room] = 0xa5;
    rc = lck_journal_read(region, kind, out, blob, room);
  }
  if (rc != 0 || out->sequence != sequence || out->length > room || blob[room] != 0xa5)
    DIE("read %lu bytes of entry %lu: %d, %lu bytes of entry %lu", room, sequence, rc, out->length,
        out->sequence);
  for (uint64_t i = 0; i < LCK_JOURNAL_PLACES; i++) {
    uint64_t at = info->journal_offset + i * place + sizeof(journal_disk);
    found |= pread(file, bytes, out->length, (off_t)at) == (ssize_t)out->length &&
             memcmp(blob, bytes, out->length) == 0;
  }
  if (!found)
    DIE("the blob of entry %lu is in no place", out->sequence);
  if (out->length > 0 && lck_journal_read(region, kind, out, blob, out->length - 1) != LCK_E_FULL)
    DIE("read %lu bytes into less", out->length);
  return 0;
}

static void check_journal(const lck_region *region, const lck_region_info *info) {
  lck_journal_entry any, of_kind[LCK_JOURNAL_FENCE + 1];
  int rc = check_entry(region, info, 0, &any), found = 0;
  for (uint32_t kind = LCK_JOURNAL_STEP_END; kind <= LCK_JOURNAL_FENCE; kind++) {
    if (check_entry(region, info, kind, &of_kind[kind]) != 0)
      continue;
    found |= rc == 0 && of_kind[kind].sequence == any.sequence;
    if (rc != 0 || of_kind[kind].sequence > any.sequence)
      DIE("kind %u has entry %lu, of any kind the newest is %lu", kind, of_kind[kind].sequence,
          any.sequence);
  }
  if (rc == 0 && !found)
    DIE("entry %lu is of no kind: %u", any.sequence, any.kind);
  if (lck_journal_read(region, LCK_JOURNAL_FENCE + 1, &any, NULL, 0) != LCK_E_INVALID)
    DIE("an unknown kind");
}

/* Extents out of the input, as a layout table would have them: taken as they are, or refused. */
static void fetch_anything(const lck_region *region, const lck_region_info *info,
                           const uint8_t *input, uint64_t bytes) {
  static unsigned char room[EXTENTS][4096];
  lck_read reads[EXTENTS] = {0};
  uint64_t seed = lck_crc32c(0, input, bytes), bad = LCK_ALL;
  int inside = 1;
  for (uint32_t i = 0; i < EXTENTS; i++) {
    uint64_t words[2];
    memcpy(words, input + image_draw(&seed) % (bytes - sizeof(words) + 1), sizeof(words));
    reads[i].offset = image_draw(&seed) % 4 ? words[0] % info->size : words[0];
    reads[i].length = image_draw(&seed) % 4 ? words[1] % sizeof(room[i]) : words[1];
    reads[i].destination = reads[i].length <= sizeof(room[i]) ? room[i] : NULL;
    int there = reads[i].offset <= info->size && reads[i].length <= info->size - reads[i].offset;
    if (there && reads[i].length > READ_AT_MOST)
      reads[i].length = 0;
    if (there && image_draw(&seed) % 4)
      reads[i].crc = file_crc(reads[i].offset, reads[i].length);
    inside = inside && there;
  }
  int rc = lck_slot_fetch(region, reads, EXTENTS, 1, &bad);
  if (rc != 0 && (rc != LCK_E_CORRUPT || bad >= EXTENTS))
    DIE("fetch: %d, bad extent %lu", rc, bad);
  if (rc == 0 && !inside)
    DIE("fetched what is outside of %lu bytes", info->size);
  for (uint32_t i = 0; i < EXTENTS && rc == 0; i++)
    if (file_crc(reads[i].offset, reads[i].length) != reads[i].crc)
      DIE("extent %u has not the CRC %08x", i, reads[i].crc);
}

/* ---- an owner writes ------------------------------------------------------------------------- */

static void commit(lck_region *region, const lck_region_info *info, uint32_t slot) {
  static const char table[] = "layout", manifest[] = "manifest";
  const lck_segment *segment = &info->segments[info->segment_count - 1];
  uint64_t start = segment->offset + slot * segment->slot_bytes;
  lck_record record = {.sequence = UINT64_C(1) << 40,
                       .layout_offset = start,
                       .layout_length = sizeof(table),
                       .manifest_offset = start + 64,
                       .manifest_length = sizeof(manifest)};
  if (lck_slot_claim(region, slot) != 0 || lck_slot_invalidate(region, slot) != 0 ||
      lck_slot_commit(region, slot, &record, table, manifest) != 0)
    DIE("commit to slot %u", slot);
  lck_slot_unclaim(region, slot);
}

/* Entries beyond all that there were, of the timeline that has just begun. */
static void write_journal(lck_region *region, const lck_region_info *info, uint64_t timeline) {
  static const char blob[] = "boundary";
  lck_journal_entry found;
  int room = LCK_JOURNAL_PLACE(info->journal_length) > 0;
  uint64_t highest = lck_journal_read(region, 0, &found, NULL, 0) == 0 ? found.sequence : 0;
  if (lck_region_branch(region, timeline, &(lck_branch){info->timeline, 1}, 1) != 0)
    DIE("branch");
  if (lck_journal_read(region, 0, &found, NULL, 0) == 0)
    DIE("entry %lu is of a timeline that had not begun", found.sequence);
  for (uint32_t kind = LCK_JOURNAL_STEP_END; kind <= LCK_JOURNAL_FENCE; kind++) {
    lck_journal_entry entry = {
        .step = 50, .timeline = timeline, .length = sizeof(blob), .kind = kind};
    int rc = lck_journal_write(region, &entry, blob);
    if (rc != (room ? 0 : LCK_E_FULL))
      DIE("write to a journal of %lu bytes: %d", info->journal_length, rc);
    if (!room)
      continue;
    if (lck_journal_read(region, 0, &found, NULL, 0) != 0 || found.kind != kind ||
        found.sequence <= highest)
      DIE("wrote kind %u beyond entry %lu, and read %u, %lu", kind, highest, found.kind,
          found.sequence);
    highest = found.sequence;
  }
}

/* What an owner wrote is there, and what it did not touch is as it was. */
static void write_and_read(lck_region *region, const lck_region_info *info, uint32_t whole) {
  uint32_t slot = info->slot_count - 1;
  lck_region_info after;
  lck_record record;
  commit(region, info, slot);
  write_journal(region, info, TIMELINE);
  int rc = lck_region_grow(region, LCK_HEADER_PAGE);
  if (rc != (info->segment_count < LCK_MAX_SEGMENTS ? 0 : LCK_E_FULL))
    DIE("grow beyond %u segments: %d", info->segment_count, rc);
  lck_region_close(region);
  if (lck_region_open(file, lock_file, LCK_READ_ONLY, -1, &region) != 0)
    DIE("open what an owner has written");
  if (lck_region_describe(region, &after) != 0 || after.timeline != TIMELINE)
    DIE("timeline %lu", after.timeline);
  check_info(&after);
  check_journal(region, &after);
  uint32_t now = check_slots(region, &after);
  if ((now & ~(1u << slot)) != (whole & ~(1u << slot)))
    DIE("slots %x, before %x and %u", now, whole, slot);
  if (lck_slot_read(region, slot, &record) != 0 || record.sequence != UINT64_C(1) << 40)
    DIE("slot %u was written", slot);
  lck_region_close(region);
}

static void open_and_look(const uint8_t *input, uint64_t bytes, uint32_t flags) {
  lck_region *region;
  lck_region_info info;
  int rc = lck_region_open(file, lock_file, flags, -1, &region);
  if (rc != 0 && rc != LCK_E_FORMAT && rc != LCK_E_CORRUPT)
    DIE("open: %d", rc);
  if (rc != 0)
    return;
  if (lck_region_describe(region, &info) != 0)
    DIE("describe");
  check_info(&info);
  uint32_t whole = check_slots(region, &info);
  check_journal(region, &info);
  fetch_anything(region, &info, input, bytes);
  for (uint32_t slot = 0; slot <= info.slot_count; slot++) {
    rc = lck_slot_lease(region, slot, 1);
    if (rc != (slot < info.slot_count ? 0 : LCK_E_INVALID))
      DIE("lease slot %u of %u: %d", slot, info.slot_count, rc);
    (void)lck_slot_lease(region, slot, 0);
  }
  if (flags & LCK_READ_ONLY)
    lck_region_close(region);
  else
    write_and_read(region, &info, whole);
}

/* ---- libFuzzer ------------------------------------------------------------------------------- */

static void write_count(void) {
  FILE *out = fopen(getenv("FUZZ_COUNT"), "w");
  if (out == NULL || fprintf(out, "%lu\n", executions) < 0 || fclose(out) != 0)
    perror("FUZZ_COUNT");
}

static void write_seeds(const char *folder) {
  static uint8_t input[sizeof(image) + FUZZ_TABLE_BYTES];
  for (uint32_t kind = 0; kind < 8; kind++) {
    char path[4096];
    uint64_t bytes = image_sound(input, sizeof(input), kind & 1);
    ((image *)(void *)input)->flags = kind / 2;
    snprintf(path, sizeof(path), "%s/sound-%u", folder, kind);
    FILE *out = fopen(path, "w");
    if (out == NULL || fwrite(input, bytes, 1, out) != 1 || fclose(out) != 0)
      DIE("write %s", path);
  }
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
  char path[64];
  (void)argc, (void)argv;
  file = memfd_create("fuzzed region", 0);
  snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
  lock_file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0 || lock_file < 0)
    DIE("memfd");
  if (getenv("FUZZ_COUNT") != NULL)
    atexit(write_count);
  if (getenv("FUZZ_SEEDS") != NULL)
    write_seeds(getenv("FUZZ_SEEDS"));
  return 0;
}

/* Most mutants get right checksums: without, nearly all would end at the first one. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned int seed) {
  uint64_t random = seed;
  if (size < sizeof(image) + sizeof(uint64_t) || image_draw(&random) % 64 == 0)
    return image_sound(data, room, (int)(image_draw(&random) % 2));
  for (uint64_t more = image_draw(&random) % 4; more > 0; more--)
    image_set_field(data, &random);
  if (image_draw(&random) % 2)
    size = LLVMFuzzerMutate(data, size, room);
  if (size >= sizeof(image) && image_draw(&random) % 8 != 0)
    image_seal(data, size);
  return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  _Alignas(image) static uint8_t input[sizeof(image) + FUZZ_TABLE_BYTES];
  executions++;
  if (size < sizeof(image) || size > sizeof(input))
    return 0;
  memcpy(input, data, size);
  uint32_t flags = ((const image *)(const void *)input)->flags;
  image_store(input, size, file);
  /* An owner rightly fills the holes of a file, which takes as much memory as there is. */
  int owner = flags & FUZZ_OWNER && !(flags & FUZZ_SPARSE);
  open_and_look(input, size, owner ? 0 : LCK_READ_ONLY);
  return 0;
}
