/* What was enumerated, for people and for programs. */
#include <string.h>

#include "crash.h"

static const char *const medium_names[MEDIA] = {"ADR",     "eADR",      "file",
                                                "process", "CXL dirty", "file, EIO"};
const char *const step_names[STEPS] = {"create", "open",    "invalidate", "payload",
                                       "tables", "record",  "publish",    "grow",
                                       "branch", "journal", "suspect"};
static const char *const mutant_names[MUTANTS] = {
    [MUTANT_TABLES_NOT_SYNCED] = "record without a sync before it",
    [MUTANT_NO_FENCE_BEFORE_RECORD] = "record without any fence before it",
    [MUTANT_WORD_BEFORE_BODY] = "record published before its own fields",
    [MUTANT_BODY_NOT_FENCED] = "record's body not fenced before its word",
    [MUTANT_ACKNOWLEDGED_EARLY] = "acknowledged before durable",
    [MUTANT_NEVER_INVALIDATED] = "slot not invalidated",
    [MUTANT_INVALIDATED_LATE] = "slot invalidated after the first payload byte",
    [MUTANT_INVALIDATION_UNSYNCED] = "invalidation not durable before payload",
    [MUTANT_BLANK_OVERTAKES_WORD] = "body blanked before the word is durably 0",
    [MUTANT_LIVE_SLOT] = "live slot overwritten",
    [MUTANT_LAYOUT_NOT_FLUSHED] = "layout table not flushed",
    [MUTANT_MANIFEST_NOT_FLUSHED] = "manifest not flushed",
    [MUTANT_PAYLOAD_NOT_FLUSHED] = "cached payload not flushed",
    [MUTANT_WORKER_NOT_FENCED] = "worker's fence left out",
    [MUTANT_CALLER_NOT_FENCED] = "training thread's fence left out",
    [MUTANT_UPDATE_NOT_FENCED] = "an update's fences left out",
    [MUTANT_SUPERBLOCKS_AT_ONCE] = "both superblocks written before a sync",
    [MUTANT_SUPERBLOCK_NEWER_FIRST] = "newer superblock overwritten first",
    [MUTANT_TORN_COPY_KEPT] = "torn superblock not wiped before the next",
    [MUTANT_GROWTH_NOT_SETTLED] = "growth not settled before the superblock",
    [MUTANT_NOT_ADOPTED] = "headers not adopted by a new owner",
    [MUTANT_SYNC_RETRIED] = "failed sync retried and believed",
    [MUTANT_ADOPTED_CLEAN] = "headers adopted without touching pages",
    [MUTANT_JOURNAL_NEWEST] = "journal: newest entry overwritten",
    [MUTANT_JOURNAL_OVER_END] = "journal: forward start over the step end of its step",
    [MUTANT_JOURNAL_SECOND] = "journal: second newest entry overwritten",
    [MUTANT_JOURNAL_KEPT_VALID] = "journal: place not invalidated",
    [MUTANT_JOURNAL_UNFENCED] = "journal: entry before its blob is fenced",
    [MUTANT_JOURNAL_UNFLUSHED] = "journal: blob not flushed",
    [MUTANT_JOURNAL_ACKED_EARLY] = "journal: acknowledged before durable",
    [MUTANT_OLD_SUPERBLOCKS_KEPT] = "remains: old superblocks not blanked",
    [MUTANT_OLD_RECORDS_KEPT] = "remains: old records not blanked",
    [MUTANT_OLD_JOURNAL_KEPT] = "remains: old journal entries not blanked",
};
const char *const case_names[CASES] = {
    [CASE_RELAYOUT] = "new layout beside an old one",
    [CASE_GROWN] = "first use of a new segment",
    [CASE_REOPENED] = "crash while reopening after a crash",
    [CASE_REMAINS] = "creation over remains",
};

uint64_t images_in(const tally *t) {
  uint64_t sum = 0;
  for (int on = 0; on < MEDIA; on++)
    for (int at = 0; at < STEPS; at++)
      sum += t->images[on][at];
  return sum;
}

uint64_t bad_in(const tally *t, int ignoring) {
  uint64_t sum = 0;
  for (int on = 0; on < MEDIA; on++)
    for (int at = 0; at < STEPS; at++)
      sum += t->bad[ignoring][on][at];
  return sum;
}

void tally_add(tally *sum, const tally *t) {
  for (int on = 0; on < MEDIA; on++) {
    sum->traces[on] += t->traces[on];
    for (int i = 0; i < CASES; i++)
      sum->cases[on][i] += t->cases[on][i];
    for (int at = 0; at < STEPS; at++) {
      sum->images[on][at] += t->images[on][at];
      sum->bad[0][on][at] += t->bad[0][on][at];
      sum->bad[1][on][at] += t->bad[1][on][at];
    }
  }
  sum->restarts += t->restarts;
  sum->cuts += t->cuts;
  sum->exhaustive += t->exhaustive;
  sum->twice += t->twice;
  sum->detected += t->detected;
  sum->as_writer += t->as_writer;
  if (sum->example[0] == '\0')
    memcpy(sum->example, t->example, sizeof(sum->example));
}

