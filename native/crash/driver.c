/* Real work on a real region, traced: creation, commits, growth, branches, restarts. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "crash.h"
#include "fault.h"

uint64_t draw(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

uint64_t draw_below(uint64_t *state, uint64_t limit) {
  return draw(state) % limit;
}

static void must(int rc) {
  if (rc != 0)
    DIE("%d %s", rc, lck_last_error());
}

int failed(const bed *b, int rc) {
  if (rc != 0 && (b->medium != MEDIUM_EIO || (rc != LCK_E_IO && rc != LCK_E_PREVIOUS)))
    DIE("%d %s", rc, lck_last_error());
  return rc != 0;
}

void mark(enum mark which, uint64_t value) {
  lck_trace(LCK_TRACE_MARK, NULL, which, value);
}

static void mark_segments(uint64_t acked, uint64_t started) {
  mark(MARK_SEGMENTS, acked << 32 | started);
}

void bed_seed(bed *b, medium on, uint64_t seed) {
  static const int forced[MEDIA] = {LCK_GRAN_LINE, LCK_GRAN_BYTE, LCK_GRAN_PAGE,
                                    LCK_GRAN_NONE, LCK_GRAN_LINE, LCK_GRAN_PAGE};
  static const char *const kernels[] = {"avx512", "avx2", "sse42", "portable", "aarch64"};
  memset(b, 0, sizeof(*b));
  b->random = seed;
  b->medium = on;
  lck_trace_force(forced[on]);
  (void)lck_kernel(kernels[draw_below(&b->random, 5)],
                   NULL); /* what this CPU lacks changes nothing */
}

/* ---- one snapshot --------------------------------------------------------------------------- */

#define NEVER_ZERO UINT64_C(0x0101010101010101) /* what was never stored shows */

void fill(unsigned char *bytes, uint64_t length, uint64_t seed) {
  uint64_t at = 0, word;
  for (; at + sizeof(word) <= length; at += sizeof(word)) {
    word = draw(&seed) | NEVER_ZERO;
    memcpy(bytes + at, &word, sizeof(word));
  }
  word = draw(&seed) | NEVER_ZERO;
  memcpy(bytes + at, &word, length - at);
}

/* Where the extents of this layout version lie: in the grown segment, too, when there is one. */
static void lay_out(const bed *b, const lck_region_info *info, uint32_t slot, truth *t) {
  uint64_t lengths = b->layout_version * UINT64_C(77) + 5;
  for (uint32_t i = 0, segment = 0; i < EXTENTS; i++) {
    uint64_t at =
        i == 0 ? 0 : t->manifest.extents[i - 1].offset + t->manifest.extents[i - 1].length;
    uint32_t wanted = i >= 4 && info->segment_count > 1 ? 1 : 0;
    if (i == 0 || wanted != segment)
      at = info->segments[wanted].offset + slot * info->segments[wanted].slot_bytes + TABLES_BYTES;
    segment = wanted;
    t->manifest.extents[i] = (lck_read){.offset = (at + LCK_LINE - 1) / LCK_LINE * LCK_LINE,
                                        .length = 40 + draw_below(&lengths, 1300)};
    if (b->layout_version % 2) /* numbers, which an update can write */
      t->manifest.extents[i].length &= ~UINT64_C(3);
  }
  t->manifest.count = EXTENTS;
  t->layout_length = 200 + 100 * (b->layout_version % 3);
  fill(t->layout, t->layout_length, b->layout_version);
}

/* New bytes, or those of the slot's last snapshot, which may then be skipped. */
static void compose(bed *b, truth *t, lck_copy *copies) {
  const truth *last = &b->truths[b->last_in_slot[t->slot] % SEQUENCES];
  int same_places =
      b->last_in_slot[t->slot] != 0 && memcmp(last->layout, t->layout, sizeof(t->layout)) == 0;
  for (uint64_t i = 0, at = 0; i < EXTENTS; i++) {
    lck_read *extent = &t->manifest.extents[i];
    same_places = same_places && last->manifest.extents[i].offset == extent->offset;
    if (same_places && draw_below(&b->random, 3) == 0)
      memcpy(t->payload + at, last->payload + at, extent->length);
    else
      fill(t->payload + at, extent->length, draw(&b->random));
    extent->crc = lck_crc32c(0, t->payload + at, extent->length);
    copies[i] = (lck_copy){.offset = extent->offset,
                           .source = t->payload + at,
                           .length = extent->length,
                           .layer = (uint32_t)i,
                           .flags = same_places ? LCK_COPY_IF_CHANGED : 0,
                           .crc = same_places ? last->manifest.extents[i].crc : 0};
    at += extent->length;
  }
}

