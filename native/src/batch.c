/* batch.c -- building a batch, claiming its chunks, and running them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "access.h"
#include "drain.h"
#include "error.h"
#include "fault.h"
#include "format.h"
#include "kernel.h"
#include "mutant.h"
#include "persist.h"
#include "region.h"
#include "snapshot.h"
#include "space.h"

static uint64_t whole_lines(uint64_t length) {
  return (length + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
}

static int check_copy(const lck_snapshot *snapshot, const lck_copy *copy, uint64_t index, int fed) {
  const uint32_t known = LCK_COPY_STAGED | (fed ? LCK_COPY_FED : LCK_COPY_IF_CHANGED);
  if ((copy->source == NULL) != fed || copy->length == 0 || copy->length > INT64_MAX ||
      (copy->flags & ~known) != 0 || ((copy->flags & LCK_COPY_FED) != 0) != fed) {
    return lck_fail(LCK_E_INVALID,
                    "copy %llu: no source (of a fed one: a source), no length or flags 0x%x",
                    (unsigned long long)index, copy->flags);
  }
  if (copy->offset % LCK_LINE != 0 || !lck_slot_contains(snapshot->region, snapshot->slot,
                                                         copy->offset, whole_lines(copy->length))) {
    return lck_fail(LCK_E_INVALID,
                    "copy %llu: [%llu, +%llu) is not on a line or not in the space of slot %u",
                    (unsigned long long)index, (unsigned long long)copy->offset,
                    (unsigned long long)copy->length, snapshot->slot);
  }
  return 0;
}

static uint64_t staging_of(const lck_snapshot *snapshot, const lck_copy *copy) {
  return snapshot->paged || copy->flags & LCK_COPY_STAGED ? whole_lines(copy->length) : 0;
}

/* Whether a copy that starts, or goes on, with `length` bytes needs another chunk. Chunks end with
 * the layer, so that a watermark at a layer's end never lets a byte of the next layer run. */
static int must_cut(const lck_batch *batch, uint64_t chunk_bytes, uint64_t at, uint32_t layer,
                    uint64_t length) {
  if (batch->chunk_count == 0)
    return 1;
  const lck_chunk *chunk = &batch->chunks[batch->chunk_count - 1];
  return chunk->layer != layer || batch->piece_count - chunk->first >= LCK_CHUNK_PIECES ||
         at - chunk->start + length > chunk_bytes;
}

/* A copy that may be skipped stays in one chunk whatever its length: it is decided as a whole. */
static void cut_copy(lck_batch *batch, uint64_t chunk_bytes, const lck_copy *copy, uint32_t index,
                     unsigned char *staged) {
  int whole = (copy->flags & LCK_COPY_IF_CHANGED) != 0;
  for (uint64_t at = 0; at < copy->length;) {
    uint64_t length = copy->length - at < chunk_bytes ? copy->length - at : chunk_bytes;
    if ((at == 0 || !whole) &&
        must_cut(batch, chunk_bytes, batch->bytes, copy->layer, whole ? copy->length : length)) {
      batch->chunks[batch->chunk_count++] =
          (lck_chunk){.first = batch->piece_count, .start = batch->bytes, .layer = copy->layer};
    }
    batch->pieces[batch->piece_count++] = (lck_piece){
        .source = copy->source ? (const unsigned char *)copy->source + at : NULL,
        .staged = staged ? staged + at : NULL,
        .offset = copy->offset + at,
        .length = length,
        .copy = index,
        .flags = copy->flags,
        .expected = copy->crc,
    };
    at += length;
    batch->bytes += length;
  }
}

