/* image.h -- a region in few bytes: what the fuzzer changes, and how it becomes a file.
 *
 * An input is `image` followed by the bytes of tables, which go to the start of every slot and
 * behind the header of each journal entry. What a region has beside that are zeros, so that a few
 * kilobytes stand for megabytes. */
#ifndef LCK_FUZZ_IMAGE_H
#define LCK_FUZZ_IMAGE_H

#include <stdint.h>

#include "format.h"

#define FUZZ_SLOTS 3u
#define FUZZ_TABLE_BYTES 2048u /* of each slot at most */

enum {
  FUZZ_OWNER = 1u << 0,  /* open as owner, and write: else read only */
  FUZZ_SPARSE = 1u << 1, /* the file claims SPARSE_BYTES, nearly all of them a hole */
};

typedef struct image {
  uint32_t flags;
  uint32_t length_pages; /* of the file, in 4 KiB, up to LONGEST_PAGES; cut to 12 bits */
  superblock_disk super[2];
  record_disk record[FUZZ_SLOTS];
  journal_disk journal[LCK_JOURNAL_PLACES];
} image;

/* A sound region of one or (`grown`) two segments, with a snapshot in two of its three slots and
 * an entry in each place of its journal. Returns the bytes of the input. */
uint64_t image_sound(uint8_t *input, uint64_t room, int grown);

/* Give every superblock, record and journal entry, and what the latter two say of tables and blobs,
 * the checksum it should have: damage then reaches what is behind the checksums. */
void image_seal(uint8_t *input, uint64_t bytes);

/* Set one field of a superblock, a record or a journal entry to a number that is likely to be on
 * some edge. */
void image_set_field(uint8_t *input, uint64_t *random);

/* Make `fd` hold what the input stands for. */
void image_store(const uint8_t *input, uint64_t bytes, int fd);

uint64_t image_draw(uint64_t *random);

#endif
