/* Images of somebody else's trace, as files: for a recovery that is not ours, such as Python's. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "crash.h"

static const char *folder;
static uint64_t wanted, offered;

/* [counts of events and bytes][events][bytes], as tests/support/traced.py writes it. */
static void load_trace(const char *path, lck_trace_log *log) {
  FILE *in = fopen(path, "rbe");
  uint64_t counts[2];
  memset(log, 0, sizeof(*log));
  if (in == NULL || fread(counts, sizeof(counts), 1, in) != 1)
    DIE("%s is no trace", path);
  log->event_count = counts[0];
  log->byte_count = counts[1];
  log->events = calloc(counts[0] + 1, sizeof(*log->events));
  log->bytes = malloc(counts[1] + 1);
  if (log->events == NULL || log->bytes == NULL)
    DIE("no memory for a trace of %lu events", (unsigned long)counts[0]);
  if (fread(log->events, sizeof(*log->events), counts[0], in) != counts[0] ||
      fread(log->bytes, 1, counts[1], in) != counts[1])
    DIE("%s is cut off", path);
  fclose(in);
  for (uint64_t i = 0; i < log->event_count; i++) {
    const lck_event *e = &log->events[i];
    if (e->op != LCK_TRACE_MARK && (e->length > IMAGE_MOST || e->offset > IMAGE_MOST - e->length))
      DIE("event %lu is at %lu, images have %lu bytes at most", (unsigned long)i,
          (unsigned long)e->offset, (unsigned long)IMAGE_MOST);
  }
}

/* Sparse: pages of zeros are holes. */
static void write_image(const model *m, uint64_t number, uint64_t size) {
  static const unsigned char zeros[LCK_HEADER_PAGE];
  char path[512];
  snprintf(path, sizeof(path), "%s/%05lu.image", folder, (unsigned long)number);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
    DIE("%s", path);
  for (uint64_t at = 0; at < size; at += LCK_HEADER_PAGE)
    if (memcmp(m->image + at, zeros, sizeof(zeros)) != 0 &&
        pwrite(fd, m->image + at, LCK_HEADER_PAGE, (off_t)at) != (ssize_t)LCK_HEADER_PAGE)
      DIE("%s", path);
  close(fd);
}

static void write_expectation(const model *m, uint64_t number, const losses *lost) {
  char path[512];
  snprintf(path, sizeof(path), "%s/%05lu.json", folder, (unsigned long)number);
  FILE *out = fopen(path, "we");
  if (out == NULL)
    DIE("%s", path);
  fprintf(out, "{\"created\": %s, \"acked\": %lu, \"started\": %lu, \"lost_lines\": %u}\n",
          m->within.segments_acked ? "true" : "false", (unsigned long)m->within.acked,
          (unsigned long)m->within.started, lost->lines);
  fclose(out);
}

/* Every image has the same chance of being among those that are kept. */
static void keep_some(model *m, const losses *lost, uint64_t size) {
  uint64_t place = offered++;
  if (place >= wanted)
    place = draw_below(&m->random, offered);
  if (place >= wanted)
    return;
  write_image(m, place, size);
  write_expectation(m, place, lost);
}

int replay(const char *trace, const char *into, uint64_t sample, uint64_t seed, medium on) {
  static const bounds nothing;
  static bed nobody;
  lck_trace_log log;
  tally sum = {0};
  model m;
  folder = into;
  wanted = sample;
  load_trace(trace, &log);
  model_make(&m);
  m.medium = on;
  m.per_cut = 100;
  m.tally = &sum;
  m.seed = m.random = seed;
  m.offer = keep_some;
  model_load(&m, &nobody, &nothing, NULL, 0);
  model_run(&m, &log, 0, log.event_count, 1);
  printf("%lu images of %lu events, %lu of them kept\n", (unsigned long)offered,
         (unsigned long)log.event_count, (unsigned long)(offered < wanted ? offered : wanted));
  model_free(&m);
  lck_trace_free(&log);
  return 0;
}
