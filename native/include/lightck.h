/* lightck.h -- the native writer: bytes on a medium, in an order that survives a crash.
 *
 * Knows no tensors and no Python. A *region* is one mapped file or device: two superblocks, one
 * commit record per slot, a boundary journal, and segments that hold the slots' space. A *snapshot*
 * is one pass of copies into one slot, followed by a commit. A *pool* owns the worker threads.
 *
 * Conventions. Functions return 0 or a negative LCK_E_* code; lck_last_error() has the text, with
 * the values that matter, for the calling thread. Out-parameters come last and are written only on
 * success, unless said otherwise. Offsets count bytes from the start of the region. A handle may be
 * used from one thread at a time, except where a function says "any thread".
 *
 * Memory that is gone (the file cut by somebody, a poisoned page, a disk that cannot be read)
 * raises SIGBUS in whoever touches it. Inside the library that is LCK_E_IO, with the offset, region
 * size, file length and what to do; a region open for writing is latched. The handler is installed
 * once per process, with the first region; anybody else's SIGBUS goes to the handler that was there
 * then, or ends the process. Whoever installs another one later must pass on what is not theirs:
 * call what sigaction() gave them, or put it back and raise the signal.
 *
 * After fork() a child has no mapping, lock or workers: calls on older handles say LCK_E_FORKED. */
#ifndef LIGHTCK_H
#define LIGHTCK_H
#include <stddef.h>
#include <stdint.h>

#define LCK_ABI 15u
#define LCK_MAX_SLOTS 16u
#define LCK_MAX_SEGMENTS 16u
#define LCK_MAX_LINEAGE 16u
#define LCK_LINE 64u /* bytes; extents start on a line and own their last line whole */
#define LCK_ALL UINT64_MAX

enum {
  LCK_E_INVALID = -1, /* an argument breaks the contract; nothing was done */
  LCK_E_IO = -2,      /* the medium or a system call failed; a region open for writing is latched */
  LCK_E_PREVIOUS = -3,  /* the region is latched by an earlier failure */
  LCK_E_FORMAT = -4,    /* not a region, or of another format version */
  LCK_E_CORRUPT = -5,   /* a checksum or a bound does not hold */
  LCK_E_EMPTY = -6,     /* the slot holds no committed snapshot */
  LCK_E_BUSY = -7,      /* another process owns the region */
  LCK_E_LEASED = -8,    /* a reader holds the slot, or (for a reader) the owner is writing it */
  LCK_E_FULL = -9,      /* not enough space, or the medium cannot grow */
  LCK_E_TIMEOUT = -10,  /* the time ran out; the operation goes on */
  LCK_E_NOMEM = -11,    /* no memory for the call's own bookkeeping */
  LCK_E_FORKED = -12,   /* the handle belongs to the parent process */
  LCK_E_MISMATCH = -13, /* live bytes differ from the copied ones (audit) */
  LCK_E_STATE = -14,    /* not possible in the snapshot's present state */
};

/* ABI of the loaded library; compare with LCK_ABI before any other call. */
uint32_t lck_abi_version(void);

/* Text of the calling thread's last error; never NULL; valid until its next failing call. */
const char *lck_last_error(void);

/* Select the copy kernel by name ("avx512", "avx2", "sse42", "portable", "aarch64"), process-wide;
 * NULL: keep it, the fastest that this CPU has. *name: the one in use. LCK_E_INVALID: not there. */
int lck_kernel(const char *select, const char **name);

/* CRC32C (Castagnoli) of `length` bytes, continuing from `crc` (0 to start). Any thread. */
uint32_t lck_crc32c(uint32_t crc, const void *bytes, uint64_t length);

/* CRC32C of bytes A then B, from crc(A), crc(B) and the length of B. Any thread. */
uint32_t lck_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

/* Bytes that this process can take without waking the OOM killer: of the machine's and its control
 * groups' DRAM, with `swap` of both and swap. LCK_ALL: nobody says. Any thread. */
