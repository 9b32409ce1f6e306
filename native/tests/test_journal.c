/* The boundary journal: the two newest entries of the region's timeline come back, whoever writes
 * meanwhile, and of three entries those that are not damaged. */
#include <pthread.h>
#include <stdatomic.h>

#include "format.h"
#include "region_fixture.h"

#define TIMELINE 7u
#define MOST 5000u

/* Names an entry; in the order in which a step's are written. */
#define ENTRY(kind, step) (3 * (step) + (kind) % 3)

static const char *path;
static int raw; /* the file under test, beside the region */

static void fill(unsigned char *bytes, uint64_t length, uint64_t seed) {
  for (uint64_t i = 0; i < length; i++)
    bytes[i] = (unsigned char)(seed * 131 + i * 7 + 1);
}

static int write_entry(lck_region *region, uint32_t kind, uint64_t step, uint64_t length) {
  static unsigned char blob[1 << 16];
  lck_journal_entry entry = {.step = step, .timeline = TIMELINE, .length = length, .kind = kind};
  fill(blob, length, ENTRY(kind, step));
  return lck_journal_write(region, &entry, blob);
}

static void must_write(lck_region *region, uint32_t kind, uint64_t step, uint64_t length) {
  int rc = write_entry(region, kind, step, length);
  CHECK(rc == 0, "%d %s", rc, lck_last_error());
}

/* ENTRY of what is read, its blob compared; or the error. */
static int64_t read_entry(const lck_region *region, uint32_t kind) {
  static _Thread_local unsigned char blob[1 << 16], expected[1 << 16];
  lck_journal_entry entry;
  int rc = lck_journal_read(region, kind, &entry, blob, sizeof(blob));
  if (rc != 0)
    return rc;
  fill(expected, entry.length, ENTRY(entry.kind, entry.step));
  if (memcmp(blob, expected, entry.length) != 0)
    CHECK(0, "step %lu kind %u has another blob", entry.step, entry.kind);
  if (entry.timeline != TIMELINE)
    CHECK(0, "timeline %lu", entry.timeline);
  if (!(entry.flags & LCK_RECORD_EARLY) != (entry.kind == LCK_JOURNAL_FORWARD))
    CHECK(0, "kind %u has flags %u", entry.kind, entry.flags);
  return (int64_t)ENTRY(entry.kind, entry.step);
}

#define FENCE(step) ENTRY(LCK_JOURNAL_FENCE, (int64_t)(step))
#define END(step) ENTRY(LCK_JOURNAL_STEP_END, (int64_t)(step))
#define FORWARD(step) ENTRY(LCK_JOURNAL_FORWARD, (int64_t)(step))

static lck_region *make(uint64_t journal_bytes) {
  lck_region_spec spec = small_spec();
  spec.journal_bytes = journal_bytes;
  lck_region *region = must_create(path, &spec);
  CHECK(lck_region_branch(region, TIMELINE, NULL, 0) == 0, "%s", lck_last_error());
  return region;
}

static void flip(uint64_t offset, unsigned bit) {
  unsigned char byte;
  if (pread(raw, &byte, 1, (off_t)offset) != 1)
    CHECK(0, "pread");
  byte ^= (unsigned char)(1u << bit);
  if (pwrite(raw, &byte, 1, (off_t)offset) != 1)
    CHECK(0, "pwrite");
}

/* ---- what is kept --------------------------------------------------------------------------- */

