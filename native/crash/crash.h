/* crash.h -- the crash-image enumerator: what its parts tell each other.
 *
 * driver.c makes real commits, growth, branches and restarts on a memory file and has them traced;
 * entries.c does so for the boundary journal.
 * model.c replays a trace: which bytes are durable for certain, which may or may not be. cuts.c
 * chooses what a crash leaves of these, images.c builds the image, oracle.c gives it to the real
 * recovery and judges what comes back. main.c shares the work among processes, report.c tells. */
#ifndef LCK_CRASH_H
#define LCK_CRASH_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "format.h"
#include "lightck.h"
#include "mutant.h"
#include "trace.h"

#define IMAGE_MOST (UINT64_C(8) << 20) /* bytes of a region under test */
#define SLOT_BYTES UINT64_C(16384)
#define TABLES_BYTES UINT64_C(1536) /* of a slot: layout table and manifest, then payload */
#define EXTENTS 6u
#define PAYLOAD_MOST 8192u
#define SEQUENCES 16u
#define JOURNAL_BYTES (LCK_JOURNAL_PLACES * LCK_HEADER_PAGE)
#define ENTRY_MOST (LCK_HEADER_PAGE - sizeof(journal_disk)) /* bytes of a blob in the journal */
#define ENTRIES 256u
#define TIMELINES 64u

#define DIE(...)                                                                                   \
  do {                                                                                             \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                \
    fprintf(stderr, __VA_ARGS__);                                                                  \
    fputc('\n', stderr);                                                                           \
    abort();                                                                                       \
  } while (0)

typedef enum medium {
  MEDIUM_ADR,     /* lines flushed and fenced are durable */
  MEDIUM_EADR,    /* what is visible is durable, but for write-combining buffers */
  MEDIUM_FILE,    /* sectors of a page cache, durable when a sync has returned */
  MEDIUM_PROCESS, /* the process alone dies: every retired store stays */
  MEDIUM_CXL,     /* as ADR, and a dirty shutdown loses lines that were fenced */
  MEDIUM_EIO,     /* MEDIUM_FILE, and one sync fails: it covers nothing, nor does any later one */
  MEDIA,
} medium;

static inline int on_pages(medium on) {
  return on == MEDIUM_FILE || on == MEDIUM_EIO;
}

/* What the newest store before the crash was part of. */
typedef enum step {
  STEP_CREATE,
  STEP_OPEN,
  STEP_INVALIDATE,
  STEP_PAYLOAD,
  STEP_TABLES,
  STEP_RECORD,
  STEP_PUBLISH,
  STEP_GROW,
  STEP_BRANCH,
  STEP_JOURNAL,
  STEP_SUSPECT,
  STEPS,
} step;

extern const char *const step_names[STEPS];

enum mark {
  MARK_STEP,
  MARK_STARTED,
  MARK_ACKED,
  MARK_BRANCHING,
  MARK_BRANCHED,
  MARK_SEGMENTS,
  MARK_JOURNALING,
  MARK_JOURNALED,
  MARK_SUSPECTING,
  MARK_SUSPECTED,
  MARK_CASES,
};

/* What a commit under way is a case of; the run must reach each, or it fails. */
enum {
  CASE_RELAYOUT, /* the slot takes a new layout, the other slot's record refers to an old one */
  CASE_GROWN,    /* the first to use a segment that was added */
  CASE_REOPENED, /* the machine failed while an owner was opening what a failure had left */
  CASE_REMAINS,  /* creation over the remains of another region */
  CASES,
};

extern const char *const case_names[CASES];

/* ---- what was written ----------------------------------------------------------------------- */

typedef struct manifest {
  uint64_t sequence, count;
  lck_read extents[EXTENTS]; /* destination is NULL on the medium */
} manifest;

typedef struct truth {
  uint64_t sequence, timeline;
  uint32_t slot;
  uint32_t layout_length;
  unsigned char layout[512];
  manifest manifest;
  unsigned char payload[PAYLOAD_MOST]; /* extents one behind the other */
} truth;

/* Between which bounds recovery may end: what was acknowledged and what was begun. */
typedef struct bounds {
  uint64_t acked, started;
  uint64_t timeline_acked, timeline_started;
  uint64_t segments_acked, segments_started; /* 0 acknowledged: creation may be unfinished */
  uint64_t entry_acked, entry_started;       /* of the journal, by number */
  uint64_t suspect_acked, suspect_started;   /* the newest timeline that was marked */
} bounds;

