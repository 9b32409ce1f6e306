/* access.c -- loads from a region's mapping, and the errors of those that meet lost memory. */
#include "access.h"

#include <inttypes.h>
#include <signal.h>
#include <string.h>

#include "error.h"
#include "fault.h"
#include "guard.h"
#include "medium.h"
#include "region.h"
#include "superblock.h"

#define ADVICE                                                                                     \
  "restore still reads snapshots that lie elsewhere; go on in another place, and keep this one "   \
  "until that has a snapshot"
#define CUT_ADVICE /* of the region's size */                                                      \
  "it was cut while it was open; go on in another place; truncate -s %" PRIu64                     \
  " gives the file its length back, and restore what lies before the cut"

/* The latch is no part of what a reader's caller sees as const. */
static int latch(const lck_region *region) {
  if (!(region->flags & LCK_READ_ONLY))
    (void)lck_region_latch((lck_region *)(uintptr_t)region, LCK_E_IO);
  return LCK_E_IO;
}

/* Set the error text. While a region is being made or mapped its superblock is not known yet. */
static int explain(const lck_region *region, const lck_bus_fault *fault) {
  uint64_t at = (fault->address - (uintptr_t)region->base) % region->reserved_length;
  uint64_t size = lck_superblock_copy(region).size;
  uint64_t length;
  if (lck_medium_length(region, &length) != 0)
    return LCK_E_IO;
  if (fault->code == BUS_MCEERR_AR) {
    uint64_t lost = UINT64_C(1) << fault->bits;
    return lck_fail(LCK_E_IO,
                    "memory error at offset %" PRIu64 ": [%" PRIu64 ", +%" PRIu64
                    ") of a region of %" PRIu64 " bytes is poisoned (file: %" PRIu64
                    " bytes); " ADVICE "; the device's list of bad blocks (ndctl list -M) has it",
                    at, at / lost * lost, lost, size, length);
  }
  if (at >= length)
    return lck_fail(LCK_E_IO,
                    "SIGBUS at offset %" PRIu64 " of a region of %" PRIu64
                    " bytes: its file has %" PRIu64 " bytes now, " CUT_ADVICE,
                    at, size, length, size);
  return lck_fail(LCK_E_IO,
                  "SIGBUS at offset %" PRIu64 " of a region of %" PRIu64 " bytes (file: %" PRIu64
                  " bytes): the medium cannot read that page or has no room for it; " ADVICE
                  "; the kernel's log says more",
                  at, size, length);
}

int lck_access_try(unsigned char *base, uint64_t reserved_length, void (*body)(void *),
                   void *argument, lck_bus_fault *fault) {
  if (lck_fault_visit(LCK_FAULT_POISON) != 0) {
    body = lck_fault_poison;
    argument = base;
  }
  return lck_bus_run(base, LCK_MAPPINGS * reserved_length, body, argument, fault);
}

int lck_access_failed(const lck_region *region, const lck_bus_fault *fault) {
  (void)explain(region, fault);
  return latch(region);
}

int lck_access_run(const lck_region *region, void (*body)(void *), void *argument) {
  lck_bus_fault fault;
  int failed = lck_access_try(region->base, region->reserved_length, body, argument, &fault);
  return failed ? lck_access_failed(region, &fault) : 0;
}

int lck_access_whole(const lck_region *region) {
  uint64_t length;
  uint64_t size = lck_superblock_copy(region).size;
  if (region->medium == LCK_DEVDAX)
    return 0; /* of fixed size */
  int rc = lck_medium_length(region, &length);
  if (rc == 0 && length >= size)
    return 0;
  if (rc == 0)
    (void)lck_fail(LCK_E_IO,
                   "the file of a region of %" PRIu64 " bytes has %" PRIu64
                   " bytes now, " CUT_ADVICE,
                   size, length, size);
  return latch(region);
}

/* ---- loads -------------------------------------------------------------------------------- */

typedef struct load_range {
  const unsigned char *from;
  void *to;
  uint64_t length, word;
  uint32_t crc;
} load_range;

static void load(void *argument) {
  load_range *at = argument;
  memcpy(at->to, at->from, at->length);
}

static void load_word(void *argument) {
  load_range *at = argument;
  at->word = __atomic_load_n((const uint64_t *)(const void *)at->from, __ATOMIC_ACQUIRE);
}

static void sum(void *argument) {
  load_range *at = argument;
  at->crc = lck_crc32c(0, at->from, at->length);
}

int lck_access_load(const lck_region *region, uint64_t offset, void *to, uint64_t length) {
  load_range at = {.from = region->base + offset, .to = to, .length = length};
  return lck_access_run(region, load, &at);
}

int lck_access_word(const lck_region *region, uint64_t offset, uint64_t *word) {
  load_range at = {.from = region->base + offset};
  int rc = lck_access_run(region, load_word, &at);
  if (rc == 0)
    *word = at.word;
  return rc;
}

int lck_access_sum(const lck_region *region, uint64_t offset, uint64_t length, uint32_t *crc) {
  load_range at = {.from = region->base + offset, .length = length};
  int rc = lck_access_run(region, sum, &at);
  if (rc == 0)
    *crc = at.crc;
  return rc;
}
