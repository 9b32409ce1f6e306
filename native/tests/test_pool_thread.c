/* test_pool_thread.c -- where workers run and with what priority, and that nobody waits for one
 * that does not get to run. A gate stands in for a CPU that others keep busy: it holds a worker of
 * the idle class in the middle of a chunk for as long as the test likes. */
#include <dirent.h>
#include <errno.h>
#include <sched.h>

#include "snapshot_bed.h"

#define CHUNK 4096u
#define LONG (INT64_C(20000) * MS)

static cpu_set_t cpus_of(pid_t thread) {
  cpu_set_t cpus;
  CHECK(sched_getaffinity(thread, sizeof cpus, &cpus) == 0, "thread %d", (int)thread);
  return cpus;
}

static void confine(const cpu_set_t *cpus) {
  CHECK(sched_setaffinity(0, sizeof *cpus, cpus) == 0, "affinity");
}

static cpu_set_t first_cpu(cpu_set_t *of) {
  cpu_set_t one;
  CPU_ZERO(&one);
  for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++) {
    if (CPU_ISSET(cpu, of)) {
      CPU_SET(cpu, &one);
      CPU_CLR(cpu, of);
    }
  }
  CHECK(CPU_COUNT(&one) == 1, "no CPU left");
  return one;
}

static lck_pool *make_pool(uint32_t threads, uint32_t idle) {
  lck_pool *pool;
  lck_pool_spec spec = {.threads = threads, .chunk_bytes = CHUNK, .idle = idle};
  CHECK(lck_pool_create(&spec, &pool) == 0, "%s", lck_last_error());
  bed_started(pool);
  return pool;
}

static int policy_of(pid_t thread) {
  return sched_getscheduler(thread);
}

/* ---- Places --------------------------------------------------------------------------------- */

static void check_places(uint32_t threads) {
  cpu_set_t all = cpus_of(0), covered, both;
  uint32_t count = (uint32_t)CPU_COUNT(&all), most = threads < count ? count / threads + 1 : 1;
  CPU_ZERO(&covered);
  lck_pool *pool = make_pool(threads, 1);
  for (uint32_t i = 0; i < threads; i++) {
    pid_t id = pool->threads[i].id;
    cpu_set_t own = cpus_of(id);
    CHECK(policy_of(id) == SCHED_IDLE, "policy %d of worker %u", policy_of(id), i);
    CHECK(CPU_EQUAL(&own, &pool->threads[i].cpus), "worker %u is not on its CPUs", i);
    CHECK((uint32_t)CPU_COUNT(&own) >= 1 && (uint32_t)CPU_COUNT(&own) <= most,
          "worker %u of %u: %d", i, threads, CPU_COUNT(&own));
    CPU_AND(&both, &own, &all);
    CHECK(CPU_EQUAL(&both, &own), "worker %u outside of the process's CPUs", i);
    CPU_AND(&both, &own, &covered);
    CHECK(threads > count || CPU_COUNT(&both) == 0, "worker %u has another one's CPU", i);
    CPU_OR(&covered, &covered, &own);
  }
  CHECK(CPU_EQUAL(&covered, &all), "%d of %u CPUs have a worker", CPU_COUNT(&covered), count);
  CHECK(policy_of(0) == SCHED_OTHER, "the caller's own priority");
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
}

static void test_idle_workers_share_the_cpus_out(void) {
  cpu_set_t all = cpus_of(0), rest = all, one = first_cpu(&rest);
  for (uint32_t threads = 1; threads <= 5; threads++)
    check_places(threads);
  confine(&one);
  check_places(1);
  check_places(3);
  confine(&all);
}

/* Shares of more CPUs than this machine may have. */
static void test_shares_are_neighbours(void) {
  static const struct {
    uint32_t worker, threads, first, count;
  } shares[] = {{0, 4, 0, 2},  {1, 4, 2, 3},  {2, 4, 5, 2},  {3, 4, 7, 3},
                {0, 1, 0, 10}, {9, 10, 9, 1}, {10, 11, 0, 1}};
  for (uint32_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
    cpu_set_t allowed, want;
    CPU_ZERO(&allowed);
    CPU_ZERO(&want);
    for (uint32_t k = 0; k < 10; k++)
      CPU_SET(3 * k + 1, &allowed); /* with holes */
    for (uint32_t k = 0; k < shares[i].count; k++)
      CPU_SET(3 * (shares[i].first + k) + 1, &want);
    cpu_set_t got = lck_cpu_share(&allowed, shares[i].worker, shares[i].threads);
    CHECK(CPU_EQUAL(&got, &want), "worker %u of %u", shares[i].worker, shares[i].threads);
  }
}