uint64_t lck_memory_available(int swap);

typedef struct lck_region lck_region;
typedef struct lck_pool lck_pool;
typedef struct lck_snapshot lck_snapshot;

enum { LCK_FSDAX = 1, LCK_DEVDAX = 2, LCK_FILE = 3, LCK_TMPFS = 4, LCK_HUGETLBFS = 5 };

/* How stores become durable: nothing beyond a fence (memory that dies with the host), a fence
 * (power-protected caches), line flush + fence, or msync/fdatasync. */
enum { LCK_GRAN_NONE = 0, LCK_GRAN_BYTE = 1, LCK_GRAN_LINE = 2, LCK_GRAN_PAGE = 3 };

enum {
  LCK_READ_ONLY = 1u << 0,       /* no owner lock, no stores */
  LCK_PROCESS_DURABLE = 1u << 1, /* an ordinary file without syncs: survives the process only */
};

typedef struct lck_region_spec {
  uint8_t run_id[16];
  uint32_t rank, world;
  uint32_t slot_count;    /* 2..LCK_MAX_SLOTS */
  uint32_t flags;         /* LCK_PROCESS_DURABLE */
  uint64_t slot_bytes;    /* of each slot; rounded up to the medium's granule */
  uint64_t journal_bytes; /* of the boundary journal, three entries; may be 0: no journal */
  int32_t numa_node;      /* bind the memory there, or -1 */
  uint32_t reserved;
} lck_region_spec;

/* A mapping that somebody else made (a libpmemobj pool) and keeps, unmoved, until the region on it
 * is closed. The region may use all of it, and can never be larger. */
typedef struct lck_backing {
  void *base;      /* of offset 0; on a page, of the file too */
  uint64_t length; /* bytes from there, allocated on the medium */
} lck_backing;

typedef struct lck_segment {
  uint64_t offset, length, slot_bytes; /* slot i owns [offset + i * slot_bytes, + slot_bytes) */
} lck_segment;

typedef struct lck_branch {
  uint64_t timeline, sequence; /* this timeline counts up to this sequence, inclusive */
} lck_branch;

typedef struct lck_region_info {
  uint8_t uuid[16], run_id[16];
  uint32_t format_version, rank, world, slot_count;
  uint32_t medium, granularity, page_bytes, latched; /* latched: 0, or the LCK_E_* code, negated */
  uint64_t size, generation, created_ns;
  uint64_t journal_offset, journal_length;
  uint64_t timeline, suspect; /* newest, 0 before the first attach; its first suspect sequence */
  const void *base;           /* where offset 0 is mapped */
  void *device;               /* the same bytes, for a device that stores fed copies itself */
  uint32_t segment_count, lineage_count;
  lck_segment segments[LCK_MAX_SEGMENTS];
  lck_branch lineage[LCK_MAX_LINEAGE]; /* ancestors of `timeline`, each up to its branch point */
} lck_region_info;

/* Make a region in the empty file (or on the device) `fd`, and own it. `lock_fd` is a second open
 * file description of the same file: it carries the owner lock. Both stay the caller's and may be
 * closed at once: the region keeps its own duplicate. On return space is allocated and pre-faulted,
 * superblocks are durable, every slot is empty. LCK_E_BUSY; LCK_E_FULL with bytes needed and free;
 * LCK_E_IO: there may be a partial region, which lck_region_open refuses (LCK_E_FORMAT). */
int lck_region_create(int fd, int lock_fd, const lck_region_spec *spec, lck_region **out);

/* Open a region, without LCK_READ_ONLY as its owner. The newer valid superblock counts; a writer
 * repairs the other. LCK_E_BUSY; LCK_E_FORMAT (none, or cut); LCK_E_CORRUPT (both); LCK_E_IO. */
int lck_region_open(int fd, int lock_fd, uint32_t flags, int32_t numa_node, lck_region **out);

