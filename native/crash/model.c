/* What is durable for certain, and what may be, after each event of a trace. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "crash.h"

#define SECTOR 512u

uint64_t line_hash(uint64_t offset, const unsigned char *bytes) {
  uint64_t hash = (offset + 1) * UINT64_C(0x9E3779B97F4A7C15), word;
  for (uint64_t i = 0; i < LCK_LINE; i += sizeof(word)) {
    memcpy(&word, bytes + i, sizeof(word));
    hash = (hash ^ word) * UINT64_C(0xBF58476D1CE4E5B9);
    hash ^= hash >> 29;
  }
  return hash;
}

void model_make(model *m) {
  memset(m, 0, sizeof(*m));
  m->fd = memfd_create("crash-image", MFD_CLOEXEC);
  char name[64];
  snprintf(name, sizeof(name), "/proc/self/fd/%d", m->fd);
  FILE *again = fopen(name, "r+e");
  if (m->fd < 0 || again == NULL || ftruncate(m->fd, (off_t)IMAGE_MOST) != 0)
    DIE("no file for images");
  m->lock_fd = dup(fileno(again));
  fclose(again);
  m->image = mmap(NULL, IMAGE_MOST, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
  m->durable = calloc(1, IMAGE_MOST);
  m->stamps = calloc(IMAGE_MOST / LCK_LINE, sizeof(*m->stamps));
  m->seen_room = UINT64_C(1) << 16;
  m->seen = calloc(m->seen_room, sizeof(*m->seen));
  if (m->image == MAP_FAILED || !m->durable || !m->stamps || !m->seen)
    DIE("no memory for images");
}

void model_free(model *m) {
  munmap(m->image, IMAGE_MOST);
  close(m->fd);
  close(m->lock_fd);
  free(m->durable);
  free(m->stamps);
  free(m->seen);
  free(m->pieces);
}

void model_load(model *m, const bed *b, const bounds *within, const unsigned char *bytes,
                uint64_t size) {
  m->bed = b;
  m->within = *within;
  m->unit = on_pages(m->medium) ? SECTOR : LCK_LINE;
  m->size = m->next_size = m->file_size = size;
  m->count = m->history_count = 0;
  m->cases = 0;
  m->hash = 0;
  m->stores = 0;
  m->changed = 1;
  if (ftruncate(m->fd, 0) != 0 || ftruncate(m->fd, (off_t)size) != 0)
    DIE("no file of %lu bytes", (unsigned long)size);
  memset(m->durable, 0, IMAGE_MOST);
  if (size > 0) {
    memcpy(m->durable, bytes, size);
    memcpy(m->image, bytes, size);
  }
  memset(m->seen, 0, m->seen_room * sizeof(*m->seen));
  m->seen_count = 0;
}

static void remember(model *m, uint64_t line) {
  memmove(&m->history[1], &m->history[0], (HISTORY - 1) * sizeof(m->history[0]));
  m->history[0].offset = line;
  memcpy(m->history[0].bytes, m->durable + line, LCK_LINE);
  if (m->history_count < HISTORY)
    m->history_count++;
}

static void settle_piece(model *m, const piece *p) {
  for (uint64_t line = p->offset & ~(uint64_t)(LCK_LINE - 1); line < p->offset + p->length;
       line += LCK_LINE) {
    if (m->medium == MEDIUM_CXL)
      remember(m, line);
    m->hash ^= line_hash(line, m->durable + line);
  }
  memcpy(m->durable + p->offset, p->bytes, p->length);
  memcpy(m->image + p->offset, p->bytes, p->length);
  for (uint64_t line = p->offset & ~(uint64_t)(LCK_LINE - 1); line < p->offset + p->length;
       line += LCK_LINE)
    m->hash ^= line_hash(line, m->durable + line);
}

static int same_unit(const model *m, const piece *a, const piece *b) {
  return a->offset / m->unit == b->offset / m->unit;
}

/* `sure` marks pieces that are durable now. What is older in the same unit is so, too: a unit is
 * written back as a whole, also before a non-temporal store passes it by. Only what is still in a
 * write-combining buffer is not part of it yet. */
static void settle_pieces(model *m, uint8_t *sure) {
  for (uint32_t i = m->count; i-- > 0;)
    for (uint32_t k = i + 1; k < m->count && !sure[i] && !m->pieces[i].nt; k++)
      sure[i] = sure[k] && same_unit(m, &m->pieces[i], &m->pieces[k]);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < m->count; i++) {
    if (sure[i])
      settle_piece(m, &m->pieces[i]);
    else
      m->pieces[kept++] = m->pieces[i];
  }
  m->count = kept;
}

