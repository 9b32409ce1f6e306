/* test_lane.c -- where workers run and with what priority, and that nobody waits for one that does
 * not get to run. A gate stands in for a busy CPU: it holds a worker until it may run on the CPU of
 * the one who waits, and nowhere else. */
#include <dirent.h>
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
  for (uint32_t i = 0; i < threads && idle; i++)
    EVENTUALLY(atomic_load(&pool->lanes[i].id) != 0);
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
    pid_t id = pool->lanes[i].id;
    cpu_set_t own = cpus_of(id);
    CHECK(policy_of(id) == SCHED_IDLE, "policy %d of worker %u", policy_of(id), i);
    CHECK(CPU_EQUAL(&own, &pool->lanes[i].home), "worker %u is not at home", i);
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
    cpu_set_t got = lck_lane_share(&allowed, shares[i].worker, shares[i].threads);
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
  CHECK(seen >= 4, "%u threads, two workers and the keeper among them", seen);
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
}

/* ---- Loans ---------------------------------------------------------------------------------- */

static struct {
  cpu_set_t waiter;       /* where the main thread is */
  _Atomic int at_gate;    /* a worker stands there */
  _Atomic int shut;       /* for it, wherever it is */
  pthread_mutex_t *mutex; /* which it then holds */
} scene;

/* Of a chunk: open for the main thread, and for a worker that has been lent the main thread's CPU.
 */
static int lent_only(void) {
  if (gettid() == getpid())
    return 1;
  cpu_set_t own;
  int known = sched_getaffinity(0, sizeof own, &own) == 0; /* CHECK is the main thread's */
  if (scene.mutex && !atomic_load(&scene.at_gate))
    pthread_mutex_lock(scene.mutex);
  atomic_store(&scene.at_gate, 1);
  if (!known || atomic_load(&scene.shut) || !CPU_EQUAL(&own, &scene.waiter))
    return 0;
  if (scene.mutex)
    pthread_mutex_unlock(scene.mutex);
  scene.mutex = NULL;
  return 1;
}

typedef struct stage {
  lck_pool *pool;
  lck_snapshot *snapshot;
  cpu_set_t all, home;
  unsigned char *source;
} stage;

/* One worker, at home on one CPU, stands at the gate with the first of eight chunks; the main
 * thread is on another CPU. */
static stage set_up(bed *b, int holds_the_lock) {
  stage t = {.all = cpus_of(0), .source = malloc(8 * CHUNK)};
  CHECK(t.source, "memory");
  bed_fill(t.source, 8 * CHUNK, 1);
  cpu_set_t rest = t.all;
  t.home = first_cpu(&rest);
  scene.waiter = first_cpu(&rest);
  confine(&t.home);
  t.pool = make_pool(1, 1);
  confine(&scene.waiter);
  t.snapshot = bed_begin(b, t.pool, 0);
  if (b->staged)
    EVENTUALLY(t.snapshot->erased);
  atomic_store(&scene.at_gate, 0);
  scene.mutex = holds_the_lock ? &t.pool->lock : NULL;
  lck_copy copy = {.offset = bed_slot(b, 0), .source = t.source, .length = 8 * CHUNK};
  uint32_t batch = bed_add(t.snapshot, &copy, 1);
  lck_fault_gate(LCK_FAULT_COPY, lent_only);
  CHECK(lck_snapshot_release(t.snapshot, batch, LCK_ALL) == 0, "%s", lck_last_error());
  EVENTUALLY(atomic_load(&scene.at_gate));
  return t;
}

static void check_home(const stage *t, const char *after) {
  cpu_set_t own = cpus_of(t->pool->lanes[0].id);
  CHECK(CPU_EQUAL(&own, &t->home), "the worker is not at home after %s", after);
}

/* At home it does its next task, too. */
static void tear_down(bed *b, stage *t) {
  lck_fault_gate(LCK_FAULT_COPY, NULL);
  bed_snapshot(b, t->pool, 1, 1);
  check_home(t, "its next task");
  CHECK(lck_pool_destroy(t->pool) == 0, "%s", lck_last_error());
  confine(&t->all);
  free(t->source);
}

/* With help the one chunk in hand is lent for, without it all of them, one after the other. */
static void test_a_capture_lends(bed *b, int help) {
  stage t = set_up(b, 0);
  CHECK(lck_snapshot_capture(t.snapshot, 0, LONG, help) == 0, "%s", lck_last_error());
  check_home(&t, "the capture");
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  tear_down(b, &t);
}

static void test_a_capture_out_of_time_takes_home(bed *b) {
  stage t = set_up(b, 0);
  atomic_store(&scene.shut, 1);
  CHECK(lck_snapshot_capture(t.snapshot, 0, 20 * MS, 1) == LCK_E_TIMEOUT, "a chunk is held");
  check_home(&t, "the timeout");
  atomic_store(&scene.shut, 0);
  CHECK(lck_snapshot_capture(t.snapshot, 0, LONG, 1) == 0, "%s", lck_last_error());
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  tear_down(b, &t);
}

/* The calls that follow have no timeout: without the loan they take until the alarm. */
static void test_giving_up_lends(bed *b) {
  stage t = set_up(b, 0);
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  check_home(&t, "giving up");
  tear_down(b, &t);
}

static void test_the_lock_lends(bed *b) {
  stage t = set_up(b, 1);
  uint32_t batch = bed_add(t.snapshot, NULL, 0);
  CHECK(batch == 1, "%u", batch);
  check_home(&t, "the lock");
  lck_fault_gate(LCK_FAULT_COPY, NULL);
  CHECK(lck_snapshot_free(t.snapshot) == 0, "%s", lck_last_error());
  tear_down(b, &t);
}

static void body(bed *b) {
  cpu_set_t all = cpus_of(0);
  if (CPU_COUNT(&all) < 2) {
    printf("SKIPPED: one CPU: nothing to lend that a worker has not\n");
    return;
  }
  bed_create(b, "lane");
  alarm(100);
  test_a_capture_lends(b, 1);
  test_a_capture_lends(b, 0);
  test_a_capture_out_of_time_takes_home(b);
  test_giving_up_lends(b);
  test_the_lock_lends(b);
  alarm(0);
  bed_destroy(b);
}

int main(void) {
  test_idle_workers_share_the_cpus_out();
  test_shares_are_neighbours();
  test_normal_workers_are_as_the_caller();
  return bed_main(body);
}