static void test_normal_workers_are_as_the_caller(void) {
  cpu_set_t all = cpus_of(0);
  lck_pool *pool = make_pool(2, 0);
  DIR *threads = opendir("/proc/self/task");
  CHECK(threads, "/proc/self/task");
  uint32_t seen = 0;
  for (const struct dirent *entry; (entry = readdir(threads));) {
    pid_t id = (pid_t)strtol(entry->d_name, NULL, 10);
    if (id == 0)
      continue;
    cpu_set_t own = cpus_of(id);
    CHECK(policy_of(id) == SCHED_OTHER && CPU_EQUAL(&own, &all), "thread %d", (int)id);
    seen++;
  }
  closedir(threads);
  CHECK(seen >= 4, "%u threads, two workers and the commit thread among them", seen);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
}

/* ---- Chunks that are taken away -----------------------------------------------------------------
 */

static struct {
  _Atomic int at_gate; /* an idle worker stands there */
  _Atomic int open;
  _Atomic int stores; /* the worker got through, after all */
} scene;

static int is_idle_thread(void) {
  return sched_getscheduler(0) == SCHED_IDLE;
}

/* Of a chunk: open for all but idle workers. */
static int not_for_idle(void) {
  if (!is_idle_thread())
    return 1;
  atomic_store(&scene.at_gate, 1);
  if (!atomic_load(&scene.open))
    return 0;
  atomic_fetch_add(&scene.stores, 1);
  return 1;
}

typedef struct stage {
  lck_pool *pool;
  lck_snapshot *snapshot;
  uint32_t batch;
  unsigned char *source;
} stage;

/* One idle worker stands at the gate with the first of eight chunks. Nobody else begins one unless
 * `watched`: a busy machine would be taken for contended. */
static stage set_up(bed *b, uint32_t flags, int watched) {
  stage t = {.pool = make_pool(1, 1), .source = malloc(8 * CHUNK)};
  CHECK(t.source, "memory");
  bed_fill(t.source, 8 * CHUNK, 1);
  atomic_store(&t.pool->contention.watched,
               !watched); /* else somebody would have to wake the watcher */
  t.snapshot = bed_begin(b, t.pool, 0);
  if (b->staged)
    EVENTUALLY(t.snapshot->invalidated);
  atomic_store(&scene.at_gate, 0);
  atomic_store(&scene.open, 0);
  atomic_store(&scene.stores, 0);
  lck_copy copy = {
      .offset = bed_slot(b, 0), .source = t.source, .length = 8 * CHUNK, .flags = flags};
  t.batch = bed_add(t.snapshot, &copy, 1);
  lck_fault_gate(LCK_FAULT_COPY, not_for_idle);
  CHECK(lck_snapshot_release(t.snapshot, t.batch, LCK_ALL) == 0, "%s", lck_last_error());
  if (!watched)
    EVENTUALLY(atomic_load(&scene.at_gate));
  return t;
}

/* The worker, let go, is found to have done nothing more with its chunk, and does its next task. */
static void tear_down(bed *b, stage *t) {
  atomic_store(&scene.open, 1);
  bed_nap(2 * MS);
  CHECK(atomic_load(&scene.stores) == 0, "a worker went on with a chunk that it had lost");
  lck_fault_gate(LCK_FAULT_COPY, NULL);
  bed_snapshot(b, t->pool, 1, 1);
  CHECK(lck_pool_destroy(t->pool) == 0, "%s", lck_last_error());
  free(t->source);
}

/* With help the caller takes the chunk, without it the reserve does. The source changes right
 * behind the wait, as an update would change it. */
