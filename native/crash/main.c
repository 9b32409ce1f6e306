/* crash -- enumerate crash images of real commits and run the real recovery on each.
 *
 * crash [--images N] [--seed N] [--json FILE] [--skip-mutants] [--only MEDIUM] [--mutant N]
 * crash --replay TRACE --dump FOLDER --only MEDIUM [--sample N] [--seed N]
 * Exit status 0: no image was bad, and every mutant of the commit order was caught. */
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "crash.h"

#define RESTARTS 4u      /* per trace, after a power failure; as many after a process died */
#define MUTANT_SEEDS 20u /* each on every medium */
#define CONTROL_SEEDS 3u

/* ---- one trace and what follows it ---------------------------------------------------------- */

typedef struct kept {
  unsigned char *bytes;
  uint64_t size;
  bounds within;
  outcome found;
} kept;

/* The first image has a superblock that lacks its first line only, the second two copies that
 * differ, if there are such images. */
typedef struct image_store {
  kept images[RESTARTS];
  uint64_t offered[RESTARTS];
} image_store;

static int lacks_first_line(const unsigned char *page) {
  superblock_disk super;
  memcpy(&super, page, sizeof(super));
  super.generation++;
  return super.crc == lck_crc32c(0, &super, offsetof(superblock_disk, crc));
}

/* Of all that are offered to a place each stays with the same probability. */
static void keep_image(model *m, const outcome *found) {
  image_store *k = m->saver;
  int update = memcmp(m->image, m->image + LCK_HEADER_PAGE, sizeof(superblock_disk)) != 0;
  uint64_t place = update ? 1 : 2 + draw_below(&m->random, RESTARTS - 2);
  if (update && (lacks_first_line(m->image) || lacks_first_line(m->image + LCK_HEADER_PAGE)))
    place = 0;
  kept *one = &k->images[place];
  if (draw_below(&m->random, ++k->offered[place]) != 0)
    return;
  free(one->bytes);
  *one = (kept){malloc(m->file_size), m->file_size, m->within, *found};
  if (!one->bytes)
    DIE("no memory for an image");
  memcpy(one->bytes, m->image, one->size);
}

static void keep_opening(model *m, const outcome *found) {
  if (m->step == STEP_OPEN)
    keep_image(m, found);
}

static int memory_file(const unsigned char *bytes, uint64_t size) {
  int fd = memfd_create("crash-region", MFD_CLOEXEC);
  if (fd < 0 || (size > 0 && pwrite(fd, bytes, size, 0) != (ssize_t)size))
    DIE("no memory file of %lu bytes", (unsigned long)size);
  return fd;
}

/* The machine failed and is up again: what recovery found is what the next owner goes on from. When
 * it fails once more while that one opens the region, a third goes on (`chained`: this one is it).
 */
static void restart_machine(model *m, const bed *from, const kept *image, int chained) {
  lck_trace_log log;
  image_store opening = {0};
  bed *b = malloc(sizeof(*b));
  if (!b)
    DIE("no memory");
  *b = *from;
  b->now = (bounds){image->found.by_checksum, image->found.by_checksum, image->found.timeline,
                    image->found.timeline,    image->found.segments,    image->found.segments,
                    image->found.entry,       image->found.entry,       image->found.timeline,
                    image->found.timeline};
  b->suspects[image->found.timeline % TIMELINES] = image->found.suspect;
  bounds within = b->now;
  int fd = memory_file(image->bytes, image->size);
  if (bed_continue(b, fd, 2, &log) == 0) {
    model_load(m, b, &within, image->bytes, image->size);
    m->saver = &opening;
    m->save = chained ? NULL : keep_opening;
    m->always = chained ? 1u << CASE_REOPENED : 0;
    model_run(m, &log, 0, log.event_count, 1);
    m->save = NULL;
    m->always = 0;
    m->tally->restarts++;
  }
  close(fd);
  lck_trace_free(&log);
  free(b);
  for (uint32_t i = 0, gone_on = 0; i < RESTARTS; i++) {
    if (opening.images[i].bytes && !m->stopped && !gone_on++)
      restart_machine(m, from, &opening.images[i], 1);
    free(opening.images[i].bytes);
  }
}

/* The process dies after `until` events; another takes over; then the machine fails. */
static void restart_process(model *m, const bed *from, const lck_trace_log *first, uint64_t until) {
  static const bounds nothing;
  lck_trace_log log;
  bed *b = malloc(sizeof(*b));
  unsigned char *bytes = malloc(IMAGE_MOST);
  if (!b || !bytes)
    DIE("no memory");
  *b = *from;
  model_load(m, b, &nothing, NULL, 0);
  model_run(m, first, 0, until, 0);
  model_kill(m);
  model_visible(m, bytes);
  b->now = m->within;
  int fd = memory_file(bytes, m->next_size);
  if (bed_continue(b, fd, 1, &log) == 0) {
    model_run(m, &log, 0, log.event_count, 1);
    m->tally->restarts++;
  }
  close(fd);
  lck_trace_free(&log);
  free(b);
  free(bytes);
}