static void test_the_two_newest_entries_are_there(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  CHECK(read_entry(region, 0) == LCK_E_EMPTY, "nothing was written");
  for (uint64_t step = 1; step < 9; step++) {
    must_write(region, LCK_JOURNAL_FENCE, step, 3000 + step);
    CHECK(read_entry(region, 0) == FENCE(step), "%s", lck_last_error());
    if (step > 1)
      CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(step - 1) &&
                read_entry(region, LCK_JOURNAL_FORWARD) == FORWARD(step - 1),
            "the fence's harmed the step before");
    must_write(region, LCK_JOURNAL_STEP_END, step, 100 * step);
    CHECK(read_entry(region, 0) == END(step), "%s", lck_last_error());
    CHECK(read_entry(region, LCK_JOURNAL_FENCE) == FENCE(step), "step end over fence");
    if (step > 1)
      CHECK(read_entry(region, LCK_JOURNAL_FORWARD) == FORWARD(step - 1), "step end over forward");
    must_write(region, LCK_JOURNAL_FORWARD, step, 7000 - step);
    CHECK(read_entry(region, 0) == FORWARD(step), "%s", lck_last_error());
    CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(step), "forward start over step end");
    CHECK(read_entry(region, LCK_JOURNAL_FENCE) == FENCE(step), "forward start over fence");
  }
  must_write(region, LCK_JOURNAL_STEP_END, 9, 10);
  must_write(region, LCK_JOURNAL_STEP_END, 9, 20); /* a loader iterated anew */
  CHECK(read_entry(region, LCK_JOURNAL_FORWARD) == FORWARD(8), "three entries are kept");
  CHECK(read_entry(region, LCK_JOURNAL_FENCE) == LCK_E_EMPTY, "and no more");
  must_close(region);
  region = must_open(path, 0);
  CHECK(read_entry(region, 0) == END(9), "a new owner reads it");
  must_write(region, LCK_JOURNAL_FORWARD, 9, 30);
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(9), "a new owner overwrites the oldest");
  lck_journal_entry entry;
  CHECK(lck_journal_read(region, 0, &entry, NULL, 0) == 0, "%s", lck_last_error());
  CHECK(entry.sequence == 27 && entry.length == 30 && entry.wall_time_ns != 0,
        "sequence %lu goes on", entry.sequence);
  must_close(region);
}

static void test_a_fences_entry_written_again_goes_over_itself(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  must_write(region, LCK_JOURNAL_STEP_END, 4, 100);
  must_write(region, LCK_JOURNAL_FORWARD, 4, 200);
  for (uint64_t length = 900; length > 600; length -= 100) {
    must_write(region, LCK_JOURNAL_FENCE, 5, length);
    lck_journal_entry entry;
    CHECK(lck_journal_read(region, 0, &entry, NULL, 0) == 0, "%s", lck_last_error());
    CHECK(entry.kind == LCK_JOURNAL_FENCE && entry.step == 5 && entry.length == length,
          "kind %u step %lu length %lu", entry.kind, entry.step, entry.length);
    CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(4), "fence over step end");
    CHECK(read_entry(region, LCK_JOURNAL_FORWARD) == FORWARD(4), "fence over forward start");
  }
  must_write(region, LCK_JOURNAL_FENCE, 6, 10);
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == LCK_E_EMPTY, "of another step: the oldest");
  CHECK(read_entry(region, LCK_JOURNAL_FORWARD) == FORWARD(4), "%s", lck_last_error());
  must_write(region, LCK_JOURNAL_STEP_END, 6, 20);
  CHECK(read_entry(region, LCK_JOURNAL_FENCE) == FENCE(6), "%s", lck_last_error());
  must_write(region, LCK_JOURNAL_FENCE, 6, 30);
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(6), "of another kind: the oldest");
  must_close(region);
  region = must_open(path, 0);
  must_write(region, LCK_JOURNAL_FENCE, 6, 40); /* of another owner: over the oldest */
  must_write(region, LCK_JOURNAL_FENCE, 6, 50);
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(6), "%s", lck_last_error());
  must_write(region, LCK_JOURNAL_FENCE, 7, 60);
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == LCK_E_EMPTY, "places are taken in turn");
  must_close(region);
}