static void test_a_capture_takes_what_an_idle_worker_has_in_hand(bed *b, int help, uint32_t flags) {
  stage t = set_up(b, flags, 0);
  unsigned char *before = malloc(8 * CHUNK);
  CHECK(before, "memory");
  memcpy(before, t.source, 8 * CHUNK);
  CHECK(lck_snapshot_capture(t.snapshot, t.batch, LONG, help) == 0, "%s", lck_last_error());
  uint32_t crc;
  bed_digests(t.snapshot, t.batch, &crc);
  CHECK(crc == lck_crc32c(0, before, 8 * CHUNK), "0x%08x", crc);
  bed_fill(t.source, 8 * CHUNK, 2);
  CHECK(bed_seal(b, t.snapshot, 0, 7) == 0, "%s", lck_last_error());
  atomic_store(&scene.open, 1);
  bed_committed(t.snapshot);
  bed_nap(MS);
  CHECK(!memcmp(b->region->base + bed_slot(b, 0), before, 8 * CHUNK), "the bytes of the capture");
  bed_holds(b, 0, 7);
  free(before);
  tear_down(b, &t);
}

/* `early`: as if it had lost its CPU between its claim and the watermark; then nobody else moves
 * that, for the snapshot has failed. */
static void test_giving_up_takes_what_an_idle_worker_has_in_hand(bed *b, int early) {
  stage t = set_up(b, 0, 0);
  if (early) {
    atomic_store(&t.snapshot->halted, 1);
    atomic_store(&lck_snapshot_batch(t.snapshot, t.batch)->next, 0);
  }
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  tear_down(b, &t);
}

/* An idle worker has found the first copy to be unchanged and marked a piece of it when it loses
 * its CPU, and the source changes in a way that no counter sees. */
static void test_what_was_taken_to_be_unchanged_is_stored_by_who_finds_it_changed(bed *b) {
  stage t = set_up(b, LCK_COPY_STAGED | LCK_COPY_IF_CHANGED, 0);
  lck_batch *batch = lck_snapshot_batch(t.snapshot, t.batch);
  batch->pieces[1].flags |= LCK_PIECE_SKIPPED;
  bed_fill(t.source, 8 * CHUNK, 3);
  bed_capture(t.snapshot, t.batch, 1);
  CHECK(bed_seal(b, t.snapshot, 0, 7) == 0, "%s", lck_last_error());
  bed_committed(t.snapshot);
  CHECK(!memcmp(b->region->base + bed_slot(b, 0), t.source, 8 * CHUNK), "the bytes of the capture");
  tear_down(b, &t);
}

/* A snapshot, captured into DRAM, that nobody drains before the pool has its pace again. */
static stage captured_without_drains(bed *b) {
  stage t = {.pool = make_pool(1, 1), .source = calloc(1, CHUNK)};
  CHECK(t.source, "memory");
  CHECK(lck_pool_pace(t.pool, 0) == 0, "%s", lck_last_error());
  t.snapshot = bed_begin(b, t.pool, 0);
  EVENTUALLY(t.snapshot->invalidated || !b->staged);
  lck_copy copy = {
      .offset = bed_slot(b, 0), .source = t.source, .length = CHUNK, .flags = LCK_COPY_STAGED};
  t.batch = bed_add(t.snapshot, &copy, 1);
  bed_capture(t.snapshot, t.batch, 1);
  return t;
}

static stage sealed_without_drains(bed *b) {
  stage t = captured_without_drains(b);
  CHECK(bed_seal(b, t.snapshot, 0, 1) == 0, "%s", lck_last_error());
  return t;
}

/* As if an idle worker had drained the last chunk and lost its CPU before it says so; nobody reads
 * the bytes. */
static void drain_without_a_word(const stage *t) {
  lck_batch *batch = lck_snapshot_batch(t->snapshot, t->batch);
  for (uint64_t i = 0; i < batch->chunk_count; i++)
    atomic_store(&batch->chunks[i].word, LCK_CHUNK_DRAINED);
}

static void test_nobody_waits_for_the_word_of_an_idle_worker(bed *b, int freeing) {
  stage t = sealed_without_drains(b);
  bed_nap(20 * MS); /* the seal has woken the commit thread, which finds nothing */
  drain_without_a_word(&t);
  if (freeing)
    CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  else
    bed_committed(t.snapshot);
  bed_holds(b, 0, 1);
  CHECK(lck_pool_destroy(t.pool) == 0, "%s", lck_last_error());
  free(t.source);
}

/* The worker loses its CPU on the way into its chunk's section, where only addresses are left of a
 * region that is closed meanwhile; and meets a fault there, which is nobody's any more. */