/* A device held a region whose superblocks are gone; another is made over its records, journal and
 * payload. Nothing of the old one may ever be found. */
static void create_over_remains(model *m, const lck_trace_log *first) {
  static const bounds nothing;
  static bed old;
  lck_trace_log log;
  bed *b = malloc(sizeof(*b));
  unsigned char *bytes = malloc(IMAGE_MOST);
  if (!b || !bytes)
    DIE("no memory");
  model_load(m, &old, &nothing, NULL, 0);
  model_run(m, first, 0, first->event_count, 0);
  model_visible(m, bytes);
  for (int copy = 0; copy < 2; copy++) {
    bytes[LCK_SUPERBLOCK_OFFSET(copy) + draw_below(&m->random, 8)] ^= 0x10; /* of its magic */
    if (draw_below(&m->random, 2)) {
      bytes[LCK_RECORD_OFFSET(copy) + 16] ^= 1;
      bytes[LCK_JOURNAL_OFFSET + (uint64_t)copy * LCK_HEADER_PAGE + 16] ^= 1; /* of its step */
    }
  }
  uint64_t size = m->next_size;
  int fd = memory_file(bytes, size);
  void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED)
    DIE("no mapping of %lu bytes", (unsigned long)size);
  bed_seed(b, m->medium, m->seed ^ 0xDEAD);
  bed_create_over(b, fd, base, size, &log);
  model_load(m, b, &nothing, bytes, size);
  m->always = 1u << CASE_REMAINS;
  model_run(m, &log, 0, log.event_count, 1);
  m->always = 0;
  munmap(base, size);
  close(fd);
  lck_trace_free(&log);
  free(b);
  free(bytes);
}

/* Where the process dies: anywhere, but first right behind a sync that has failed, if one has. */
static uint64_t place_to_die(model *m, const lck_trace_log *log, uint32_t attempt) {
  for (uint64_t i = 0; i < log->event_count && attempt == 0; i++)
    if (log->events[i].op == LCK_TRACE_SYNC_FAILED)
      return i + 1;
  return draw_below(&m->random, log->event_count) + 1;
}

static void run_trace(medium on, uint64_t seed, uint32_t per_cut, int stop_at_bad, tally *sum) {
  static const bounds nothing;
  static bed b;
  lck_trace_log log;
  model m;
  image_store kept = {0};
  model_make(&m);
  m.medium = on;
  m.per_cut = per_cut;
  m.tally = sum;
  m.stop_at_bad = stop_at_bad;
  m.seed = seed;
  m.random = seed ^ 0x5EED;
  m.saver = &kept;
  bed_seed(&b, on, seed);
  b.device = 1;
  int fd = memory_file(NULL, 0);
  bed_create(&b, fd, &log);
  close(fd);
  sum->traces[on]++;
  model_load(&m, &b, &nothing, NULL, 0);
  m.save = keep_image;
  model_run(&m, &log, 0, log.event_count, 1);
  m.save = NULL;
  for (uint32_t i = 0; i < RESTARTS && !m.stopped; i++)
    restart_process(&m, &b, &log, place_to_die(&m, &log, i));
  for (uint32_t i = 0; i < RESTARTS && !m.stopped; i++)
    if (kept.images[i].bytes)
      restart_machine(&m, &b, &kept.images[i], 0);
  if (!m.stopped && (on == MEDIUM_ADR || on == MEDIUM_EADR || on == MEDIUM_CXL))
    create_over_remains(&m, &log);
  for (uint32_t i = 0; i < RESTARTS; i++)
    free(kept.images[i].bytes);
  lck_trace_free(&log);
  model_free(&m);
}

typedef struct settings {
  uint64_t images, seed;
  const char *json, *replay, *dump;
  uint64_t sample;
  int mutants, only; /* medium, or -1 */
} settings;

/* ---- sharing the work among processes ------------------------------------------------------- */

/* MUTANT_NONE is the control: on the seeds that catch nearly all others it must survive. */
static void hunt(shared *all, int mutant) {
  tally found = {0};
  lck_mutant = mutant;
  for (uint64_t seed = 1; seed <= (mutant ? MUTANT_SEEDS : CONTROL_SEEDS); seed++)
    for (int on = 0; on < MEDIA; on++) {
      run_trace((medium)on, seed, 16, 1, &found);
      for (int ignoring = 0; ignoring < 2; ignoring++)
        if (bad_in(&found, ignoring) > 0) {
          all->mutants[mutant].medium = on;
          all->mutants[mutant].ignoring = ignoring;
          memcpy(all->mutants[mutant].example, found.example, sizeof(found.example));
          return;
        }
    }
}