int lck_batch_build(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
                    lck_batch **out) {
  uint64_t chunk_bytes = snapshot->pool->chunk_bytes, pieces = 0, staging = 0;
  if (count > UINT32_MAX)
    return lck_fail(LCK_E_INVALID, "%llu copies in one batch", (unsigned long long)count);
  int fed = count > 0 && (copies[0].flags & LCK_COPY_FED) != 0;
  for (uint64_t i = 0; i < count; i++) {
    int rc = check_copy(snapshot, &copies[i], i, fed);
    if (rc)
      return rc;
    pieces += (copies[i].length + chunk_bytes - 1) / chunk_bytes;
    staging += staging_of(snapshot, &copies[i]);
  }
  lck_batch *batch = aligned_alloc(64, sizeof *batch);
  if (batch) {
    memset(batch, 0, sizeof *batch);
    batch->pieces = calloc(pieces + 1, sizeof *batch->pieces);
    batch->chunks = calloc(pieces + 1, sizeof *batch->chunks);
  }
  unsigned char *staged = NULL;
  if (staging > 0 && batch)
    staged = lck_staging_take(snapshot->pool, &snapshot->areas, staging);
  if (!batch || !batch->pieces || !batch->chunks || (staging > 0 && !staged)) {
    lck_batch_free(batch);
    return lck_fail(LCK_E_NOMEM, "no memory for a batch of %llu copies, %llu bytes of staging",
                    (unsigned long long)count, (unsigned long long)staging);
  }
  for (uint64_t i = 0; i < count; i++) {
    uint64_t needed = staging_of(snapshot, &copies[i]);
    cut_copy(batch, chunk_bytes, &copies[i], (uint32_t)i, needed > 0 ? staged : NULL);
    staged = staged ? staged + needed : NULL;
  }
  if (staging > 0)
    atomic_store(&snapshot->staged, 1);
  batch->chunks[batch->chunk_count] =
      (lck_chunk){.first = batch->piece_count, .start = batch->bytes};
  batch->copy_count = count;
  batch->fed = fed;
  *out = batch;
  return 0;
}

void lck_batch_free(lck_batch *batch) {
  if (batch) {
    free(batch->pieces);
    free(batch->chunks);
    free(batch);
  }
}