/* Make or open a region on a mapping that somebody else made. `fd` and `lock_fd` are of the file it
 * maps: for medium, syncs and locks. The region never unmaps it, but takes it from forked children
 * for good. The medium is found out as ever. create_on refuses space that holds a region, or whose
 * head cannot be read, and clears the headers' pages of any other.
 * Errors also: LCK_E_INVALID (alignment, length, a NUMA node). */
int lck_region_create_on(const lck_backing *backing, int fd, int lock_fd,
                         const lck_region_spec *spec, lck_region **out);
int lck_region_open_on(const lck_backing *backing, int fd, int lock_fd, uint32_t flags,
                       lck_region **out);

/* How many bytes a new region takes on a medium with pages of 4 KiB. */
int lck_region_measure(const lck_region_spec *spec, uint64_t *bytes);

/* Add a segment that gives every slot at least `slot_bytes` more, durably. Nothing mapped moves.
 * LCK_E_FULL (space, segments, or the fixed size of a device or backing; bytes needed and free are
 * named; the region stays as it was); LCK_E_IO. May block on the medium. */
int lck_region_grow(lck_region *region, uint64_t slot_bytes);

/* Begin a timeline: durably record its id and the ancestors it continues, each up to the sequence
 * where it branched off; suspects stay such. May block. LCK_E_INVALID, LCK_E_PREVIOUS, LCK_E_IO. */
int lck_region_branch(lck_region *region, uint64_t timeline, const lck_branch *lineage,
                      uint32_t count);

/* Durably mark every snapshot of the newest timeline from `sequence` on, there or to come: its
 * record is read with LCK_RECORD_SUSPECT. Not a byte of a slot changes. An earlier mark stays. Any
 * thread; may block on the medium. LCK_E_INVALID (also: no timeline), LCK_E_PREVIOUS, LCK_E_IO. */
int lck_region_suspect(lck_region *region, uint64_t sequence);

/* Describe the region. Any thread. */
int lck_region_describe(const lck_region *region, lck_region_info *out);

/* Unmap, unlock, free. No snapshot may be open. NULL is allowed. */
int lck_region_close(lck_region *region);

enum {
  LCK_RECORD_EARLY = 1u << 0,   /* finished before forward start */
  LCK_RECORD_SUSPECT = 1u << 1, /* replicas disagreed: said at its seal, or of its sequence since */
  LCK_RECORD_JIT = 1u << 2,     /* made by the failure path */
};

/* A commit record. Blob extents are in the slot's own space. */
typedef struct lck_record {
  uint64_t sequence; /* > 0; grows over the region's life; recovery prefers the highest */
  uint64_t step, timeline, parent;
  uint64_t layout_offset, layout_length, manifest_offset, manifest_length;
  uint64_t payload_bytes, wall_time_ns;
  uint8_t run_id[16];
  uint8_t share_digest[16]; /* of the share map; zero: this rank holds all */
  uint32_t layout_crc, manifest_crc;
  uint32_t flags, slot, rank, world;
} lck_record;

/* Read a slot's record and check it, its bounds, and the checksums of layout table and manifest.
 * Errors: LCK_E_EMPTY; LCK_E_CORRUPT, with what does not hold; LCK_E_IO, it cannot be read. */
int lck_slot_read(const lck_region *region, uint32_t slot, lck_record *out);

/* Take (`hold` 1) or drop (0) a reader's lease: no owner reuses the slot meanwhile. Then read the
 * record again. LCK_E_LEASED: the owner is writing the slot. */
int lck_slot_lease(lck_region *region, uint32_t slot, int hold);

typedef struct lck_read {
  uint64_t offset, length;
  void *destination; /* NULL: verify only */
  uint32_t crc;      /* expected CRC32C of the extent */
  uint32_t reserved;
} lck_read;

/* Verify extents and copy them out in one pass, on `threads` threads including the caller. Errors
 * leave destinations undefined: LCK_E_CORRUPT (*bad: the first, or one out of bounds), LCK_E_IO. */