static void test_another_timeline_makes_entries_void(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  lck_branch from = {TIMELINE, 1};
  must_write(region, LCK_JOURNAL_STEP_END, 3, 100);
  must_write(region, LCK_JOURNAL_FORWARD, 3, 100);
  lck_region *reader = must_open(path, LCK_READ_ONLY);
  CHECK(read_entry(reader, 0) == FORWARD(3), "%s", lck_last_error());
  CHECK(lck_region_branch(region, TIMELINE + 1, &from, 1) == 0, "%s", lck_last_error());
  CHECK(read_entry(region, 0) == LCK_E_EMPTY, "the owner");
  CHECK(read_entry(reader, 0) == LCK_E_EMPTY, "a reader that opened before");
  CHECK(write_entry(region, LCK_JOURNAL_STEP_END, 4, 10) == LCK_E_INVALID, "the old timeline");
  lck_journal_entry entry = {
      .step = 2, .timeline = TIMELINE + 1, .length = 3, .kind = LCK_JOURNAL_STEP_END};
  CHECK(lck_journal_write(region, &entry, "abc") == 0, "%s", lck_last_error());
  CHECK(lck_journal_read(reader, 0, &entry, NULL, 0) == 0, "%s", lck_last_error());
  CHECK(entry.step == 2 && entry.timeline == TIMELINE + 1, "step %lu", entry.step);
  must_close(reader);
  must_close(region);
}

static void test_a_place_holds_an_entry_and_no_more(void) {
  uint64_t most = 2 * LCK_HEADER_PAGE - sizeof(journal_disk);
  lck_region *region = make(6 * LCK_HEADER_PAGE + 4000);
  unsigned char small[16];
  lck_journal_entry entry;
  must_write(region, LCK_JOURNAL_STEP_END, 1, most);
  must_write(region, LCK_JOURNAL_FORWARD, 1, most);
  must_write(region, LCK_JOURNAL_FENCE, 2, most);
  CHECK(read_entry(region, LCK_JOURNAL_FENCE) == FENCE(2), "%s", lck_last_error());
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(1), "%s", lck_last_error());
  CHECK(read_entry(region, LCK_JOURNAL_FORWARD) == FORWARD(1), "%s", lck_last_error());
  CHECK(write_entry(region, LCK_JOURNAL_STEP_END, 2, most + 1) == LCK_E_FULL, "too large");
  CHECK(strstr(lck_last_error(), "8065 bytes needed") && strstr(lck_last_error(), "8064 there"),
        "%s", lck_last_error());
  CHECK(read_entry(region, LCK_JOURNAL_STEP_END) == END(1), "a refused write changes nothing");
  CHECK(lck_journal_read(region, 0, &entry, small, sizeof(small)) == LCK_E_FULL, "no room");
  CHECK(entry.length == most, "length %lu is told", entry.length);
  must_write(region, LCK_JOURNAL_STEP_END, 2, 0);
  CHECK(read_entry(region, 0) == END(2), "an empty blob");
  must_close(region);
  region = make(0);
  CHECK(write_entry(region, LCK_JOURNAL_STEP_END, 1, 0) == LCK_E_FULL, "no journal");
  CHECK(strstr(lck_last_error(), "has no journal") != NULL, "%s", lck_last_error());
  CHECK(read_entry(region, 0) == LCK_E_EMPTY, "no journal");
  must_close(region);
}

static void test_misuse_is_refused(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  lck_journal_entry entry = {.step = 1, .timeline = TIMELINE, .length = 1, .kind = 4};
  CHECK(lck_journal_write(region, &entry, "x") == LCK_E_INVALID, "unknown kind");
  entry.kind = LCK_JOURNAL_FORWARD;
  entry.step = LCK_COUNT_LIMIT + 1;
  CHECK(lck_journal_write(region, &entry, "x") == LCK_E_INVALID, "a step beyond all counts");
  CHECK(lck_journal_write(region, NULL, "x") == LCK_E_INVALID, "no entry");
  CHECK(lck_journal_write(region, &entry, NULL) == LCK_E_INVALID, "no blob");
  CHECK(lck_journal_read(region, 4, &entry, NULL, 0) == LCK_E_INVALID, "unknown kind");
  CHECK(lck_journal_read(region, 0, NULL, NULL, 0) == LCK_E_INVALID, "no out");
  lck_region *reader = must_open(path, LCK_READ_ONLY);
  CHECK(write_entry(reader, LCK_JOURNAL_STEP_END, 1, 1) == LCK_E_INVALID, "read-only");
  must_close(reader);
  must_write(region, LCK_JOURNAL_STEP_END, 1, 8);
  lck_region_latch(region, LCK_E_IO);
  CHECK(write_entry(region, LCK_JOURNAL_STEP_END, 2, 1) == LCK_E_PREVIOUS, "latched");
  CHECK(read_entry(region, 0) == END(1), "reading goes on");
  must_close(region);
}

