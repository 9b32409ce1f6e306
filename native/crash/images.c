/* One image: built in place, given to recovery, judged, taken out again. */
#include <string.h>
#include <unistd.h>

#include "crash.h"

#define TOUCHED_MOST 8192u
#define WRITER_EVERY 48u /* images that are also opened for writing */

/* ---- one image ------------------------------------------------------------------------------ */

uint64_t words_in(const piece *p) {
  return (p->offset % 8 + p->length + 7) / 8;
}

uint64_t all_words(const piece *p) {
  return UINT64_MAX >> (64 - words_in(p));
}

static void put_words(model *m, const piece *p, uint64_t words) {
  uint64_t start = p->offset & ~UINT64_C(7), end = p->offset + p->length;
  for (uint64_t i = 0; i < words_in(p); i++) {
    uint64_t from = start + 8 * i < p->offset ? p->offset : start + 8 * i;
    uint64_t to = start + 8 * i + 8 < end ? start + 8 * i + 8 : end;
    if (words >> i & 1)
      memcpy(m->image + from, p->bytes + (from - p->offset), to - from);
  }
}

typedef struct touched {
  uint32_t lines[TOUCHED_MOST], count;
} touched;

static void touch(model *m, touched *t, uint64_t offset, uint64_t length, uint64_t *hash) {
  for (uint64_t line = offset / LCK_LINE; line <= (offset + length - 1) / LCK_LINE; line++) {
    if (m->stamps[line] == m->stamp)
      continue;
    if (t->count == TOUCHED_MOST)
      DIE("more than %u lines are pending", TOUCHED_MOST);
    m->stamps[line] = m->stamp;
    t->lines[t->count++] = (uint32_t)line;
    *hash ^= line_hash(line * LCK_LINE, m->durable + line * LCK_LINE);
  }
}

/* 1 if this image was looked at before, within the same bounds. */
static int seen_before(model *m, uint64_t key) {
  key = key ? key : 1;
  if (2 * m->seen_count > m->seen_room) {
    uint64_t *old = m->seen, room = m->seen_room;
    m->seen_room *= 4, m->seen_count = 0;
    m->seen = calloc(m->seen_room, sizeof(*m->seen));
    if (!m->seen)
      DIE("no memory for %lu images", (unsigned long)m->seen_room);
    for (uint64_t i = 0; i < room; i++)
      if (old[i])
        seen_before(m, old[i]);
    free(old);
  }
  uint64_t at = key * UINT64_C(0x9E3779B97F4A7C15) % m->seen_room;
  for (; m->seen[at]; at = (at + 1) % m->seen_room)
    if (m->seen[at] == key)
      return 1;
  m->seen[at] = key;
  m->seen_count++;
  return 0;
}

static uint64_t bounds_hash(const bounds *b) {
  uint64_t hash = 0, words[sizeof(*b) / 8];
  memcpy(words, b, sizeof(*b));
  for (uint32_t i = 0; i < sizeof(*b) / 8; i++)
    hash = (hash ^ words[i]) * UINT64_C(0x2545F4914F6CDD1D) + i;
  return hash;
}

static losses drop_lines(cut *c, touched *t, uint64_t *hash) {
  model *m = c->m;
  losses lost = {0};
  for (uint32_t i = 0; i < HISTORY; i++) {
    if (!(c->dropped >> i & 1))
      continue;
    const old_line *old = &m->history[i];
    touch(m, t, old->offset, LCK_LINE, hash);
    memcpy(m->image + old->offset, old->bytes, LCK_LINE);
    lost.lines++;
    if (old->offset < 2 * LCK_HEADER_PAGE)
      lost.superblocks |= 1u << old->offset / LCK_HEADER_PAGE;
    else if (in_journal(old->offset))
      lost.journal = 1;
    else
      lost.slots |=
          1u << (old->offset < LCK_JOURNAL_OFFSET ? old->offset / LCK_HEADER_PAGE - 2
                                                  : old->offset % LCK_GRANULE / SLOT_BYTES);
  }
  return lost;
}

static int same_outcome(const outcome *a, const outcome *b) {
  return a->opened == b->opened && a->by_order == b->by_order && a->by_checksum == b->by_checksum &&
         a->timeline == b->timeline && a->segments == b->segments && a->rejected == b->rejected &&
         a->torn == b->torn && a->entry == b->entry && a->before == b->before;
}