int lck_slot_fetch(const lck_region *region, const lck_read *reads, uint64_t count,
                   uint32_t threads, uint64_t *bad);

/* The small state of a step's instants, due or not, in three places: the next entry goes over the
 * oldest, or over the newest if both are the fence's of one step; after any crash the two others
 * come back whole. Written, it survives the process, and power loss on line and byte media; on page
 * media it is whole then or not there. */
enum {
  LCK_JOURNAL_STEP_END = 1, /* step end: complete in itself; always carries LCK_RECORD_EARLY */
  LCK_JOURNAL_FORWARD = 2,  /* forward start: everything, of the same step */
  LCK_JOURNAL_FENCE = 3, /* before the first update that `step` needs: what none changes; early */
};

typedef struct lck_journal_entry {
  uint64_t step, timeline; /* serves parameters of this very step and timeline, no others */
  uint64_t length;         /* of the blob */
  uint64_t sequence;       /* out: grows with every write over the region's life */
  uint64_t wall_time_ns;   /* out: of the write */
  uint32_t kind, flags;    /* LCK_JOURNAL_*, LCK_RECORD_* */
} lck_journal_entry;

/* Write an entry; never syncs. One thread at a time, not only the handle's. LCK_E_FULL, with bytes
 * needed and there (a third); LCK_E_INVALID, so for an older timeline; LCK_E_PREVIOUS. */
int lck_journal_write(lck_region *region, const lck_journal_entry *entry, const void *blob);

/* Read the newest whole entry of a kind (0: of any) that belongs to the region's newest
 * timeline; what is older counts no more. blob NULL: describe and verify only. Any thread, also
 * read-only beside an owner that writes. Errors: LCK_E_EMPTY; LCK_E_CORRUPT, no entry is whole and
 * one is damaged; LCK_E_FULL, `room` is less than out->length, which is written; LCK_E_LEASED, the
 * owner rewrote the entries faster than they could be read. */
int lck_journal_read(const lck_region *region, uint32_t kind, lck_journal_entry *out, void *blob,
                     uint64_t room);

typedef struct lck_pool_spec {
  uint32_t threads;     /* 1..64 */
  uint32_t chunk_bytes; /* a copy is cut into pieces of this size; multiple of 4096 */
  uint32_t idle; /* 1: workers take what others leave of a CPU (a wish; at most 32); 0: as caller */
  uint32_t spans; /* of the trace, kept per thread; 0: none is recorded; at most 2^24 */
} lck_pool_spec;

typedef struct lck_stats {
  uint64_t bytes_copied, bytes_skipped, bytes_helped; /* helped: copied by callers of capture */
  uint64_t copy_ns;                                   /* captures, summed over threads */
  uint64_t bytes_drained, drain_ns;                   /* DRAM to region, summed over threads */
  uint64_t commits, commit_ns;
  uint64_t staging_bytes; /* DRAM held for staged snapshots */
} lck_stats;

/* Start the workers. All signals but SIGBUS are blocked in them, and a real-time signal of the
 * library's own in idle ones. These share out the caller's CPUs; beside them stand as many of the
 * caller's priority, asleep until somebody waits or others keep the CPUs busy. */
int lck_pool_create(const lck_pool_spec *spec, lck_pool **out);

/* Wake the workers for nothing, and measure until one of them looks for work: *ns, at most
 * `timeout_ns`. The caller spins. Any thread. */
int lck_pool_wake_time(lck_pool *pool, uint64_t timeout_ns, uint64_t *ns);

/* Set the workers' (no helper's) pace in thousandths; 0 pauses copies, not commits. Any thread. */
int lck_pool_pace(lck_pool *pool, uint32_t per_mille);

/* Write at most `bytes_per_s` to the (shared) region, all threads together; 0: no limit. What comes
 * from DRAM (LCK_COPY_STAGED) is stored up to 8 ms ahead of it, never committed. Any thread. */
