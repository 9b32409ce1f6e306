/* snapshot.h -- inside a snapshot: batches, chunks, pieces.
 *
 * A batch is built once and its tables never change shape. A *piece* is one copy, or a part of one
 * that is too large for a chunk. A *chunk* is what one thread does at a time: a run of pieces of
 * one layer. A chunk is *captured* when its bytes have left their sources and, where one of its
 * copies is staged, *drained* when they have reached the region.
 *
 * Threads share all of it without a lock: one word per chunk says how far it is and whose it is.
 * Whoever makes a step of a snapshot's life (list, phase, slot) holds the pool's lock; workers of
 * the idle class make none. */
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

/* How far a chunk is: the low bits of its word. Above them, while it is claimed, the number of
 * the thread, plus 1. */
enum {
  LCK_CHUNK_WAITS = 0,
  LCK_CHUNK_IN_CAPTURE = 1,
  LCK_CHUNK_CAPTURED = 2,
  LCK_CHUNK_IN_DRAIN = 3,
  LCK_CHUNK_DRAINED = 4,
  LCK_CHUNK_PHASES = 8,
};

/* `crc` and LCK_PIECE_SKIPPED are written by the thread whose chunk it is, before the chunk's word
 * says captured, and read by others after they have seen that. */
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
  _Atomic uint32_t word;
} lck_chunk;

/* No chunk below `next` waits, and none from `released` on is claimed. Below `done` all are
 * captured, below `drain_next` all are drained or in a drain, below `drained` all are drained: each
 * as far as anybody has looked. `counted` chunks were captured, as far as their threads have come
 * to count them. */
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
  _Atomic uint64_t counted, drain_next, drained;
} lck_batch;

/* `phase` of a snapshot; with `failure` set it is LCK_SNAP_FAILED to the outside. */
enum { LCK_PHASE_OPEN, LCK_PHASE_SEALED, LCK_PHASE_COMMITTED };

struct lck_snapshot {
  lck_pool *pool;
  lck_region *region;
  unsigned char
      *base; /* the region's addresses, for threads that may outlast it: see run_section */
  uint64_t reserved_length;
  uint32_t slot;
  int paged; /* every copy is staged, and the commit thread invalidates the slot */
  _Atomic(lck_snapshot *) next; /* in the pool's list */

  /* Changed under the pool's lock. */
  uint32_t users; /* the commit thread, or who commits it: it must not be freed */
  _Atomic int phase;
  int committing;                  /* somebody is at it, or was */
  int claimed;                     /* the slot is ours */
  int invalidation_due;            /* the commit thread has yet to invalidate the slot */
  uint64_t began;                  /* ns */
  uint64_t deadline;               /* of the drains, ns; see drain.h */
  uint64_t sealed_at, sealed_left; /* ns; bytes not drained then */

  _Atomic uint32_t scan_from;  /* batches below have no chunk that waits */
  _Atomic uint32_t drain_from; /* batches below have no chunk that waits for its drain */
  _Atomic(char *) text;        /* of the first failure; set before `failure` is */
  _Atomic int failure;         /* or 0 */
  _Atomic int halted;      /* failed or given up: nobody touches a source or the region any more */
  _Atomic int invalidated; /* the slot's old content is invalid, durably: drains may run */
  _Atomic int staged; /* some copy is: every chunk has its drain, which may find nothing to do */
  _Atomic uint32_t urgent;
  _Atomic uint32_t batch_count;   /* stored after the batch and its block */
  _Atomic uint64_t drained_bytes; /* of the payload, also where a chunk had nothing to drain */
  lck_batch **blocks[LCK_BATCHES / LCK_BATCH_BLOCK];

  lck_area *areas; /* staging in use */
  uint64_t payload_bytes;
  lck_record record;
  void *layout, *manifest;

  /* Freed while workers may be looking at it: see lck_pool_free_later. */
  lck_snapshot *deferred;
  uint64_t visits[LCK_MAX_THREADS];
};

/* A thread, and how long its last chunk took. */
typedef struct lck_last_chunk {
  lck_pool_thread *thread;
  uint64_t spent, finished; /* ns */
} lck_last_chunk;

/* 0, or LCK_E_INVALID / LCK_E_FORKED with text. */
int lck_snapshot_usable(const lck_snapshot *snapshot);

/* 0, or the snapshot is not usable, has failed, or is sealed. */
int lck_snapshot_open(lck_snapshot *snapshot);

/* 0, or the snapshot's failure with its text, set for the calling thread. */
int lck_snapshot_failure(const lck_snapshot *snapshot);

/* Make `code` and this thread's error text the snapshot's failure unless it has one; latch the
 * region; wake everybody. Takes no lock. */
void lck_snapshot_fail(lck_snapshot *snapshot, int code);

/* NULL with text: no such batch. */
lck_batch *lck_snapshot_batch(const lck_snapshot *snapshot, uint32_t batch);

int lck_batch_build(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
                    lck_batch **out);
void lck_batch_free(lck_batch *batch);

/* Chunks that start before byte `bytes` of the batch. */
uint64_t lck_batch_chunks(const lck_batch *batch, uint64_t bytes);

/* Claim for `thread` the next released chunk, or the next captured one that waits for its drain. A
 * snapshot that has halted has none. */
uint64_t lck_batch_claim(const lck_snapshot *snapshot, lck_batch *batch,
                         const lck_pool_thread *thread);
uint64_t lck_batch_claim_drain(const lck_snapshot *snapshot, lck_batch *batch,
                               const lck_pool_thread *thread);

/* Claim for `thread` a chunk (LCK_CHUNK_IN_CAPTURE or LCK_CHUNK_IN_DRAIN) that a worker of the idle
 * class has claimed; that one does nothing more to it once this has returned. LCK_NO_CHUNK: none of
 * them has one. */
uint64_t lck_batch_seize(lck_snapshot *snapshot, lck_batch *batch, const lck_pool_thread *thread,
                         uint32_t phase);

/* Seize all chunks that idle workers have claimed, and do nothing with them: the snapshot has
 * halted. */
void lck_snapshot_seize_all(lck_snapshot *snapshot);

/* How many chunks from the first on are captured; all of them are drained. */
uint64_t lck_batch_captured(lck_batch *batch);
int lck_batch_drained(lck_batch *batch);

/* Whether a thread has claimed a chunk; of a batch, for its capture. */
int lck_batch_busy(const lck_batch *batch);
int lck_snapshot_busy(const lck_snapshot *snapshot);

/* Run a claimed chunk. */
void lck_chunk_capture(lck_snapshot *snapshot, lck_batch *batch, uint64_t index, int helping,
                       lck_last_chunk *last);
void lck_chunk_drain(lck_snapshot *snapshot, lck_batch *batch, uint64_t index,
                     lck_last_chunk *last);

/* Invalidate the slot of a snapshot whose invalidation is due. Called by the commit thread. */
void lck_snapshot_invalidate(lck_snapshot *snapshot);

/* Commit the snapshot if it is due, nobody commits it already, and the medium needs no sync
 * (`may_sync`: or does). Never on a thread of the idle class. */
void lck_snapshot_try_commit(lck_snapshot *snapshot, int may_sync, lck_pool_thread *thread);

/* Return whether a snapshot is sealed, has not failed, and is in the region with all its bytes.
 * Under the pool's lock. */
int lck_snapshot_due(const lck_snapshot *snapshot);

/* Free the memory of a snapshot that nobody has. */
void lck_snapshot_discard(lck_snapshot *snapshot);

#endif
