/* audit.c -- comparing captured bytes with the live ones, and the digests of captured copies. */
#include <stdlib.h>
#include <string.h>

#include "access.h"
#include "api.h"
#include "error.h"
#include "format.h"
#include "kernel.h"
#include "region.h"
#include "snapshot.h"

#define SAMPLE_BYTES UINT64_C(4096)
#define AHEAD 16 /* pieces whose bytes are fetched early: small ones lie anywhere in memory */

typedef struct layer_chunk {
  uint32_t layer;
  uint64_t chunk;
} layer_chunk;

static uint64_t splitmix64(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static int find_captured(const lck_snapshot *snapshot, uint32_t index, lck_batch **out) {
  int rc = lck_snapshot_usable(snapshot);
  if (rc)
    return rc;
  *out = lck_snapshot_batch(snapshot, index);
  if (!*out)
    return LCK_E_INVALID;
  uint64_t done = lck_batch_captured(*out);
  if (done < (*out)->chunk_count) {
    return lck_fail(LCK_E_STATE, "batch %u: %llu of %llu chunks captured", index,
                    (unsigned long long)done, (unsigned long long)(*out)->chunk_count);
  }
  return lck_snapshot_failure(snapshot);
}

/* Return the number of pieces of the copy that starts at piece `first`, and its length. */
static uint64_t copy_pieces(const lck_batch *batch, uint64_t first, uint64_t *length) {
  uint64_t count = 0;
  *length = 0;
  while (first + count < batch->piece_count &&
         batch->pieces[first + count].copy == batch->pieces[first].copy) {
    *length += batch->pieces[first + count++].length;
  }
  return count;
}

static int mismatch(const lck_snapshot *snapshot, const lck_piece *piece, uint64_t *bad) {
  if (bad)
    *bad = piece->copy;
  return lck_fail(LCK_E_MISMATCH,
                  "copy %u of %llu bytes near offset %llu of slot %u: live bytes differ",
                  piece->copy, (unsigned long long)piece->length, (unsigned long long)piece->offset,
                  snapshot->slot);
}

typedef struct comparison {
  const lck_snapshot *snapshot;
  const lck_batch *batch;
  uint64_t *seed;
  const lck_piece *different; /* NULL: none */
} comparison;

/* The pieces of a copy lie one behind the other, in DRAM as in the region, and are skipped
 * together. */
static void compare(void *argument) {
  comparison *to = argument;
  const lck_batch *batch = to->batch;
  for (uint64_t i = 0, length; i < batch->piece_count && to->different == NULL;) {
    const lck_piece *piece = &batch->pieces[i];
    if (batch->piece_count - i > AHEAD) {
      __builtin_prefetch(piece[AHEAD].source);
      __builtin_prefetch(to->snapshot->region->base + piece[AHEAD].offset);
    }
    i += copy_pieces(batch, i, &length);
    uint64_t size = length < SAMPLE_BYTES ? length : SAMPLE_BYTES;
    uint64_t start = splitmix64(to->seed) % (length - size + 1);
    const unsigned char *captured = piece->staged && !(piece->flags & LCK_PIECE_SKIPPED)
                                        ? piece->staged
                                        : to->snapshot->region->base + piece->offset;
    if (memcmp(piece->source + start, captured + start, size) != 0)
      to->different = piece;
  }
}

/* Compare a random part of every copy, byte by byte. */
static int compare_samples(const lck_snapshot *snapshot, const lck_batch *batch, uint64_t *seed,
                           uint64_t *bad) {
  comparison to = {.snapshot = snapshot, .batch = batch, .seed = seed};
  int rc = lck_access_run(snapshot->region, compare, &to);
  if (rc != 0)
    return rc;
  return to.different == NULL ? 0 : mismatch(snapshot, to.different, bad);
}

static int rehash(const lck_snapshot *snapshot, const lck_batch *batch, uint64_t first,
                  uint64_t end, uint64_t *bad) {
  for (uint64_t i = first; i < end; i++) {
    const lck_piece *piece = &batch->pieces[i];
    if (lck_kernel_current()->crc(piece->source, piece->length, 0) != piece->crc)
      return mismatch(snapshot, piece, bad);
  }
  return 0;
}

static int by_layer(const void *a, const void *b) {
  const layer_chunk *x = a, *y = b;
  return x->layer != y->layer ? (x->layer > y->layer) - (x->layer < y->layer)
                              : (x->chunk > y->chunk) - (x->chunk < y->chunk);
}

/* Hash one random chunk of every layer; of a chunk that holds a copy too large for one, which only
 * a copy that may be skipped can be, a random piece. */
static int rehash_layers(const lck_snapshot *snapshot, const lck_batch *batch, uint64_t *seed,
                         uint64_t *bad) {
  layer_chunk *chunks = calloc(batch->chunk_count + 1, sizeof *chunks);
  if (!chunks) {
    return lck_fail(LCK_E_NOMEM, "no memory to audit %llu chunks",
                    (unsigned long long)batch->chunk_count);
  }
  for (uint64_t i = 0; i < batch->chunk_count; i++)
    chunks[i] = (layer_chunk){.layer = batch->chunks[i].layer, .chunk = i};
  qsort(chunks, batch->chunk_count, sizeof *chunks, by_layer);
  int rc = 0;
  for (uint64_t i = 0, end; i < batch->chunk_count && rc == 0; i = end) {
    for (end = i + 1; end < batch->chunk_count && chunks[end].layer == chunks[i].layer;)
      end++;
    const lck_chunk *chunk = &batch->chunks[chunks[i + splitmix64(seed) % (end - i)].chunk];
    uint64_t first = chunk[0].first, last = chunk[1].first;
    if (chunk[1].start - chunk[0].start > snapshot->pool->chunk_bytes) {
      first += splitmix64(seed) % (last - first);
      last = first + 1;
    }
    rc = rehash(snapshot, batch, first, last, bad);
  }
  free(chunks);
  return rc;
}

LCK_API int lck_snapshot_audit(lck_snapshot *snapshot, uint32_t batch, uint64_t seed,
                               int everything, uint64_t *bad) {
  lck_batch *captured;
  int rc = find_captured(snapshot, batch, &captured);
  if (rc == 0 && captured->fed)
    rc = lck_fail(LCK_E_STATE, "batch %u is fed: its sources are not here", batch);
  if (rc == 0)
    rc = compare_samples(snapshot, captured, &seed, bad);
  if (rc == 0) {
    rc = everything ? rehash(snapshot, captured, 0, captured->piece_count, bad)
                    : rehash_layers(snapshot, captured, &seed, bad);
  }
  return rc;
}

LCK_API int lck_snapshot_digests(const lck_snapshot *snapshot, uint32_t batch, uint32_t *crcs) {
  lck_batch *captured;
  int rc = find_captured(snapshot, batch, &captured);
  if (rc)
    return rc;
  if (!crcs && captured->copy_count > 0)
    return lck_fail(LCK_E_INVALID, "no place for the digests");
  for (uint64_t i = 0; i < captured->piece_count; i++) {
    const lck_piece *piece = &captured->pieces[i];
    int more = i > 0 && piece[-1].copy == piece->copy;
    crcs[piece->copy] =
        more ? lck_crc32c_combine(crcs[piece->copy], piece->crc, piece->length) : piece->crc;
  }
  return 0;
}
