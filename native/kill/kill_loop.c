/* A writer is killed at random instants, hundreds of times per medium, and recovered each time by
 * the next one: at least what was acknowledged comes back, never more than was begun, byte for
 * byte.
 *
 * kill_loop CYCLES SEED MEDIUM=FOLDER... : MEDIUM names what the numbers are called; "process" in
 * it opens without syncs. Prints one line per medium. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "lightck.h"

#define DIE(...)                                                                                   \
  do {                                                                                             \
    fprintf(stderr, "%s:%d: cycle %u: ", __FILE__, __LINE__, cycle);                               \
    fprintf(stderr, __VA_ARGS__);                                                                  \
    fprintf(stderr, ": %s\n", lck_last_error());                                                   \
    _exit(1);                                                                                      \
  } while (0)

#define SLOTS 3u
#define EXTENTS 8u
#define TABLES_BYTES 8192u
#define SLOT_BYTES (TABLES_BYTES + EXTENTS * 16384u)
#define GROW_EVERY 50u                /* commits */
#define LONGEST_NS UINT64_C(3000000)  /* until the kill, from when the writer was started */
#define STUCK_NS UINT64_C(5000000000) /* a writer that has written nothing is killed, too */

/* Shared with the writer that will be killed. Acknowledged is stored after lck_snapshot_wait has
 * said so, begun before lck_snapshot_seal is called: the writer may die in between. */
typedef struct progress {
  _Atomic uint64_t begun, acknowledged, timeline;
  _Atomic uint64_t died_in[4]; /* kills in opening, copying, committing, closing */
  _Atomic uint32_t phase;
} progress;

typedef struct manifest {
  uint64_t sequence;
  lck_read extents[EXTENTS];
} manifest;

static unsigned cycle;
static progress *shared;