static void test_a_closed_region_is_not_touched_by_an_idle_worker(bed *b) {
  lck_pool *pool = make_pool(1, 1);
  unsigned char *source = calloc(1, CHUNK);
  CHECK(source, "memory");
  atomic_store(&pool->contention.watched, 1);
  lck_snapshot *s = bed_begin(b, pool, 0);
  if (b->staged)
    EVENTUALLY(s->invalidated);
  atomic_store(&scene.at_gate, 0);
  atomic_store(&scene.open, 0);
  lck_copy copy = {.offset = bed_slot(b, 0), .source = source, .length = CHUNK};
  uint32_t batch = bed_add(s, &copy, 1);
  lck_fault_gate(LCK_FAULT_POISON, not_for_idle);
  CHECK(lck_snapshot_release(s, batch, LCK_ALL) == 0, "%s", lck_last_error());
  EVENTUALLY(atomic_load(&scene.at_gate));
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  bed_reopen(b);
  CHECK(lck_fault_arm(LCK_FAULT_POISON, 0, EIO) == 0, "arm");
  atomic_store(&scene.open, 1);
  EVENTUALLY(atomic_load(&pool->threads[0].visits) % 2 == 0);
  lck_fault_gate(LCK_FAULT_POISON, NULL);
  CHECK(lck_fault_arm(LCK_FAULT_POISON, -1, 0) == 0, "disarm");
  bed_snapshot(b, pool, 1, 1);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(source);
}

/* What an idle worker looks at is not freed under it. A third worker without a thread stands in for
 * one that looks on: freeing wakes the reserve, whose own visits change its count meanwhile. */
static void test_a_visited_snapshot_is_freed_later(bed *b) {
  stage t = set_up(b, 0, 0);
  lck_snapshot *freed = t.snapshot;
  CHECK(t.pool->workers == 2, "%u workers", t.pool->workers);
  t.pool->workers = 3;
  atomic_store(&t.pool->threads[2].visits, 1);
  CHECK(lck_snapshot_free(freed) == 0, "%s", lck_last_error());
  CHECK(t.pool->deferred == freed, "a snapshot was freed while it was visited");
  atomic_store(&t.pool->threads[2].visits, 2);
  t.pool->workers = 2;
  tear_down(b, &t);
}

/* ---- A contended machine
 * ---------------------------------------------------------------------------
 */

static int never_for_idle(void) {
  return !is_idle_thread();
}

/* Nobody waits: the reserve alone finishes what stands still. */
static void test_copies_that_stand_still_go_over_to_the_reserve(bed *b) {
  uint64_t began = lck_now_ns();
  stage t = set_up(b, 0, 1);
  lck_fault_gate(LCK_FAULT_COPY, never_for_idle);
  lck_batch *batch = lck_snapshot_batch(t.snapshot, t.batch);
  EVENTUALLY(atomic_load(&batch->next) == 8);
  CHECK(atomic_load(&t.pool->contention.on), "the machine is not taken for contended");
  CHECK(lck_now_ns() - began >= 50 * MS, "a first window of unknown length was judged too soon");
  bed_capture(t.snapshot, t.batch, 1);
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  for (uint64_t sequence = 2; atomic_load(&t.pool->contention.on); sequence++) {
    CHECK(sequence < 40, "the idle workers get no other try");
    bed_snapshot(b, t.pool, 1, sequence);
  }
  EVENTUALLY(!atomic_load(&t.pool->contention.watched)); /* or the next work would wake nobody */
  tear_down(b, &t);
}

/* Somebody waited, the reserve had its turn, and it is over: the watcher watches again, else the
 * next window would be nobody's to watch. */
static void test_the_watcher_does_not_sleep_over_the_end_of_its_turn(bed *b) {
  stage t = {.pool = make_pool(1, 1), .source = calloc(8, CHUNK)};
  CHECK(t.source, "memory");
  t.snapshot = bed_begin(b, t.pool, 0);
  EVENTUALLY(t.snapshot->invalidated || !b->staged);
  lck_copy copy = {.offset = bed_slot(b, 0), .source = t.source, .length = 8 * CHUNK};
  t.batch = bed_add(t.snapshot, &copy, 1);
  lck_fault_gate(LCK_FAULT_COPY, never_for_idle);
  CHECK(lck_snapshot_release(t.snapshot, t.batch, LCK_ALL) == 0, "%s", lck_last_error());
  atomic_fetch_add(&t.pool->waiters, 1);
  lck_pool_wake(t.pool);
  EVENTUALLY(atomic_load(&lck_snapshot_batch(t.snapshot, t.batch)->next) == 8);
  lck_fault_gate(LCK_FAULT_COPY, NULL);
  bed_nap(10 * MS);
  atomic_fetch_sub(&t.pool->waiters, 1);
  EVENTUALLY(!atomic_load(&t.pool->contention.watched));
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(t.pool) == 0, "%s", lck_last_error());
  free(t.source);
}