static uint8_t *flags_for(const model *m) {
  uint8_t *flags = calloc(m->count + 1, 1);
  if (!flags)
    DIE("no memory");
  return flags;
}

static void fenced(model *m, uint32_t thread) {
  uint8_t *sure = flags_for(m);
  for (uint32_t i = 0; i < m->count; i++) {
    piece *p = &m->pieces[i];
    int own = p->thread == thread;
    if (on_pages(m->medium)) {
      if (own)
        p->nt = 0; /* in the page cache now */
    } else if (m->medium == MEDIUM_EADR) {
      sure[i] = (uint8_t)own;
    } else {
      sure[i] = (uint8_t)(p->nt ? own : p->flusher == thread);
      if (own)
        p->visible = 1;
    }
  }
  /* On eADR nothing but the order of one thread's own stores matters. */
  settle_pieces(m, sure);
  free(sure);
}

static void synced(model *m, uint32_t thread) {
  uint8_t *sure = flags_for(m);
  for (uint32_t i = 0; i < m->count && on_pages(m->medium); i++)
    sure[i] =
        !m->pieces[i].nt && !m->pieces[i].clean && m->pieces[i].store < m->sync_from[thread % 64];
  settle_pieces(m, sure);
  free(sure);
  m->size = m->next_size;
}

/* The kernel counts the pages as clean, whatever of them has reached the medium. */
static void sync_failed(model *m, uint32_t thread) {
  for (uint32_t i = 0; i < m->count; i++)
    m->pieces[i].clean |= !m->pieces[i].nt && m->pieces[i].store < m->sync_from[thread % 64];
  m->changed = 1;
}

static void touched_pages(model *m, const lck_event *e) {
  for (uint32_t i = 0; i < m->count; i++)
    if (m->pieces[i].offset >= e->offset && m->pieces[i].offset < e->offset + e->length)
      m->pieces[i].clean = 0;
}

static void flushed(model *m, const lck_event *e) {
  uint64_t first = e->offset & ~(uint64_t)(LCK_LINE - 1);
  for (uint32_t i = 0; i < m->count; i++) {
    piece *p = &m->pieces[i];
    if (!p->nt && (p->thread == e->thread || p->visible) && p->offset + p->length > first &&
        p->offset < e->offset + e->length)
      p->flusher = e->thread;
  }
}

static void add_pieces(model *m, const lck_event *e, const unsigned char *bytes) {
  for (uint64_t at = 0, length; at < e->length; at += length) {
    uint64_t offset = e->offset + at;
    length = m->unit - offset % m->unit;
    length = length < e->length - at ? length : e->length - at;
    if (m->count == m->room) {
      m->room = 2 * m->room + 256;
      m->pieces = realloc(m->pieces, m->room * sizeof(*m->pieces));
      if (!m->pieces)
        DIE("no memory for %u pieces", m->room);
    }
    m->pieces[m->count++] = (piece){.offset = offset,
                                    .bytes = bytes + at,
                                    .length = (uint32_t)length,
                                    .store = m->stores,
                                    .thread = e->thread,
                                    .nt = e->op == LCK_TRACE_NT};
  }
  m->stores++;
}

static void settle_all(model *m) {
  for (uint32_t i = 0; i < m->count; i++)
    settle_piece(m, &m->pieces[i]);
  m->count = 0;
}

/* Write-combining buffers are drained on the way. The next process's trace numbers its events from
 * 0.
 */
void model_kill(model *m) {
  uint8_t *sure = flags_for(m);
  for (uint32_t i = 0; i < m->count; i++) {
    piece *p = &m->pieces[i];
    sure[i] = m->medium == MEDIUM_EADR || (p->nt && !on_pages(m->medium));
    p->nt = 0;
    p->visible = 1;
    p->flusher = 0;
  }
  settle_pieces(m, sure);
  free(sure);
  m->changed = 1;
}

void model_visible(const model *m, unsigned char *bytes) {
  memcpy(bytes, m->durable, m->next_size);
  for (uint32_t i = 0; i < m->count; i++)
    memcpy(bytes + m->pieces[i].offset, m->pieces[i].bytes, m->pieces[i].length);
}