typedef struct bed {
  uint64_t random; /* state */
  medium medium;
  int device; /* some snapshots are fed */
  uint32_t layout_version;
  uint64_t last_in_slot[2]; /* sequence that this process wrote there whole, or 0 */
  uint64_t segments_used;
  bounds now;
  truth truths[SEQUENCES];
  uint64_t entries; /* of the journal so far, numbered from 1 */
  uint64_t entry_timelines[ENTRIES];
  uint64_t suspects[TIMELINES]; /* first suspect sequence of each timeline; 0: none */
} bed;

void fill(unsigned char *bytes, uint64_t length, uint64_t seed);
void mark(enum mark which, uint64_t value);
int failed(const bed *b, int rc); /* 1 where a sync has failed as it should */
uint64_t draw(uint64_t *state);
uint64_t draw_below(uint64_t *state, uint64_t limit);

/* Create a region in the empty file `fd`, or open the one there, and commit; all of it traced. */
void bed_create(bed *b, int fd, lck_trace_log *log);
/* Create one in fixed space full of remains, mapped at `base`, as on a device. */
void bed_create_over(bed *b, int fd, void *base, uint64_t size, lck_trace_log *log);
/* -1: the region's creation was cut short. */
int bed_continue(bed *b, int fd, uint32_t commits, lck_trace_log *log);
void bed_seed(bed *b, medium on, uint64_t seed);

/* Whether these copies shall be fed; they are marked then. */
int bed_fed(bed *b, lck_copy *copies);
/* Feed all of them. */
int bed_feed(bed *b, const lck_region *region, lck_snapshot *snapshot, uint32_t batch,
             const truth *t, const lck_copy *copies);

/* Choose whether an update shall write the copies; if so they are such that one can. */
int bed_streamed(bed *b, lck_copy *copies);

/* Let an update write them; the truth is then what it has computed. */
int bed_stream(bed *b, lck_snapshot *snapshot, uint32_t batch, truth *t, const lck_copy *copies);

/* ---- recovery ------------------------------------------------------------------------------- */

typedef struct seen {
  uint64_t sequence, timeline; /* 0: no record that counts */
  int suspect;
} seen;

typedef struct outcome {
  int opened;           /* code of lck_region_open */
  uint64_t by_order;    /* highest sequence whose record holds */
  uint64_t by_checksum; /* highest whose payload's checksums hold, too */
  uint64_t timeline, segments;
  uint64_t suspect; /* first sequence of the timeline that is; 0: none */
  seen slots[2];
  uint32_t rejected;   /* slots refused by the checksum of a record or table */
  uint32_t torn;       /* slots whose record holds but whose payload's checksum does not */
  const char *wrong;   /* accepted, but not what was written; NULL if there is none */
  const char *by_luck; /* the same with payload checksums ignored */
  uint64_t entry;      /* number of the journal's newest, or 0 */
  uint64_t before;     /* of the newest of the kind that was written before it, or 0 */
  const char *entry_wrong, *entry_by_luck;
} outcome;

void recover(int fd, int lock_fd, uint32_t flags, const bed *b, outcome *out);

/* Which fenced lines a dirty shutdown has lost. */
typedef struct losses {
  uint32_t lines, slots, superblocks, journal; /* number; bit per slot, per copy; any */
} losses;

/* NULL, or what is wrong: for who verifies payload, or (`ignoring` its checksums) relies on order
 * alone. */
const char *judge(const bed *b, const outcome *out, const bounds *within, const losses *lost,
                  int ignoring);

/* ---- the boundary journal ------------------------------------------------------------------- */

/* Leave a number out: the entry before an owner's first is not the one with the number before. */
void entries_part(bed *b);

/* Write up to `most` entries, acknowledged one by one. */
void entries_write(bed *b, lck_region *region, uint64_t timeline, uint64_t most);

void entries_recover(const lck_region *region, const bed *b, const lck_region_info *info,
                     outcome *out);

/* NULL, or what is wrong. `may_be_lost`: by a power failure of a page cache, or a dirty shutdown.
 */
const char *entries_judge(const bed *b, const outcome *out, const bounds *within, int may_be_lost);

/* ---- the model ------------------------------------------------------------------------------ */

/* One store's part of one unit: a line, or a sector of a file. */
typedef struct piece {
  uint64_t offset;
  const unsigned char *bytes;
  uint32_t length, store, thread, flusher; /* store: its number, in the order of the trace */
  uint8_t nt, visible;
  uint8_t clean; /* a sync failed on it: no sync covers it until it is touched */
} piece;

