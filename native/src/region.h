/* region.h -- an open region, and the slot life cycle that the snapshots drive. */
#ifndef LCK_REGION_H
#define LCK_REGION_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "format.h"
#include "lightck.h"

/* The layout table that a slot holds, as this process last saw it proven; length 0: unknown. */
typedef struct lck_layout {
  uint64_t offset, length;
  uint32_t crc;
} lck_layout;

/* The state of the journal's writer; sequence 0: it has not looked at the places yet. */
typedef struct lck_journal {
  uint64_t sequence; /* highest so far */
  uint64_t step;     /* of the newest entry, if this handle has written it */
  uint32_t newest;   /* its place; the one before it holds the next older one */
  uint32_t kind;     /* as step; 0: not this handle's */
} lck_journal;

struct lck_region {
  unsigned char *base;      /* address of offset 0, in a reservation larger than the region */
  uint64_t reserved_length; /* of that address range; segments are mapped into it, never moved */
  int backed;               /* that range is mapped by somebody else, all of it */
#ifdef LCK_GUARD
  uint64_t writable; /* where the primitives store, from `base`; see guard.h */
#endif
  int fd, lock_fd; /* own duplicates */
  uint32_t flags, medium, granularity;
  uint64_t page_bytes;      /* of the mapping: 4 KiB, or a huge page */
  uint64_t granule;         /* mapped lengths are multiples: LCK_GRANULE, or a larger huge page */
  pthread_mutex_t mutex;    /* guards `super` and `layouts`: a commit may run beside a growth */
  pthread_mutex_t sync;     /* one at a time: the kernel tells one caller only of a lost page */
  pthread_mutex_t changing; /* held from reading `super` to having written the next one */
  superblock_disk super;    /* as last written */
  lck_layout layouts[LCK_MAX_SLOTS];
  lck_journal journal;
  _Atomic int latched;   /* first failure, 0 while healthy */
  _Atomic int explained; /* `why` is written: its text, never changed after */
  char why[512];
  _Atomic uint32_t writing;  /* bit per slot with an open snapshot */
  _Atomic uint32_t unmapped; /* bit per slot of which pages may have no mapping yet: see space.h */
  uint32_t leased;           /* bit per slot leased through this handle; guarded as the list is */
  _Atomic pid_t owner;       /* process that opened it; in a forked child -1 */
  int32_t numa_node;
  lck_region *next; /* list of open regions, for the fork handler */
};

/* 0, or LCK_E_INVALID (NULL) / LCK_E_FORKED with text: the first line of every reading call. */
int lck_region_alive(const lck_region *region);

/* As lck_region_alive, or LCK_E_INVALID (read-only) / LCK_E_PREVIOUS: the first line of every
 * mutating call. */
int lck_region_writable(const lck_region *region);

/* 0, or LCK_E_PREVIOUS with the text of the failure that latched the region. Any thread. */
int lck_region_previous(const lck_region *region);

/* Latch the first failure, with the calling thread's error text; returns `code`. Any thread. */
int lck_region_latch(lck_region *region, int code);

/* 1 when what the superblock says makes this snapshot suspect. */
int lck_region_suspects(const superblock_disk *super, uint64_t timeline, uint64_t sequence);

/* 1 when [offset, +length) lies in the slot's own space, in one segment. Any thread. */
int lck_slot_contains(const lck_region *region, uint32_t slot, uint64_t offset, uint64_t length);

/* Claim a slot for writing against readers' leases and other snapshots, or give it back. Never
 * blocks. Errors: LCK_E_LEASED, LCK_E_BUSY. */
int lck_slot_claim(lck_region *region, uint32_t slot);
void lck_slot_unclaim(lck_region *region, uint32_t slot);

/* Make the slot's record invalid, durably on the medium's own terms. */
int lck_slot_invalidate(lck_region *region, uint32_t slot);

/* The commit. Payload stores have been fenced by the threads that made them; returns when the
 * record is durable. `layout` may be NULL (already in the slot). The order and its argument are in
 * the body. */
int lck_slot_commit(lck_region *region, uint32_t slot, const lck_record *record, const void *layout,
                    const void *manifest);

#endif
