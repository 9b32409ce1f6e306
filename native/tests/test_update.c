/* test_update.c -- an update into a snapshot: the bytes are those in place, whatever becomes of the
 * region. That they are torch's, too, tests/unit/test_update_bits.py shows. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sys/stat.h>

#include "half.h"
#include "snapshot_bed.h"

enum { TASKS = 9, COLUMNS = 4 };
static const uint64_t lengths[TASKS] = {1, 7, 16, 56, 1024, 1031, 4096, 33333, 65536};

typedef struct method {
  lck_update_rule rule;
  uint32_t type;
} method;

typedef struct training {
  void *columns[COLUMNS][TASKS], *gradients[TASKS];
  float steps[TASKS];
  lck_update_rule rule;
  lck_update_task tasks[TASKS];
  lck_copy copies[COLUMNS * TASKS];
  uint32_t type, columns_used, count;
} training;

static float drawn(uint64_t *state) {
  return (float)(int32_t)(bed_random(state) >> 32) / 1e9F;
}

static uint64_t size_of(const training *t, uint32_t i) {
  return lengths[i] * (t->type == LCK_FLOAT32 ? 4 : 2);
}

static void *made(const training *t, uint32_t i, int positive, uint64_t *state) {
  void *column = malloc(size_of(t, i));
  CHECK(column, "memory");
  for (uint64_t k = 0; k < lengths[i]; k++) {
    float value = positive ? fabsf(drawn(state)) : drawn(state);
    if (t->type == LCK_FLOAT32)
      ((float *)column)[k] = value;
    else
      ((uint16_t *)column)[k] =
          t->type == LCK_BFLOAT16 ? lck_to_bfloat16(value) : lck_to_float16(value);
  }
  return column;
}

/* Two that are made alike hold the same numbers. */
static void make(training *t, const method *how, uint64_t offset, int some) {
  const lck_update_rule *rule = &how->rule;
  uint64_t state = 77;
  memset(t, 0, sizeof *t);
  t->rule = *rule;
  t->type = how->type;
  t->columns_used = rule->kind == LCK_SGD ? 2 : rule->flags & LCK_UPDATE_AMSGRAD ? 4 : 3;
  for (uint32_t i = 0; i < TASKS; i++) {
    t->gradients[i] = made(t, i, 0, &state);
    t->tasks[i] = (lck_update_task){
        .gradient = t->gradients[i], .step = &t->steps[i], .length = lengths[i], .type = t->type};
    for (uint32_t c = 0; c < t->columns_used; c++) {
      void *column = t->columns[c][i] = made(t, i, c >= 2, &state);
      t->tasks[i].copies[c] = LCK_NOT_STREAMED;
      if (some && (i + c) % 3 == 0) /* another rank's, say */
        continue;
      t->tasks[i].copies[c] = t->count;
      t->copies[t->count++] =
          (lck_copy){.offset = offset, .source = column, .length = size_of(t, i), .layer = i};
      offset += (size_of(t, i) + LCK_LINE - 1) / LCK_LINE * LCK_LINE;
    }
    t->tasks[i].parameter = t->columns[0][i];
    t->tasks[i].first = t->columns[1][i];
    t->tasks[i].second = t->columns[2][i];
    t->tasks[i].largest = t->columns[3][i];
  }
}

static void drop(training *t) {
  for (uint32_t i = 0; i < TASKS; i++) {
    free(t->gradients[i]);
    for (uint32_t c = 0; c < COLUMNS; c++)
      free(t->columns[c][i]);
  }
}

static void stream_none(training *t) {
  for (uint32_t i = 0; i < TASKS; i++)
    for (uint32_t c = 0; c < COLUMNS; c++)
      t->tasks[i].copies[c] = LCK_NOT_STREAMED;
}

static void same(const training *a, const training *b) {
  for (uint32_t i = 0; i < TASKS; i++) {
    CHECK(a->steps[i] == b->steps[i], "step of %u", i);
    for (uint32_t c = 0; c < a->columns_used; c++)
      CHECK(!memcmp(a->columns[c][i], b->columns[c][i], size_of(a, i)), "column %u of task %u", c,
            i);
  }
}

static int update(training *t, lck_snapshot *snapshot, uint32_t batch, uint32_t threads) {
  return lck_update(&t->rule, 1, t->tasks, TASKS, snapshot, batch, threads, NULL);
}

