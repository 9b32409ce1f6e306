/* Inputs of the fuzzer: sound ones, ones with right checksums around wrong values, and their files.
 */
#include "image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernel.h"

#define SLOT_BYTES UINT64_C(65536)
#define JOURNAL_BYTES UINT64_C(12288)
#define SPARSE_BYTES (UINT64_C(1) << 45)
#define LONGEST_PAGES 0xfffu

uint64_t image_draw(uint64_t *random) {
  uint64_t z = (*random += UINT64_C(0x9E3779B97F4A7C15));
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

/* Where a slot's tables lie in the sound region; damage to the segments does not move them. */
static uint64_t table_offset(uint32_t slot) {
  return LCK_GRANULE + slot * SLOT_BYTES;
}

/* Where an entry of the journal lies in the sound region. */
static uint64_t entry_offset(uint32_t place) {
  return LCK_JOURNAL_OFFSET + place * LCK_JOURNAL_PLACE(JOURNAL_BYTES);
}

static uint64_t table_bytes(uint64_t bytes) {
  uint64_t rest = bytes - sizeof(image);
  return rest < FUZZ_TABLE_BYTES ? rest : FUZZ_TABLE_BYTES;
}

/* ---- sound ---------------------------------------------------------------------------------- */

static superblock_disk sound_superblock(int grown) {
  superblock_disk super = {.magic = LCK_SUPERBLOCK_MAGIC,
                           .version = LCK_FORMAT_VERSION,
                           .bytes = sizeof(superblock_disk),
                           .generation = 5,
                           .uuid = "fuzzed region",
                           .world = 1,
                           .slot_count = FUZZ_SLOTS,
                           .segment_count = 1 + (uint32_t)grown,
                           .journal_offset = LCK_JOURNAL_OFFSET,
                           .journal_length = JOURNAL_BYTES,
                           .timeline = 7,
                           .lineage_count = 1,
                           .lineage = {{6, 1}}};
  for (uint32_t i = 0; i < super.segment_count; i++)
    super.segments[i] = (segment_disk){(1 + i) * LCK_GRANULE, LCK_GRANULE, SLOT_BYTES};
  super.size = (1 + super.segment_count) * LCK_GRANULE;
  return super;
}

static record_disk sound_record(uint32_t slot, uint64_t sequence) {
  record_disk record = {.sequence = sequence | LCK_PUBLISHED,
                        .magic = LCK_RECORD_MAGIC,
                        .version = LCK_FORMAT_VERSION,
                        .step = sequence * 10,
                        .timeline = 7,
                        .parent = 6,
                        .slot = slot,
                        .layout_offset = table_offset(slot),
                        .layout_length = 300,
                        .manifest_offset = table_offset(slot) + 320,
                        .manifest_length = 200,
                        .payload_bytes = 1000,
                        .world = 1,
                        .uuid = "fuzzed region"};
  return record;
}

static journal_disk sound_entry(uint32_t place, uint64_t sequence) {
  journal_disk entry = {.sequence = sequence | LCK_PUBLISHED,
                        .magic = LCK_JOURNAL_MAGIC,
                        .version = LCK_FORMAT_VERSION,
                        .step = 30,
                        .timeline = 7,
                        .length = 250,
                        .kind = LCK_JOURNAL_STEP_END + place,
                        .place = place,
                        .uuid = "fuzzed region"};
  return entry;
}

uint64_t image_sound(uint8_t *input, uint64_t room, int grown) {
  image *head = (image *)(void *)input;
  if (room < sizeof(image) + 520)
    abort();
  memset(input, 0, sizeof(image));
  head->length_pages = (uint32_t)((2 + (uint64_t)grown) * LCK_GRANULE / LCK_HEADER_PAGE);
  head->super[0] = head->super[1] = sound_superblock(grown);
  head->record[0] = sound_record(0, 2);
  head->record[1] = sound_record(1, 3);
  head->journal[0] = sound_entry(0, 8);
  head->journal[1] = sound_entry(1, 9);
  head->journal[2] = sound_entry(2, 10);
  for (uint64_t i = 0; i < 520; i++)
    input[sizeof(image) + i] = (uint8_t)(i * 7 + 1);
  image_seal(input, sizeof(image) + 520);
  return sizeof(image) + 520;
}

/* ---- checksums ------------------------------------------------------------------------------ */

/* Of a blob among the slots' tables, the zeros behind them included; of any other 0. */
static uint32_t blob_crc(const uint8_t *input, uint64_t bytes, uint64_t offset, uint64_t length) {
  static uint8_t space[(FUZZ_SLOTS + 1) * SLOT_BYTES];
  uint64_t at = offset - table_offset(0);
  if (at > sizeof(space) || length > sizeof(space) - at)
    return 0;
  memset(space, 0, sizeof(space));
  for (uint32_t slot = 0; slot < FUZZ_SLOTS; slot++)
    memcpy(space + slot * SLOT_BYTES, input + sizeof(image), table_bytes(bytes));
  return lck_crc32c(0, space + at, length);
}

/* Of what follows the header of an entry: the tables' bytes, then zeros; of more than that 0. */
static uint32_t entry_blob_crc(const uint8_t *input, uint64_t bytes, uint64_t length) {
  static uint8_t space[JOURNAL_BYTES];
  if (length > sizeof(space))
    return 0;
  memset(space, 0, sizeof(space));
  memcpy(space, input + sizeof(image), table_bytes(bytes));
  return lck_crc32c(0, space, length);
}

void image_seal(uint8_t *input, uint64_t bytes) {
  image *head = (image *)(void *)input;
  for (int i = 0; i < 2; i++)
    head->super[i].crc = lck_crc32c(0, &head->super[i], offsetof(superblock_disk, crc));
  for (uint32_t i = 0; i < FUZZ_SLOTS; i++) {
    record_disk *record = &head->record[i];
    if (record->sequence == 0)
      continue;
    record->layout_crc = blob_crc(input, bytes, record->layout_offset, record->layout_length);
    record->manifest_crc = blob_crc(input, bytes, record->manifest_offset, record->manifest_length);
    record->crc = lck_crc32c(0, record, offsetof(record_disk, crc));
  }
  for (uint32_t i = 0; i < LCK_JOURNAL_PLACES; i++) {
    journal_disk *entry = &head->journal[i];
    entry->blob_crc = entry_blob_crc(input, bytes, entry->length);
    entry->crc = lck_crc32c(0, entry, offsetof(journal_disk, crc));
  }
}

/* ---- damage --------------------------------------------------------------------------------- */

static uint64_t edge(uint64_t present, uint64_t *random) {
  static const uint64_t edges[] = {0,
                                   1,
                                   2,
                                   16,
                                   17,
                                   LCK_HEADER_PAGE,
                                   LCK_JOURNAL_OFFSET,
                                   LCK_GRANULE,
                                   2 * LCK_GRANULE,
                                   SLOT_BYTES,
                                   UINT64_C(1) << 31,
                                   UINT64_C(1) << 32,
                                   UINT64_C(1) << 44,
                                   SPARSE_BYTES,
                                   UINT64_C(1) << 63,
                                   UINT64_MAX};
  uint64_t near = edges[image_draw(random) % (sizeof(edges) / sizeof(edges[0]))];
  switch (image_draw(random) % 6) {
  case 0:
    return near - 1;
  case 1:
    return present + near;
  case 2:
    return present - near;
  case 3:
    return present ^ UINT64_C(1) << image_draw(random) % 64;
  default:
    return near;
  }
}

/* Fields are 4 or 8 bytes and aligned: any aligned word of a structure is one, or two. */
void image_set_field(uint8_t *input, uint64_t *random) {
  image *head = (image *)(void *)input;
  uint8_t *start = (uint8_t *)&head->record[image_draw(random) % FUZZ_SLOTS];
  uint64_t fields = offsetof(record_disk, reserved);
  uint64_t value = 0;
  int both = image_draw(random) % 4 != 0; /* a superblock is believed when it is the newer one */
  switch (image_draw(random) % 4) {
  case 0:
  case 1:
    start = (uint8_t *)&head->super[0];
    fields = offsetof(superblock_disk, segments) + 3 * sizeof(segment_disk);
    break;
  case 2:
    start = (uint8_t *)&head->journal[image_draw(random) % LCK_JOURNAL_PLACES];
    fields = offsetof(journal_disk, reserved);
    break;
  default:
    break;
  }
  uint64_t width = image_draw(random) % 2 ? 8 : 4;
  uint64_t at = image_draw(random) % (fields / width) * width;
  memcpy(&value, start + at, width);
  value = edge(value, random);
  memcpy(start + at, &value, width);
  if (start == (uint8_t *)&head->super[0] && both)
    head->super[1] = head->super[0];
}

/* ---- the file ------------------------------------------------------------------------------- */

static void put(int fd, uint64_t offset, const void *bytes, uint64_t length, uint64_t end) {
  if (offset >= end)
    return;
  length = length < end - offset ? length : end - offset;
  if (pwrite(fd, bytes, length, (off_t)offset) != (ssize_t)length) {
    perror("pwrite");
    abort();
  }
}

void image_store(const uint8_t *input, uint64_t bytes, int fd) {
  const image *head = (const image *)(const void *)input;
  uint64_t end = (head->length_pages & LONGEST_PAGES) * LCK_HEADER_PAGE;
  if (head->flags & FUZZ_SPARSE)
    end = SPARSE_BYTES;
  if (ftruncate(fd, 0) != 0 || ftruncate(fd, (off_t)end) != 0) {
    perror("ftruncate");
    abort();
  }
  for (int i = 0; i < 2; i++)
    put(fd, LCK_SUPERBLOCK_OFFSET(i), &head->super[i], sizeof(superblock_disk), end);
  for (uint32_t i = 0; i < FUZZ_SLOTS; i++) {
    put(fd, LCK_RECORD_OFFSET(i), &head->record[i], sizeof(record_disk), end);
    put(fd, table_offset(i), input + sizeof(image), table_bytes(bytes), end);
  }
  for (uint32_t place = 0; place < LCK_JOURNAL_PLACES; place++) {
    uint64_t at = entry_offset(place), after = at + sizeof(journal_disk);
    uint64_t room = LCK_JOURNAL_PLACE(JOURNAL_BYTES) - sizeof(journal_disk);
    uint64_t length = table_bytes(bytes) < room ? table_bytes(bytes) : room;
    put(fd, at, &head->journal[place], sizeof(journal_disk), end);
    put(fd, after, input + sizeof(image), length, end);
  }
}
