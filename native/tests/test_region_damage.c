/* What is on the medium may be anything: every single flipped bit is found or harmless, a truncated
 * or random file is an error, nothing crashes. */
#include "region_fixture.h"

static const char *path;
static int raw; /* the file under test, beside the region */

static void peek(uint64_t offset, void *bytes, size_t length) {
  CHECK(pread(raw, bytes, length, (off_t)offset) == (ssize_t)length, "pread");
}

static void poke(uint64_t offset, const void *bytes, size_t length) {
  if (pwrite(raw, bytes, length, (off_t)offset) != (ssize_t)length)
    CHECK(0, "pwrite");
}

static void flip(uint64_t offset, unsigned bit) {
  unsigned char byte;
  if (pread(raw, &byte, 1, (off_t)offset) != 1)
    CHECK(0, "pread");
  byte ^= (unsigned char)(1u << bit);
  poke(offset, &byte, 1);
}

static void make(void) {
  lck_region_spec spec = small_spec();
  lck_region *region = must_create(path, &spec);
  lck_branch lineage = {1, 2};
  CHECK(write_snapshot(region, 0, 4) == 0, "%s", lck_last_error());
  CHECK(lck_region_branch(region, 2, &lineage, 1) == 0, "%s", lck_last_error());
  CHECK(lck_region_suspect(region, 5) == 0, "%s", lck_last_error());
  must_close(region);
}

/* ---- single bits --------------------------------------------------------------------------- */

static void test_superblock_bits(void) {
  make();
  lck_region *region;
  unsigned char whole[sizeof(superblock_disk)];
  unsigned char repaired[sizeof(superblock_disk)];
  for (int copy = 0; copy < 2; copy++) {
    region = must_open(path, LCK_READ_ONLY);
    lck_region_info good = describe(region);
    must_close(region);
    peek(LCK_SUPERBLOCK_OFFSET(copy), whole, sizeof(whole));
    for (uint64_t at = 0; at < sizeof(whole) * 8; at++) {
      flip(LCK_SUPERBLOCK_OFFSET(copy) + at / 8, at % 8);
      lck_region_info info = {0};
      int rc = try_open(path, LCK_READ_ONLY, &region);
      if (rc == 0 && (rc = lck_region_describe(region, &info)) == 0)
        lck_region_close(region);
      good.base = info.base;
      if (rc != 0 || memcmp(&info, &good, sizeof(info)) != 0)
        CHECK(0, "copy %d bit %lu: %d %s", copy, at, rc, lck_last_error());
      poke(LCK_SUPERBLOCK_OFFSET(copy), whole, sizeof(whole));
    }
    checks_passed++;
    flip(LCK_SUPERBLOCK_OFFSET(copy) + 100, 3);
    region = must_open(path, 0);
    must_close(region);
    for (int i = 0; i < 2; i++) {
      peek(LCK_SUPERBLOCK_OFFSET(i), repaired, sizeof(repaired));
      CHECK(repaired[100] == whole[100], "a writer repairs copy %d", i);
    }
  }
  /* The same bit in both copies. */
  for (uint64_t at = 0; at < sizeof(whole) * 8; at++) {
    flip(at / 8, at % 8);
    flip(LCK_SUPERBLOCK_OFFSET(1) + at / 8, at % 8);
    int rc = try_open(path, at % 2 ? LCK_READ_ONLY : 0, &region);
    if (rc != (at < 96 ? LCK_E_FORMAT : LCK_E_CORRUPT))
      CHECK(0, "bit %lu of both: %d %s", at, rc, lck_last_error());
    flip(at / 8, at % 8);
    flip(LCK_SUPERBLOCK_OFFSET(1) + at / 8, at % 8);
  }
  checks_passed++;
}

/* Returns how many flips of [offset, +length) were neither `first` nor `second` on reading slot 0.
 */
static uint64_t undetected(const lck_region *region, uint64_t offset, uint64_t length, int first,
                           int second) {
  lck_record record;
  uint64_t missed = 0;
  for (uint64_t at = 0; at < length * 8; at++) {
    flip(offset + at / 8, at % 8);
    int rc = lck_slot_read(region, 0, &record);
    missed += rc != first && rc != second;
    flip(offset + at / 8, at % 8);
  }
  return missed;
}