#define ADAMW .kind = LCK_ADAMW, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8
#define ADAM .kind = LCK_ADAM, .lr = 0.01, .beta1 = 0.4, .beta2 = 0.95, .weight_decay = 0.1
enum { BOTH = LCK_UPDATE_AMSGRAD | LCK_UPDATE_MAXIMIZE };
static const method methods[] = {
    {{ADAMW, .weight_decay = 0.1}, LCK_FLOAT32},
    {{ADAM, .eps = 1e-8, .flags = BOTH}, LCK_FLOAT32},
    {{.kind = LCK_SGD, .lr = 0.01, .momentum = 0.9, .flags = LCK_UPDATE_NESTEROV}, LCK_FLOAT32},
    {{ADAMW, .flags = LCK_UPDATE_UNFUSED}, LCK_FLOAT32},
    {{ADAMW, .weight_decay = 0.1}, LCK_BFLOAT16},
    {{ADAMW, .weight_decay = 0.1}, LCK_FLOAT16},
    {{ADAM, .eps = 1e-8, .flags = BOTH}, LCK_BFLOAT16},
    {{ADAM, .eps = 1e-4, .flags = BOTH}, LCK_FLOAT16},
    {{ADAMW, .flags = LCK_UPDATE_UNFUSED}, LCK_BFLOAT16},
    {{ADAMW, .flags = LCK_UPDATE_UNFUSED}, LCK_FLOAT16},
};
enum { METHODS = sizeof methods / sizeof methods[0], UNFUSED = 3 };

/* This CPU can make it at all. */
static int possible(const method *how) {
  float p = 1, m = 0, v = 0, g = 0, step = 0;
  lck_update_task task = {.parameter = &p, .first = &m, .second = &v, .largest = &v};
  task.gradient = &g;
  task.step = &step;
  task.length = 1;
  task.type = how->type;
  return lck_update(&how->rule, 1, &task, 1, NULL, 0, 1, NULL) == 0;
}

static const char *const kernels[] = {"avx512", "avx2", "sse42", "portable", "aarch64"};

