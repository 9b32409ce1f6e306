/* snapshot.h -- inside a snapshot: batches, chunks, pieces.
 *
 * A batch is built once and its tables never change shape. A *piece* is one copy, or a part of one
 * that is too large for a chunk. A *chunk* is what one thread does at a time: a run of pieces of
 * one layer. A chunk is *captured* when its bytes have left their sources and, where one of its
 * copies is staged, *drained* when they have reached the region. */
#ifndef LCK_SNAPSHOT_H
#define LCK_SNAPSHOT_H

#include <stdatomic.h>
#include <stdint.h>

#include "lightck.h"
#include "pool.h"

#define LCK_BATCHES 65536u
#define LCK_BATCH_BLOCK 256u
#define LCK_CHUNK_PIECES 64u
#define LCK_NO_CHUNK UINT64_MAX
#define LCK_PIECE_SKIPPED (1u << 31) /* unchanged: neither staged nor stored */

/* `crc` and LCK_PIECE_SKIPPED are written by the thread that claimed the chunk, before it counts
 * the chunk as done, and read by others after they have seen that count. */
typedef struct lck_piece {
  const unsigned char *source; /* of a fed copy: NULL, its bytes are in the extent */
  unsigned char *staged;       /* NULL: straight to the region */
  uint64_t offset, length;
  uint32_t copy;     /* index in the batch */
  uint32_t flags;    /* LCK_COPY_*, LCK_PIECE_SKIPPED */
  uint32_t expected; /* with LCK_COPY_IF_CHANGED: of the whole copy */
  uint32_t crc;      /* of what was captured */
} lck_piece;

typedef struct lck_chunk {
  uint64_t first; /* its pieces: [first, first of the next chunk) */
  uint64_t start; /* byte of the batch at which it starts */
  uint32_t layer;
  _Atomic uint32_t captured;
} lck_chunk;

/* Chunks [0, next) are claimed, never beyond `released`; `done` of them are finished. The same with
 * `drain_next` and `drained` for the way from DRAM to the region. */
typedef struct lck_batch {
  lck_piece *pieces;
  lck_chunk *chunks; /* chunk_count and a last one that ends the pieces */
  uint64_t copy_count, chunk_count, piece_count, bytes;
  uint32_t number; /* in its snapshot */
  int fed;         /* sources come with lck_snapshot_feed, which alone raises `released` */
  _Alignas(64) _Atomic uint64_t released;
  _Atomic uint32_t waiting; /* captures that wait for this batch */
  _Alignas(64) _Atomic uint64_t next;
  _Alignas(64) _Atomic uint64_t done;
  _Atomic uint64_t drain_next, drained;
} lck_batch;

/* `phase` of a snapshot; with `failure` set it is LCK_SNAP_FAILED to the outside. */
enum { LCK_PHASE_OPEN, LCK_PHASE_SEALED, LCK_PHASE_COMMITTED };

struct lck_snapshot {
  lck_pool *pool;
  lck_region *region;
  uint32_t slot;
  int paged;          /* every copy is staged, and the keeper invalidates the slot */
  lck_snapshot *next; /* in the pool's list */

  /* Under the pool's lock. */
  uint32_t users; /* workers or the keeper hold it: it must not be freed */
  int phase;
  int claimed;                     /* the slot is ours */
  int doomed;                      /* the keeper has yet to invalidate the slot */
  uint32_t scan_from;              /* batches below have no unclaimed chunk */
  uint32_t drain_from;             /* batches below have no unclaimed drain */
  uint64_t deadline;               /* of the drains, ns; see drain.h */
  uint64_t sealed_at, sealed_left; /* ns; bytes not drained then */
  char text[512];                  /* of the failure; constant once `failure` is set */

  _Atomic int failure; /* first one, or 0 */
  _Atomic int halted;  /* failed or given up: nobody touches a source or the region any more */
  _Atomic int erased;  /* the slot's old content is invalid, durably: drains may run */
  _Atomic int staged;  /* some copy is: every chunk has its drain, which may find nothing to do */
  _Atomic uint32_t urgent;
  _Atomic uint32_t batch_count;   /* stored after the batch and its block */
  _Atomic uint32_t drained;       /* batches */
  _Atomic uint64_t drained_bytes; /* of the payload, also where a chunk had nothing to drain */
  lck_batch **blocks[LCK_BATCHES / LCK_BATCH_BLOCK];

  lck_area *areas; /* staging in use */
  uint64_t payload_bytes;
  lck_record record;
  void *layout, *manifest;
};

/* What a thread knows of itself and of its last chunk. */
typedef struct lck_lap {
  lck_lane *lane;
  uint64_t spent, finished; /* ns */
} lck_lap;

/* 0, or LCK_E_INVALID / LCK_E_FORKED with text. */
int lck_snapshot_usable(const lck_snapshot *snapshot);

/* 0, or the snapshot is not usable, has failed, or is sealed. */
int lck_snapshot_open(lck_snapshot *snapshot);

/* 0, or the snapshot's failure with its text, set for the calling thread. */
int lck_snapshot_failure(const lck_snapshot *snapshot);

/* Make `code` and this thread's error text the snapshot's failure unless it has one; latch the
 * region; wake everybody. */
void lck_snapshot_fail(lck_snapshot *snapshot, int code);

/* NULL with text: no such batch. */
lck_batch *lck_snapshot_batch(const lck_snapshot *snapshot, uint32_t batch);

int lck_batch_build(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
                    lck_batch **out);
void lck_batch_free(lck_batch *batch);

/* Chunks that start before byte `bytes` of the batch. */
uint64_t lck_batch_chunks(const lck_batch *batch, uint64_t bytes);

/* Claim the next released chunk, or the next captured one that waits for its drain. */
uint64_t lck_batch_claim(lck_batch *batch);
uint64_t lck_batch_claim_drain(lck_batch *batch);

/* Run a claimed chunk and count it as done, whatever comes of it. */
void lck_chunk_capture(lck_snapshot *snapshot, lck_batch *batch, uint64_t index, int helping,
                       lck_lap *lap);
void lck_chunk_drain(lck_snapshot *snapshot, lck_batch *batch, uint64_t index, lck_lap *lap);

/* The keeper's two duties. */
void lck_snapshot_erase(lck_snapshot *snapshot);
void lck_snapshot_commit(lck_snapshot *snapshot);

#endif