static void test_slot_bits(void) {
  make();
  lck_region *region = must_open(path, 0);
  lck_record record;
  CHECK(lck_slot_read(region, 0, &record) == 0, "%s", lck_last_error());
  uint64_t places[3][2] = {{LCK_RECORD_OFFSET(0), sizeof(record_disk)},
                           {record.layout_offset, record.layout_length},
                           {record.manifest_offset, record.manifest_length}};
  for (int i = 0; i < 3; i++) {
    /* EMPTY: the sequence 4 has one bit set. */
    uint64_t missed = undetected(region, places[i][0], places[i][1], LCK_E_CORRUPT,
                                 i == 0 ? LCK_E_EMPTY : LCK_E_CORRUPT);
    CHECK(missed == 0, "%lu flips of part %d not found", missed, i);
  }
  CHECK(sequence_in(region, 0) == 4, "%s", lck_last_error());
  CHECK(lck_slot_invalidate(region, 0) == 0, "%s", lck_last_error());
  uint64_t missed = undetected(region, places[0][0], places[0][1], LCK_E_CORRUPT, LCK_E_EMPTY);
  CHECK(missed == 0, "%lu flips make an invalid slot valid", missed);
  must_close(region);
}

/* A record of another slot or another region is not this slot's, whatever its CRC. */
static void test_strange_records(void) {
  make();
  unsigned char block[sizeof(record_disk)];
  lck_record record;
  peek(LCK_RECORD_OFFSET(0), block, sizeof(block));
  lck_region *region = must_open(path, 0);
  poke(LCK_RECORD_OFFSET(1), block, sizeof(block));
  CHECK(lck_slot_read(region, 1, &record) == LCK_E_CORRUPT, "of slot 0: %s", lck_last_error());
  must_close(region);
  make();
  region = must_open(path, 0);
  poke(LCK_RECORD_OFFSET(0), block, sizeof(block));
  CHECK(lck_slot_read(region, 0, &record) == LCK_E_CORRUPT, "of a region: %s", lck_last_error());
  must_close(region);
}

static int reread(lck_region *region, record_disk forged) {
  lck_record record;
  forged.crc = lck_crc32c(0, &forged, offsetof(record_disk, crc));
  poke(LCK_RECORD_OFFSET(0), &forged, sizeof(forged));
  return lck_slot_read(region, 0, &record);
}

/* Right checksums, and numbers from which no training could go on. */
static void test_impossible_counts(void) {
  make();
  record_disk good;
  superblock_disk super;
  peek(LCK_RECORD_OFFSET(0), &good, sizeof(good));
  lck_region *region = must_open(path, LCK_READ_ONLY);
  CHECK(reread(region, good) == 0, "%s", lck_last_error());
  record_disk forged = good;
  forged.sequence = 4;
  CHECK(reread(region, forged) == LCK_E_CORRUPT, "never published: %s", lck_last_error());
  forged.sequence = LCK_PUBLISHED;
  CHECK(reread(region, forged) == LCK_E_CORRUPT, "commit 0: %s", lck_last_error());
  forged.sequence = LCK_PUBLISHED | (LCK_COUNT_LIMIT + 1);
  CHECK(reread(region, forged) == LCK_E_CORRUPT, "commits run out: %s", lck_last_error());
  forged = good;
  forged.step = LCK_COUNT_LIMIT + 1;
  CHECK(reread(region, forged) == LCK_E_CORRUPT, "steps run out: %s", lck_last_error());
  must_close(region);
  peek(0, &super, sizeof(super));
  super.lineage[0].sequence = LCK_COUNT_LIMIT + 1;
  super.crc = lck_crc32c(0, &super, offsetof(superblock_disk, crc));
  poke(0, &super, sizeof(super));
  poke(LCK_SUPERBLOCK_OFFSET(1), &super, sizeof(super));
  CHECK(try_open(path, 0, &region) == LCK_E_CORRUPT, "ancestors: %s", lck_last_error());
}

/* A file full of holes may claim tables of terabytes: they are not read, which would take as much
 * memory, or as long. */
