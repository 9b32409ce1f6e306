/* test_calls.c -- every system call that reaches a region's medium fails once, at each of its calls
 * and with each errno: a typed error, the region and its file as before, and no second try that
 * makes a failure look like success. */
#include "calls.h"
#include "region_fixture.h"

enum { GROWN = 300000, MOST = 10000 };

static const int errnos[] = {EIO, ENOSPC, EDQUOT, EFBIG, EINTR, ENOMEM};

/* WRITE is what allocation falls back to: it is reached where fallocate is not supported. */
static const struct {
  enum lck_fault_point point;
  const char *name;
} calls[] = {
    {LCK_FAULT_ALLOCATE, "fallocate"}, {LCK_FAULT_SYNC, "fdatasync"}, {LCK_FAULT_MAP, "mmap"},
    {LCK_FAULT_TRUNCATE, "ftruncate"}, {LCK_FAULT_READ, "pread"},     {LCK_FAULT_ADVISE, "madvise"},
    {LCK_FAULT_LIMIT, "getrlimit"},    {LCK_FAULT_STAT, "fstat"},     {LCK_FAULT_WRITE, "pwrite"},
    {LCK_FAULT_LOCK, "fcntl"},
};

enum { ERRNOS = sizeof errnos / sizeof *errnos, CALLS = sizeof calls / sizeof *calls };

typedef struct trial {
  const char *path;
  lck_region *region; /* open before growth, commit and close; after creation and opening */
  uint64_t length;    /* of the file, before */
  enum lck_fault_point point;
  int error; /* 0: none, count the calls */
  int64_t after;
} trial;

static uint64_t cases[CALLS];

static int says(const char *text) {
  return strstr(lck_last_error(), text) != NULL;
}

static void arm(const trial *t, int64_t after, int error) {
  if (t->point == LCK_FAULT_WRITE)
    CHECK(lck_fault_arm(LCK_FAULT_ALLOCATE, 0, EOPNOTSUPP) == 0, "arm");
  CHECK(lck_fault_arm(t->point, after, error) == 0, "arm");
}

static void disarm(const trial *t) {
  (void)lck_fault_arm(LCK_FAULT_ALLOCATE, -1, 0);
  (void)lck_fault_arm(t->point, -1, 0);
}

/* Not the call itself but room is missing. */
static int is_about_space(const trial *t) {
  return (t->point == LCK_FAULT_ALLOCATE || t->point == LCK_FAULT_WRITE) && t->error != EIO &&
         t->error != EINTR;
}

/* An interrupted call is made again; without a limit's value the allocation itself finds it; a
 * slot's lock that cannot be dropped goes with the next claim of the slot. */
static int may_succeed(const trial *t) {
  return t->error == EINTR || t->point == LCK_FAULT_LIMIT ||
         (t->point == LCK_FAULT_LOCK && t->after > 0);
}

static void check_code(const trial *t, int rc) {
  int expected = is_about_space(t) ? LCK_E_FULL : LCK_E_IO;
  CHECK(rc == expected || (rc == 0 && may_succeed(t)), "point %d errno %d call %ld: %d %s",
        t->point, t->error, (long)t->after, rc, lck_last_error());
  if (rc == LCK_E_FULL)
    CHECK(says("bytes needed") && says(" free"), "%s", lck_last_error());
  if (rc == LCK_E_IO)
    CHECK(says(strerror(t->error)), "errno %d: %s", t->error, lck_last_error());
}

static void check_whole(trial *t) {
  CHECK(sequence_in(t->region, 0) == 1, "the older snapshot: %s", lck_last_error());
  CHECK(describe(t->region).size <= file_length(t->path), "space for all that is named");
  must_close(t->region);
  t->region = must_open(t->path, 0);
  CHECK(describe(t->region).latched == 0 && sequence_in(t->region, 0) == 1, "%s", lck_last_error());
  CHECK(write_snapshot(t->region, 1, 4) == 0, "usable again: %s", lck_last_error());
  must_close(t->region);
}

static void check_latch(trial *t) {
  CHECK(describe(t->region).latched == (uint32_t)-LCK_E_IO, "latched");
  CHECK(write_snapshot(t->region, 1, 3) == LCK_E_PREVIOUS, "%s", lck_last_error());
  CHECK(lck_region_grow(t->region, 1) == LCK_E_PREVIOUS, "%s", lck_last_error());
  CHECK(describe(t->region).latched == (uint32_t)-LCK_E_IO, "still latched");
}

/* ---- what is done while a call fails -------------------------------------------------------- */

static void prepare(trial *t) {
  lck_region_spec spec = small_spec();
  t->region = must_create(t->path, &spec);
  CHECK(write_snapshot(t->region, 0, 1) == 0, "%s", lck_last_error());
  t->length = file_length(t->path);
}

static void prepare_nothing(trial *t) {
  close(open_file(t->path, O_RDWR | O_CREAT | O_TRUNC));
  t->length = 0;
}

static int create(trial *t) {
  int fd = open_file(t->path, O_RDWR);
  int lock_fd = open_file(t->path, O_RDWR);
  lck_region_spec spec = small_spec();
  int rc = lck_region_create(fd, lock_fd, &spec, &t->region);
  close(fd);
  close(lock_fd);
  return rc;
}

