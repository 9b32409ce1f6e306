/* Making a region as lightck's Python part does, and committing snapshots into it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest.h"

#define PATH_MOST 256
#define GROW_EVERY 16u      /* snapshots */
#define NODE_OF_ADDRESS 3ul /* get_mempolicy: MPOL_F_NODE | MPOL_F_ADDR */

/* ---- open and create ---------------------------------------------------------------------- */

static int node_of(const lck_region_info *info) {
  int node = -1;
  const char *payload = (const char *)info->base + info->segments[0].offset;
  if (syscall(SYS_get_mempolicy, &node, NULL, 0, payload, NODE_OF_ADDRESS) != 0)
    return -1;
  return node;
}

static void describe(const lck_region *region) {
  static const char *const media[] = {"", "fsdax", "devdax", "file", "tmpfs", "hugetlbfs"};
  static const char *const units[] = {"none", "byte", "line", "page"};
  lck_region_info info;
  must(lck_region_describe(region, &info), "describe the region");
  say("IS %s %s granularity=%u node=%d segments=%u", media[info.medium], units[info.granularity],
      info.granularity, node_of(&info), info.segment_count);
}

/* Two descriptors, as the region wants them: one to map, one that carries the locks. */
static int open_pair(const char *path, int flags, int pair[2]) {
  pair[0] = open(path, flags | O_CLOEXEC, 0600);
  pair[1] = pair[0] < 0 ? -1 : open(path, (flags & O_ACCMODE) | O_CLOEXEC);
  if (pair[1] >= 0)
    return 0;
  if (pair[0] >= 0 || errno != ENOENT) {
    say("FAILED open %s: %s", path, strerror(errno));
    exit(1);
  }
  return ABSENT;
}

int region_open(const options *o, uint32_t flags, lck_region **out) {
  int pair[2];
  int code = open_pair(o->path, flags & LCK_READ_ONLY ? O_RDONLY : O_RDWR, pair);
  if (code != 0)
    return code;
  code = lck_region_open(pair[0], pair[1], flags, o->node, out);
  close(pair[0]);
  close(pair[1]);
  if (code == 0)
    describe(*out);
  return code;
}

static lck_region *create_at(const options *o, const char *path, int flags) {
  int pair[2];
  lck_region *region = NULL;
  lck_region_spec spec = {.run_id = "guest",
                          .world = 1,
                          .slot_count = 2,
                          .slot_bytes = SLOT_BYTES,
                          .journal_bytes = 65536,
                          .flags = o->flags,
                          .numa_node = o->node};
  say("CREATING %s", path);
  must(open_pair(path, O_RDWR | flags, pair), "open");
  must(lck_region_create(pair[0], pair[1], &spec, &region), "create the region");
  close(pair[0]);
  close(pair[1]);
  describe(region);
  return region;
}