/* Recovery again gives the same, also after an owner has opened the region and died. */
static const char *repeat(model *m, const outcome *first) {
  unsigned char superblocks[2 * LCK_HEADER_PAGE];
  outcome again;
  m->tally->twice++;
  recover(m->fd, m->lock_fd, LCK_READ_ONLY, m->bed, &again);
  if (!same_outcome(first, &again))
    return "recovery gives another answer the second time";
  memcpy(superblocks, m->image, sizeof(superblocks));
  m->tally->as_writer++;
  recover(m->fd, m->lock_fd, 0, m->bed, &again);
  int same = same_outcome(first, &again);
  recover(m->fd, m->lock_fd, LCK_READ_ONLY, m->bed, &again);
  same = same && same_outcome(first, &again);
  memcpy(m->image, superblocks, sizeof(superblocks));
  return same ? NULL : "recovery gives another answer once an owner has opened the region";
}

static void report(cut *c, const char *what, const outcome *found, const losses *lost,
                   int ignoring) {
  model *m = c->m;
  m->tally->bad[ignoring][m->medium][m->step]++;
  c->bad = 1;
  if (m->tally->example[0] == '\0')
    snprintf(
        m->tally->example, sizeof(m->tally->example),
        "seed %lu, %s: %s: found %lu/%lu, acknowledged %lu, begun %lu, opened %d, %u lines lost",
        (unsigned long)m->seed, step_names[m->step], what, (unsigned long)found->by_order,
        (unsigned long)found->by_checksum, (unsigned long)m->within.acked,
        (unsigned long)m->within.started, found->opened, lost->lines);
}

/* Give the image to recovery. The file has its choice in it; it is taken out by the caller. */
static void examine(cut *c, const losses *lost) {
  model *m = c->m;
  outcome found;
  const char *what;
  recover(m->fd, m->lock_fd, LCK_READ_ONLY, m->bed, &found);
  m->tally->images[m->medium][m->step]++;
  for (uint32_t i = 0; i < CASES; i++)
    m->tally->cases[m->medium][i] += (m->cases | m->always) >> i & 1;
  m->tally->detected += lost->lines > 0 && (found.rejected > 0 || found.torn > 0);
  for (int ignoring = 0; ignoring < 2; ignoring++)
    if ((what = judge(m->bed, &found, &m->within, lost, ignoring)) != NULL)
      report(c, what, &found, lost, ignoring);
  uint64_t number = m->tally->images[m->medium][m->step];
  if (number % WRITER_EVERY == 1 && found.opened == 0 && !c->bad && lost->lines == 0 &&
      (what = repeat(m, &found)) != NULL)
    report(c, what, &found, lost, 0);
  if (m->save && !c->bad && found.opened == 0 && lost->lines == 0)
    m->save(m, &found);
}

void look(cut *c) {
  model *m = c->m;
  static touched t;
  uint64_t hash = m->hash;
  t.count = 0;
  m->stamp++;
  c->attempts++;
  for (uint32_t i = 0; i < m->count; i++)
    if (c->words[i]) {
      touch(m, &t, m->pieces[i].offset, m->pieces[i].length, &hash);
      put_words(m, &m->pieces[i], c->words[i]);
    }
  losses lost = drop_lines(c, &t, &hash);
  for (uint32_t i = 0; i < t.count; i++)
    hash ^= line_hash(t.lines[i] * (uint64_t)LCK_LINE, m->image + t.lines[i] * (uint64_t)LCK_LINE);
  uint64_t size = c->short_file ? m->size : m->next_size;
  hash ^= bounds_hash(&m->within) ^ size << 20 ^ (lost.lines ? 5 : 0);
  if (!seen_before(m, hash)) {
    if (size < m->file_size && ftruncate(m->fd, (off_t)size) != 0)
      DIE("cut the file");
    if (m->offer)
      m->offer(m, &lost, size);
    else
      examine(c, &lost);
    if (size < m->file_size && ftruncate(m->fd, (off_t)m->file_size) != 0)
      DIE("lengthen the file");
  }
  for (uint32_t i = 0; i < t.count; i++)
    memcpy(m->image + t.lines[i] * (uint64_t)LCK_LINE, m->durable + t.lines[i] * (uint64_t)LCK_LINE,
           LCK_LINE);
}
