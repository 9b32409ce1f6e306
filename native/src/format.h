/* format.h -- the bytes on the medium, format version 2. The only description of the layout;
 * docs/design.md's offset tables are checked against this file.
 *
 * Little-endian. Offsets count from the start of the region. Every structure that can be torn
 * carries a CRC32C over all bytes before it. Each superblock and each record has a page of its
 * own, so that no medium rewrites one while it writes another. */
#ifndef LCK_FORMAT_H
#define LCK_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#include "lightck.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the region format is little-endian"
#endif

#define LCK_FORMAT_VERSION 2u
#define LCK_SUPERBLOCK_MAGIC UINT64_C(0x314B43544847494C) /* "LIGHTCK1" */
#define LCK_RECORD_MAGIC UINT32_C(0x524B434C)             /* "LCKR" */
#define LCK_JOURNAL_MAGIC UINT32_C(0x4A4B434C)            /* "LCKJ" */

#define LCK_HEADER_PAGE UINT64_C(4096)
#define LCK_SUPERBLOCK_OFFSET(copy) ((uint64_t)(copy) * LCK_HEADER_PAGE)    /* copy 0, 1 */
#define LCK_RECORD_OFFSET(slot) ((2u + (uint64_t)(slot)) * LCK_HEADER_PAGE) /* slot 0..15 */
#define LCK_JOURNAL_OFFSET (32u * LCK_HEADER_PAGE)
#define LCK_GRANULE (UINT64_C(2) << 20) /* segments start and end on 2 MiB: huge pages, devdax */

/* A layout table or a manifest has at most so many bytes. Both are read whole before anything is
 * known of them: in a file full of holes, a wrong length under a right checksum would otherwise
 * take all memory. The fuzzer lowers it. */
#ifndef LCK_TABLE_LIMIT
#define LCK_TABLE_LIMIT (UINT64_C(1) << 30)
#endif

/* No count of commits or steps comes here. A higher one is damage: counting on from it would end in
 * an overflow in the middle of a training. */
#define LCK_COUNT_LIMIT (UINT64_C(1) << 62)

typedef struct segment_disk {
  uint64_t offset, length, slot_bytes;
} segment_disk;

typedef struct branch_disk {
  uint64_t timeline, sequence;
} branch_disk;

/* Identity, space and ancestry. Two copies with the same content, rewritten one after the other:
 * at any instant one of them is whole. The higher generation counts. */
typedef struct superblock_disk {
  uint64_t magic;
  uint32_t version;
  uint32_t bytes; /* sizeof(superblock_disk) */
  uint64_t generation;
  uint64_t size; /* of the region */
  uint8_t uuid[16];
  uint8_t run_id[16];
  uint32_t rank, world;
  uint32_t slot_count, segment_count;
  uint64_t created_ns; /* wall clock */
  uint64_t journal_offset, journal_length;
  uint64_t timeline; /* newest; 0 before the first attach */
  uint32_t lineage_count, flags;
  uint64_t suspect; /* first sequence of `timeline` that is suspect; 0: none */
  segment_disk segments[LCK_MAX_SEGMENTS];
  branch_disk lineage[LCK_MAX_LINEAGE];
  uint64_t suspect_before[LCK_MAX_LINEAGE]; /* the same of each ancestor */
  uint8_t reserved[60];
  uint32_t crc;
} superblock_disk;

/* Set in a published sequence word, so that two bits would have to flip to make it look empty. */
#define LCK_PUBLISHED (UINT64_C(1) << 63)

/* The commit record, which makes a snapshot valid. `sequence` is 0 while the slot is empty or being
 * written; the number and LCK_PUBLISHED are stored last, as one aligned 8-byte store, after the
 * rest of the block is durable. */
typedef struct record_disk {
  uint64_t sequence;
  uint32_t magic;
  uint32_t version;
  uint64_t step;
  uint64_t timeline;
  uint64_t parent;
  uint8_t run_id[16];
  uint32_t flags;
  uint32_t slot;
  uint64_t layout_offset;
  uint64_t layout_length;
  uint64_t manifest_offset;
  uint64_t manifest_length;
  uint32_t layout_crc;
  uint32_t manifest_crc;
  uint64_t payload_bytes;
  uint64_t wall_time_ns;
  uint8_t share_digest[16];
  uint32_t rank, world;
  uint8_t uuid[16];
  uint8_t reserved[92];
  uint32_t crc;
} record_disk;

/* One entry of the boundary journal, at the start of each of its places; its blob follows at
 * once. `sequence` grows over the region's life and is published last, as a record's. */
typedef struct journal_disk {
  uint64_t sequence;
  uint32_t magic;
  uint32_t version;
  uint64_t step;
  uint64_t timeline;
  uint64_t length; /* of the blob */
  uint32_t kind;
  uint32_t flags;
  uint32_t blob_crc;
  uint32_t place;
  uint64_t wall_time_ns;
  uint8_t uuid[16];
  uint8_t reserved[44];
  uint32_t crc;
} journal_disk;

#define LCK_JOURNAL_PLACES 3u
/* Whole pages, so that no medium rewrites one place while it writes another. */
#define LCK_JOURNAL_PLACE(journal_length)                                                          \
  ((journal_length) / LCK_JOURNAL_PLACES / LCK_HEADER_PAGE * LCK_HEADER_PAGE)

/* The statistics that a trainer last published. Informational: nothing relies on it, recovery never
 * reads it, and of a page that was never written everything is 0. The CRC leaves out `turn`. */
#define LCK_STATISTICS_OFFSET LCK_RECORD_OFFSET(LCK_MAX_SLOTS) /* the page behind the records */
#define LCK_STATISTICS_MAGIC UINT32_C(0x534B434C)              /* "LCKS" */

typedef struct statistics_disk {
  uint64_t turn; /* odd while the page is being written */
  uint32_t magic;
  uint32_t version;
  uint32_t bytes; /* sizeof(statistics_disk) */
  uint32_t reserved0;
  lck_statistics values;
  uint32_t reserved;
  uint32_t crc;
} statistics_disk;

_Static_assert(sizeof(segment_disk) == 24, "segment_disk");
_Static_assert(sizeof(branch_disk) == 16, "branch_disk");
_Static_assert(sizeof(superblock_disk) == 960, "superblock_disk");
_Static_assert(offsetof(superblock_disk, segments) == 128, "superblock_disk.segments");
_Static_assert(offsetof(superblock_disk, lineage) == 512, "superblock_disk.lineage");
_Static_assert(offsetof(superblock_disk, suspect_before) == 768, "superblock_disk.suspect_before");
_Static_assert(offsetof(superblock_disk, crc) == 956, "superblock_disk.crc");
_Static_assert(sizeof(record_disk) == 256, "record_disk");
_Static_assert(offsetof(record_disk, layout_offset) == 64, "record_disk.layout_offset");
_Static_assert(offsetof(record_disk, crc) == 252, "record_disk.crc");
_Static_assert(sizeof(journal_disk) == 128, "journal_disk"); /* whole lines: blobs share none */
_Static_assert(offsetof(journal_disk, length) == 32, "journal_disk.length");
_Static_assert(offsetof(journal_disk, crc) == 124, "journal_disk.crc");
_Static_assert(sizeof(lck_statistics) == 960, "lck_statistics");
_Static_assert(sizeof(statistics_disk) == 992, "statistics_disk");
_Static_assert(LCK_STATISTICS_OFFSET + LCK_HEADER_PAGE <= LCK_JOURNAL_OFFSET, "before the journal");

#endif