int lck_pool_limit(lck_pool *pool, uint64_t bytes_per_s);

/* Map DRAM for staged copies of `bytes` in all and fault it in: slow. Any thread. LCK_E_NOMEM. */
int lck_pool_stage(lck_pool *pool, uint64_t bytes);

/* Counters since the pool began; no lock is taken on the copy path. Any thread. */
int lck_pool_stats(const lck_pool *pool, lck_stats *out);

/* Kinds of spans: chunks copied and drained; a slot's record made invalid; the stages of a commit.
 */
enum { LCK_SPAN_COPY = 1, LCK_SPAN_DRAIN = 2, LCK_SPAN_INVALIDATE = 3 };
enum { LCK_SPAN_TABLES = 4, LCK_SPAN_SYNC = 5, LCK_SPAN_RECORD = 6 };
enum { LCK_THREAD_COMMIT = 64, LCK_THREAD_CALLER = 65 }; /* below: the number of a worker */
/* One thing that a thread did, in ns of CLOCK_MONOTONIC. Slot and time tell the snapshot. */
typedef struct lck_span {
  uint64_t begin_ns, end_ns;
  uint64_t bytes, start; /* moved (not the unchanged); of a chunk: its place in the batch */
  uint32_t kind, thread, slot, batch;
  uint32_t copy, copies; /* of a chunk: its first copy in the batch, and how many it touches */
} lck_span;

/* Read the newest spans of every thread, each thread's in the order of their ends; *lost: how many
 * gave way to newer ones. Without `spans`: only how many there can ever be. Any thread. */
int lck_pool_trace(lck_pool *pool, lck_span *spans, uint64_t room, uint64_t *count, uint64_t *lost);

/* Stop the workers after the chunks in hand; free the pool, or NULL. No snapshot may be open. */
int lck_pool_destroy(lck_pool *pool);

enum {
  LCK_COPY_IF_CHANGED = 1u << 0, /* hash first; skip when the CRC equals `crc` (whole extent) */
  LCK_COPY_STAGED = 1u << 1,     /* to DRAM first, to the region after the capture */
  LCK_COPY_FED = 1u << 2,        /* the pool cannot read it: source NULL, see lck_snapshot_feed */
};

typedef struct lck_copy {
  uint64_t offset;    /* in the slot's space, on a line; the extent owns its last line whole */
  const void *source; /* any alignment; must stay readable until captured */
  uint64_t length;    /* > 0 */
  uint32_t layer;     /* audit draws one whole chunk per distinct layer */
  uint32_t flags;
  uint32_t crc; /* with LCK_COPY_IF_CHANGED: CRC of what the extent holds now */
  uint32_t reserved;
} lck_copy;

/* Open `slot` for a new snapshot. Its old content is durably invalid before the first payload byte
 * changes: at once, but on page media in the background. There every copy is staged
 * (LCK_COPY_STAGED): neither capture nor training ever waits for a sync. LCK_E_LEASED;
 * LCK_E_PREVIOUS; LCK_E_BUSY (a snapshot is open in the slot). */
int lck_snapshot_begin(lck_pool *pool, lck_region *region, uint32_t slot, lck_snapshot **out);

/* Add a batch of copies, done in this order once they are released or fed. *batch: its number, from
 * 0; at most 65,536 batches. The array is copied. */
int lck_snapshot_add(lck_snapshot *snapshot, const lck_copy *copies, uint64_t count,
                     uint32_t *batch);

/* Let the first `bytes` of a batch's copies run (LCK_ALL: all). Never goes back. Any thread. */
int lck_snapshot_release(lck_snapshot *snapshot, uint32_t batch, uint64_t bytes);

/* The bytes of a batch, copies one behind the other, at which its chunks start: all *count of them,
 * of which `room` are written. LCK_E_INVALID: it is not fed (LCK_COPY_FED: all copies, or none). */
