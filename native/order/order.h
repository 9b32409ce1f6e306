/* order.h -- the release build's own instructions: are they what the shim says they are?
 *
 * tracee.c is a program of the very objects that are released and of the crash enumerator's driver;
 * step.c runs it one instruction at a time, all threads, and decode.c reads what each of them does.
 * record.c turns that into the events that trace.h has. compare.c holds them against those that the
 * trace build recorded for the same work; main.c also gives them to the crash enumerator, and sees
 * to it that wrong builds are found out. */
#ifndef LCK_ORDER_H
#define LCK_ORDER_H

#include "crash.h"
#include "decode.h"

/* What the program under trace says with an int3: rax holds the word, rdi which, rsi and rdx the
 * rest. */
#define SAYING UINT64_C(0x6f72646572000000)

enum saying {
  SAY_START,   /* a trace begins */
  SAY_STOP,    /* ... and ends */
  SAY_MARK,    /* rsi, rdx: of LCK_TRACE_MARK */
  SAY_MAPPED,  /* a writer's region: address of offset 0, bytes of addresses */
  SAY_SETTLED, /* rsi: the file's length, durable */
};

/* One traced life of a region: its owner opens or creates it, works and closes it. */
typedef struct life {
  lck_trace_log log;
  bounds within;        /* when it began */
  unsigned char *bytes; /* the region's, then */
  uint64_t size;
} life;

#define LIVES 2u

typedef struct recording {
  life lives[LIVES];
  uint32_t life_count;
  uint64_t steps, stores, nt, flushes, fences, unknown;
  char wrong[256]; /* why the recording cannot be trusted; empty if it can */
  /* While it is made. */
  const bed *bed;            /* shared with the program under trace */
  const unsigned char *file; /* the region's, IMAGE_MOST bytes of addresses */
  int fd;                    /* of it */
  unsigned char *shadow;     /* the region as the recorded stores have made it */
  uint64_t base, reserved;   /* where the program has mapped it for writing */
  uint64_t stop_at;          /* sequence whose acknowledgement ends the trace, or 0 */
  int running;               /* between start and stop */
  int finished;              /* nothing more is wanted */
} recording;

#define WRONG(r, ...)                                                                              \
  do {                                                                                             \
    if ((r)->wrong[0] == '\0')                                                                     \
      snprintf((r)->wrong, sizeof((r)->wrong), __VA_ARGS__);                                       \
  } while (0)

/* ---- record.c ------------------------------------------------------------------------------- */

/* `bed` and the region's file are those of the program under trace. */
void recording_begin(recording *r, const bed *bed, int fd);
void recording_free(recording *r);

/* It said this. */
void record_saying(recording *r, uint32_t thread, uint64_t which, uint64_t a, uint64_t b);

/* It executed this, with this target; a file's length may have changed. */
void record_deed(recording *r, uint32_t thread, const instruction *i, uint64_t target);
void record_extended(recording *r, uint32_t thread, uint64_t length);

/* ---- step.c --------------------------------------------------------------------------------- */

/* Run a program under trace from its first SAY_START until it is finished. */
void step_through(recording *r, const char *const *arguments);

/* ---- compare.c ------------------------------------------------------------------------------ */

/* 1 when both say the same; else 0 with the first difference. */
int same_order(const lck_trace_log *instructions, const lck_trace_log *shim, char *difference,
               uint64_t room);

#endif