static void test_tables_without_end(void) {
  make();
  superblock_disk super;
  record_disk record;
  uint64_t length = UINT64_C(1) << 40;
  peek(0, &super, sizeof(super));
  peek(LCK_RECORD_OFFSET(0), &record, sizeof(record));
  super.segments[0].length = length;
  super.segments[0].slot_bytes = length / super.slot_count;
  super.size = super.segments[0].offset + length;
  super.crc = lck_crc32c(0, &super, offsetof(superblock_disk, crc));
  poke(0, &super, sizeof(super));
  poke(LCK_SUPERBLOCK_OFFSET(1), &super, sizeof(super));
  CHECK(ftruncate(raw, (off_t)super.size) == 0, "ftruncate: %s", strerror(errno));
  lck_region *region = must_open(path, LCK_READ_ONLY);
  record.manifest_length = length / super.slot_count - 4096;
  CHECK(reread(region, record) == LCK_E_CORRUPT, "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), "at most 1073741824") != NULL, "%s", lck_last_error());
  must_close(region);
  CHECK(ftruncate(raw, 0) == 0, "ftruncate");
}

/* ---- whole files --------------------------------------------------------------------------- */

static void test_superblock_versions(void) {
  make();
  lck_region *region;
  uint32_t version = LCK_FORMAT_VERSION - 1;
  uint64_t zero[1024] = {0};
  poke(8, &version, 4);
  region = must_open(path, LCK_READ_ONLY);
  must_close(region);
  poke(LCK_SUPERBLOCK_OFFSET(1) + 8, &version, 4);
  CHECK(try_open(path, 0, &region) == LCK_E_FORMAT, "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), "version 1, expected 2: another lightck wrote it") != NULL, "%s",
        lck_last_error());
  make();
  poke(0, zero, 4096);
  flip(LCK_SUPERBLOCK_OFFSET(1) + 300, 1);
  CHECK(try_open(path, 0, &region) == LCK_E_FORMAT, "torn creation: %s", lck_last_error());
  poke(0, zero, 8192);
  CHECK(try_open(path, 0, &region) == LCK_E_FORMAT, "blank: %s", lck_last_error());
}

static void test_truncation(void) {
  make();
  uint64_t size = file_length(path);
  lck_region *region;
  uint64_t lengths[] = {size - 1, size - 4096, size / 2, 131072, 8192, 8191, 4096, 100, 1, 0};
  for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
    CHECK(ftruncate(raw, (off_t)lengths[i]) == 0, "ftruncate");
    for (uint32_t flags = 0; flags <= LCK_READ_ONLY; flags++)
      CHECK(try_open(path, flags, &region) == LCK_E_FORMAT, "%lu bytes: %s", lengths[i],
            lck_last_error());
    char expected[64];
    snprintf(expected, sizeof(expected), "found %lu", lengths[i]);
    CHECK(lengths[i] < 4096 || strstr(lck_last_error(), expected) != NULL, "%s", lck_last_error());
  }
  make();
  CHECK(ftruncate(raw, (off_t)size + 12345) == 0, "ftruncate");
  region = must_open(path, 0);
  CHECK(sequence_in(region, 0) == 4, "bytes beyond: %s", lck_last_error());
  CHECK(lck_region_grow(region, 4096) == 0, "%s", lck_last_error());
  CHECK(describe(region).size == file_length(path), "beyond is cut on growth");
  must_close(region);
}

/* A copy may have holes; a writer fills them, so that no store meets a full medium. */
static void test_holes(off_t beyond) {
  make();
  uint64_t size = file_length(path);
  CHECK(beyond == 0 || fallocate(raw, 0, (off_t)size, beyond) == 0, "allocate beyond");
  struct stat file;
  CHECK(fallocate(raw, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)size - (1 << 20),
                  1 << 20) == 0,
        "punch: %s", strerror(errno));
  lck_region *region = must_open(path, 0);
  CHECK(fstat(raw, &file) == 0 && file.st_blocks * 512 >= (off_t)size + beyond, "%ld blocks",
        file.st_blocks);
  CHECK(sequence_in(region, 0) == 4, "content stays: %s", lck_last_error());
  must_close(region);
}

static uint64_t random_state;