static int closed_gate(void) {
  return atomic_load(&scene.open);
}

/* All is drained, and the commit thread is in a commit, as in a slow sync. */
static void test_a_reserve_sleeps_while_a_snapshot_is_committed(bed *b) {
  stage t = sealed_without_drains(b);
  lck_pool_lock(t.pool);
  t.pool->contention.left = 100;
  atomic_store(&t.pool->contention.on, 1);
  lck_pool_unlock(t.pool);
  atomic_store(&scene.open, 0);
  lck_fault_gate(LCK_FAULT_COMMIT, closed_gate);
  drain_without_a_word(&t);
  lck_wait_queue_wake(&t.pool->commit_work);
  lck_pool_wake(t.pool);
  bed_nap(20 * MS);
  uint64_t before = atomic_load(&t.pool->threads[1].visits);
  bed_nap(50 * MS);
  uint64_t looks = (atomic_load(&t.pool->threads[1].visits) - before) / 2;
  CHECK(looks < 5, "the reserve has looked %u times for nothing", (unsigned)looks);
  atomic_store(&scene.open, 1);
  bed_committed(t.snapshot);
  lck_fault_gate(LCK_FAULT_COMMIT, NULL);
  CHECK(lck_pool_destroy(t.pool) == 0, "%s", lck_last_error());
  free(t.source);
}

/* On a contended machine the reserve has its turn all the time; between snapshots it sleeps, also
 * when one was staged, and drained, before: each look would take a CPU from the training. */
static void test_a_reserve_without_work_sleeps(bed *b) {
  lck_pool *pool = make_pool(1, 1);
  lck_pool_lock(pool);
  pool->contention.left = 100;
  atomic_store(&pool->contention.on, 1);
  lck_pool_unlock(pool);
  bed_snapshot(b, pool, 1, 1);
  bed_nap(20 * MS);
  uint64_t before = atomic_load(&pool->threads[1].visits);
  bed_nap(50 * MS);
  uint64_t looks = (atomic_load(&pool->threads[1].visits) - before) / 2;
  CHECK(atomic_load(&pool->contention.on), "the machine is not taken for contended");
  CHECK(looks < 5, "the reserve has looked %u times for nothing", (unsigned)looks);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
}

/* Drains that others have claimed are the reserve's to take away once the snapshot is sealed. In a
 * paused pool nothing else wakes it. */
static void test_a_seal_wakes_a_reserve_that_has_its_turn(bed *b) {
  stage t = captured_without_drains(b);
  lck_pool_lock(t.pool);
  t.pool->contention.left = 100;
  atomic_store(&t.pool->contention.on, 1);
  lck_pool_unlock(t.pool);
  bed_nap(20 * MS);
  uint64_t before = atomic_load(&t.pool->threads[1].visits);
  CHECK(bed_seal(b, t.snapshot, 0, 1) == 0, "%s", lck_last_error());
  EVENTUALLY(atomic_load(&t.pool->threads[1].visits) != before);
  uint32_t told = atomic_load(&t.pool->commit_work.wakes);
  CHECK(lck_pool_pace(t.pool, 1000) == 0, "%s", lck_last_error());
  CHECK(atomic_load(&t.pool->commit_work.wakes) != told, "late drains would go on sleeping");
  bed_committed(t.snapshot);
  CHECK(lck_pool_destroy(t.pool) == 0, "%s", lck_last_error());
  free(t.source);
}

/* ---- Beside threads that never sleep
 * -------------------------------------------------------------
 */

static _Atomic int spinning;

static void *spin(void *unused) {
  while (atomic_load(&spinning)) {
  }
  return unused;
}

/* Idle workers lose their CPUs at any instruction here. Sources change right behind each capture,
 * and what a worker still stored after that would be seen. */