static void test_what_is_streamed_is_what_stands_in_place(bed *b) {
  bed_create(b, "update");
  lck_pool *pool = bed_pool(2, 4096);
  uint64_t sequence = 0;
  for (uint32_t k = 0; k < 5; k++) {
    if (lck_kernel(kernels[k], NULL) != 0)
      continue;
    for (uint32_t r = 0; r < METHODS; r++) {
      training streamed, plain;
      uint32_t crcs[COLUMNS * TASKS], slot = (uint32_t)(sequence % 3);
      if (!possible(&methods[r]))
        continue;
      make(&streamed, &methods[r], bed_slot(b, slot), sequence % 2);
      make(&plain, &methods[r], 0, 0);
      lck_snapshot *s = bed_begin(b, pool, slot);
      uint32_t batch = bed_add(s, streamed.copies, streamed.count);
      CHECK(update(&streamed, s, batch, 1 + r % 3) == 0, "%s", lck_last_error());
      stream_none(&plain);
      CHECK(update(&plain, NULL, 0, 1) == 0, "%s", lck_last_error());
      same(&streamed, &plain);
      bed_capture(s, batch, 1);
      uint64_t bad;
      CHECK(lck_snapshot_audit(s, batch, 1, 1, &bad) == 0, "%s", lck_last_error());
      bed_digests(s, batch, crcs);
      CHECK(update(&streamed, s, batch, 1) == LCK_E_STATE, "streamed twice");
      same(&streamed, &plain);
      CHECK(bed_seal(b, s, slot, ++sequence) == 0, "%s", lck_last_error());
      bed_committed(s);
      bed_verify(b, streamed.copies, crcs, streamed.count);
      drop(&streamed);
      drop(&plain);
    }
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

/* A region that goes away, at any line of any copy, costs the snapshot and not one element. */
static void test_a_lost_region_loses_no_element(bed *b) {
  for (uint32_t round = 0; round < (UNDER_TSAN ? 6 : 40); round++) {
    training streamed, plain;
    bed_create(b, "update");
    lck_pool *pool = bed_pool(2, round % 2 ? 4096 : 65536);
    (void)lck_kernel(kernels[round % 5], NULL); /* what this CPU lacks changes nothing */
    const method *how = &methods[(round + round / 5) % METHODS]; /* with each kernel, some */
    if (!possible(how))
      how = &methods[UNFUSED];
    make(&streamed, how, bed_slot(b, 1), 0);
    make(&plain, how, 0, 0);
    lck_snapshot *s = bed_begin(b, pool, 1);
    uint32_t batch = bed_add(s, streamed.copies, streamed.count);
    const lck_copy *last = &streamed.copies[streamed.count - 1];
    uint64_t span = last->offset + last->length - bed_slot(b, 1);
    if (round % 4 == 3)
      CHECK(lck_fault_arm(LCK_FAULT_COPY, round % 7, ENOSPC) == 0, "arm");
    else
      CHECK(truncate(b->path, (off_t)(bed_slot(b, 1) + span * round / 40 / 4096 * 4096)) == 0, "%s",
            b->path);
    CHECK(update(&streamed, s, batch, 1 + round % 3) == 0, "%s", lck_last_error());
    CHECK(lck_fault_arm(LCK_FAULT_COPY, -1, 0) == 0, "disarm");
    stream_none(&plain);
    CHECK(update(&plain, NULL, 0, 1) == 0, "%s", lck_last_error());
    same(&streamed, &plain);
    CHECK(lck_snapshot_capture(s, batch, -1, 1) == LCK_E_IO, "captured all the same");
    CHECK(bed_seal(b, s, 1, 1) == LCK_E_IO, "sealed all the same");
    CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
    CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
    bed_destroy(b);
    drop(&streamed);
    drop(&plain);
  }
}

/* Once the update has begun, or ended already. */
static void *give_up(void *argument) {
  lck_snapshot *snapshot = argument;
  lck_batch *batch = lck_snapshot_batch(snapshot, 0);
  uint32_t users = 0;
  while (users == 0 && atomic_load(&batch->counted) == 0) {
    lck_pool_lock(snapshot->pool);
    users = snapshot->users;
    lck_pool_unlock(snapshot->pool);
  }
  return lck_snapshot_free(snapshot) == 0 ? NULL : snapshot;
}

/* Another thread gives the snapshot up in the middle: its memory stays until the update has ended,
 * which is made whole. */
static void test_a_snapshot_that_is_given_up_meanwhile_costs_no_element(bed *b) {
  bed_create(b, "update");
  lck_pool *pool = bed_pool(2, 4096);
  for (uint32_t round = 0; round < (UNDER_TSAN ? 5 : 20); round++) {
    training streamed, plain;
    pthread_t other;
    const method *how = &methods[possible(&methods[0]) ? 0 : UNFUSED];
    make(&streamed, how, bed_slot(b, 0), 0);
    make(&plain, how, 0, 0);
    stream_none(&plain);
    lck_snapshot *s = bed_begin(b, pool, 0);
    uint32_t batch = bed_add(s, streamed.copies, streamed.count);
    CHECK(lck_fault_delay(LCK_FAULT_COPY, 20000) == 0, "delay"); /* of each item */
    CHECK(pthread_create(&other, NULL, give_up, s) == 0, "thread");
    CHECK(update(&streamed, s, batch, 1 + round % 2) == 0, "%s", lck_last_error());
    void *wrong;
    CHECK(pthread_join(other, &wrong) == 0 && wrong == NULL, "given up");
    CHECK(lck_fault_delay(LCK_FAULT_COPY, 0) == 0, "no delay");
    CHECK(update(&plain, NULL, 0, 1) == 0, "%s", lck_last_error());
    same(&streamed, &plain);
    drop(&streamed);
    drop(&plain);
  }
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
}

static void test_what_is_refused_changes_nothing(bed *b) {
  training t, before;
  bed_create(b, "update");
  lck_pool *pool = bed_pool(1, 4096);
  make(&t, &methods[UNFUSED], bed_slot(b, 0), 0);
  make(&before, &methods[UNFUSED], 0, 0);
  lck_snapshot *s = bed_begin(b, pool, 0);
  uint32_t batch = bed_add(s, t.copies, t.count);
  CHECK(update(&t, s, batch + 1, 1) == LCK_E_INVALID, "no such batch");
  t.tasks[3].copies[0]++;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "another's copy");
  t.tasks[3].copies[0] = LCK_NOT_STREAMED;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "a copy that nobody makes");
  t.tasks[3].copies[0] = before.tasks[3].copies[0];
  t.tasks[2].length--;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "a copy of other length");
  t.tasks[2].length++;
  t.tasks[2].second = NULL;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "no column");
  t.tasks[2].second = t.columns[2][2];
  t.tasks[1].type = 3;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "no type");
  t.tasks[1].type = LCK_FLOAT16;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "a copy of another type");
  t.tasks[1].type = LCK_FLOAT32;
  t.tasks[8].rule = 1;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "no rule");
  t.tasks[8].rule = 0;
  t.rule.kind = 3;
  CHECK(update(&t, s, batch, 1) == LCK_E_INVALID, "no kind");
  t.rule.kind = LCK_SGD;
  t.tasks[0].type = LCK_BFLOAT16;
  CHECK(update(&t, NULL, 0, 1) == LCK_E_INVALID, "what torch does wrong");
  t.tasks[0].type = LCK_FLOAT32;
  t.rule.kind = LCK_ADAMW;
  same(&t, &before);
  CHECK(lck_snapshot_release(s, batch, 1) == 0, "%s", lck_last_error());
  CHECK(update(&t, s, batch, 1) == LCK_E_STATE, "released");
  same(&t, &before);
  CHECK(lck_snapshot_free(s) == 0, "%s", lck_last_error());
  CHECK(lck_pool_destroy(pool) == 0, "%s", lck_last_error());
  bed_destroy(b);
  drop(&t);
  drop(&before);
}

static void body(bed *b) {
  if (b->staged)
    return; /* page media are staged: nothing is streamed there */
  test_what_is_streamed_is_what_stands_in_place(b);
  test_a_lost_region_loses_no_element(b);
  test_a_snapshot_that_is_given_up_meanwhile_costs_no_element(b);
  test_what_is_refused_changes_nothing(b);
}

int main(void) {
  return bed_main(body);
}
