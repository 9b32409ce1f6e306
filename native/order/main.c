/* order -- do the release build's instructions keep the order that the shim has seen?
 *
 * order --json FILE TRACEE [KERNEL MUTANT-TRACEE NAME]...
 * Exit status 0: for every copy kernel that this CPU has, every instruction is known, stores,
 * flushes and fences are those of the trace build in the same order, and no crash image of the real
 * instructions is bad; and each of the mutant builds is found out. */
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "order.h"

#define SEED 3u
#define PER_CUT 40u
#define JOBS 24u
#define PARALLEL 2

typedef struct job {
  const char *kernel, *tracee;
  const char *mutant; /* NULL: the release itself */
  uint64_t commits;   /* after which the trace ends; 0: growth, restart and all */
  int done;
  uint64_t steps, stores, nt, flushes, fences, unknown, threads, events;
  uint64_t images, bad, bad_unsummed;
  int same;
  char difference[512], wrong[256], example[200];
} job;

static const char *const kernels[] = {"avx512", "avx2", "sse42", "portable"};
enum { KERNELS = sizeof(kernels) / sizeof(kernels[0]) };

/* ---- the same work, twice ------------------------------------------------------------------- */

static int memory_file(const char *name, uint64_t size) {
  int fd = memfd_create(name, 0);
  if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
    DIE("no memory file of %lu bytes", (unsigned long)size);
  return fd;
}

static void by_shim(const char *kernel, lck_trace_log *logs) {
  static bed b;
  int fd = memory_file("order-shim", 0);
  bed_seed(&b, MEDIUM_ADR, SEED);
  if (lck_kernel(kernel, NULL) != 0)
    DIE("%s", lck_last_error());
  bed_create(&b, fd, &logs[0]);
  if (bed_continue(&b, fd, 1, &logs[1]) != 0)
    DIE("%s", lck_last_error());
  close(fd);
}

static void by_instructions(const job *j, recording *r, bed **shared) {
  char seed[32], region_fd[16], bed_fd[16];
  int fd = memory_file("order-region", 0);
  int bed_file = memory_file("order-bed", sizeof(bed));
  *shared = mmap(NULL, sizeof(bed), PROT_READ | PROT_WRITE, MAP_SHARED, bed_file, 0);
  if (*shared == MAP_FAILED)
    DIE("no memory for the bed");
  snprintf(seed, sizeof(seed), "%u", SEED);
  snprintf(region_fd, sizeof(region_fd), "%d", fd);
  snprintf(bed_fd, sizeof(bed_fd), "%d", bed_file);
  const char *const arguments[] = {j->tracee, j->kernel, seed, region_fd, bed_fd, NULL};
  recording_begin(r, *shared, fd);
  r->stop_at = j->commits;
  step_through(r, arguments);
}

/* ---- what comes of it ----------------------------------------------------------------------- */

/* Up to the mark that ended the recording. */
static void cut_short(lck_trace_log *log, uint64_t commits) {
  for (uint64_t i = 0; i < log->event_count; i++)
    if (log->events[i].op == LCK_TRACE_MARK && log->events[i].offset == MARK_ACKED &&
        log->events[i].length == commits) {
      log->event_count = i + 1;
      return;
    }
}

static uint64_t threads_that_stored(const lck_trace_log *log) {
  uint64_t seen = 0;
  for (uint64_t i = 0; i < log->event_count; i++)
    if (log->events[i].op == LCK_TRACE_STORE || log->events[i].op == LCK_TRACE_NT)
      seen |= UINT64_C(1) << log->events[i].thread % 64;
  return (uint64_t)__builtin_popcountll(seen);
}

static void enumerate(const recording *r, medium on, tally *sum) {
  model m;
  model_make(&m);
  m.medium = on;
  m.per_cut = PER_CUT;
  m.tally = sum;
  m.seed = m.random = SEED;
  for (uint32_t i = 0; i < r->life_count; i++) {
    const life *l = &r->lives[i];
    sum->traces[on]++;
    model_load(&m, r->bed, &l->within, l->bytes, l->size);
    model_run(&m, &l->log, 0, l->log.event_count, 1);
  }
  model_free(&m);
}