/* The slot's own table is kept when it is the wanted one. */
static const void *layout_to_write(const lck_region *region, const lck_region_info *info,
                                   const truth *t, uint64_t offset) {
  lck_record present;
  int kept = lck_slot_read(region, t->slot, &present) == 0 && present.layout_offset == offset &&
             present.layout_length == t->layout_length &&
             memcmp((const char *)info->base + offset, t->layout, t->layout_length) == 0;
  return kept ? NULL : t->layout;
}

/* Open the slot that is not protected and copy the next snapshot into it; NULL: a sync failed. */
static lck_snapshot *capture(bed *b, lck_pool *pool, lck_region *region, truth *t) {
  lck_copy copies[EXTENTS];
  lck_snapshot *snapshot;
  uint32_t batch;
  compose(b, t, copies);
  int fed = bed_fed(b, copies), streamed = !fed && bed_streamed(b, copies);
  int help = (int)draw_below(&b->random, 3);
  if (failed(b, lck_snapshot_begin(pool, region, t->slot, &snapshot)))
    return NULL;
  if (!failed(b, lck_snapshot_add(snapshot, copies, EXTENTS, &batch)) &&
      !failed(b, fed                      ? bed_feed(b, region, snapshot, batch, t, copies)
                 : streamed               ? bed_stream(b, snapshot, batch, t, copies)
                 : help == LCK_HELP_ALONE ? 0
                                          : lck_snapshot_release(snapshot, batch, LCK_ALL)) &&
      !failed(b, lck_snapshot_capture(snapshot, batch, -1, help)))
    return snapshot;
  (void)failed(b, lck_snapshot_free(snapshot));
  return NULL;
}

static truth *next_truth(bed *b, const lck_region_info *info) {
  uint64_t sequence = b->now.acked + 1;
  uint32_t newest = b->now.acked ? b->truths[b->now.acked % SEQUENCES].slot : 1;
  truth *t = &b->truths[sequence % SEQUENCES];
  memset(t, 0, sizeof(*t));
  t->slot = LCK_MUTANT(MUTANT_LIVE_SLOT) ? newest : 1 - newest;
  t->sequence = t->manifest.sequence = sequence;
  t->timeline = info->timeline;
  lay_out(b, info, t->slot, t);
  return t;
}

typedef struct sealing {
  const bed *bed;
  lck_snapshot *snapshot;
  const lck_record *record;
  const void *layout, *manifest;
  int bad;
} sealing;

static void *seal_now(void *argument) {
  sealing *s = argument;
  s->bad = failed(s->bed, lck_snapshot_seal(s->snapshot, s->record, s->layout, s->manifest));
  return NULL;
}

/* By another thread than the one that has copied, as a just-in-time save does it: what that thread
 * has not fenced, this one's fences do not order. */
static int sealed_elsewhere(sealing s) {
  pthread_t other;
  if (pthread_create(&other, NULL, seal_now, &s) != 0)
    DIE("no thread");
  pthread_join(other, NULL);
  return !s.bad;
}

/* Whether it was committed; it is acknowledged then, and only then. */
static int seal(bed *b, lck_snapshot *snapshot, const lck_record *record, const void *layout,
                lck_region *region, const truth *t) {
  int state = LCK_SNAP_FAILED;
  entries_write(b, region, t->timeline, 1);
  sealing s = {b, snapshot, record, layout, &t->manifest, 0};
  int bad = draw_below(&b->random, 4) == 0 ? !sealed_elsewhere(s) : (seal_now(&s), s.bad);
  entries_write(b, region, t->timeline, 1); /* beside the commit */
  bad = bad || failed(b, lck_snapshot_wait(snapshot, -1, &state));
  if (!bad && state != LCK_SNAP_COMMITTED)
    DIE("committed, but in state %d", state);
  if (!bad)
    mark(MARK_ACKED, t->sequence);
  return !failed(b, lck_snapshot_free(snapshot)) && !bad;
}

static uint64_t cases_of(const bed *b, const lck_region_info *info, const truth *t) {
  const truth *other = &b->truths[b->now.acked % SEQUENCES];
  int relayout = b->now.acked != 0 && other->slot != t->slot &&
                 memcmp(other->layout, t->layout, sizeof(t->layout)) != 0;
  int grown = b->segments_used != 0 && info->segment_count > b->segments_used;
  return (uint64_t)relayout << CASE_RELAYOUT | (uint64_t)grown << CASE_GROWN;
}