int lck_snapshot_cuts(const lck_snapshot *snapshot, uint32_t batch, uint64_t *starts, uint64_t room,
                      uint64_t *count);

/* Give a fed batch its bytes up to `end`, a later cut or its end: at `from`, readable until taken;
 * or (NULL, none staged) in their extents already, every store arrived: they are hashed and flushed
 * there. One thread at a time, not only the handle's. LCK_E_INVALID; the snapshot's failure. */
int lck_snapshot_feed(lck_snapshot *snapshot, uint32_t batch, uint64_t end, const void *from);

/* Wait as lck_snapshot_capture does, for the bytes of a fed batch up to `end`; feeds nothing
 * itself. */
int lck_snapshot_taken(lck_snapshot *snapshot, uint32_t batch, uint64_t end, int64_t timeout_ns,
                       int help);

/* Who copies what a caller waits for: the workers; the caller, too; or the caller alone, who wakes
 * no worker as long as none has claimed a chunk. */
enum { LCK_HELP_NONE = 0, LCK_HELP_TOO = 1, LCK_HELP_ALONE = 2 };

/* Wait until every copy of the batch has left its source, releasing what is held back (and is not
 * fed). `help`: LCK_HELP_*. timeout_ns < 0: no limit. Afterwards the sources may change. Any
 * thread. Errors: LCK_E_TIMEOUT; the snapshot's own failure. */
int lck_snapshot_capture(lck_snapshot *snapshot, uint32_t batch, int64_t timeout_ns, int help);

/* Compare a captured, not fed batch with its live sources: a random 4 KiB of every copy and a chunk
 * of every layer, or (`everything`) all of it. LCK_E_MISMATCH: *bad = a copy's index. */
int lck_snapshot_audit(lck_snapshot *snapshot, uint32_t batch, uint64_t seed, int everything,
                       uint64_t *bad);

/* CRC32C per copy of a captured batch, in the order given to lck_snapshot_add. */
int lck_snapshot_digests(const lck_snapshot *snapshot, uint32_t batch, uint32_t *crcs);

/* Commit in the background: payload, layout table (NULL: the one that the slot already holds at
 * record->layout_offset), manifest, record, each durable before the next. Blobs are copied; their
 * CRCs, run_id, slot, rank, payload_bytes and a world of 0 are filled in. LCK_E_STATE: a batch is
 * not captured. */
int lck_snapshot_seal(lck_snapshot *snapshot, const lck_record *record, const void *layout,
                      const void *manifest);

enum { LCK_ADAM = 0, LCK_ADAMW = 1, LCK_SGD = 2 };
enum {
  LCK_UPDATE_AMSGRAD = 1u << 0,
  LCK_UPDATE_MAXIMIZE = 1u << 1,
  LCK_UPDATE_NESTEROV = 1u << 2,
  LCK_UPDATE_UNFUSED = 1u << 3, /* every operation rounded: torch without AVX2; all rules or none */
};
#define LCK_NOT_STREAMED UINT32_MAX
/* Of a parameter, its gradient and its state; but for the first, not of LCK_SGD: torch's fused
 * kernel leaves most of such a parameter as it is. */
enum { LCK_FLOAT32 = 0, LCK_BFLOAT16 = 1, LCK_FLOAT16 = 2 };

/* The options of a group of parameters, as torch.optim names them. */
typedef struct lck_update_rule {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
  uint32_t kind, flags;
} lck_update_rule;

/* The update of one parameter: dense, all columns alike; they overlap with no other's. */
typedef struct lck_update_task {
  void *parameter;
  void *first, *second, *largest; /* exp_avg or momentum_buffer, exp_avg_sq, max_exp_avg_sq */
  const void *gradient;
  float *step;        /* count of steps, raised by 1 first; NULL for LCK_SGD */
  uint64_t length;    /* elements, > 0 */
  uint32_t rule;      /* index */
  uint32_t copies[4]; /* of each column, its number in the batch, or LCK_NOT_STREAMED */
  uint32_t type;      /* of elements */
} lck_update_task;

