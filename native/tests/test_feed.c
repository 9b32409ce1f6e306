/* test_feed.c -- copies whose bytes are brought by somebody else: through a ring, or in place. */
#include <errno.h>

#include "snapshot_bed.h"

enum { COUNT = 90, MOST = 30000, CHUNK = 8192 };

/* What a device would have: the copies' bytes one behind the other. */
typedef struct load {
  lck_copy copies[COUNT], fed[COUNT];
  uint32_t crcs[COUNT];
  unsigned char *block, *packed;
  uint64_t total;
} load;

static void load_make(load *l, uint64_t offset, uint64_t seed, uint32_t flags) {
  l->block = bed_copies(l->copies, COUNT, offset, MOST, seed);
  l->total = 0;
  for (uint32_t i = 0; i < COUNT; i++)
    l->total += l->copies[i].length;
  l->packed = malloc(l->total);
  CHECK(l->packed, "memory");
  for (uint64_t i = 0, at = 0; i < COUNT; at += l->copies[i++].length) {
    memcpy(l->packed + at, l->copies[i].source, l->copies[i].length);
    l->fed[i] = l->copies[i];
    l->fed[i].source = NULL;
    l->fed[i].flags = LCK_COPY_FED | flags;
  }
}

static void load_free(load *l) {
  free(l->block);
  free(l->packed);
}

static uint64_t cuts_of(const lck_snapshot *s, uint32_t batch, uint64_t **starts) {
  uint64_t count = 0;
  CHECK(lck_snapshot_cuts(s, batch, NULL, 0, &count) == 0, "%s", lck_last_error());
  *starts = calloc(count + 1, sizeof **starts);
  CHECK(*starts && count > 20, "%llu cuts", (unsigned long long)count);
  CHECK(lck_snapshot_cuts(s, batch, *starts, count, &count) == 0, "%s", lck_last_error());
  CHECK((*starts)[0] == 0, "the first chunk starts elsewhere");
  return count;
}

/* Through a ring of two places, each overwritten as soon as it is said to be taken. */
static void feed_by_ring(lck_snapshot *s, uint32_t batch, const load *l, int help) {
  uint64_t *starts, count = cuts_of(s, batch, &starts), ends[2] = {0, 0};
  unsigned char *ring[2] = {malloc(4 * CHUNK), malloc(4 * CHUNK)};
  CHECK(ring[0] && ring[1], "memory");
  starts[count] = l->total;
  for (uint64_t i = 0, turn = 0; i < count; turn++) {
    uint64_t next = i + 1;
    while (next < count && starts[next + 1] - starts[i] <= 4 * CHUNK)
      next++;
    CHECK(starts[next] - starts[i] <= 4 * CHUNK, "a chunk larger than chunks are");
    if (ends[turn % 2] > 0) {
      int rc = lck_snapshot_taken(s, batch, ends[turn % 2], -1, help);
      CHECK(rc == 0, "%s", lck_last_error());
      memset(ring[turn % 2], 0xEE, 4 * CHUNK);
    }
    memcpy(ring[turn % 2], l->packed + starts[i], starts[next] - starts[i]);
    ends[turn % 2] = starts[next];
    CHECK(lck_snapshot_feed(s, batch, starts[next], ring[turn % 2]) == 0, "%s", lck_last_error());
    i = next;
  }
  bed_capture(s, batch, help);
  free(ring[0]);
  free(ring[1]);
  free(starts);
}

static void test_through_a_ring(bed *b) {
  bed_create(b, "ring");
  for (uint32_t round = 0; round < 6; round++) {
    lck_pool *pool = bed_pool(1 + round % 3, CHUNK);
    load l;
    load_make(&l, bed_slot(b, round % 3), round + 1, round % 2 ? LCK_COPY_STAGED : 0);
    lck_snapshot *s = bed_begin(b, pool, round % 3);
    uint32_t batch = bed_add(s, l.fed, COUNT);
    feed_by_ring(s, batch, &l, round % 2);
    bed_digests(s, batch, l.crcs);
    CHECK(bed_seal(b, s, round % 3, round + 1) == 0, "%s", lck_last_error());
    bed_committed(s);
    bed_verify(b, l.copies, l.crcs, COUNT);
    bed_holds(b, round % 3, round + 1);
    load_free(&l);
    CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  }
  bed_destroy(b);
}

