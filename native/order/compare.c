/* The order of stores, flushes and fences, freed of what may differ.
 *
 * What a thread does from one fence to the next is a *segment*, told as a text: runs of stores,
 * non-temporal stores and flushes, each as the bytes or lines that it covers. An aligned word alone
 * in its run says how many instructions stored it: a published word must not be torn. Segments of
 * one thread come in its order. Which thread copies which chunk is up to the scheduler, so payload
 * is ordered by marks and offsets instead, and so are fences of chunks of which nothing had
 * changed. */
#include <string.h>

#include "order.h"

#define THREADS 64u
#define PAYLOAD UINT32_MAX

typedef struct span {
  uint64_t from, to;
} span;

typedef struct segment {
  uint32_t thread; /* in the order of first deeds, or PAYLOAD */
  uint32_t epoch;  /* marks before its end */
  uint64_t offset; /* of PAYLOAD: its first byte */
  uint32_t number;
  char *text;
} segment;

typedef struct lane {
  uint32_t thread;
  int kind; /* of the run in hand, or -1 */
  span *spans;
  uint64_t count, room;
  char *text;
  uint64_t length, text_room;
  uint64_t lowest;
  int payload;
} lane;

typedef struct story {
  segment *segments;
  uint64_t count, room;
  lane lanes[THREADS];
  uint32_t lane_count, epoch;
} story;

static void *more(void *items, uint64_t count, uint64_t *room, uint64_t item_bytes) {
  if (count < *room)
    return items;
  *room = 2 * count + 64;
  items = realloc(items, *room * item_bytes);
  if (items == NULL)
    DIE("no memory for %lu items", (unsigned long)count);
  return items;
}

static lane *lane_of(story *s, uint32_t thread) {
  for (uint32_t i = 0; i < s->lane_count; i++)
    if (s->lanes[i].thread == thread)
      return &s->lanes[i];
  if (s->lane_count == THREADS)
    DIE("more than %u threads", THREADS);
  s->lanes[s->lane_count] = (lane){.thread = thread, .kind = -1, .lowest = UINT64_MAX};
  return &s->lanes[s->lane_count++];
}

/* ---- runs ----------------------------------------------------------------------------------- */

static void tell(lane *l, const char *format, uint64_t a, uint64_t b) {
  char part[64];
  int length = snprintf(part, sizeof(part), format, (unsigned long)a, (unsigned long)b);
  l->text = more(l->text, l->length + (uint64_t)length + 1, &l->text_room, 1);
  memcpy(l->text + l->length, part, (size_t)length + 1);
  l->length += (uint64_t)length;
}

static int by_start(const void *a, const void *b) {
  const span *x = a, *y = b;
  return (x->from > y->from) - (x->from < y->from);
}

static void end_run(lane *l) {
  static const char *const names[] = {
      [LCK_TRACE_STORE] = "store", [LCK_TRACE_NT] = "stream", [LCK_TRACE_FLUSH] = "flush"};
  if (l->kind < 0)
    return;
  qsort(l->spans, l->count, sizeof(span), by_start);
  uint64_t kept = 0;
  for (uint64_t i = 1; i < l->count; i++) {
    if (l->spans[i].from > l->spans[kept].to)
      l->spans[++kept] = l->spans[i];
    else if (l->spans[i].to > l->spans[kept].to)
      l->spans[kept].to = l->spans[i].to;
  }
  tell(l, names[l->kind], 0, 0);
  for (uint64_t i = 0; i <= kept; i++)
    tell(l, "[%lu,+%lu)", l->spans[i].from, l->spans[i].to - l->spans[i].from);
  if (l->kind == LCK_TRACE_STORE && kept == 0 && l->spans[0].from % 8 == 0 &&
      l->spans[0].to - l->spans[0].from == 8)
    tell(l, " at %lu times", l->count, 0);
  tell(l, "; ", 0, 0);
  l->kind = -1;
  l->count = 0;
}

static int is_payload(uint64_t offset) {
  return offset >= LCK_JOURNAL_OFFSET && !in_journal(offset) && offset % SLOT_BYTES >= TABLES_BYTES;
}