void print_table(const tally *t) {
  printf("%-10s", "images");
  for (int at = 0; at < STEPS; at++)
    printf("%11s", step_names[at]);
  printf("%10s%7s%9s\n", "all", "bad", "unsummed");
  for (int on = 0; on < MEDIA; on++) {
    uint64_t all = 0, bad[2] = {0, 0};
    printf("%-10s", medium_names[on]);
    for (int at = 0; at < STEPS; at++) {
      printf("%11lu", (unsigned long)t->images[on][at]);
      all += t->images[on][at];
      bad[0] += t->bad[0][on][at];
      bad[1] += t->bad[1][on][at];
    }
    printf("%10lu%7lu%9lu\n", (unsigned long)all, (unsigned long)bad[0], (unsigned long)bad[1]);
  }
}

static uint64_t of_case(const tally *t, int which) {
  uint64_t sum = 0;
  for (int on = 0; on < MEDIA; on++)
    sum += t->cases[on][which];
  return sum;
}

uint32_t print_cases(const tally *t) {
  uint32_t missing = 0;
  for (int i = 0; i < CASES; i++) {
    missing += of_case(t, i) == 0;
    printf("  %-46s", case_names[i]);
    for (int on = 0; on < MEDIA; on++)
      printf("%s %s %lu", on ? "," : "", medium_names[on], (unsigned long)t->cases[on][i]);
    printf("%s\n", of_case(t, i) ? "" : ": NOT REACHED");
  }
  return missing;
}

void write_json(const char *path, const tally *t, const shared *all, double seconds, int mutants) {
  FILE *out = fopen(path, "we");
  if (!out)
    DIE("%s", path);
  fprintf(out, "{\n  \"seconds\": %.1f,\n  \"images\": %lu,\n  \"restarts\": %lu,\n", seconds,
          (unsigned long)images_in(t), (unsigned long)t->restarts);
  fprintf(out, "  \"recovered_twice\": %lu,\n  \"lost_lines_detected\": %lu,\n",
          (unsigned long)t->twice, (unsigned long)t->detected);
  fprintf(out, "  \"cases\": {");
  for (int i = 0; i < CASES; i++)
    fprintf(out, "%s\"%s\": %lu", i ? ", " : "", case_names[i], (unsigned long)of_case(t, i));
  fprintf(out, "},\n  \"media\": {");
  for (int on = 0; on < MEDIA; on++) {
    fprintf(out, "%s\n    \"%s\": {\"traces\": %lu, \"steps\": {", on ? "," : "", medium_names[on],
            (unsigned long)t->traces[on]);
    for (int at = 0; at < STEPS; at++)
      fprintf(out, "%s\n      \"%s\": {\"images\": %lu, \"bad\": %lu, \"bad_unsummed\": %lu}",
              at ? "," : "", step_names[at], (unsigned long)t->images[on][at],
              (unsigned long)t->bad[0][on][at], (unsigned long)t->bad[1][on][at]);
    fprintf(out, "\n    }}");
  }
  fprintf(out, "\n  },\n  \"mutants\": [");
  for (int i = 1; i < MUTANTS && mutants; i++)
    fprintf(out, "%s\n    {\"name\": \"%s\", \"caught\": %s, \"on\": \"%s\", \"by\": \"%s\"}",
            i > 1 ? "," : "", mutant_names[i], all->mutants[i].medium < 0 ? "false" : "true",
            all->mutants[i].medium < 0 ? "" : medium_names[all->mutants[i].medium],
            all->mutants[i].ignoring ? "order" : "content");
  fprintf(out, "\n  ]\n}\n");
  fclose(out);
}

uint32_t print_mutants(const shared *all) {
  uint32_t caught = 0;
  int control = all->mutants[MUTANT_NONE].medium;
  if (control >= 0)
    printf("BAD: without a mutant, %s: %s\n", medium_names[control],
           all->mutants[MUTANT_NONE].example);
  for (int i = 1; i < MUTANTS; i++) {
    int on = all->mutants[i].medium;
    caught += on >= 0;
    printf("  %-46s %s%s%s\n", mutant_names[i], on < 0 ? "SURVIVED" : medium_names[on],
           on < 0 ? "" : ": ", all->mutants[i].example);
  }
  printf("%u mutants of the commit order seeded, %u caught\n", MUTANTS - 1, caught);
  return MUTANTS - 1 - caught + (control >= 0);
}