/* One in four is given up first: nothing of it may ever be found. */
static int commit(bed *b, lck_pool *pool, lck_region *region) {
  lck_region_info info;
  must(lck_region_describe(region, &info));
  truth *t = next_truth(b, &info);
  uint64_t start = info.segments[0].offset + t->slot * info.segments[0].slot_bytes;
  lck_record record = {.sequence = t->sequence,
                       .step = 10 * t->sequence,
                       .timeline = t->timeline,
                       .layout_offset = start,
                       .layout_length = t->layout_length,
                       .manifest_offset = start + 576,
                       .manifest_length = sizeof(t->manifest)};
  if (draw_below(&b->random, 4) == 0) {
    lck_snapshot *given_up = capture(b, pool, region, t);
    b->last_in_slot[t->slot] = 0;
    if (given_up == NULL || failed(b, lck_snapshot_free(given_up)))
      return 0;
  }
  const void *layout = layout_to_write(region, &info, t, record.layout_offset);
  mark(MARK_CASES, cases_of(b, &info, t));
  mark(MARK_STARTED, t->sequence);
  b->now.started = t->sequence;
  lck_snapshot *snapshot = capture(b, pool, region, t);
  b->last_in_slot[t->slot] = 0;
  if (snapshot == NULL || !seal(b, snapshot, &record, layout, region, t))
    return 0;
  mark(MARK_CASES, 0);
  b->now.acked = t->sequence;
  b->last_in_slot[t->slot] = t->sequence;
  b->segments_used = info.segment_count;
  return 1;
}

/* ---- the other protocols -------------------------------------------------------------------- */

static int branch(bed *b, lck_region *region) {
  lck_branch from = {b->now.timeline_acked, b->now.acked};
  uint64_t next = b->now.timeline_acked + 1;
  mark(MARK_STEP, STEP_BRANCH);
  mark(MARK_BRANCHING, next);
  b->now.timeline_started = next;
  b->suspects[next % TIMELINES] = 0;
  if (failed(b, lck_region_branch(region, next, &from, b->now.timeline_acked > 0)))
    return 0;
  mark(MARK_BRANCHED, next);
  mark(MARK_STEP, STEP_PUBLISH);
  b->now.timeline_acked = next;
  return 1;
}

/* From the newest snapshot on, or from the next; once in a timeline. */
static int suspect(bed *b, lck_region *region) {
  uint64_t timeline = b->now.timeline_acked, first = b->now.acked + draw_below(&b->random, 2);
  uint64_t *known = &b->suspects[timeline % TIMELINES];
  if (first == 0 || *known != 0)
    return 1;
  mark(MARK_STEP, STEP_SUSPECT);
  mark(MARK_SUSPECTING, timeline);
  *known = first, b->now.suspect_started = timeline;
  if (failed(b, lck_region_suspect(region, first)))
    return 0;
  b->now.suspect_acked = timeline;
  mark(MARK_SUSPECTED, timeline);
  mark(MARK_STEP, STEP_PUBLISH);
  return 1;
}

static int grow(bed *b, lck_region *region) {
  mark(MARK_STEP, STEP_GROW);
  mark_segments(b->now.segments_acked, b->now.segments_acked + 1);
  b->now.segments_started = b->now.segments_acked + 1;
  if (failed(b, lck_region_grow(region, SLOT_BYTES)))
    return 0;
  b->now.segments_acked = b->now.segments_started = b->now.segments_acked + 1;
  mark_segments(b->now.segments_acked, b->now.segments_acked);
  mark(MARK_STEP, STEP_PUBLISH);
  b->layout_version++;
  return 1;
}

/* After a failed sync everything is refused, and nothing is acknowledged. */
static void go_on(const bed *b, lck_pool *pool, lck_region *region) {
  lck_branch from = {b->now.timeline_acked, b->now.acked};
  lck_journal_entry entry = {.timeline = b->now.timeline_acked, .kind = LCK_JOURNAL_STEP_END};
  lck_snapshot *snapshot;
  for (uint32_t slot = 0; slot < 2; slot++)
    if (lck_snapshot_begin(pool, region, slot, &snapshot) != LCK_E_PREVIOUS)
      DIE("a snapshot is begun after a failed sync");
  if (lck_region_branch(region, 99, &from, 1) != LCK_E_PREVIOUS ||
      lck_region_grow(region, SLOT_BYTES) != LCK_E_PREVIOUS ||
      lck_region_suspect(region, 1) != LCK_E_PREVIOUS ||
      lck_journal_write(region, &entry, "") != LCK_E_PREVIOUS)
    DIE("a region is written after a failed sync");
}

static lck_pool *make_pool(bed *b) {
  lck_pool_spec spec = {.threads = 1 + (uint32_t)draw_below(&b->random, 3), .chunk_bytes = 4096};
  lck_pool *pool;
  must(lck_pool_create(&spec, &pool));
  return pool;
}

static int reopened(int fd) {
  char name[64];
  snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
  int again = open(name, O_RDWR | O_CLOEXEC);
  if (again < 0)
    DIE("%s", name);
  return again;
}