/* ---- damage --------------------------------------------------------------------------------- */

/* Every single bit of entry and blob, in each place, newest and older. */
static void test_damage_is_found_and_another_entry_serves(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  const uint64_t length = 90;
  for (uint32_t step = 1, count = 0; step <= 3; step++) {
    must_write(region, LCK_JOURNAL_FENCE, step, length);
    must_write(region, LCK_JOURNAL_STEP_END, step, length);
    if (step > 1) /* taken again: the places change their roles */
      must_write(region, LCK_JOURNAL_STEP_END, step, length);
    must_write(region, LCK_JOURNAL_FORWARD, step, length);
    count += step > 1 ? 4 : 3;
    uint32_t of_newest = (count - 1) % LCK_JOURNAL_PLACES;
    int64_t newest = FORWARD(step), older = END(step);
    CHECK(read_entry(region, 0) == newest, "%s", lck_last_error());
    for (uint32_t which = 0; which < LCK_JOURNAL_PLACES; which++) {
      uint64_t at = LCK_JOURNAL_OFFSET + which * 2 * LCK_HEADER_PAGE;
      for (uint64_t bit = 0; bit < 8 * (sizeof(journal_disk) + length); bit++) {
        flip(at + bit / 8, bit % 8);
        int64_t found = read_entry(region, 0);
        if (found != (which == of_newest ? older : newest))
          CHECK(0, "place %u bit %lu: %ld %s", which, bit, found, lck_last_error());
        flip(at + bit / 8, bit % 8);
      }
      checks_passed++;
    }
  }
  flip(LCK_JOURNAL_OFFSET + sizeof(journal_disk) + 5, 0);
  flip(LCK_JOURNAL_OFFSET + 2 * LCK_HEADER_PAGE + sizeof(journal_disk) + 5, 0);
  CHECK(read_entry(region, 0) == END(3), "two damaged, the oldest serves: %s", lck_last_error());
  flip(LCK_JOURNAL_OFFSET + 4 * LCK_HEADER_PAGE + sizeof(journal_disk) + 5, 0);
  CHECK(read_entry(region, 0) == LCK_E_CORRUPT, "all");
  CHECK(strstr(lck_last_error(), "expected") != NULL, "%s", lck_last_error());
  must_close(region);
  region = must_open(path, 0);
  must_write(region, LCK_JOURNAL_FORWARD, 5, length);
  CHECK(read_entry(region, 0) == FORWARD(5), "writing goes on over damage");
  must_close(region);
}

/* Rewrite the entry in place 0 with a right checksum, and see what serves. */
static void serves_instead(lck_region *region, const journal_disk *entry, const char *what) {
  journal_disk sealed = *entry;
  sealed.crc = lck_crc32c(0, &sealed, offsetof(journal_disk, crc));
  CHECK(pwrite(raw, &sealed, sizeof(sealed), LCK_JOURNAL_OFFSET) == sizeof(sealed), "pwrite");
  CHECK(read_entry(region, 0) == END(1), "%s: %ld", what, read_entry(region, 0));
}