uint64_t lck_batch_chunks(const lck_batch *batch, uint64_t bytes) {
  uint64_t low = 0, high = batch->chunk_count;
  while (low < high) {
    uint64_t middle = low + (high - low) / 2;
    if (batch->chunks[middle].start < bytes)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* ---- Claiming chunks ------------------------------------------------------------------------- */

static uint32_t phase_of(const lck_chunk *chunk) {
  return atomic_load(&chunk->word) % LCK_CHUNK_PHASES;
}

static uint32_t claimed_by(const lck_pool_thread *thread, uint32_t phase) {
  return (thread->number + 1) * LCK_CHUNK_PHASES + phase;
}

static int change(lck_chunk *chunk, uint32_t from, uint32_t to) {
  return atomic_compare_exchange_strong(&chunk->word, &from, to);
}

static void advance(_Atomic uint64_t *mark, uint64_t to) {
  uint64_t seen = atomic_load(mark);
  while (seen < to && !atomic_compare_exchange_weak(mark, &seen, to)) {
  }
}

/* `halted` is read after the claim: whoever sets it and then finds no chunk claimed knows that no
 * source is touched any more. */
static uint64_t claim(const lck_snapshot *snapshot, lck_chunk *chunks, uint64_t index,
                      const lck_pool_thread *thread, uint32_t phase) {
  lck_chunk *chunk = &chunks[index];
  uint32_t held = claimed_by(thread, phase);
  if (!change(chunk, phase - 1, held))
    return LCK_NO_CHUNK;
  if (!atomic_load(&snapshot->halted))
    return index;
  (void)change(chunk, held, phase - 1);
  return LCK_NO_CHUNK;
}

uint64_t lck_batch_claim(const lck_snapshot *snapshot, lck_batch *batch,
                         const lck_pool_thread *thread) {
  for (uint64_t i = atomic_load(&batch->next);
       i < atomic_load(&batch->released) && !atomic_load(&snapshot->halted); i++) {
    uint64_t claimed = claim(snapshot, batch->chunks, i, thread, LCK_CHUNK_IN_CAPTURE);
    advance(&batch->next, i + 1);
    if (claimed != LCK_NO_CHUNK)
      return claimed;
  }
  return LCK_NO_CHUNK;
}

uint64_t lck_batch_claim_drain(const lck_snapshot *snapshot, lck_batch *batch,
                               const lck_pool_thread *thread) {
  for (uint64_t i = atomic_load(&batch->drain_next);
       i < batch->chunk_count && !atomic_load(&snapshot->halted); i++) {
    if (phase_of(&batch->chunks[i]) < LCK_CHUNK_CAPTURED)
      break;
    uint64_t claimed = claim(snapshot, batch->chunks, i, thread, LCK_CHUNK_IN_DRAIN);
    advance(&batch->drain_next, i + 1);
    if (claimed != LCK_NO_CHUNK)
      return claimed;
  }
  return LCK_NO_CHUNK;
}

/* A worker that sleeps for the write limit has booked its bytes: to copy them anew would book them
 * twice. */
static int may_be_taken(const lck_pool *pool, uint32_t word) {
  const lck_pool_thread *thread = &pool->threads[word / LCK_CHUNK_PHASES - 1];
  if (!lck_pool_thread_is_idle(thread))
    return 0;
  uint64_t now = lck_now_ns();
  return now >= atomic_load(&thread->busy_since) + LCK_SEIZE_AFTER_NS &&
         now >= atomic_load(&thread->sleeps_until);
}

uint64_t lck_batch_seize(lck_snapshot *snapshot, lck_batch *batch, const lck_pool_thread *thread,
                         uint32_t phase) {
  int draining = phase == LCK_CHUNK_IN_DRAIN;
  uint64_t first = draining ? atomic_load(&batch->drained) : lck_batch_captured(batch);
  uint64_t end = atomic_load(draining ? &batch->drain_next : &batch->next);
  end += end < batch->chunk_count; /* claimed, and the watermark not moved yet */
  for (uint64_t i = first; i < end; i++) {
    lck_chunk *chunk = &batch->chunks[i];
    uint32_t word = atomic_load(&chunk->word);
    if (word % LCK_CHUNK_PHASES == phase && may_be_taken(snapshot->pool, word) &&
        lck_revoke_possible() && change(chunk, word, claimed_by(thread, phase))) {
      lck_revoke(atomic_load(&snapshot->pool->threads[word / LCK_CHUNK_PHASES - 1].id));
      return i;
    }
  }
  return LCK_NO_CHUNK;
}

uint64_t lck_batch_captured(lck_batch *batch) {
  uint64_t done = atomic_load(&batch->done), from = done;
  while (done < batch->chunk_count && phase_of(&batch->chunks[done]) >= LCK_CHUNK_CAPTURED)
    done++;
  if (done > from)
    advance(&batch->done, done);
  return done;
}

int lck_batch_drained(lck_batch *batch) {
  uint64_t drained = atomic_load(&batch->drained), from = drained;
  while (drained < batch->chunk_count && phase_of(&batch->chunks[drained]) == LCK_CHUNK_DRAINED)
    drained++;
  if (drained > from)
    advance(&batch->drained, drained);
  return drained == batch->chunk_count;
}

int lck_batch_busy(const lck_batch *batch) {
  for (uint64_t i = atomic_load(&batch->done); i < batch->chunk_count; i++)
    if (phase_of(&batch->chunks[i]) == LCK_CHUNK_IN_CAPTURE)
      return 1;
  return 0;
}

int lck_snapshot_busy(const lck_snapshot *snapshot) {
  uint32_t count = atomic_load(&snapshot->batch_count);
  for (uint32_t i = 0; i < count; i++) {
    const lck_batch *batch = lck_snapshot_batch(snapshot, i);
    for (uint64_t k = 0; k < batch->chunk_count; k++)
      if (atomic_load(&batch->chunks[k].word) >= LCK_CHUNK_PHASES)
        return 1;
  }
  return 0;
}

void lck_snapshot_seize_all(lck_snapshot *snapshot) {
  const lck_pool_thread *thread = &snapshot->pool->threads[LCK_THREAD_CALLER];
  uint32_t count = atomic_load(&snapshot->batch_count);
  for (uint32_t i = 0; i < count; i++) {
    lck_batch *batch = lck_snapshot_batch(snapshot, i);
    for (uint32_t phase = LCK_CHUNK_IN_CAPTURE; phase <= LCK_CHUNK_IN_DRAIN; phase += 2)
      for (uint64_t k; (k = lck_batch_seize(snapshot, batch, thread, phase)) != LCK_NO_CHUNK;)
        atomic_store(&batch->chunks[k].word, phase - 1);
  }
}

/* ---- Running a chunk ------------------------------------------------------------------------- */

static void add_relaxed(_Atomic uint64_t *counter, uint64_t value) {
  atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

typedef struct chunk_run {
  lck_snapshot *snapshot;
  lck_batch *batch;
  lck_chunk *chunk;
  lck_pool_thread *thread;
  uint32_t held;            /* the chunk's word while it is the thread's */
  int kept;                 /* it was, to the end */
  int fault;                /* an errno that a test has injected */
  const lck_piece *flipped; /* by a drain: its bytes in DRAM are not those that were captured */
  uint32_t crc;
  uint64_t moved, skipped; /* bytes */
} chunk_run;

/* A sleep in the middle of a chunk, told to those who might take it away. */
static void throttle(const chunk_run *run, uint64_t began, uint64_t bytes, uint64_t ahead) {
  uint64_t end = lck_pool_book(run->snapshot->pool, began, bytes, ahead);
  if (end == 0)
    return;
  atomic_store(&run->thread->sleeps_until, end + LCK_SEIZE_AFTER_NS);
  lck_sleep_until(end);
  atomic_store(&run->thread->sleeps_until, 0);
}

/* Run body(run) inside the region's section. */
static void run_body(chunk_run *run, void (*body)(void *)) {
  lck_pool_thread *thread = run->thread;
  if (lck_pool_thread_is_idle(thread)) {
    run->kept = lck_revocable_run(&thread->revocable, &run->chunk->word, run->held, body, run);
  } else {
    body(run);
    run->kept = 1;
  }
}

/* Claim the run's chunk on behalf of the callers, whom nobody seizes from; 0: it was seized. Then
 * the snapshot may be given up and its region closed at any time. A failure is told only while
 * neither can be; who has seized the chunk copies it anew, and meets the failure again. */
static int keep(chunk_run *run, uint32_t phase) {
  uint32_t callers = claimed_by(&run->snapshot->pool->threads[LCK_THREAD_CALLER], phase);
  run->kept = change(run->chunk, run->held, callers);
  run->held = callers;
  return run->kept;
}

/* Run the section of a claimed chunk. A worker that loses its CPU on the way in may find the region
 * closed: only its addresses are used until the chunk is known to be the worker's still. */
static int run_section(chunk_run *run, uint32_t phase, void (*section)(void *)) {
  lck_snapshot *snapshot = run->snapshot;
  lck_bus_fault fault;
  int failed = lck_access_try(snapshot->base, snapshot->reserved_length, section, run, &fault);
  return failed && keep(run, phase) ? lck_access_failed(snapshot->region, &fault) : 0;
}

static void fail_chunk(chunk_run *run, uint32_t phase, int code) {
  if (!keep(run, phase))
    return;
  lck_snapshot_fail(run->snapshot, code);
  (void)change(run->chunk, run->held, phase - 1);
  lck_wait_queue_wake(&run->snapshot->pool->progress);
}

/* Inside the chunk's section, which a fault leaves. */
static void store_piece(const chunk_run *run, lck_piece *piece) {
  lck_snapshot *snapshot = run->snapshot;
  if (piece->staged) {
    piece->crc = lck_kernel_current()->copy(piece->staged, piece->source, piece->length, 0);
  } else {
    uint32_t crc = 0;
    uint64_t began = lck_pool_write_begins(snapshot->pool);
    lck_space_touch(snapshot->region, snapshot->slot, piece->offset, piece->length);
    if (piece->source)
      (void)lck_persist_payload(snapshot->region, piece->offset, piece->source, piece->length,
                                &crc);
    else
      (void)lck_persist_in_place(snapshot->region, piece->offset, piece->length, &crc);
    piece->crc = crc;
    throttle(run, began, piece->length, lck_pool_copies_ahead(snapshot->pool));
  }
}

/* Hash the `count` pieces of one copy; mark them as skipped when the extent holds these bytes
 * already. If it does not, the CRCs of the copy replace those of the hash: they describe what was
 * stored even when the source changed in between. Whoever has lost the chunk may have marked some.
 */
static int unchanged(lck_piece *pieces, uint64_t count) {
  uint32_t crc = 0;
  for (uint64_t i = 0; i < count; i++) {
    pieces[i].flags &= ~LCK_PIECE_SKIPPED;
    pieces[i].crc = lck_kernel_current()->crc(pieces[i].source, pieces[i].length, 0);
    crc = i == 0 ? pieces[0].crc : lck_crc32c_combine(crc, pieces[i].crc, pieces[i].length);
  }
  if (crc != pieces[0].expected)
    return 0;
  for (uint64_t i = 0; i < count; i++)
    pieces[i].flags |= LCK_PIECE_SKIPPED;
  return 1;
}

static void capture_pieces(void *argument) {
  chunk_run *run_of = argument;
  run_of->fault = lck_fault_visit(LCK_FAULT_COPY);
  if (run_of->fault)
    return;
  lck_batch *batch = run_of->batch;
  const lck_chunk *chunk = run_of->chunk;
  uint64_t copied = 0, skipped = 0;
  for (uint64_t i = chunk[0].first; i < chunk[1].first;) {
    lck_piece *piece = &batch->pieces[i];
    uint64_t run = 1;
    uint64_t length = piece->length;
    int skip = 0;
    if (piece->flags & LCK_COPY_IF_CHANGED) {
      for (; i + run < chunk[1].first && piece[run].copy == piece->copy; run++)
        length += piece[run].length;
      skip = unchanged(piece, run);
    }
    for (uint64_t k = 0; k < run && !skip; k++)
      store_piece(run_of, &piece[k]);
    *(skip ? &skipped : &copied) += length;
    i += run;
  }
  /* Nothing else is to be copied now: the last copy ends when the medium has them all. */
  if (atomic_load(&batch->next) >= atomic_load(&batch->released) &&
      !batch->pieces[chunk->first].staged)
    throttle(run_of, 0, 0, 0);
  /* A fence drains this thread's stores only, so it must come before the chunk is captured. */
  int callers = run_of->thread->number == LCK_THREAD_CALLER;
  if (!(callers ? LCK_MUTANT(MUTANT_CALLER_NOT_FENCED) : LCK_MUTANT(MUTANT_WORKER_NOT_FENCED)))
    lck_persist_fence();
  run_of->moved = copied;
  run_of->skipped = skipped;
}

static void capture_in_section(void *argument) {
  run_body(argument, capture_pieces);
}

static void finish_chunk(_Atomic uint64_t *total_ns, uint64_t started, lck_last_chunk *last) {
  last->finished = lck_now_ns();
  last->spent = last->finished - started;
  add_relaxed(total_ns, last->spent);
}

/* Before the chunk counts as done: whoever has waited for it finds its span. */
static void trace_chunk(const lck_snapshot *snapshot, const lck_batch *batch, uint64_t index,
                        uint32_t kind, uint64_t bytes, const lck_last_chunk *last) {
  if (!last->thread->cells)
    return;
  const lck_chunk *chunk = &batch->chunks[index];
  uint32_t copy = batch->pieces[chunk[0].first].copy;
  lck_span span = {.begin_ns = last->finished - last->spent,
                   .end_ns = last->finished,
                   .bytes = bytes,
                   .start = chunk->start,
                   .kind = kind,
                   .slot = snapshot->slot,
                   .batch = batch->number,
                   .copy = copy,
                   .copies = batch->pieces[chunk[1].first - 1].copy - copy + 1};
  lck_thread_trace_add(last->thread, &span);
}

/* 0, or why the chunk cannot be captured. A failure is stored while the chunk is claimed, so that a
 * batch with all chunks captured and no failure is whole. */
static int judge(const chunk_run *run, uint64_t index, int rc) {
  const lck_piece *piece = &run->batch->pieces[run->chunk->first];
  if (rc || !run->fault)
    return rc;
  errno = run->fault;
  return lck_fail_errno(LCK_E_IO, "chunk %llu, copy %u to offset %llu of slot %u",
                        (unsigned long long)index, piece->copy, (unsigned long long)piece->offset,
                        run->snapshot->slot);
}

static void count_capture(const chunk_run *run, int helping) {
  lck_pool *pool = run->snapshot->pool;
  lck_batch *batch = run->batch;
  add_relaxed(&pool->bytes_copied, run->moved);
  add_relaxed(&pool->bytes_skipped, run->skipped);
  add_relaxed(&pool->bytes_helped, helping ? run->moved : 0);
  uint64_t counted = atomic_fetch_add(&batch->counted, 1) + 1;
  if (counted == batch->chunk_count || batch->fed || atomic_load(&run->snapshot->halted) ||
      (atomic_load(&batch->waiting) > 0 &&
       atomic_load(&batch->next) >= atomic_load(&batch->released)))
    lck_wait_queue_wake(&pool->progress);
  if (atomic_load(&run->snapshot->staged) && atomic_load(&run->snapshot->invalidated))
    lck_pool_wake(pool);
}

void lck_chunk_capture(lck_snapshot *snapshot, lck_batch *batch, uint64_t index, int helping,
                       lck_last_chunk *last) {
  uint64_t started = lck_now_ns();
  lck_chunk *chunk = &batch->chunks[index];
  chunk_run run = {.snapshot = snapshot, .batch = batch, .chunk = chunk, .thread = last->thread};
  run.held = claimed_by(last->thread, LCK_CHUNK_IN_CAPTURE);
  int rc = judge(&run, index, run_section(&run, LCK_CHUNK_IN_CAPTURE, capture_in_section));
  if (rc) {
    fail_chunk(&run, LCK_CHUNK_IN_CAPTURE, rc);
    return;
  }
  if (run.kept && LCK_MUTANT(MUTANT_INVALIDATED_LATE))
    (void)lck_slot_invalidate(snapshot->region, snapshot->slot);
  finish_chunk(&snapshot->pool->copy_ns, started, last);
  if (!run.kept)
    return;
  trace_chunk(snapshot, batch, index, LCK_SPAN_COPY, run.moved, last);
  if (change(chunk, run.held, LCK_CHUNK_CAPTURED))
    count_capture(&run, helping);
}

static void drain_pieces(void *argument) {
  chunk_run *run = argument;
  lck_snapshot *snapshot = run->snapshot;
  const lck_chunk *chunk = run->chunk;
  uint64_t drained = 0;
  for (uint64_t i = chunk[0].first;
       i < chunk[1].first && run->flipped == NULL && !atomic_load(&snapshot->halted); i++) {
    const lck_piece *piece = &run->batch->pieces[i];
    uint32_t crc = 0;
    if (!piece->staged || piece->flags & LCK_PIECE_SKIPPED)
      continue;
    uint64_t began = lck_pool_write_begins(snapshot->pool);
    lck_space_touch(snapshot->region, snapshot->slot, piece->offset, piece->length);
    (void)lck_persist_payload(snapshot->region, piece->offset, piece->staged, piece->length, &crc);
    if (crc != piece->crc) {
      run->flipped = piece;
      run->crc = crc;
    }
    drained += piece->length;
    throttle(run, began, piece->length, LCK_AHEAD_NS);
  }
  /* No commit comes before the medium has it all. */
  if (atomic_load(&run->batch->drain_next) == run->batch->chunk_count)
    throttle(run, 0, 0, 0);
  if (!LCK_MUTANT(MUTANT_WORKER_NOT_FENCED))
    lck_persist_fence();
  run->moved = drained;
}

static void drain_in_section(void *argument) {
  run_body(argument, drain_pieces);
}

static int drain(chunk_run *run) {
  int rc = run_section(run, LCK_CHUNK_IN_DRAIN, drain_in_section);
  const lck_piece *piece = run->flipped;
  if (rc != 0 || piece == NULL)
    return rc;
  return lck_fail(LCK_E_CORRUPT,
                  "copy %u to offset %llu of slot %u changed in DRAM: CRC 0x%08x, captured 0x%08x",
                  piece->copy, (unsigned long long)piece->offset, run->snapshot->slot, run->crc,
                  piece->crc);
}

/* A batch's last drain may be the snapshot's: then it is committed, here or by the commit thread.
 */
static void count_drain(const chunk_run *run) {
  lck_snapshot *snapshot = run->snapshot;
  lck_pool *pool = snapshot->pool;
  const lck_chunk *chunk = run->chunk;
  add_relaxed(&pool->bytes_drained, run->moved);
  atomic_fetch_add(&snapshot->drained_bytes, chunk[1].start - chunk[0].start);
  if (!lck_batch_drained(run->batch))
    return;
  if (!lck_pool_thread_is_idle(run->thread))
    lck_snapshot_try_commit(snapshot, 0, run->thread);
  lck_wait_queue_wake(&pool->commit_work);
}

void lck_chunk_drain(lck_snapshot *snapshot, lck_batch *batch, uint64_t index,
                     lck_last_chunk *last) {
  uint64_t started = lck_now_ns();
  lck_chunk *chunk = &batch->chunks[index];
  chunk_run run = {.snapshot = snapshot, .batch = batch, .chunk = chunk, .thread = last->thread};
  run.held = claimed_by(last->thread, LCK_CHUNK_IN_DRAIN);
  int rc = drain(&run);
  if (rc) {
    fail_chunk(&run, LCK_CHUNK_IN_DRAIN, rc);
    return;
  }
  finish_chunk(&snapshot->pool->drain_ns, started, last);
  if (!run.kept)
    return;
  if (run.moved > 0)
    trace_chunk(snapshot, batch, index, LCK_SPAN_DRAIN, run.moved, last);
  if (change(chunk, run.held, LCK_CHUNK_DRAINED))
    count_drain(&run);
}