static uint64_t draw(uint64_t *random) {
  uint64_t z = (*random += UINT64_C(0x9E3779B97F4A7C15));
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static void must(int rc) {
  if (rc != 0)
    DIE("code %d", rc);
}

/* What snapshot `sequence` holds follows from its number: the golden trajectory. */
static uint64_t fill(unsigned char *bytes, uint64_t sequence, uint32_t extent) {
  uint64_t random = sequence * EXTENTS + extent;
  uint64_t length = 40 + draw(&random) % 16000;
  for (uint64_t i = 0; i < length; i += sizeof(uint64_t)) {
    uint64_t word = draw(&random);
    memcpy(bytes + i, &word, sizeof(word));
  }
  return length;
}

/* ---- a place -------------------------------------------------------------------------------- */

static lck_region *open_region(const char *path, uint32_t flags) {
  int mode = flags & LCK_READ_ONLY ? O_RDONLY : O_RDWR;
  int fd = open(path, mode | O_CLOEXEC), lock_fd = open(path, mode | O_CLOEXEC);
  lck_region *region;
  if (fd < 0 || lock_fd < 0)
    DIE("%s: %s", path, strerror(errno));
  must(lck_region_open(fd, lock_fd, flags, -1, &region));
  close(fd);
  close(lock_fd);
  return region;
}

static void create_region(const char *path, uint32_t flags) {
  lck_region_spec spec = {.world = 1,
                          .slot_count = SLOTS,
                          .flags = flags,
                          .slot_bytes = SLOT_BYTES,
                          .journal_bytes = 4096,
                          .numa_node = -1};
  int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  int lock_fd = open(path, O_RDWR | O_CLOEXEC);
  lck_region *region;
  if (fd < 0 || lock_fd < 0)
    DIE("%s: %s", path, strerror(errno));
  must(lck_region_create(fd, lock_fd, &spec, &region));
  must(lck_region_close(region));
  close(fd);
  close(lock_fd);
}

/* ---- recovery ------------------------------------------------------------------------------- */

static void compare(const lck_region *region, const void *base, const lck_record *record) {
  static unsigned char found[16384], expected[16384];
  manifest held;
  memcpy(&held, (const char *)base + record->manifest_offset, sizeof(held));
  if (held.sequence != record->sequence)
    DIE("manifest of %" PRIu64 " in snapshot %" PRIu64, held.sequence, record->sequence);
  for (uint32_t i = 0; i < EXTENTS; i++) {
    uint64_t length = fill(expected, record->sequence, i);
    held.extents[i].destination = found;
    must(lck_slot_fetch(region, &held.extents[i], 1, 1, NULL));
    if (held.extents[i].length != length || memcmp(found, expected, length) != 0)
      DIE("snapshot %" PRIu64 ", extent %u differs", record->sequence, i);
  }
}

/* Slot and sequence of the newest snapshot; LCK_MAX_SLOTS when there is none. Whatever is valid,
 * the older ones too, is compared byte by byte: one that is being overwritten must not be. */
static uint32_t recover(lck_region *region, uint64_t *sequence) {
  lck_region_info info;
  lck_record record;
  uint32_t newest = LCK_MAX_SLOTS;
  *sequence = 0;
  must(lck_region_describe(region, &info));
  for (uint32_t slot = 0; slot < SLOTS; slot++) {
    int rc = lck_slot_read(region, slot, &record);
    if (rc != 0 && rc != LCK_E_EMPTY)
      DIE("slot %u: code %d", slot, rc);
    if (rc != 0)
      continue;
    compare(region, info.base, &record);
    if (record.sequence > *sequence) {
      *sequence = record.sequence;
      newest = slot;
    }
  }
  return newest;
}

static void check_recovered(uint64_t sequence) {
  uint64_t least = atomic_load(&shared->acknowledged), most = atomic_load(&shared->begun);
  if (sequence < least || sequence > most)
    DIE("recovered %" PRIu64 ", acknowledged %" PRIu64 ", begun %" PRIu64, sequence, least, most);
}

/* ---- the writer that will be killed ---------------------------------------------------------- */

static void commit(lck_pool *pool, lck_region *region, uint32_t slot, uint64_t sequence) {
  static unsigned char payload[EXTENTS][16384];
  lck_copy copies[EXTENTS] = {0};
  manifest held = {.sequence = sequence};
  uint32_t batch, crcs[EXTENTS];
  lck_region_info info;
  lck_snapshot *snapshot;
  int state;
  must(lck_region_describe(region, &info));
  /* In the newest segment: growth is used as soon as it is there. */
  const lck_segment *segment = &info.segments[info.segment_count - 1];
  uint64_t start = segment->offset + slot * segment->slot_bytes;
  for (uint32_t i = 0; i < EXTENTS; i++)
    copies[i] = (lck_copy){.offset = start + TABLES_BYTES + i * sizeof(payload[i]),
                           .source = payload[i],
                           .length = fill(payload[i], sequence, i),
                           .layer = i};
  atomic_store(&shared->phase, 1);
  must(lck_snapshot_begin(pool, region, slot, &snapshot));
  must(lck_snapshot_add(snapshot, copies, EXTENTS, &batch));
  must(lck_snapshot_release(snapshot, batch, LCK_ALL));
  must(lck_snapshot_capture(snapshot, batch, -1, (int)(sequence % 3)));
  must(lck_snapshot_digests(snapshot, batch, crcs));
  for (uint32_t i = 0; i < EXTENTS; i++)
    held.extents[i] =
        (lck_read){.offset = copies[i].offset, .length = copies[i].length, .crc = crcs[i]};
  lck_record record = {.sequence = sequence,
                       .step = sequence,
                       .timeline = info.timeline,
                       .layout_offset = start,
                       .layout_length = 64,
                       .manifest_offset = start + 1024,
                       .manifest_length = sizeof(held)};
  atomic_store(&shared->phase, 2);
  atomic_store(&shared->begun, sequence);
  must(lck_snapshot_seal(snapshot, &record, payload[0], &held));
  must(lck_snapshot_wait(snapshot, -1, &state));
  if (state != LCK_SNAP_COMMITTED)
    DIE("state %d", state);
  atomic_store(&shared->acknowledged, sequence);
  must(lck_snapshot_free(snapshot));
}

/* Opens, recovers, begins a timeline and commits until it is killed. */
static void write_on(const char *path, uint32_t flags) {
  lck_pool_spec spec = {.threads = 2, .chunk_bytes = 4096};
  uint64_t sequence;
  lck_pool *pool;
  lck_region_info info;
  atomic_store(&shared->phase, 0);
  lck_region *region = open_region(path, flags);
  uint32_t newest = recover(region, &sequence);
  check_recovered(sequence);
  must(lck_region_describe(region, &info));
  if (info.timeline < atomic_load(&shared->timeline))
    DIE("timeline %" PRIu64 " after %" PRIu64, info.timeline, atomic_load(&shared->timeline));
  lck_branch lineage = {info.timeline, sequence};
  must(lck_region_branch(region, info.timeline + 1, &lineage, 1));
  atomic_store(&shared->timeline, info.timeline + 1);
  must(lck_pool_create(&spec, &pool));
  for (;;) {
    newest = (newest + 1) % SLOTS;
    commit(pool, region, newest, ++sequence);
    if (sequence % GROW_EVERY == 0 && info.segment_count < 4) {
      atomic_store(&shared->phase, 3);
      must(lck_region_grow(region, SLOT_BYTES));
      must(lck_region_describe(region, &info));
    }
  }
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void pause_ns(uint64_t ns) {
  struct timespec wait = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  nanosleep(&wait, NULL);
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void kill_once(const char *path, uint32_t flags, uint64_t *random) {
  int status;
  fflush(NULL);
  atomic_store(&shared->phase, 0);
  uint64_t started = now_ns();
  pid_t child = fork();
  if (child < 0)
    DIE("fork: %s", strerror(errno));
  if (child == 0)
    write_on(path, flags);
  /* A third of the kills comes at any time, the others once the first snapshot is being written:
   * opening takes longest where commits do, so its time says what is soon. */
  uint64_t longest = LONGEST_NS;
  if (draw(random) % 3 != 0) {
    while (atomic_load(&shared->phase) == 0 && now_ns() - started < STUCK_NS)
      pause_ns(20000);
    longest = 2 * (now_ns() - started);
  }
  pause_ns(draw(random) % longest);
  kill(child, SIGKILL);
  if (waitpid(child, &status, 0) != child || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
    DIE("the writer ended by itself: status 0x%x", status);
  atomic_fetch_add(&shared->died_in[atomic_load(&shared->phase)], 1);
}

static void run(const char *name, const char *folder, unsigned cycles, uint64_t *random) {
  char path[4096];
  struct stat file;
  uint64_t sequence;
  lck_region_info info;
  uint32_t flags = strstr(name, "process") != NULL ? LCK_PROCESS_DURABLE : 0;
  snprintf(path, sizeof(path), "%s/region", folder);
  memset(shared, 0, sizeof(*shared));
  create_region(path, flags);
  for (cycle = 0; cycle < cycles; cycle++) {
    kill_once(path, flags, random);
    lck_region *region = open_region(path, LCK_READ_ONLY | flags);
    (void)recover(region, &sequence);
    check_recovered(sequence);
    must(lck_region_close(region));
  }
  lck_region *region = open_region(path, flags);
  must(lck_region_describe(region, &info));
  must(lck_region_close(region));
  /* A growth that was cut short leaves at most its own bytes behind. */
  if (stat(path, &file) != 0 || (uint64_t)file.st_size > info.size + (UINT64_C(64) << 20))
    DIE("%s: %ld bytes, the region has %lu", path, (long)file.st_size, info.size);
  printf(
      "%s: %u kills (%lu opening, %lu copying, %lu committing, %lu growing), %lu commits, 0 lost\n",
      name, cycles, shared->died_in[0], shared->died_in[1], shared->died_in[2], shared->died_in[3],
      sequence);
  if (sequence == 0 || shared->died_in[1] + shared->died_in[2] == 0)
    DIE("no kill met a commit: nothing was shown");
  unlink(path);
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "kill_loop CYCLES SEED MEDIUM=FOLDER...\n");
    return 2;
  }
  unsigned cycles = (unsigned)strtoul(argv[1], NULL, 10);
  uint64_t random = strtoull(argv[2], NULL, 10);
  printf("seed %s\n", argv[2]);
  shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED)
    DIE("mmap: %s", strerror(errno));
  for (int i = 3; i < argc; i++) {
    char *folder = strchr(argv[i], '=');
    if (folder == NULL)
      DIE("%s: expected MEDIUM=FOLDER", argv[i]);
    *folder = '\0';
    run(argv[i], folder + 1, cycles, &random);
  }
  return 0;
}