/* The bytes are stored by somebody else; what is behind an extent's end is padded all the same. */
static void test_in_place(bed *b) {
  if (b->staged)
    return;
  bed_create(b, "place");
  lck_pool *pool = bed_pool(2, CHUNK);
  load l;
  load_make(&l, bed_slot(b, 1), 7, 0);
  lck_snapshot *s = bed_begin(b, pool, 1);
  uint32_t batch = bed_add(s, l.fed, COUNT);
  uint64_t *starts, count = cuts_of(s, batch, &starts);
  CHECK(lck_region_describe(b->region, &b->info) == 0, "%s", lck_last_error());
  for (uint32_t i = 0; i < COUNT; i++) {
    uint64_t lines = (l.copies[i].length + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
    memset((char *)b->info.device + l.copies[i].offset, 0xEE, lines);
    memcpy((char *)b->info.device + l.copies[i].offset, l.copies[i].source, l.copies[i].length);
  }
  for (uint64_t i = 1; i < count; i++)
    CHECK(lck_snapshot_feed(s, batch, starts[i], NULL) == 0, "%s", lck_last_error());
  CHECK(lck_snapshot_feed(s, batch, l.total, NULL) == 0, "%s", lck_last_error());
  bed_capture(s, batch, 1);
  bed_digests(s, batch, l.crcs);
  CHECK(bed_seal(b, s, 1, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  bed_verify(b, l.copies, l.crcs, COUNT);
  for (uint32_t i = 0; i < COUNT; i++)
    for (uint64_t at = l.copies[i].length; at % LCK_LINE; at++)
      CHECK(b->region->base[l.copies[i].offset + at] == 0, "copy %u is not padded", i);
  free(starts);
  load_free(&l);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* Nothing of what is not fed counts as captured, and nothing can be fed out of turn. */
static void test_contract(bed *b) {
  bed_create(b, "feeds");
  lck_pool *pool = bed_pool(2, CHUNK);
  load l;
  load_make(&l, bed_slot(b, 0), 3, 0);
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t batch, other;
  l.fed[1].source = l.packed;
  CHECK(lck_snapshot_add(s, l.fed, COUNT, &batch) == LCK_E_INVALID, "a source of a fed copy");
  l.fed[1] = l.copies[1];
  CHECK(lck_snapshot_add(s, l.fed, COUNT, &batch) == LCK_E_INVALID, "fed and not");
  l.fed[1].source = NULL;
  l.fed[1].flags = LCK_COPY_FED | LCK_COPY_IF_CHANGED;
  CHECK(lck_snapshot_add(s, l.fed, COUNT, &batch) == LCK_E_INVALID, "fed, if changed");
  l.fed[1].flags = LCK_COPY_FED;
  batch = bed_add(s, l.fed, COUNT / 2);
  other = bed_add(s, l.copies + COUNT / 2, COUNT - COUNT / 2);
  uint64_t *starts, count = cuts_of(s, batch, &starts), bad;
  uint64_t end = starts[count - 1] + 1;
  CHECK(lck_snapshot_cuts(s, other, NULL, 0, &bad) == LCK_E_INVALID, "cuts of what is not fed");
  CHECK(lck_snapshot_feed(s, other, 1, l.packed) == LCK_E_INVALID, "feed of what is not fed");
  CHECK(lck_snapshot_release(s, batch, LCK_ALL) == LCK_E_INVALID, "released, not fed");
  CHECK(lck_snapshot_feed(s, batch, 0, l.packed) == LCK_E_INVALID, "nothing");
  CHECK(lck_snapshot_feed(s, batch, starts[3] + 1, l.packed) == LCK_E_INVALID, "off a cut");
  CHECK(lck_snapshot_feed(s, batch, end + MOST, l.packed) == LCK_E_INVALID, "beyond the end");
  CHECK(lck_snapshot_feed(s, batch, starts[5], l.packed) == 0, "%s", lck_last_error());
  CHECK(lck_snapshot_feed(s, batch, starts[5], l.packed) == LCK_E_INVALID, "twice");
  CHECK(lck_snapshot_feed(s, batch, starts[4], l.packed) == LCK_E_INVALID, "back");
  CHECK(lck_snapshot_taken(s, batch, starts[5], -1, 1) == 0, "%s", lck_last_error());
  CHECK(lck_snapshot_taken(s, batch, starts[6], 20 * MS, 1) == LCK_E_TIMEOUT, "not fed, but taken");
  CHECK(lck_snapshot_capture(s, batch, 20 * MS, 1) == LCK_E_TIMEOUT, "not fed, but captured");
  CHECK(lck_snapshot_audit(s, batch, 1, 1, &bad) == LCK_E_STATE, "audit of what is not there");
  bed_capture(s, other, 1);
  CHECK(bed_seal(b, s, 0, 1) == LCK_E_STATE, "sealed without what is not fed");
  uint64_t all = 0;
  for (uint32_t i = 0; i < COUNT / 2; i++)
    all += l.copies[i].length;
  CHECK(lck_snapshot_feed(s, batch, all, l.packed + starts[5]) == 0, "%s", lck_last_error());
  bed_capture(s, batch, 1);
  CHECK(lck_snapshot_audit(s, batch, 1, 1, &bad) == LCK_E_STATE, "audit of a fed batch");
  bed_digests(s, batch, l.crcs);
  bed_digests(s, other, l.crcs + COUNT / 2);
  CHECK(bed_seal(b, s, 0, 1) == 0, "%s", lck_last_error());
  bed_committed(s);
  bed_verify(b, l.copies, l.crcs, COUNT);
  free(starts);
  load_free(&l);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* A feed that fails fails the snapshot; what was fed is free afterwards, and nothing waits on. */
static void test_failure(bed *b) {
  bed_create(b, "fails");
  /* Not of the idle class: what fails in such a worker's hands may be copied anew by another, and
   * then the failure comes after the bytes were taken. */
  lck_pool *pool;
  lck_pool_spec spec = {.threads = 2, .chunk_bytes = CHUNK};
  CHECK(lck_pool_create(&spec, &pool) == 0, "%s", lck_last_error());
  load l;
  load_make(&l, bed_slot(b, 0), 5, 0);
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t batch = bed_add(s, l.fed, COUNT);
  uint64_t *starts, count = cuts_of(s, batch, &starts);
  CHECK(lck_fault_arm(LCK_FAULT_COPY, 3, EIO) == 0, "arm");
  CHECK(lck_snapshot_feed(s, batch, starts[count / 2], l.packed) <= 0, "feed");
  CHECK(lck_snapshot_taken(s, batch, starts[count / 2], -1, 0) == LCK_E_IO, "%s", lck_last_error());
  CHECK(lck_snapshot_feed(s, batch, l.total, l.packed + starts[count / 2]) == LCK_E_IO, "feed");
  CHECK(lck_snapshot_capture(s, batch, -1, 1) == LCK_E_IO, "%s", lck_last_error());
  CHECK(bed_seal(b, s, 0, 1) == LCK_E_IO, "sealed");
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_fault_arm(LCK_FAULT_COPY, -1, 0) == 0, "disarm");
  free(starts);
  load_free(&l);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* Given up in the middle: nobody reads what was fed afterwards. */
static void test_given_up(bed *b) {
  bed_create(b, "given");
  lck_pool *pool = bed_pool(2, CHUNK);
  for (uint32_t round = 0; round < 8; round++) {
    load l;
    load_make(&l, bed_slot(b, 0), round + 1, 0);
    lck_snapshot *s = bed_begin(b, pool, 0);
    uint32_t batch = bed_add(s, l.fed, COUNT);
    uint64_t *starts, count = cuts_of(s, batch, &starts);
    uint64_t end = starts[1 + (round * 5) % (count - 1)];
    CHECK(lck_snapshot_feed(s, batch, end, l.packed) == 0, "%s", lck_last_error());
    CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
    load_free(&l);
    free(starts);
  }
  bed_snapshot(b, pool, 0, 1);
  bed_holds(b, 0, 1);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void body(bed *b) {
  test_through_a_ring(b);
  test_in_place(b);
  test_contract(b);
  test_failure(b);
  test_given_up(b);
}

int main(void) {
  return bed_main(body);
}