static void work(job *j) {
  lck_trace_log shim[LIVES];
  static recording r;
  static tally sum;
  bed *b;
  by_shim(j->kernel, shim);
  by_instructions(j, &r, &b);
  const uint32_t lives = j->commits ? 1 : LIVES;
  if (j->commits != 0)
    cut_short(&shim[0], j->commits);
  j->same = r.life_count == lives;
  if (!j->same)
    snprintf(j->difference, sizeof(j->difference), "%u traces instead of %u", r.life_count, lives);
  for (uint32_t i = 0; i < r.life_count && j->same; i++)
    j->same = same_order(&r.lives[i].log, &shim[i], j->difference, sizeof(j->difference));
  if (r.wrong[0] == '\0') {
    enumerate(&r, MEDIUM_ADR, &sum);
    enumerate(&r, MEDIUM_CXL, &sum);
  }
  memcpy(j->wrong, r.wrong, sizeof(j->wrong));
  memcpy(j->example, sum.example, sizeof(j->example));
  j->steps = r.steps;
  j->stores = r.stores;
  j->nt = r.nt;
  j->flushes = r.flushes;
  j->fences = r.fences;
  j->unknown = r.unknown;
  j->threads = r.life_count ? threads_that_stored(&r.lives[0].log) : 0;
  j->images = images_in(&sum);
  j->bad = bad_in(&sum, 0);
  j->bad_unsummed = bad_in(&sum, 1);
  j->done = 1;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int good(const job *j) {
  return j->done && j->same && j->wrong[0] == '\0' && j->unknown == 0 && j->bad == 0 &&
         j->bad_unsummed == 0 && j->threads >= 2; /* the caller and a worker */
}

/* A mutant counts as found out only when its order differs: that bad images follow is told, too. */
static int found_out(const job *j) {
  return j->done && j->wrong[0] == '\0' && !j->same;
}

static void run_all(job *jobs, uint32_t count) {
  int running = 0;
  fflush(NULL);
  for (uint32_t i = 0; i < count; i++) {
    if (running == PARALLEL)
      (void)wait(NULL), running--;
    pid_t child = fork();
    if (child < 0)
      DIE("fork");
    if (child == 0) {
      work(&jobs[i]);
      _exit(0);
    }
    running++;
  }
  for (; running > 0; running--)
    (void)wait(NULL);
}

static void print_job(const job *j) {
  if (j->mutant != NULL) {
    printf("  %-40s %s%s%s%s\n", j->mutant, found_out(j) ? "" : "NOT FOUND OUT ",
           j->wrong[0] ? j->wrong : j->difference, j->example[0] ? "; bad images: " : "",
           j->example);
    return;
  }
  printf(
      "%-10s %8lu instructions of %lu threads that store: %lu stores, %lu streamed, %lu flushes, "
      "%lu fences, %lu unknown; order %s; %lu images, %lu bad, %lu unsummed\n",
      j->kernel, (unsigned long)j->steps, (unsigned long)j->threads, (unsigned long)j->stores,
      (unsigned long)j->nt, (unsigned long)j->flushes, (unsigned long)j->fences,
      (unsigned long)j->unknown, j->same ? "as the shim's" : "DIFFERS", (unsigned long)j->images,
      (unsigned long)j->bad, (unsigned long)j->bad_unsummed);
  if (!good(j))
    printf("BAD: %s: %s %s %s %s\n", j->kernel, j->done ? "" : "no result",
           j->same ? "" : j->difference, j->wrong, j->example);
}

static void write_result(const char *path, const job *jobs, uint32_t count) {
  FILE *out = fopen(path, "we");
  if (out == NULL)
    DIE("%s", path);
  fprintf(out, "{\n  \"kernels\": {");
  uint32_t i = 0;
  for (; i < count && jobs[i].mutant == NULL; i++)
    fprintf(out,
            "%s\n    \"%s\": {\"instructions\": %lu, \"threads\": %lu, \"stores\": %lu, "
            "\"nt_stores\": %lu, \"flushes\": %lu, \"fences\": %lu, \"undecoded\": %lu, "
            "\"same_order_as_shim\": %s, \"images\": %lu, \"bad\": %lu, \"bad_unsummed\": %lu}",
            i ? "," : "", jobs[i].kernel, (unsigned long)jobs[i].steps,
            (unsigned long)jobs[i].threads, (unsigned long)jobs[i].stores,
            (unsigned long)jobs[i].nt, (unsigned long)jobs[i].flushes,
            (unsigned long)jobs[i].fences, (unsigned long)jobs[i].unknown,
            jobs[i].same ? "true" : "false", (unsigned long)jobs[i].images,
            (unsigned long)jobs[i].bad, (unsigned long)jobs[i].bad_unsummed);
  fprintf(out, "\n  },\n  \"not_run\": [\"aarch64\"],\n  \"mutants\": [");
  for (uint32_t first = i; i < count; i++)
    fprintf(out, "%s\n    {\"name\": \"%s\", \"kernel\": \"%s\", \"found_out\": %s, \"bad\": %lu}",
            i > first ? "," : "", jobs[i].mutant, jobs[i].kernel,
            found_out(&jobs[i]) ? "true" : "false",
            (unsigned long)(jobs[i].bad + jobs[i].bad_unsummed));
  fprintf(out, "\n  ]\n}\n");
  fclose(out);
}

int main(int count, char **arguments) {
  if (count < 4 || strcmp(arguments[1], "--json") != 0 || (count - 4) % 3 != 0 ||
      (uint32_t)(count - 4) / 3 + KERNELS > JOBS)
    DIE("usage: order --json FILE TRACEE [KERNEL TRACEE NAME]...");
  job *jobs =
      mmap(NULL, JOBS * sizeof(*jobs), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (jobs == MAP_FAILED)
    DIE("no memory");
  uint32_t made = 0, wrong = 0;
  int shortened = 0;
  for (int i = 0; i < KERNELS; i++) {
    if (lck_kernel(kernels[i], NULL) == 0)
      /* The first runs all of it; the others differ in how payload is copied only. */
      jobs[made++] =
          (job){.kernel = kernels[i], .tracee = arguments[3], .commits = shortened ? 2 : 0};
    else
      printf("SKIPPED: %s\n", lck_last_error());
    shortened = made > 0;
  }
  printf("SKIPPED: aarch64: this check steps through x86 instructions only\n");
  for (int i = 4; i < count; i += 3)
    jobs[made++] = (job){.kernel = arguments[i],
                         .tracee = arguments[i + 1],
                         .mutant = arguments[i + 2],
                         .commits = 1};
  run_all(jobs, made);
  for (uint32_t i = 0; i < made; i++) {
    print_job(&jobs[i]);
    wrong += jobs[i].mutant ? !found_out(&jobs[i]) : !good(&jobs[i]);
  }
  write_result(arguments[2], jobs, made);
  return wrong > 0;
}