static void test_an_entry_that_no_writer_writes_is_damage_whatever_its_checksum(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  journal_disk sound, entry;
  must_write(region, LCK_JOURNAL_FORWARD, 0, 8);
  must_write(region, LCK_JOURNAL_FENCE, 1, 8);
  must_write(region, LCK_JOURNAL_STEP_END, 1, 8);
  must_write(region, LCK_JOURNAL_FORWARD, 1, 8);
  if (pread(raw, &sound, sizeof(sound), LCK_JOURNAL_OFFSET) != sizeof(sound))
    CHECK(0, "pread");
  CHECK(sound.kind == LCK_JOURNAL_FORWARD && sound.step == 1, "place 0 holds the newest");
  entry = sound, entry.kind = 0;
  serves_instead(region, &entry, "no kind");
  entry = sound, entry.step = LCK_COUNT_LIMIT + 1;
  serves_instead(region, &entry, "a step beyond all counts");
  entry = sound, entry.sequence = LCK_PUBLISHED | (LCK_COUNT_LIMIT + 1);
  serves_instead(region, &entry, "a sequence beyond all counts");
  entry = sound, entry.sequence &= ~LCK_PUBLISHED;
  serves_instead(region, &entry, "a sequence that was not published");
  must_close(region);
}

static void test_entries_of_another_region_or_place_do_not_count(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  unsigned char place[2 * 4096];
  must_write(region, LCK_JOURNAL_STEP_END, 1, 100);
  CHECK(pread(raw, place, sizeof(place), LCK_JOURNAL_OFFSET) == sizeof(place), "pread");
  CHECK(pwrite(raw, place, sizeof(place), LCK_JOURNAL_OFFSET + sizeof(place)) == sizeof(place),
        "pwrite");
  flip(LCK_JOURNAL_OFFSET, 0); /* its sequence */
  CHECK(read_entry(region, 0) == LCK_E_CORRUPT, "place 0's entry in place 1");
  must_close(region);
  region = make(6 * LCK_HEADER_PAGE);
  CHECK(pwrite(raw, place, sizeof(place), LCK_JOURNAL_OFFSET) == sizeof(place), "pwrite");
  CHECK(read_entry(region, 0) == LCK_E_EMPTY, "another region's entry: %s", lck_last_error());
  must_close(region);
}

/* Both superblocks say something else, as behind another region's creation on the same device. */
static void forge(const superblock_disk *super) {
  superblock_disk sealed = *super;
  sealed.crc = lck_crc32c(0, &sealed, offsetof(superblock_disk, crc));
  for (int copy = 0; copy < 2; copy++)
    CHECK(pwrite(raw, &sealed, sizeof(sealed), (off_t)LCK_SUPERBLOCK_OFFSET(copy)) ==
              sizeof(sealed),
          "pwrite");
}

static void test_a_reader_follows_no_region_that_was_made_there_later(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  superblock_disk sound, other;
  must_write(region, LCK_JOURNAL_STEP_END, 1, 100);
  lck_region *reader = must_open(path, LCK_READ_ONLY);
  must_close(region);
  CHECK(pread(raw, &sound, sizeof(sound), (off_t)LCK_SUPERBLOCK_OFFSET(0)) == sizeof(sound),
        "pread");
  other = sound, other.size *= 16, other.journal_length = 8 * sound.size;
  forge(&other); /* its places lie beyond what the reader has mapped */
  CHECK(read_entry(reader, 0) == LCK_E_CORRUPT, "a longer journal: %s", lck_last_error());
  other = sound, other.uuid[0] ^= 1;
  forge(&other);
  CHECK(read_entry(reader, 0) == LCK_E_CORRUPT &&
            strstr(lck_last_error(), "another region") != NULL,
        "another UUID: %s", lck_last_error());
  forge(&sound);
  CHECK(read_entry(reader, 0) == END(1), "%s", lck_last_error());
  must_close(reader);
}