static uint64_t next_random(void) {
  random_state += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

/* Numbers that a bound may get wrong. */
static uint64_t nasty(void) {
  static const uint64_t picks[] = {0,
                                   1,
                                   2,
                                   16,
                                   17,
                                   4095,
                                   4096,
                                   131072,
                                   2097152,
                                   4194304,
                                   1 << 30,
                                   INT64_MAX,
                                   UINT64_MAX,
                                   UINT64_MAX - 4095,
                                   UINT64_C(1) << 63};
  uint64_t which = next_random() % 20;
  return which < 15 ? picks[which] : next_random() >> (next_random() % 64);
}

/* A header with a right CRC and wrong numbers: only the bounds stand in the way. */
static void forge(const unsigned char *good, unsigned char *bytes) {
  superblock_disk super;
  memcpy(&super, good, sizeof(super));
  for (uint64_t changes = 1 + next_random() % 3; changes > 0; changes--) {
    uint64_t value = nasty();
    switch (next_random() % 8) {
    case 0:
      super.size = value;
      break;
    case 1:
      super.slot_count = (uint32_t)value;
      break;
    case 2:
      super.segment_count = (uint32_t)value;
      break;
    case 3:
      super.lineage_count = (uint32_t)value;
      break;
    case 4:
      super.segments[next_random() % 3].offset = value;
      break;
    case 5:
      super.segments[next_random() % 3].length = value;
      break;
    case 6:
      super.segments[next_random() % 3].slot_bytes = value;
      break;
    default:
      super.journal_length = value;
      break;
    }
  }
  super.crc = lck_crc32c(0, &super, offsetof(superblock_disk, crc));
  memcpy(bytes, &super, sizeof(super));
  memcpy(bytes + LCK_HEADER_PAGE, &super, sizeof(super));
}

/* A record with a right CRC and wrong blobs. */
static void forge_record(const unsigned char *good, unsigned char *bytes) {
  record_disk record;
  memcpy(&record, good, sizeof(record));
  record.layout_offset = nasty();
  record.layout_length = nasty();
  if (next_random() % 2)
    record.manifest_length = nasty();
  record.crc = lck_crc32c(0, &record, offsetof(record_disk, crc));
  memcpy(bytes, &record, sizeof(record));
}

static void test_random_files(void) {
  enum { HEAD = 4 * 4096, SEEDS = 10000 };
  static unsigned char good[HEAD];
  static unsigned char bytes[HEAD];
  uint64_t opened = 0;
  make();
  uint64_t size = file_length(path);
  peek(0, good, HEAD);
  for (uint64_t seed = 0; seed < SEEDS; seed++) {
    random_state = seed;
    memcpy(bytes, good, HEAD);
    if (seed % 4 == 0)
      for (size_t i = 0; i < HEAD; i++)
        bytes[i] = (unsigned char)next_random();
    else if (seed % 4 == 1)
      forge_record(good + LCK_RECORD_OFFSET(0), bytes + LCK_RECORD_OFFSET(0));
    else
      forge(good, bytes);
    if (ftruncate(raw, seed % 8 == 7 ? (off_t)(next_random() % (2 * size)) : (off_t)size) != 0)
      CHECK(0, "ftruncate");
    poke(0, bytes, HEAD);
    lck_region *region = NULL;
    int rc = try_open(path, seed % 16 < 8 ? LCK_READ_ONLY : 0, &region);
    lck_record record;
    for (uint32_t slot = 0; rc == 0 && slot < 17; slot++)
      (void)lck_slot_read(region, slot, &record);
    opened += rc == 0;
    if (rc == 0 && lck_region_close(region) != 0)
      CHECK(0, "seed %lu", seed);
    if (rc == 0 && seed % 4 == 0)
      CHECK(0, "seed %lu opens", seed);
  }
  CHECK(opened > SEEDS / 4, "only %lu files opened: the bounds of a slot were hardly tried",
        opened);
}

int main(void) {
  path = path_in("/dev/shm");
  raw = open_file(path, O_RDWR | O_CREAT);
  test_superblock_bits();
  test_slot_bits();
  test_strange_records();
  test_impossible_counts();
  test_tables_without_end();
  test_superblock_versions();
  test_truncation();
  test_holes(0);
  test_random_files();
  unlink(path);
  close(raw);
  /* Where no fault allocates. */
  path = path_in(getenv("LCK_TEST_DISK") ? getenv("LCK_TEST_DISK") : "/var/tmp");
  raw = open_file(path, O_RDWR | O_CREAT);
  test_holes(0);
  test_holes(4 << 20);
  unlink(path);
  return checks_end();
}
