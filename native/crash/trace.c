#include "trace.h"

#ifdef LCK_TRACE

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"
#include "mutant.h"
#include "region.h"

int lck_mutant;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards `current` and what it holds */
static lck_trace_log *current;
static int forced = -1;

static uint32_t this_thread(void) {
  static _Atomic uint32_t threads;
  static _Thread_local uint32_t number;
  if (number == 0)
    number = atomic_fetch_add(&threads, 1) + 1;
  return number;
}

static void *room_for(void *items, uint64_t count, uint64_t *room, uint64_t item_bytes) {
  if (count <= *room)
    return items;
  *room = 2 * count + 4096;
  items = realloc(items, *room * item_bytes);
  if (items == NULL) {
    fprintf(stderr, "no memory for a trace\n");
    abort();
  }
  return items;
}

void lck_trace(enum lck_trace_op op, const lck_region *region, uint64_t offset, uint64_t length) {
  uint64_t stored = op == LCK_TRACE_STORE || op == LCK_TRACE_NT ? length : 0;
  pthread_mutex_lock(&mutex);
  lck_trace_log *log = current;
  if (log != NULL) {
    log->events = room_for(log->events, log->event_count + 1, &log->event_room, sizeof(lck_event));
    log->bytes = room_for(log->bytes, log->byte_count + stored, &log->byte_room, 1);
    log->events[log->event_count++] =
        (lck_event){op, this_thread(), offset, length, log->byte_count};
    if (stored > 0)
      memcpy(log->bytes + log->byte_count, region->base + offset, stored);
    log->byte_count += stored;
  }
  pthread_mutex_unlock(&mutex);
}

/* A kernel pads the last line. */
void lck_trace_payload(const lck_region *region, uint64_t offset, uint64_t length, int cached) {
  uint64_t lines = (length + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
  lck_trace(cached ? LCK_TRACE_STORE : LCK_TRACE_NT, region, offset, lines);
}

void lck_trace_start(lck_trace_log *log) {
  memset(log, 0, sizeof(*log));
  pthread_mutex_lock(&mutex);
  current = log;
  pthread_mutex_unlock(&mutex);
}

void lck_trace_stop(void) {
  pthread_mutex_lock(&mutex);
  current = NULL;
  pthread_mutex_unlock(&mutex);
}

void lck_trace_free(lck_trace_log *log) {
  free(log->events);
  free(log->bytes);
  memset(log, 0, sizeof(*log));
}

void lck_trace_force(int granularity) {
  forced = granularity;
}

uint32_t lck_trace_granularity(uint32_t detected) {
  return forced < 0 ? detected : (uint32_t)forced;
}

int lck_mutant_store(lck_region *region, uint64_t offset, const void *bytes, uint64_t length) {
  if (length == 0)
    return 0;
  memcpy(lck_guard_store(region, offset), bytes, length);
  lck_trace(LCK_TRACE_STORE, region, offset, length);
  return 0;
}

#endif