static void marked(model *m, uint64_t which, uint64_t value) {
  switch (which) {
  case MARK_STEP:
    m->step = (step)value;
    return;
  case MARK_STARTED:
    m->within.started = value;
    break;
  case MARK_ACKED:
    m->within.acked = m->within.started = value;
    break;
  case MARK_BRANCHING:
    m->within.timeline_started = value;
    break;
  case MARK_BRANCHED:
    m->within.timeline_acked = m->within.timeline_started = value;
    break;
  case MARK_JOURNALING:
    m->within.entry_started = value;
    break;
  case MARK_JOURNALED:
    m->within.entry_acked = m->within.entry_started = value;
    break;
  case MARK_SUSPECTING:
    m->within.suspect_started = value;
    break;
  case MARK_SUSPECTED:
    m->within.suspect_acked = m->within.suspect_started = value;
    break;
  case MARK_CASES:
    m->cases = (uint32_t)value;
    return;
  default:
    m->within.segments_acked = value >> 32 ? value >> 32 : m->within.segments_acked;
    m->within.segments_started = value & UINT32_MAX;
  }
  m->changed = 1;
}

/* The protocol step that a store belongs to; creation, opening, growth, branching and
 * marks are marked. */
static void classify(model *m, const lck_event *e, const unsigned char *bytes) {
  uint64_t slot = e->offset / LCK_HEADER_PAGE - 2, word = 0;
  if (m->step == STEP_CREATE || m->step == STEP_OPEN || m->step == STEP_GROW ||
      m->step == STEP_BRANCH || m->step == STEP_SUSPECT)
    return;
  if (in_journal(e->offset)) {
    m->step = STEP_JOURNAL;
  } else if (e->offset < LCK_JOURNAL_OFFSET) {
    memcpy(&word, bytes, sizeof(word));
    int is_word = e->offset == LCK_RECORD_OFFSET(slot);
    if (is_word && e->length == sizeof(word))
      m->step = word ? STEP_PUBLISH : STEP_INVALIDATE;
    else
      m->step = is_word ? STEP_RECORD : STEP_INVALIDATE;
  } else {
    m->step = e->offset % SLOT_BYTES < TABLES_BYTES ? STEP_TABLES : STEP_PAYLOAD;
  }
}

/* A process may die in the midst of a copy, whose words come in any order; what is retired stays.
 */
static int stored(model *m, const lck_event *e, const unsigned char *bytes, int look) {
  classify(m, e, bytes);
  add_pieces(m, e, bytes);
  m->changed = 1;
  if (m->medium != MEDIUM_PROCESS)
    return 0;
  int stop = look && images_cut(m);
  settle_all(m);
  return stop;
}

static void extended(model *m, uint64_t size) {
  m->next_size = size;
  if (m->medium == MEDIUM_PROCESS)
    m->size = size;
  if (size > m->file_size && ftruncate(m->fd, (off_t)size) != 0)
    DIE("no file of %lu bytes", (unsigned long)size);
  m->file_size = size > m->file_size ? size : m->file_size;
  m->changed = 1;
}

/* A cut lies before every event that makes something certain, and on both sides of a mark: the
 * images in between are among those of the next cut. */
void model_run(model *m, const lck_trace_log *log, uint64_t from, uint64_t to, int look) {
  for (uint64_t i = from; i < to; i++) {
    const lck_event *e = &log->events[i];
    const unsigned char *bytes = log->bytes + e->bytes;
    int barrier = e->op != LCK_TRACE_STORE && e->op != LCK_TRACE_NT && e->op != LCK_TRACE_FLUSH;
    if (look && barrier && m->changed && images_cut(m))
      return;
    switch (e->op) {
    case LCK_TRACE_STORE:
    case LCK_TRACE_NT:
      if (stored(m, e, bytes, look))
        return;
      break;
    case LCK_TRACE_FLUSH:
      flushed(m, e);
      break;
    case LCK_TRACE_FENCE:
      fenced(m, e->thread);
      break;
    case LCK_TRACE_SYNC_BEGIN:
      m->sync_from[e->thread % 64] = m->stores;
      break;
    case LCK_TRACE_SYNC:
      synced(m, e->thread);
      break;
    case LCK_TRACE_SYNC_FAILED:
      sync_failed(m, e->thread);
      break;
    case LCK_TRACE_TOUCH:
      touched_pages(m, e);
      break;
    case LCK_TRACE_EXTEND:
      extended(m, e->length);
      break;
    case LCK_TRACE_SETTLE:
      m->size = e->length;
      break;
    default:
      marked(m, e->offset, e->length);
      if (look && m->changed && images_cut(m))
        return;
    }
  }
  if (look)
    images_cut(m);
}