static void test_what_is_captured_beside_busy_threads_is_what_was_there(bed *b) {
  enum { HOGS = 4, ROUNDS = 60, BYTES = 8 << 20, WORDS = BYTES / 8 };
  pthread_t hogs[HOGS];
  uint64_t *source = malloc(BYTES), *before = malloc(BYTES);
  CHECK(source && before, "memory");
  lck_pool *pool = bed_pool(2, 256 << 10);
  atomic_store(&spinning, 1);
  for (int i = 0; i < HOGS; i++)
    CHECK(pthread_create(&hogs[i], NULL, spin, NULL) == 0, "thread");
  for (uint64_t round = 1; round <= ROUNDS; round++) {
    uint32_t slot = (uint32_t)(round % 2);
    for (uint64_t i = 0; i < WORDS; i++)
      before[i] = source[i] = (round << 32) + i;
    atomic_store(&pool->contention.on, 0); /* or the idle workers would be left out */
    lck_snapshot *s = bed_begin(b, pool, slot);
    lck_copy copy = {.offset = bed_slot(b, slot),
                     .source = source,
                     .length = BYTES,
                     .flags = round % 3 == 0 ? LCK_COPY_STAGED : 0};
    uint32_t batch = bed_add(s, &copy, 1);
    CHECK(lck_snapshot_release(s, batch, LCK_ALL) == 0, "%s", lck_last_error());
    if (round % 4 == 0)
      sched_yield();
    bed_capture(s, batch, round % 5 != 0);
    memset(source, (int)round, BYTES);
    if (round % 7 == 0) {
      CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
      continue;
    }
    CHECK(bed_seal(b, s, slot, round) == 0, "%s", lck_last_error());
    bed_committed(s);
    CHECK(!memcmp(b->region->base + bed_slot(b, slot), before, BYTES), "round %u", (unsigned)round);
  }
  atomic_store(&spinning, 0);
  for (int i = 0; i < HOGS; i++)
    pthread_join(hogs[i], NULL);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  free(source);
  free(before);
}

static void body(bed *b) {
  bed_create(b, "thread");
  alarm(300); /* beside busy loops idle workers hardly run */
  for (int help = 0; help < 2; help++) {
    test_a_capture_takes_what_an_idle_worker_has_in_hand(b, help, 0);
    test_a_capture_takes_what_an_idle_worker_has_in_hand(b, help, LCK_COPY_STAGED);
  }
  for (int early = 0; early < 2; early++)
    test_giving_up_takes_what_an_idle_worker_has_in_hand(b, early);
  test_what_was_taken_to_be_unchanged_is_stored_by_who_finds_it_changed(b);
  for (int freeing = 0; freeing < 2; freeing++)
    test_nobody_waits_for_the_word_of_an_idle_worker(b, freeing);
  test_a_closed_region_is_not_touched_by_an_idle_worker(b);
  test_a_visited_snapshot_is_freed_later(b);
  test_copies_that_stand_still_go_over_to_the_reserve(b);
  test_the_watcher_does_not_sleep_over_the_end_of_its_turn(b);
  test_a_reserve_without_work_sleeps(b);
  test_a_reserve_sleeps_while_a_snapshot_is_committed(b);
  test_a_seal_wakes_a_reserve_that_has_its_turn(b);
  test_what_is_captured_beside_busy_threads_is_what_was_there(b);
  alarm(0);
  bed_destroy(b);
}

static void another(int number) {
  (void)number;
}

/* Lightning brings back the default that Python knows of. */
static void test_the_signal_is_had_again_where_the_default_has_come_back(void) {
  struct sigaction now;
  int number = SIGRTMAX;
  while (sigaction(number, NULL, &now) == 0 && now.sa_handler == SIG_DFL)
    number--;
  CHECK(number >= SIGRTMIN, "none has a handler");
  CHECK(signal(number, another) != SIG_ERR && !lck_revoke_possible(), "another's is left alone");
  CHECK(signal(number, SIG_DFL) != SIG_ERR && lck_revoke_possible(), "the default is not");
}

int main(void) {
  test_normal_workers_are_as_the_caller();
  if (!lck_revoke_possible()) {
    printf("SKIPPED: chunks cannot be taken from idle workers here: all are normal\n");
    return checks_end();
  }
  test_the_signal_is_had_again_where_the_default_has_come_back();
  test_idle_workers_share_the_cpus_out();
  test_shares_are_neighbours();
  return bed_main(body);
}
