/* guest.h -- what runs inside the emulated machine: commits whose contents say which they are.
 *
 * content.c says what snapshot n holds; commit.c makes regions and commits snapshots, recover.c
 * finds what a crash left and compares every byte; main.c is the command line, sector.c says what
 * to damage. liar.c is linked into a second program only: region code that promises what the medium
 * does not keep.
 *
 * Whoever watches the machine reads these lines: IS, BEGUN n, COMMITTED n, FELLBACK n why,
 * RECOVERED n or none, UNCOMMITTED code why, REFUSED slot, SECTOR n, NOTHING code why, FAILED code
 * why, WRONG what. */
#ifndef LCK_GUEST_H
#define LCK_GUEST_H

#include <stdint.h>

#include "lightck.h"

#define EXTENTS 6u
#define SLOT_BYTES (UINT64_C(1) << 20)
#define SEGMENTS 4u       /* growth ends here */
#define LAYOUT_MOST 400u  /* bytes of a layout table */
#define MANIFEST_AT 2048u /* in the slot; the layout table is at 0 */
#define PAYLOAD_AT 4096u
#define ABSENT 1

typedef struct options {
  const char *path;
  uint32_t flags; /* LCK_PROCESS_DURABLE */
  int32_t node;   /* to bind memory to, or -1 */
  uint64_t commits;
  const char *part; /* "record", "manifest" or "payload" */
} options;

/* What is in a slot besides payload; a snapshot's number decides all but the places. */
typedef struct manifest {
  uint64_t number, count;
  lck_read extents[EXTENTS];
} manifest;

/* One line, on its way out of the machine when this returns. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* FAILED with lck_last_error(), and the process ends. */
void must(int code, const char *what);

uint32_t content_layout(uint64_t number, unsigned char *table); /* length */
uint64_t content_length(uint64_t number, uint32_t extent);
void content_fill(uint64_t number, uint32_t extent, unsigned char *bytes);

/* Open, saying what the region lies on. Errors: those of lck_region_open, or ABSENT, no file. */
int region_open(const options *o, uint32_t flags, lck_region **out);
/* The region at the path, which is made when there is none. */
lck_region *region_own(const options *o);
/* Commit one snapshot after the other, `commits` in all, and close the region. */
void commit_on(const options *o, lck_region *region);

typedef struct found {
  uint64_t number; /* 0: none */
  lck_record record;
  uint64_t last_sequence; /* of any record that holds */
} found;

/* The newest snapshot of the region's timeline that is whole; its contents are compared. */
found recover(const lck_region *region);

/* Say where on its device a part of the newest snapshot lies. */
void say_sector(const options *o);

#endif
