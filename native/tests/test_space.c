/* What an owner maps of a region that is there already: on tmpfs the pages that it writes. */
#include "snapshot_bed.h"
#include "space.h"

static uint64_t page_bytes(void) {
  return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Pages of [offset, +length) that have a mapping in this process. */
static uint64_t mapped_pages(const bed *b, uint64_t offset, uint64_t length) {
  int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  CHECK(fd >= 0, "pagemap");
  uint64_t first = (uint64_t)(uintptr_t)lck_guard_store(b->region, offset) / page_bytes();
  uint64_t count = length / page_bytes(), found = 0;
  for (uint64_t i = 0; i < count; i++) {
    uint64_t entry;
    CHECK(pread(fd, &entry, 8, (off_t)((first + i) * 8)) == 8, "pagemap");
    found += entry >> 63;
  }
  close(fd);
  return found;
}

static uint64_t mapped_of_slot(const bed *b, uint32_t slot) {
  return mapped_pages(b, bed_slot(b, slot), b->info.segments[0].slot_bytes);
}

static void test_an_owner_maps_the_slots_that_it_writes(bed *b) {
  bed_create(b, "space");
  uint64_t slot_pages = b->info.segments[0].slot_bytes / page_bytes();
  int memory = b->info.medium == LCK_TMPFS;
  if (memory) /* new space is zeroed before training, not in it */
    for (uint32_t slot = 0; slot < 3; slot++)
      CHECK(mapped_of_slot(b, slot) == slot_pages, "slot %u", slot);
  bed_reopen(b);
  for (uint32_t slot = 0; slot < 3 && memory; slot++)
    CHECK(mapped_of_slot(b, slot) == 0, "slot %u: %lu", slot, mapped_of_slot(b, slot));
  lck_pool *pool = bed_pool(2, 65536);
  CHECK(!memory || atomic_load(&b->region->unmapped) >> 1 & 1, "not yet");
  bed_snapshot(b, pool, 1, 1);
  CHECK(!memory || !(atomic_load(&b->region->unmapped) >> 1 & 1), "slot 1 was written");
  CHECK(!memory || atomic_load(&b->region->unmapped) & 1, "slot 0 was not");
  if (memory)
    CHECK(mapped_of_slot(b, 1) > 0 && mapped_of_slot(b, 2) < 16, "%lu", mapped_of_slot(b, 2));
  bed_snapshot(b, pool, 1, 2);
  bed_snapshot(b, pool, 2, 3);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* Beside a store's own page lie others, of which one fault maps all that the kernel takes at once:
 * after the touch a store to any page of the piece finds a mapping that it may write through. */
static void test_touched_pages_take_stores_without_a_fault(bed *b) {
  bed_create(b, "touch");
  bed_reopen(b);
  if (b->info.medium == LCK_TMPFS) {
    uint64_t at = bed_slot(b, 0) + 3 * page_bytes(), length = 2 << 20;
    lck_space_touch(b->region, 0, at, length);
    uint64_t touched = mapped_pages(b, at, length);
    CHECK(touched >= length / 65536, "%lu", touched);
    lck_space_touched(b->region, 1);
    lck_space_touch(b->region, 1, bed_slot(b, 1), length);
    CHECK(mapped_pages(b, bed_slot(b, 1) + 65536, length - 65536) == 0, "known to be mapped");
  }
  bed_destroy(b);
}

static void body(bed *b) {
  test_an_owner_maps_the_slots_that_it_writes(b);
  test_touched_pages_take_stores_without_a_fault(b);
}

int main(void) {
  return bed_main(body);
}
