/* fetch.c -- reading extents back: verified and copied out in one pass over the medium, on several
 * threads. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "access.h"
#include "api.h"
#include "error.h"
#include "kernel.h"
#include "persist.h"
#include "pool.h"
#include "region.h"

#define PIECE_BYTES (UINT64_C(4) << 20) /* what one thread takes at a time of a large extent */

typedef struct piece {
  uint64_t read, start, length;
  uint32_t crc;
} piece;

typedef struct fetch {
  const lck_region *region;
  const lck_read *reads;
  piece *pieces;
  uint64_t count;
  _Atomic uint64_t next; /* first piece that no thread has taken */
  _Atomic uint64_t gone; /* extent with a piece that cannot be read */
  lck_first_error failure;
} fetch;

typedef struct step {
  const lck_read *read;
  piece *part;
  const unsigned char *source;
} step;

/* Through the copy kernel, which passes the cache by: a copy in blocks and a sum while they are in
 * the cache reached 0.55 of memcpy's rate here, this reaches 0.96. It writes whole lines only, so
 * both ends are copied apart. Every sum describes the bytes that the caller gets, even if an owner
 * changed the region meanwhile.
 */
static uint32_t copy_and_sum(unsigned char *destination, const unsigned char *source,
                             uint64_t length) {
  const lck_kernel_table *kernel = lck_kernel_current();
  uint64_t head = -(uint64_t)(uintptr_t)destination % LCK_LINE;
  head = head < length ? head : length;
  uint64_t lines = (length - head) / LCK_LINE * LCK_LINE;
  uint64_t tail = length - head - lines;
  memcpy(destination, source, head);
  uint32_t crc = lck_crc32c(0, destination, head);
  if (lines > 0)
    crc = kernel->copy(destination + head, source + head, lines, crc);
  memcpy(destination + head + lines, source + head + lines, tail);
  return lck_crc32c(crc, destination + head + lines, tail);
}

static void take(void *argument) {
  const step *now = argument;
  piece *part = now->part;
  unsigned char *destination = now->read->destination;
  part->crc = destination == NULL
                  ? lck_crc32c(0, now->source, part->length)
                  : copy_and_sum(destination + part->start, now->source, part->length);
}

static void *work(void *argument) {
  fetch *job = argument;
  while (!lck_error_recorded(&job->failure)) {
    uint64_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (index >= job->count)
      break;
    piece *part = &job->pieces[index];
    const lck_read *read = &job->reads[part->read];
    step now = {read, part, job->region->base + read->offset + part->start};
    int rc = lck_access_run(job->region, take, &now);
    if (rc != 0)
      atomic_store(&job->gone, part->read);
    lck_error_record(&job->failure, rc);
  }
  lck_persist_fence(); /* the kernel's stores pass the order that joining a thread gives */
  return NULL;
}

static int check_bounds(const lck_region *region, const lck_read *reads, uint64_t count,
                        uint64_t *pieces, uint64_t *bad) {
  uint64_t size = region->super.size;
  *pieces = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (reads[i].offset > size || reads[i].length > size - reads[i].offset) {
      *bad = i; /* damage, or the owner grew the region after it was opened here */
      return lck_fail(LCK_E_CORRUPT,
                      "extent %" PRIu64 ": [%" PRIu64 ", +%" PRIu64
                      ") is outside the region's %" PRIu64 " bytes",
                      i, reads[i].offset, reads[i].length, size);
    }
    *pieces += (reads[i].length + PIECE_BYTES - 1) / PIECE_BYTES;
  }
  return 0;
}

static void cut(fetch *job, uint64_t count) {
  uint64_t index = 0;
  for (uint64_t i = 0; i < count; i++)
    for (uint64_t start = 0; start < job->reads[i].length; start += PIECE_BYTES) {
      uint64_t left = job->reads[i].length - start;
      job->pieces[index++] = (piece){i, start, left < PIECE_BYTES ? left : PIECE_BYTES, 0};
    }
}

/* Pieces lie in the order of their extents; an empty extent has none and the CRC 0. */
static int compare(const fetch *job, uint64_t count, uint64_t *bad) {
  uint64_t index = 0;
  for (uint64_t i = 0; i < count; i++) {
    uint32_t crc = 0;
    for (; index < job->count && job->pieces[index].read == i; index++)
      crc = job->pieces[index].start == 0
                ? job->pieces[index].crc
                : lck_crc32c_combine(crc, job->pieces[index].crc, job->pieces[index].length);
    if (crc != job->reads[i].crc) {
      *bad = i;
      return lck_fail(LCK_E_CORRUPT,
                      "extent %" PRIu64 ": [%" PRIu64 ", +%" PRIu64 ") has CRC %08x, expected %08x",
                      i, job->reads[i].offset, job->reads[i].length, crc, job->reads[i].crc);
    }
  }
  return 0;
}

LCK_API int lck_slot_fetch(const lck_region *region, const lck_read *reads, uint64_t count,
                           uint32_t threads, uint64_t *bad) {
  uint64_t ignored;
  int rc = lck_region_alive(region);
  if (rc != 0)
    return rc;
  if (threads == 0 || threads > LCK_MAX_THREADS || (count > 0 && reads == NULL))
    return lck_fail(LCK_E_INVALID, "%u threads, expected 1..%u, or reads is NULL", threads,
                    LCK_MAX_THREADS);
  if (bad == NULL)
    bad = &ignored;
  fetch job = {.region = region, .reads = reads};
  rc = check_bounds(region, reads, count, &job.count, bad);
  if (rc != 0)
    return rc;
  job.pieces = calloc(job.count + 1, sizeof(piece));
  if (job.pieces == NULL)
    return lck_fail(LCK_E_NOMEM, "%" PRIu64 " bytes to share %" PRIu64 " extents among threads",
                    (job.count + 1) * sizeof(piece), count);
  cut(&job, count);
  lck_threads_run(work, &job, job.count < threads ? job.count : threads);
  rc = lck_error_report(&job.failure);
  if (rc != 0)
    *bad = atomic_load(&job.gone);
  else
    rc = compare(&job, count, bad);
  free(job.pieces);
  return rc;
}
