/* mutant.h -- mistakes in the commit order, made on purpose: a crash test that does not find every
 * one of them proves nothing. In the trace build `lck_mutant` chooses one; elsewhere all of them
 * are constant 0 and leave no instruction behind. */
#ifndef LCK_MUTANT_H
#define LCK_MUTANT_H

#include <stdint.h>

#include "lightck.h"

enum lck_mutants {
  MUTANT_NONE,
  MUTANT_TABLES_NOT_SYNCED,      /* record follows payload and tables without a sync */
  MUTANT_NO_FENCE_BEFORE_RECORD, /* nor with any fence up to the word */
  MUTANT_WORD_BEFORE_BODY,       /* record published before its own fields */
  MUTANT_BODY_NOT_FENCED,        /* nothing orders the record's body before its word */
  MUTANT_ACKNOWLEDGED_EARLY,     /* commit returns before the word is durable */
  MUTANT_NEVER_INVALIDATED,      /* the record stays valid while payload changes */
  MUTANT_INVALIDATED_LATE,       /* invalidation follows the first payload byte */
  MUTANT_INVALIDATION_UNSYNCED,  /* invalidation not durable before payload */
  MUTANT_BLANK_OVERTAKES_WORD,   /* body blanked before the word is durably 0 */
  MUTANT_LIVE_SLOT,              /* the newest snapshot is overwritten (by the driver) */
  MUTANT_LAYOUT_NOT_FLUSHED,     /* layout table stored, never flushed */
  MUTANT_MANIFEST_NOT_FLUSHED,   /* manifest likewise */
  MUTANT_PAYLOAD_NOT_FLUSHED,    /* cached kernel's payload likewise */
  MUTANT_WORKER_NOT_FENCED,      /* a worker reports a chunk done before it fenced */
  MUTANT_CALLER_NOT_FENCED,      /* so does the training thread, where it copies alone or helps */
  MUTANT_UPDATE_NOT_FENCED,      /* so do the threads of an update that streams */
  MUTANT_SUPERBLOCKS_AT_ONCE,    /* both copies written before a sync */
  MUTANT_SUPERBLOCK_NEWER_FIRST, /* the copy that counts is overwritten, not the other */
  MUTANT_TORN_COPY_KEPT,         /* a superblock is written over what is left of a torn one */
  MUTANT_GROWTH_NOT_SETTLED,     /* superblock names space that is not durably there */
  MUTANT_NOT_ADOPTED,            /* a new owner relies on what is in caches only */
  MUTANT_SYNC_RETRIED,           /* a failed sync is tried again and then believed */
  MUTANT_ADOPTED_CLEAN,          /* a new owner syncs pages that may count as clean */
  MUTANT_JOURNAL_NEWEST,         /* journal: the newest entry is overwritten */
  MUTANT_JOURNAL_OVER_END,       /* journal: forward start's entry overwrites its own step's end */
  MUTANT_JOURNAL_SECOND,         /* journal: the second newest is overwritten, not the oldest */
  MUTANT_JOURNAL_KEPT_VALID,     /* journal: the old word stays while its place changes */
  MUTANT_JOURNAL_UNFENCED,       /* journal: nothing orders entry and blob before the word */
  MUTANT_JOURNAL_UNFLUSHED,      /* journal: blob stored, never flushed */
  MUTANT_JOURNAL_ACKED_EARLY,    /* journal: the write returns before the word is durable */
  MUTANT_OLD_SUPERBLOCKS_KEPT,   /* creation: superblocks of an old region's remains not blanked */
  MUTANT_OLD_RECORDS_KEPT,       /* creation: nor its records */
  MUTANT_OLD_JOURNAL_KEPT,       /* creation: nor its journal entries */
  MUTANTS,
};

#ifdef LCK_TRACE

extern int lck_mutant;
#define LCK_MUTANT(which) (lck_mutant == (which))

/* lck_persist_store without its flush. */
int lck_mutant_store(lck_region *region, uint64_t offset, const void *bytes, uint64_t length);

#else

#define LCK_MUTANT(which) 0

static inline int lck_mutant_store(lck_region *region, uint64_t offset, const void *bytes,
                                   uint64_t length) {
  (void)region, (void)offset, (void)bytes, (void)length;
  return 0;
}

#endif

#endif