static void add(lane *l, const lck_event *e) {
  span one = {e->offset, e->offset + e->length};
  if (l->kind != (int)e->op)
    end_run(l);
  l->kind = (int)e->op;
  if (e->op == LCK_TRACE_FLUSH)
    one = (span){one.from / LCK_LINE * LCK_LINE, (one.to + LCK_LINE - 1) / LCK_LINE * LCK_LINE};
  l->payload = l->lowest == UINT64_MAX ? is_payload(one.from) : l->payload;
  l->lowest = one.from < l->lowest ? one.from : l->lowest;
  l->spans = more(l->spans, l->count, &l->room, sizeof(span));
  l->spans[l->count++] = one;
}

/* ---- segments ------------------------------------------------------------------------------- */

static void end_segment(story *s, lane *l, const char *how) {
  end_run(l);
  int by_mark = l->payload || l->length == 0;
  tell(l, how, 0, 0);
  s->segments = more(s->segments, s->count, &s->room, sizeof(segment));
  s->segments[s->count] = (segment){.thread = by_mark ? PAYLOAD : l->thread,
                                    .epoch = s->epoch,
                                    .offset = l->lowest,
                                    .number = (uint32_t)s->count,
                                    .text = l->text};
  s->count++;
  *l = (lane){
      .thread = l->thread, .kind = -1, .spans = l->spans, .room = l->room, .lowest = UINT64_MAX};
}

static int by_thread(const void *a, const void *b) {
  const segment *x = a, *y = b;
  if (x->thread != y->thread)
    return x->thread < y->thread ? -1 : 1;
  if (x->thread == PAYLOAD && x->epoch != y->epoch)
    return x->epoch < y->epoch ? -1 : 1;
  if (x->thread == PAYLOAD && x->offset != y->offset)
    return x->offset < y->offset ? -1 : 1;
  return (x->number > y->number) - (x->number < y->number);
}

/* The n-th thread that did anything but copy is thread n in both stories. */
static void number_threads(story *s) {
  uint32_t seen[THREADS], count = 0;
  for (uint64_t i = 0; i < s->count; i++) {
    uint32_t k = 0;
    while (k < count && seen[k] != s->segments[i].thread)
      k++;
    if (s->segments[i].thread == PAYLOAD)
      continue;
    if (k == count)
      seen[count++] = s->segments[i].thread;
    s->segments[i].thread = k;
  }
}

static story tell_story(const lck_trace_log *log) {
  story s = {0};
  for (uint64_t i = 0; i < log->event_count; i++) {
    const lck_event *e = &log->events[i];
    if (e->op == LCK_TRACE_MARK)
      s.epoch++;
    else if (e->op == LCK_TRACE_FENCE)
      end_segment(&s, lane_of(&s, e->thread), "fence");
    else if (e->op == LCK_TRACE_STORE || e->op == LCK_TRACE_NT || e->op == LCK_TRACE_FLUSH)
      add(lane_of(&s, e->thread), e);
  }
  for (uint32_t i = 0; i < s.lane_count; i++) {
    if (s.lanes[i].length > 0 || s.lanes[i].kind >= 0)
      end_segment(&s, &s.lanes[i], "end");
    free(s.lanes[i].spans);
  }
  number_threads(&s);
  qsort(s.segments, s.count, sizeof(segment), by_thread);
  return s;
}

static void end_story(story *s) {
  for (uint64_t i = 0; i < s->count; i++)
    free(s->segments[i].text);
  free(s->segments);
}

int same_order(const lck_trace_log *instructions, const lck_trace_log *shim, char *difference,
               uint64_t room) {
  story a = tell_story(instructions), b = tell_story(shim);
  uint64_t at = 0;
  while (at < a.count && at < b.count && a.segments[at].thread == b.segments[at].thread &&
         strcmp(a.segments[at].text, b.segments[at].text) == 0)
    at++;
  int same = at == a.count && at == b.count;
  if (!same)
    snprintf(difference, room, "segment %lu: instructions: %.160s, shim: %.160s", (unsigned long)at,
             at < a.count ? a.segments[at].text : "nothing",
             at < b.count ? b.segments[at].text : "nothing");
  end_story(&a);
  end_story(&b);
  return same;
}