/* Under another name first, so that a crash leaves no half-made region under its own. */
static lck_region *create(const options *o) {
  char draft[PATH_MOST];
  char folder[PATH_MOST];
  snprintf(draft, sizeof(draft), "%s.new", o->path);
  snprintf(folder, sizeof(folder), "%s", o->path);
  unlink(draft);
  lck_region *region = create_at(o, draft, O_CREAT | O_EXCL);
  int fd = open(dirname(folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int published = fd >= 0 && link(draft, o->path) == 0 && unlink(draft) == 0;
  if (!published || ((o->flags & LCK_PROCESS_DURABLE) == 0 && fsync(fd) != 0)) {
    say("FAILED publish %s: %s", o->path, strerror(errno));
    exit(1);
  }
  close(fd);
  return region;
}

lck_region *region_own(const options *o) {
  lck_region *region = NULL;
  int code = region_open(o, o->flags, &region);
  if (code == ABSENT)
    return create(o);
  if (code == LCK_E_FORMAT && strncmp(o->path, "/dev/", 5) == 0)
    return create_at(o, o->path, 0);
  must(code, "open the region");
  return region;
}

/* ---- commit ------------------------------------------------------------------------------- */

/* Where the extents go: the last two into the newest segment, so that growth is used. */
static void place(const lck_region_info *info, uint32_t slot, manifest *listed) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < EXTENTS; i++) {
    const lck_segment *segment = &info->segments[i < 4 ? 0 : info->segment_count - 1];
    if (i == 0 || (i == 4 && info->segment_count > 1))
      at = segment->offset + slot * segment->slot_bytes + (i == 0 ? PAYLOAD_AT : 0);
    listed->extents[i] = (lck_read){.offset = at, .length = content_length(listed->number, i)};
    at += (listed->extents[i].length + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
  }
}

/* The slot's own table is kept when it is the wanted one. */
static const void *layout_to_write(const lck_region *region, const lck_region_info *info,
                                   uint32_t slot, const unsigned char *table, uint32_t length) {
  lck_record present;
  const unsigned char *base = info->base;
  int kept = lck_slot_read(region, slot, &present) == 0 && present.layout_length == length &&
             memcmp(base + present.layout_offset, table, length) == 0;
  return kept ? NULL : table;
}

/* Bytes come from one buffer for all extents, which stays as it is until they are captured. */
static int capture(lck_snapshot *snapshot, manifest *listed, unsigned char *bytes) {
  lck_copy copies[EXTENTS];
  uint32_t crcs[EXTENTS];
  uint32_t batch;
  for (uint32_t i = 0; i < EXTENTS; i++) {
    content_fill(listed->number, i, bytes);
    copies[i] = (lck_copy){.offset = listed->extents[i].offset,
                           .source = bytes,
                           .length = listed->extents[i].length,
                           .layer = i};
    bytes += listed->extents[i].length;
  }
  int code = lck_snapshot_add(snapshot, copies, EXTENTS, &batch);
  if (code == 0)
    code = lck_snapshot_capture(snapshot, batch, -1, 1);
  if (code == 0)
    code = lck_snapshot_digests(snapshot, batch, crcs);
  for (uint32_t i = 0; code == 0 && i < EXTENTS; i++)
    listed->extents[i].crc = crcs[i];
  return code;
}

/* Whatever has failed, nothing may be written any more, as if the medium were well again. */
static void show_latch(lck_region *region, lck_pool *pool, int code, const char *why) {
  lck_snapshot *snapshot;
  uint32_t slot = 0;
  say("UNCOMMITTED %d %s", code, why);
  for (; slot < 2 && (code = lck_snapshot_begin(pool, region, slot, &snapshot)) != 0; slot++)
    say("REFUSED slot %u: %d %s", slot, code, lck_last_error());
  exit(slot == 2 ? 0 : 1);
}

/* Into an open snapshot; its failure, if there is one, in the words of the call that met it. */
static int fill(lck_region *region, lck_snapshot *snapshot, lck_record *record,
                unsigned char *bytes) {
  lck_region_info info;
  unsigned char table[LAYOUT_MOST];
  manifest listed = {.number = record->step, .count = EXTENTS};
  int state;
  must(lck_region_describe(region, &info), "describe the region");
  place(&info, record->slot, &listed);
  uint64_t start = info.segments[0].offset + record->slot * info.segments[0].slot_bytes;
  record->timeline = info.timeline;
  record->layout_offset = start;
  record->layout_length = content_layout(record->step, table);
  record->manifest_offset = start + MANIFEST_AT;
  record->manifest_length = sizeof(listed);
  const void *layout =
      layout_to_write(region, &info, record->slot, table, (uint32_t)record->layout_length);
  int code = capture(snapshot, &listed, bytes);
  if (code == 0)
    code = lck_snapshot_seal(snapshot, record, layout, &listed);
  if (code == 0)
    code = lck_snapshot_wait(snapshot, -1, &state);
  return code;
}

static int grow_sometimes(lck_region *region, uint64_t number) {
  lck_region_info info;
  must(lck_region_describe(region, &info), "describe the region");
  if (number % GROW_EVERY != 0 || info.segment_count == SEGMENTS)
    return 0;
  return lck_region_grow(region, SLOT_BYTES);
}

static void commit(lck_region *region, lck_pool *pool, lck_record *record, unsigned char *bytes) {
  lck_snapshot *snapshot = NULL;
  char why[256];
  int code = grow_sometimes(region, record->step);
  if (code == 0)
    code = lck_snapshot_begin(pool, region, record->slot, &snapshot);
  if (code == 0)
    code = fill(region, snapshot, record, bytes);
  if (code == 0)
    say("COMMITTED %" PRIu64, record->step); /* at once: this is when others are told */
  snprintf(why, sizeof(why), "%s", lck_last_error());
  must(lck_snapshot_free(snapshot), "free the snapshot");
  if (code != 0)
    show_latch(region, pool, code, why);
}

/* A new timeline that continues what was found, as every attach begins one. */
static void branch(lck_region *region, const found *from) {
  lck_region_info info;
  lck_branch lineage[LCK_MAX_LINEAGE];
  uint32_t count = 0;
  must(lck_region_describe(region, &info), "describe the region");
  if (from->number > 0)
    lineage[count++] = (lck_branch){from->record.timeline, from->record.sequence};
  for (uint32_t i = 0; from->number > 0 && i < info.lineage_count && count < LCK_MAX_LINEAGE; i++)
    if (info.lineage[i].sequence < from->record.sequence &&
        info.lineage[i].timeline != from->record.timeline)
      lineage[count++] = info.lineage[i];
  must(lck_region_branch(region, info.timeline + 1, lineage, count), "begin a timeline");
}

void commit_on(const options *o, lck_region *region) {
  found from = recover(region);
  lck_pool_spec spec = {.threads = 2, .chunk_bytes = 65536};
  lck_pool *pool;
  unsigned char *bytes = malloc(SLOT_BYTES);
  must(bytes == NULL ? LCK_E_NOMEM : 0, "memory for the sources");
  branch(region, &from);
  must(lck_pool_create(&spec, &pool), "start the pool");
  lck_record record = {.slot = from.number > 0 ? from.record.slot : 1};
  for (uint64_t i = 1; i <= o->commits; i++) {
    record.step = from.number + i;
    record.sequence = from.last_sequence + i;
    record.slot = 1 - record.slot;
    say("BEGUN %" PRIu64, record.step);
    commit(region, pool, &record, bytes);
  }
  must(lck_pool_destroy(pool), "stop the pool");
  must(lck_region_close(region), "close the region");
  free(bytes);
}