#define HISTORY 24u

typedef struct old_line {
  uint64_t offset;
  unsigned char bytes[LCK_LINE];
} old_line;

typedef struct tally {
  uint64_t images[MEDIA][STEPS], bad[2][MEDIA][STEPS]; /* [1]: payload checksums ignored */
  uint64_t traces[MEDIA], cases[MEDIA][CASES], restarts, cuts, exhaustive, twice, detected,
      as_writer;
  char example[200]; /* of something bad */
} tally;

typedef struct model {
  const bed *bed;
  medium medium;
  uint64_t unit; /* bytes */
  step step;
  bounds within;
  uint32_t cases, always; /* bit per case: of the commit under way, of the whole trace */
  unsigned char *durable; /* for certain */
  unsigned char *image;   /* the file that recovery sees; equals `durable` between images */
  int fd, lock_fd;
  uint64_t size, next_size, file_size; /* of the file: durable, perhaps, and of the image's now */
  piece *pieces;
  uint32_t count, room;
  uint32_t stores;
  uint32_t sync_from[64]; /* by thread: stores before are in its sync */
  old_line history[HISTORY];
  uint32_t history_count;
  uint64_t hash; /* of `durable`, relative to the start */
  uint32_t *stamps;
  uint32_t stamp;
  uint64_t *seen;
  uint64_t seen_count, seen_room;
  uint64_t random, seed;
  uint32_t per_cut;
  int changed;
  tally *tally;
  int stop_at_bad, stopped;
  void (*save)(struct model *m, const outcome *found); /* good images, for what follows a crash */
  void *saver;
  /* Instead of recovery, when it is set: what is done with an image of `size` bytes. */
  void (*offer)(struct model *m, const losses *lost, uint64_t size);
} model;

void model_make(model *m);
void model_free(model *m);

/* Start from an image: what lies in it is durable, nothing else is pending. */
void model_load(model *m, const bed *b, const bounds *within, const unsigned char *bytes,
                uint64_t size);

/* Replay events [from, to), looking at the images of every cut if `look`. */
void model_run(model *m, const lck_trace_log *log, uint64_t from, uint64_t to, int look);

/* The process dies, the machine does not: stores become visible to the next process. */
void model_kill(model *m);

/* The image as the next process would see it. */
void model_visible(const model *m, unsigned char *bytes);

static inline int in_journal(uint64_t offset) {
  return offset >= LCK_JOURNAL_OFFSET && offset < LCK_JOURNAL_OFFSET + JOURNAL_BYTES;
}

uint64_t line_hash(uint64_t offset, const unsigned char *bytes);

/* ---- images --------------------------------------------------------------------------------- */

/* A cut of a trace, and one choice of what the crash left of what was pending there. */
typedef struct cut {
  model *m;
  uint64_t *words; /* the choice, by piece */
  uint32_t *unit_of;
  uint32_t units;
  uint64_t *of_unit;   /* unit number, by unit */
  uint8_t *read_first; /* by unit: not payload, hence what recovery depends on most */
  uint32_t attempts;
  uint32_t dropped; /* bit per line of the history */
  int short_file;
  int bad;
} cut;

uint64_t words_in(const piece *p);
uint64_t all_words(const piece *p);

/* Build the chosen image, if it is a new one, and judge what recovery makes of it. */
void look(cut *c);

/* Enumerate the images of the present cut; 1 when a bad one was found and that ends the run. */
int images_cut(model *m);

/* ---- somebody else's trace ------------------------------------------------------------------ */

/* Write a sample of the images of the trace in a file, and what each may give, into a folder. */
int replay(const char *trace, const char *into, uint64_t sample, uint64_t seed, medium on);

/* ---- the result ----------------------------------------------------------------------------- */

#define WORKERS 64u

/* Among the processes that share the work. */
typedef struct shared {
  _Atomic uint64_t next; /* trace */
  tally tallies[WORKERS];
  struct {
    int medium; /* -1: survived */
    int ignoring;
    char example[200];
  } mutants[MUTANTS];
} shared;

uint64_t images_in(const tally *t);
uint64_t bad_in(const tally *t, int ignoring);
void tally_add(tally *sum, const tally *t);
void print_table(const tally *t);

/* Returns how many cases no image was of. */
uint32_t print_cases(const tally *t);

/* Returns how many survived, and 1 more if the control did not. */
uint32_t print_mutants(const shared *all);

void write_json(const char *path, const tally *t, const shared *all, double seconds, int mutants);

#endif