static void check_created(trial *t, int rc) {
  if (rc != 0) {
    CHECK(file_length(t->path) == 0, "cut back, not %lu", file_length(t->path));
    CHECK(create(t) == 0, "in the same file: %s", lck_last_error());
  }
  CHECK(write_snapshot(t->region, 0, 1) == 0, "%s", lck_last_error());
  check_whole(t);
}

/* With a hole, as a copy of a region's file may have them. */
static void prepare_closed(trial *t) {
  prepare(t);
  must_close(t->region);
  int fd = open_file(t->path, O_RDWR);
  CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)t->length - 65536,
                  65536) == 0,
        "punch a hole: %s", strerror(errno));
  close(fd);
}

static int attach(trial *t) {
  return try_open(t->path, 0, &t->region);
}

static void check_attached(trial *t, int rc) {
  CHECK(file_length(t->path) == t->length, "as before");
  if (rc != 0)
    CHECK(attach(t) == 0, "the next attach: %s", lck_last_error());
  check_whole(t);
}

/* Behind the region lies what a growth left that a crash cut short. */
static void prepare_leftover(trial *t) {
  prepare(t);
  CHECK(truncate(t->path, (off_t)t->length + 65536) == 0, "%s", t->path);
}

static int grow(trial *t) {
  return lck_region_grow(t->region, GROWN);
}

static void check_grown(trial *t, int rc) {
  lck_region_info info = describe(t->region);
  /* The first sync settles the space; after it a superblock may name it, so it stays. */
  int may_stay = t->point == LCK_FAULT_SYNC && t->after > 0;
  int leftover =
      t->point == LCK_FAULT_TRUNCATE || t->point == LCK_FAULT_STAT || t->point == LCK_FAULT_LIMIT;
  if (rc != 0) {
    CHECK(info.size == t->length && info.segment_count == 1, "size %lu", info.size);
    CHECK(file_length(t->path) == t->length || may_stay || leftover, "cut back, not %lu",
          file_length(t->path));
  }
  if (rc == LCK_E_IO)
    check_latch(t);
  if (rc == LCK_E_FULL)
    CHECK(info.latched == 0 && grow(t) == 0, "there is room again: %s", lck_last_error());
  check_whole(t);
}

static int commit(trial *t) {
  return write_snapshot(t->region, 1, 2);
}

static void check_committed(trial *t, int rc) {
  CHECK(file_length(t->path) == t->length, "as before");
  CHECK(sequence_in(t->region, 1) == (rc == 0 ? 2 : 0), "committed or not: %s", lck_last_error());
  /* A lock that cannot be had is no loss of the medium: nothing was done. */
  if (rc != 0 && t->point == LCK_FAULT_LOCK)
    CHECK(describe(t->region).latched == 0 && commit(t) == 0, "%s", lck_last_error());
  else if (rc != 0)
    check_latch(t);
  check_whole(t);
}

static int shut(trial *t) {
  return lck_region_close(t->region);
}

static void check_shut(trial *t, int rc) {
  CHECK(rc == 0, "%s", lck_last_error());
  CHECK(attach(t) == 0, "%s", lck_last_error());
  check_whole(t);
}

static const struct phase {
  const char *name;
  void (*prepare)(trial *);
  int (*act)(trial *);
  void (*check)(trial *, int rc);
} phases[] = {
    {"create", prepare_nothing, create, check_created},
    {"attach", prepare_closed, attach, check_attached},
    {"grow", prepare_leftover, grow, check_grown},
    {"commit", prepare, commit, check_committed},
    {"close", prepare, shut, check_shut},
};

/* ---- all of them ---------------------------------------------------------------------------- */

/* How often the action makes the call, found with a fault that is armed too late for it. */
static int64_t count_calls(const struct phase *phase, trial *t) {
  int64_t left = 0;
  t->error = 0;
  phase->prepare(t);
  arm(t, MOST, EIO);
  int rc = phase->act(t);
  CHECK(rc == 0, "%s: %d %s", phase->name, rc, lck_last_error());
  while (lck_fault_visit(t->point) == 0)
    left++;
  disarm(t);
  if (phase->act != shut)
    must_close(t->region);
  return MOST - left;
}

static void try_each(const struct phase *phase, trial *t, uint64_t *count) {
  int64_t made = count_calls(phase, t);
  for (int e = 0; e < ERRNOS; e++)
    for (t->after = 0; t->after < made; t->after++) {
      t->error = errnos[e];
      phase->prepare(t);
      arm(t, t->after, t->error);
      int rc = phase->act(t);
      disarm(t);
      check_code(t, rc);
      phase->check(t, rc);
      ++*count;
    }
}

int main(void) {
  const char *disk = getenv("LCK_TEST_DISK") ? getenv("LCK_TEST_DISK") : "/var/tmp";
  const char *const folders[] = {"/dev/shm", disk};
  uint64_t all = 0;
  for (size_t f = 0; f < 2; f++)
    for (size_t p = 0; p < sizeof phases / sizeof *phases; p++)
      for (size_t c = 0; c < CALLS; c++) {
        trial t = {.path = path_in(folders[f]), .point = calls[c].point};
        try_each(&phases[p], &t, &cases[c]);
        unlink(t.path);
      }
  for (size_t c = 0; c < CALLS; c++) {
    CHECK(cases[c] > 0, "%s was never made to fail", calls[c].name);
    all += cases[c];
  }
  printf("%d calls, %d errnos, %lu cases\n", CALLS, ERRNOS, all);
  return checks_end();
}