static void work(bed *b, lck_region *region, uint32_t commits) {
  lck_pool *pool = make_pool(b);
  entries_part(b);
  int well = branch(b, region);
  for (uint32_t i = 0; i < commits && well; i++) {
    if (b->now.segments_acked < 2 && (i == 2 || (i == 1 && draw_below(&b->random, 3) == 0)))
      well = grow(b, region);
    else if (draw_below(&b->random, 3) == 0)
      b->layout_version++;
    entries_write(b, region, b->now.timeline_acked, 2);
    well = well && commit(b, pool, region);
    well = well && (draw_below(&b->random, 3) != 0 || suspect(b, region));
  }
  if (well)
    entries_write(b, region, b->now.timeline_acked, 3);
  else
    go_on(b, pool, region);
  must(lck_pool_destroy(pool));
  must(lck_region_close(region));
}

/* One of the next `most` syncs fails, or none. */
static void arm(bed *b, uint64_t most) {
  if (b->medium == MEDIUM_EIO)
    must(lck_fault_arm(LCK_FAULT_SYNC, (int64_t)draw_below(&b->random, most), EIO));
}

static void disarm(void) {
  must(lck_fault_arm(LCK_FAULT_SYNC, -1, 0));
}

static lck_region_spec spec_of_a_bed(void) {
  return (lck_region_spec){.run_id = "crash",
                           .world = 1,
                           .slot_count = 2,
                           .slot_bytes = SLOT_BYTES,
                           .journal_bytes = JOURNAL_BYTES,
                           .numa_node = -1};
}

void bed_create(bed *b, int fd, lck_trace_log *log) {
  lck_region_spec spec = spec_of_a_bed();
  lck_region *region;
  int lock_fd = reopened(fd);
  lck_trace_start(log);
  mark(MARK_STEP, STEP_CREATE);
  mark_segments(0, 1);
  arm(b, 40);
  b->now.segments_started = 1;
  if (!failed(b, lck_region_create(fd, lock_fd, &spec, &region))) {
    b->now.segments_acked = 1;
    mark_segments(1, 1);
    work(b, region, 4 + (uint32_t)draw_below(&b->random, 2));
  }
  disarm();
  lck_trace_stop();
  close(lock_fd);
}

void bed_create_over(bed *b, int fd, void *base, uint64_t size, lck_trace_log *log) {
  lck_region_spec spec = spec_of_a_bed();
  lck_backing backing = {.base = base, .length = size};
  lck_region *region;
  int lock_fd = reopened(fd);
  lck_trace_start(log);
  mark(MARK_STEP, STEP_CREATE);
  mark_segments(0, 1);
  must(lck_region_create_on(&backing, fd, lock_fd, &spec, &region));
  b->now.segments_acked = b->now.segments_started = 1;
  mark_segments(1, 1);
  work(b, region, 1);
  lck_trace_stop();
  close(lock_fd);
}

/* What the owner finds, it relies on from now on. */
static void rely(bed *b, lck_region *region, int lock_fd, int fd) {
  lck_region_info info;
  outcome found;
  must(lck_region_describe(region, &info));
  recover(fd, lock_fd, LCK_READ_ONLY, b, &found);
  if (found.opened != 0 || found.wrong != NULL)
    DIE("an image that was judged good: %d %s", found.opened, found.wrong);
  uint64_t at = found.by_checksum, timeline = info.timeline, parts = info.segment_count;
  b->now = (bounds){at,    at,          timeline,    timeline, parts,
                    parts, found.entry, found.entry, timeline, timeline};
  b->suspects[info.timeline % TIMELINES] = info.suspect;
  mark(MARK_ACKED, b->now.acked);
  mark(MARK_BRANCHED, info.timeline);
  mark(MARK_JOURNALED, found.entry);
  mark(MARK_SUSPECTED, info.timeline);
  mark_segments(info.segment_count, info.segment_count);
}

int bed_continue(bed *b, int fd, uint32_t commits, lck_trace_log *log) {
  lck_region *region;
  int lock_fd = reopened(fd);
  int reader = reopened(fd);
  b->last_in_slot[0] = b->last_in_slot[1] = 0;
  lck_trace_start(log);
  mark(MARK_STEP, STEP_OPEN);
  if (draw_below(&b->random, 2) == 0)
    arm(b, 12);
  int rc = lck_region_open(fd, lock_fd, 0, -1, &region);
  if (rc == 0) {
    rely(b, region, reader, fd);
    b->layout_version += (uint32_t)draw_below(&b->random, 2);
    work(b, region, commits);
  } else if (rc != LCK_E_FORMAT || b->now.segments_acked != 0) {
    rc = !failed(b, rc); /* what it has done until then is looked at, too */
  }
  disarm();
  lck_trace_stop();
  close(lock_fd);
  close(reader);
  return rc;
}
