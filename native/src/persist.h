/* persist.h -- every store to a region goes through these few primitives, and only these.
 *
 * One that meets memory which is gone (see access.h) fails with LCK_E_IO and latches the region.
 * What makes stores durable is chosen once per mapping (granularity). A fence orders and drains the
 * calling thread's own flushes and non-temporal stores, nobody else's: each worker fences for
 * itself before it reports a copy as done. */
#ifndef LCK_PERSIST_H
#define LCK_PERSIST_H

#include <stdint.h>

#include "lightck.h"

/* Copy payload with the current kernel; *crc is continued. Flushes when the kernel's stores are
 * cached; does not fence. `offset` is on a line; the last line is padded with zeros. Thread-safe
 * for disjoint extents. */
int lck_persist_payload(lck_region *region, uint64_t offset, const void *source, uint64_t length,
                        uint32_t *crc);

/* Where payload may be stored whose stores need no flush: whole lines, non-temporal; and, in the
 * same section, that it has been. No fence. */
unsigned char *lck_persist_stream_to(lck_region *region, uint64_t offset);
void lck_persist_streamed(lck_region *region, uint64_t offset, uint64_t length);

/* Make payload durable that somebody else (a device) has stored there already, through whatever
 * cache: hash it, pad the last line with zeros, flush every line. No store of that other one may
 * still be under way. */
int lck_persist_in_place(lck_region *region, uint64_t offset, uint64_t length, uint32_t *crc);

/* Ordinary stores, then flush of their lines; no fence. */
int lck_persist_store(lck_region *region, uint64_t offset, const void *bytes, uint64_t length);

/* One aligned 8-byte store, never torn, then flush of its line; no fence. */
int lck_persist_publish(lck_region *region, uint64_t offset, uint64_t word);

/* Bytes that nobody recovers: ordinary stores, neither flushed nor fenced. Their first 8 bytes are
 * not stored but count the turns there, odd while the rest changes. */
int lck_persist_note(lck_region *region, uint64_t offset, const void *bytes, uint64_t length);

/* Drain the calling thread's stores, also those outside any region. On page media this orders
 * nothing on the medium: see sync. */
void lck_persist_fence(void);

/* On page media: fdatasync; returns when the file's data is on the medium. Elsewhere: a fence.
 * A failure latches the region; it is never retried, and every later sync fails. Any thread. */
int lck_persist_sync(lck_region *region);

/* Make what a new owner finds durable, which may be in caches only: its predecessor may have died
 * before a sync, or stopped at a failed one, which leaves pages that count as clean. This covers
 * the headers and the boundary journal, and with them what they say, before anything is overwritten
 * in reliance on them. */
int lck_persist_adopt(lck_region *region);

/* Make the kernel back every page of [offset, +length) without changing a byte; no other thread may
 * store there meanwhile. */
int lck_persist_touch(lck_region *region, uint64_t offset, uint64_t length);

#endif
