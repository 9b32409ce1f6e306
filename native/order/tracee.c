/* tracee -- the program under trace: release objects, driven as the crash enumerator drives them.
 *
 * tracee KERNEL SEED REGION-FD BED-FD. It was told nothing of tracing but here: the region's medium
 * is taken for one whose lines must be flushed, and an int3 tells the tracer what no instruction
 * shows: marks, the region's address, a length that is durable. Linked with --wrap for these. */
#include <string.h>
#include <sys/mman.h>

#include "fault.h"
#include "medium.h"
#include "order.h"
#include "region.h"
#include "space.h"

int lck_mutant; /* of the driver */

static void say(enum saying which, uint64_t a, uint64_t b) {
  __asm__ volatile("int3" : : "a"(SAYING), "D"((uint64_t)which), "S"(a), "d"(b) : "memory");
}

void lck_trace_start(lck_trace_log *log) {
  memset(log, 0, sizeof(*log));
  say(SAY_START, 0, 0);
}

void lck_trace_stop(void) {
  say(SAY_STOP, 0, 0);
}

void lck_trace_force(int granularity) {
  if (granularity != LCK_GRAN_LINE)
    DIE("granularity %d", granularity);
}

/* The driver has no sync to fail here. */
int lck_fault_arm(uint32_t point, int64_t after, int error) {
  if (after >= 0)
    DIE("fault %u after %ld: %d", point, (long)after, error);
  return 0;
}

/* The driver's marks; the release objects have no calls of it. */
void lck_trace(enum lck_trace_op op, const lck_region *region, uint64_t offset, uint64_t length) {
  (void)op, (void)region;
  say(SAY_MARK, offset, length);
}

int __real_lck_medium_detect(lck_region *region);
int __real_lck_space_reserve(lck_region *region, uint64_t size);
int __real_lck_space_extend(lck_region *region, uint64_t old_size, uint64_t new_size);
int __wrap_lck_medium_detect(lck_region *region);
int __wrap_lck_space_reserve(lck_region *region, uint64_t size);
int __wrap_lck_space_extend(lck_region *region, uint64_t old_size, uint64_t new_size);

int __wrap_lck_medium_detect(lck_region *region) {
  int rc = __real_lck_medium_detect(region);
  region->granularity = LCK_GRAN_LINE;
  return rc;
}

int __wrap_lck_space_reserve(lck_region *region, uint64_t size) {
  int rc = __real_lck_space_reserve(region, size);
  if (rc == 0 && !(region->flags & LCK_READ_ONLY))
    say(SAY_MAPPED, (uint64_t)(uintptr_t)region->base, region->reserved_length);
  return rc;
}

int __wrap_lck_space_extend(lck_region *region, uint64_t old_size, uint64_t new_size) {
  int rc = __real_lck_space_extend(region, old_size, new_size);
  if (rc == 0)
    say(SAY_SETTLED, new_size, 0);
  return rc;
}

int main(int count, char **arguments) {
  if (count != 5)
    DIE("%d arguments, expected KERNEL SEED REGION-FD BED-FD", count - 1);
  int fd = atoi(arguments[3]);
  bed *b = mmap(NULL, sizeof(*b), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(arguments[4]), 0);
  lck_trace_log log;
  if (b == MAP_FAILED)
    DIE("no memory for the bed");
  bed_seed(b, MEDIUM_ADR, strtoull(arguments[2], NULL, 0));
  if (lck_kernel(arguments[1], NULL) != 0)
    DIE("%s", lck_last_error());
  bed_create(b, fd, &log);
  return bed_continue(b, fd, 1, &log);
}