static void enumerate(shared *all, uint32_t worker, uint32_t workers, const settings *s) {
  tally *own = &all->tallies[worker];
  while (images_in(own) * workers < s->images || all->next < MEDIA) {
    uint64_t number = all->next++;
    run_trace((medium)(s->only < 0 ? number % MEDIA : (uint64_t)s->only), s->seed + number, 24, 0,
              own);
  }
}

static int wait_for_one(void) {
  int status;
  return wait(&status) < 0 ? -1 : !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- the whole ------------------------------------------------------------------------------ */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static settings parse(int count, char **arguments) {
  settings s = {.images = 120000, .seed = 1, .mutants = 1, .only = -1, .sample = 100};
  for (int i = 1; i < count; i++) {
    if (strcmp(arguments[i], "--skip-mutants") == 0)
      s.mutants = 0;
    else if (i + 1 < count && strcmp(arguments[i], "--images") == 0)
      s.images = strtoull(arguments[++i], NULL, 0);
    else if (i + 1 < count && strcmp(arguments[i], "--seed") == 0)
      s.seed = strtoull(arguments[++i], NULL, 0);
    else if (i + 1 < count && strcmp(arguments[i], "--only") == 0)
      s.only = atoi(arguments[++i]);
    else if (i + 1 < count && strcmp(arguments[i], "--mutant") == 0)
      lck_mutant = atoi(arguments[++i]);
    else if (i + 1 < count && strcmp(arguments[i], "--replay") == 0)
      s.replay = arguments[++i];
    else if (i + 1 < count && strcmp(arguments[i], "--dump") == 0)
      s.dump = arguments[++i];
    else if (i + 1 < count && strcmp(arguments[i], "--sample") == 0)
      s.sample = strtoull(arguments[++i], NULL, 0);
    else if (i + 1 < count && strcmp(arguments[i], "--json") == 0)
      s.json = arguments[++i];
    else
      DIE("%s is no argument of this program", arguments[i]);
  }
  return s;
}

/* Returns how many children failed. */
static int in_processes(shared *all, const settings *s, uint32_t workers) {
  int failed = 0, running = 0;
  fflush(NULL);
  for (int i = 0; i < MUTANTS && s->mutants; i++) {
    all->mutants[i].medium = -1;
    if (running == (int)workers)
      failed += wait_for_one(), running--;
    if (fork() == 0) {
      hunt(all, i);
      _exit(0);
    }
    running++;
  }
  for (; running > 0; running--)
    failed += wait_for_one();
  for (uint32_t i = 0; i < workers; i++)
    if (fork() == 0) {
      enumerate(all, i, workers, s);
      _exit(0);
    }
  for (uint32_t i = 0; i < workers; i++)
    failed += wait_for_one();
  return failed;
}

int main(int count, char **arguments) {
  settings s = parse(count, arguments);
  if (s.replay && (!s.dump || s.only < 0 || s.only >= MEDIA))
    DIE("--replay needs --dump and --only");
  if (s.replay)
    return replay(s.replay, s.dump, s.sample, s.seed, (medium)s.only);
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  uint32_t workers = cores < 1 ? 1 : cores > WORKERS ? WORKERS : (uint32_t)cores;
  shared *all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED)
    DIE("no memory");
  double started = now();
  int failed = in_processes(all, &s, workers);
  tally sum = {0};
  for (uint32_t i = 0; i < workers; i++)
    tally_add(&sum, &all->tallies[i]);
  print_table(&sum);
  uint32_t missing = print_cases(&sum);
  printf("%lu images in %lu cuts, %lu of them exhaustively; %lu restarts; %lu recovered twice, %lu "
         "by an owner too; %lu found out that lines were lost; %.1f s\n",
         (unsigned long)images_in(&sum), (unsigned long)sum.cuts, (unsigned long)sum.exhaustive,
         (unsigned long)sum.restarts, (unsigned long)sum.twice, (unsigned long)sum.as_writer,
         (unsigned long)sum.detected, now() - started);
  if (sum.example[0])
    printf("BAD: %s\n", sum.example);
  uint32_t survived = s.mutants ? print_mutants(all) : 0;
  if (s.json)
    write_json(s.json, &sum, all, now() - started, s.mutants);
  return bad_in(&sum, 0) + bad_in(&sum, 1) > 0 || survived > 0 || (missing > 0 && s.only < 0) ||
         failed > 0;
}
