/* From instructions to events. The region itself is the witness: between two barriers no byte of it
 * may have changed but by a recorded store, whatever the decoder made of the instructions. */
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "order.h"

void recording_begin(recording *r, const bed *bed, int fd) {
  memset(r, 0, sizeof(*r));
  r->bed = bed;
  r->fd = fd;
  r->file = mmap(NULL, IMAGE_MOST, PROT_READ, MAP_SHARED, fd, 0);
  r->shadow = calloc(1, IMAGE_MOST);
  if (r->file == MAP_FAILED || r->shadow == NULL)
    DIE("no memory for a recording");
}

void recording_free(recording *r) {
  for (uint32_t i = 0; i < r->life_count; i++) {
    lck_trace_free(&r->lives[i].log);
    free(r->lives[i].bytes);
  }
  munmap((void *)(uintptr_t)r->file, IMAGE_MOST);
  free(r->shadow);
}

static uint64_t file_length(const recording *r) {
  struct stat file;
  if (fstat(r->fd, &file) != 0 || (uint64_t)file.st_size > IMAGE_MOST)
    DIE("the region's file");
  return (uint64_t)file.st_size;
}

/* ---- events --------------------------------------------------------------------------------- */

static void *room_for(void *items, uint64_t count, uint64_t *room, uint64_t item_bytes) {
  if (count <= *room)
    return items;
  *room = 2 * count + 4096;
  items = realloc(items, *room * item_bytes);
  if (items == NULL)
    DIE("no memory for %lu events", (unsigned long)count);
  return items;
}

static void append(recording *r, enum lck_trace_op op, uint32_t thread, uint64_t offset,
                   uint64_t length) {
  lck_trace_log *log = &r->lives[r->life_count - 1].log;
  uint64_t stored = op == LCK_TRACE_STORE || op == LCK_TRACE_NT ? length : 0;
  log->events = room_for(log->events, log->event_count + 1, &log->event_room, sizeof(lck_event));
  /* A word more: who classifies a store looks at the first word from its start. */
  log->bytes = room_for(log->bytes, log->byte_count + stored + 8, &log->byte_room, 1);
  log->events[log->event_count++] = (lck_event){op, thread, offset, length, log->byte_count};
  if (stored > 0) {
    memcpy(log->bytes + log->byte_count, r->file + offset, stored);
    memcpy(r->shadow + offset, r->file + offset, stored);
  }
  log->byte_count += stored;
}

static void witness(recording *r) {
  uint64_t size = file_length(r);
  if (memcmp(r->file, r->shadow, size) == 0)
    return;
  uint64_t at = 0;
  while (r->file[at] == r->shadow[at])
    at++;
  WRONG(r, "the byte at offset %lu changed, and no store to it was seen", (unsigned long)at);
}

/* ---- what the program says ------------------------------------------------------------------ */

static void start(recording *r) {
  if (r->life_count == LIVES)
    DIE("more than %u lives", LIVES);
  life *l = &r->lives[r->life_count++];
  l->within = r->bed->now;
  l->size = file_length(r);
  l->bytes = malloc(l->size + 1);
  if (l->bytes == NULL)
    DIE("no memory for %lu bytes", (unsigned long)l->size);
  memcpy(l->bytes, r->file, l->size);
  memcpy(r->shadow, r->file, l->size);
  r->running = 1;
}

void record_saying(recording *r, uint32_t thread, uint64_t which, uint64_t a, uint64_t b) {
  if (r->running)
    witness(r);
  switch (which) {
  case SAY_START:
    start(r);
    break;
  case SAY_STOP:
    r->running = 0;
    break;
  case SAY_MARK:
    append(r, LCK_TRACE_MARK, thread, a, b);
    r->finished = r->stop_at != 0 && a == MARK_ACKED && b == r->stop_at;
    break;
  case SAY_MAPPED:
    r->base = a;
    r->reserved = b;
    break;
  case SAY_SETTLED:
    append(r, LCK_TRACE_SETTLE, thread, 0, a);
    break;
  default:
    DIE("saying %lu", (unsigned long)which);
  }
}

void record_extended(recording *r, uint32_t thread, uint64_t length) {
  append(r, LCK_TRACE_EXTEND, thread, 0, length);
}

/* ---- what it does --------------------------------------------------------------------------- */

static int in_region(const recording *r, uint64_t target, uint64_t bytes) {
  return target + bytes > r->base && target < r->base + r->reserved;
}

void record_deed(recording *r, uint32_t thread, const instruction *i, uint64_t target) {
  if (i->deed == DEED_FENCE) {
    append(r, LCK_TRACE_FENCE, thread, 0, 0);
    r->fences++;
    witness(r);
    return;
  }
  if (!in_region(r, target, i->bytes))
    return;
  uint64_t offset = target - r->base;
  if (i->deed == DEED_INEXACT || target < r->base || offset + i->bytes > file_length(r)) {
    WRONG(r, "at %lx: %s: which bytes of the region it writes is not known",
          (unsigned long)i->address, i->text);
  } else if (i->deed == DEED_FLUSH) {
    append(r, LCK_TRACE_FLUSH, thread, offset & ~(uint64_t)(LCK_LINE - 1), LCK_LINE);
    r->flushes++;
  } else {
    int nt = i->deed == DEED_NT;
    append(r, nt ? LCK_TRACE_NT : LCK_TRACE_STORE, thread, offset, i->bytes);
    *(nt ? &r->nt : &r->stores) += 1;
  }
}