/* On page media a power cut may keep any sector of any moment. */
static void test_places_that_were_all_cut_short_hold_no_entry(void) {
  static const uint64_t nothing;
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  must_write(region, LCK_JOURNAL_STEP_END, 1, 100);
  must_write(region, LCK_JOURNAL_FORWARD, 1, 100);
  must_write(region, LCK_JOURNAL_FENCE, 2, 100);
  for (uint64_t place = 0; place < LCK_JOURNAL_PLACES; place++)
    CHECK(pwrite(raw, &nothing, sizeof(nothing),
                 (off_t)(LCK_JOURNAL_OFFSET + place * 2 * LCK_HEADER_PAGE)) == sizeof(nothing),
          "pwrite");
  CHECK(read_entry(region, 0) == LCK_E_EMPTY, "%s", lck_last_error());
  must_close(region);
}

/* ---- a reader beside a writer --------------------------------------------------------------- */

typedef struct race {
  lck_region *reader;
  _Atomic int64_t written; /* what the newest entry is at least */
  _Atomic int ended;
  uint64_t reads, leased;
} race;

static void *keep_reading(void *argument) {
  race *r = argument;
  while (!atomic_load(&r->ended)) {
    int64_t least = atomic_load(&r->written);
    int64_t found = read_entry(r->reader, 0);
    if (found == LCK_E_LEASED)
      r->leased++;
    else if (found < least)
      CHECK(0, "found %ld, %ld was written before: %s", found, least, lck_last_error());
    else
      r->reads++;
  }
  return NULL;
}

static void test_a_reader_beside_a_writer_sees_whole_entries_only(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  must_write(region, LCK_JOURNAL_STEP_END, 1, 100);
  race r = {.reader = must_open(path, LCK_READ_ONLY), .written = END(1)};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, keep_reading, &r) == 0, "thread");
  uint64_t steps = UNDER_TSAN ? 2000 : 40000;
  for (uint64_t step = 2; step < steps; step++) {
    if (write_entry(region, LCK_JOURNAL_FENCE, step, step * 13 % MOST) != 0)
      CHECK(0, "%s", lck_last_error());
    atomic_store(&r.written, FENCE(step));
    if (write_entry(region, LCK_JOURNAL_STEP_END, step, step % MOST) != 0)
      CHECK(0, "%s", lck_last_error());
    atomic_store(&r.written, END(step));
    if (write_entry(region, LCK_JOURNAL_FORWARD, step, step * 37 % MOST) != 0)
      CHECK(0, "%s", lck_last_error());
    atomic_store(&r.written, FORWARD(step));
  }
  atomic_store(&r.ended, 1);
  CHECK(pthread_join(thread, NULL) == 0, "join");
  CHECK(read_entry(r.reader, 0) == FORWARD(steps - 1), "%s", lck_last_error());
  printf("%lu reads beside %lu writes, %lu gave up\n", r.reads, 3 * steps, r.leased);
  must_close(r.reader);
  must_close(region);
}

/* The region outlives the process, wherever that stops. */
static void write_and_die(void *argument) {
  (void)argument;
  lck_region *region = must_open(path, 0);
  must_write(region, LCK_JOURNAL_FORWARD, 8, 4000);
}

static void test_an_entry_outlives_its_writer(void) {
  lck_region *region = make(6 * LCK_HEADER_PAGE);
  must_close(region);
  in_child(write_and_die, NULL);
  region = must_open(path, LCK_READ_ONLY);
  CHECK(read_entry(region, 0) == FORWARD(8), "%s", lck_last_error());
  must_close(region);
}

int main(void) {
  path = path_in("/dev/shm");
  raw = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  test_the_two_newest_entries_are_there();
  test_a_fences_entry_written_again_goes_over_itself();
  test_another_timeline_makes_entries_void();
  test_a_place_holds_an_entry_and_no_more();
  test_misuse_is_refused();
  test_damage_is_found_and_another_entry_serves();
  test_an_entry_that_no_writer_writes_is_damage_whatever_its_checksum();
  test_entries_of_another_region_or_place_do_not_count();
  test_a_reader_follows_no_region_that_was_made_there_later();
  test_places_that_were_all_cut_short_hold_no_entry();
  test_a_reader_beside_a_writer_sees_whole_entries_only();
  test_an_entry_outlives_its_writer();
  close(raw);
  unlink(path);
  return checks_end();
}