/* An OpenMP runtime's GOMP_parallel: runs body(argument) on `threads` of its threads. */
typedef void (*lck_parallel)(void (*body)(void *), void *argument, unsigned threads,
                             unsigned flags);

/* 1 if the calling thread takes denormals for zeros, or flushes them: a mode of each thread. */
int lck_flushes_denormals(void);

/* Update all tasks as torch's fused CPU kernels do, bit for bit but for the sign and payload of
 * NaNs. With a snapshot, what is computed is stored in the extents of `batch`, too, in the same
 * pass: copies that were added and never released, those of the tasks and no others. On return they
 * are captured. Should the region fail, the snapshot does and the update is made all the same.
 * `parallel`: NULL runs threads of the library's own. Errors, nothing was changed: LCK_E_INVALID;
 * LCK_E_STATE (the batch; the thread flushes denormals); LCK_E_NOMEM; the snapshot's failure. */
int lck_update(const lck_update_rule *rules, uint64_t rule_count, const lck_update_task *tasks,
               uint64_t count, lck_snapshot *snapshot, uint32_t batch, uint32_t threads,
               lck_parallel parallel);

#define LCK_MAX_STALLS 8u
#define LCK_NO_STEP UINT64_MAX
typedef struct lck_stall {
  char cause[16]; /* zero-terminated; empty: unused */
  uint64_t ns;
} lck_stall;

/* The statistics that a trainer publishes at the end of a step. Times `_ns` are durations or, of
 * `began` and `updated`, of the wall clock; counters begin at attach. */
typedef struct lck_statistics {
  uint8_t boot_id[16];     /* of the kernel on which process and start mean something */
  uint64_t process_start;  /* ticks since boot: with the id it names one process */
  uint32_t process, ended; /* ended: 1 handle closed, 2 by an error, 3 by the user; else 0 */
  uint64_t began_ns, updated_ns, began_step, step;
  uint64_t captured_step, committed_step, step_ns; /* LCK_NO_STEP: none yet; of the last step */
  uint64_t captured, committed, slipped, torn, failed;
  uint64_t bytes_copied, bytes_skipped, bytes_helped, copy_ns, commit_ns, staging_bytes;
  uint64_t payload_bytes, errors;   /* of the last snapshot; so far */
  lck_stall stalls[LCK_MAX_STALLS]; /* of the training thread, by cause */
  char last_error[560];             /* UTF-8, zero-terminated */
  uint64_t bytes_drained, drain_ns; /* DRAM to region, summed over threads */
} lck_statistics;

/* Put `values` on the region's statistics page, with the pool's counters. Not durable; never waits:
 * where a store might, the commit thread does it (the region must outlive the pool). */
int lck_pool_publish(lck_pool *pool, lck_region *region, const lck_statistics *values);

/* Read the statistics last published, and (in any case) in *owned whether any process owns the
 * region now. Errors: LCK_E_EMPTY, nothing was; LCK_E_CORRUPT, the page is torn or of another
 * build. */
int lck_region_statistics(const lck_region *region, lck_statistics *out, int *owned);

enum { LCK_SNAP_OPEN = 0, LCK_SNAP_SEALED = 1, LCK_SNAP_COMMITTED = 2, LCK_SNAP_FAILED = 3 };

/* Wait until a sealed snapshot is committed or has failed; 0 polls. *state is always written. Any
 * thread. LCK_E_TIMEOUT; the failure's code. */
int lck_snapshot_wait(lck_snapshot *snapshot, int64_t timeout_ns, int *state);

/* Give the snapshot up unless it is sealed (then wait for it): the slot stays invalid. Wait for
 * copies in hand, free it. NULL is allowed. */
int lck_snapshot_free(lck_snapshot *snapshot);

#endif
