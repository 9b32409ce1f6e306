/* test_bus.c -- whose SIGBUS it is: ours becomes an error, every other one goes where it went
 * before. Every case runs in a process of its own, whose handlers are set before or after ours. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "bus.h"
#include "region_fixture.h"

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

static const char *memory_path;

static volatile sig_atomic_t calls;
static void *volatile seen_address;
static volatile int seen_code;
static sigjmp_buf *out;

/* ---- memory that is gone ------------------------------------------------------------------- */

/* Of a file that has no pages any more, no region. */
static volatile unsigned char *foreign(void) {
  char path[] = "/dev/shm/lightck-foreign-XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && ftruncate(fd, 8192) == 0, "%s", path);
  void *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(map != MAP_FAILED && ftruncate(fd, 0) == 0, "map");
  close(fd);
  unlink(path);
  return map;
}

static void fault_foreign(void) {
  (void)foreign()[4096];
}

/* A region whose headers are gone: 1 if its loss is told as an error. */
static void fault_ours(void) {
  lck_region_spec spec = small_spec();
  lck_record record;
  lck_region *region = must_create(memory_path, &spec);
  CHECK(truncate(memory_path, 0) == 0, "cut");
  CHECK(lck_slot_read(region, 0, &record) == LCK_E_IO, "%s", lck_last_error());
  CHECK(strstr(lck_last_error(), "SIGBUS at offset 8192") != NULL, "%s", lck_last_error());
  must_close(region);
}

static void open_a_region(void) {
  lck_region_spec spec = small_spec();
  must_close(must_create(memory_path, &spec));
}

/* Send this thread a SIGBUS as the kernel would. */
static void inject(int code, const void *address) {
  siginfo_t info = {.si_signo = SIGBUS, .si_code = code};
  info.si_addr = (void *)(uintptr_t)address;
  CHECK(syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS, &info) == 0,
        "inject");
}

/* ---- handlers ------------------------------------------------------------------------------ */

static void on_info(int number, siginfo_t *info, void *context) {
  (void)number, (void)context;
  calls++;
  seen_address = info->si_addr;
  seen_code = info->si_code;
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  CHECK(sigismember(&blocked, SIGBUS) == 1 && sigismember(&blocked, SIGUSR2) == 1, "its mask");
  if (info->si_code > 0 && out != NULL)
    siglongjmp(*out, 1);
}

static void on_plain(int number) {
  CHECK(number == SIGBUS, "%d", number);
  calls++;
  if (out != NULL)
    siglongjmp(*out, 1);
}

static void install(void (*plain)(int), int flags) {
  struct sigaction action = {.sa_handler = plain, .sa_flags = flags};
  CHECK(sigaction(SIGBUS, &action, NULL) == 0, "sigaction");
}

static void install_with_information(void) {
  struct sigaction action = {.sa_sigaction = on_info, .sa_flags = SA_SIGINFO};
  sigaddset(&action.sa_mask, SIGUSR2);
  CHECK(sigaction(SIGBUS, &action, NULL) == 0, "sigaction");
}

/* Runs `body` in a child; the signal that ended it, or 0. */
static int end_of(void (*body)(void)) {
  int status = 0;
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0, "fork: %s", strerror(errno));
  if (child == 0) {
    body();
    _exit(0);
  }
  CHECK(waitpid(child, &status, 0) == child, "waitpid");
  if (WIFEXITED(status))
    CHECK(WEXITSTATUS(status) == 0, "child status 0x%x", status);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* ---- who is asked -------------------------------------------------------------------------- */

static void earlier_with_information(void) {
  sigjmp_buf here;
  install_with_information();
  open_a_region();
  fault_ours();
  CHECK(calls == 0, "ours is nobody else's business");
  volatile unsigned char *gone = foreign();
  out = &here;
  if (sigsetjmp(here, 1) == 0)
    (void)gone[4096];
  CHECK(calls == 1 && seen_address == gone + 4096 && seen_code == BUS_ADRERR, "%d calls",
        (int)calls);
  kill(getpid(), SIGBUS);
  CHECK(calls == 2 && seen_code == SI_USER, "what somebody sends");
  fault_ours();
  CHECK(calls == 2, "and ours is still ours");
}

static void earlier_plain(void) {
  sigjmp_buf here;
  install(on_plain, 0);
  open_a_region();
  out = &here;
  if (sigsetjmp(here, 1) == 0)
    fault_foreign();
  CHECK(calls == 1, "%d calls", (int)calls);
  out = NULL;
  raise(SIGBUS);
  CHECK(calls == 2, "%d calls", (int)calls);
}

static void serves_once(void) {
  install(on_plain, (int)SA_RESETHAND);
  open_a_region();
  raise(SIGBUS);
  CHECK(calls == 1, "%d calls", (int)calls);
  raise(SIGBUS);
  _exit(1);
}

static void nobody_before(void) {
  install(SIG_DFL, 0);
  open_a_region();
  fault_ours();
  fault_foreign();
  _exit(1);
}

static void nobody_before_sent(void) {
  install(SIG_DFL, 0);
  open_a_region();
  raise(SIGBUS);
  _exit(1);
}

static void ignored_fault(void) {
  install(SIG_IGN, 0);
  open_a_region();
  fault_foreign();
  _exit(1);
}

static void ignored_sent(void) {
  install(SIG_IGN, 0);
  open_a_region();
  raise(SIGBUS);
  kill(getpid(), SIGBUS);
  fault_ours();
}

/* ---- the state of the thread --------------------------------------------------------------- */

/* A blocked fault ends a process: sections unblock it, and leave the mask as it was. */
static void blocked(void) {
  sigset_t all;
  sigset_t after;
  sigfillset(&all);
  open_a_region();
  pthread_sigmask(SIG_BLOCK, &all, NULL);
  fault_ours();
  fault_ours();
  pthread_sigmask(SIG_SETMASK, NULL, &after);
  CHECK(sigismember(&after, SIGBUS) == 1, "blocked as before");
  sigemptyset(&all);
  pthread_sigmask(SIG_SETMASK, &all, NULL);
  fault_ours();
  pthread_sigmask(SIG_SETMASK, NULL, &after);
  CHECK(sigismember(&after, SIGBUS) == 0, "open as before");
}

static void peep(void *memory) {
  (void)((volatile unsigned char *)memory)[100];
}

/* Returns how many of 50 faults were not told, or not as they were. */
static void *from_a_thread(void *argument) {
  intptr_t wrong = 0;
  for (int i = 0; i < 50; i++) {
    lck_bus_fault fault = {0};
    void *gone = (void *)(uintptr_t)argument;
    wrong += lck_bus_run(gone, 8192, peep, gone, &fault) != 1 ||
             fault.address != (uintptr_t)gone + 100 || fault.code != BUS_ADRERR;
  }
  return (void *)wrong;
}

static void many_threads(void) {
  pthread_t threads[8];
  void *wrong;
  install(SIG_DFL, 0);
  for (int i = 0; i < 8; i++)
    CHECK(pthread_create(&threads[i], NULL, from_a_thread, (void *)(uintptr_t)foreign()) == 0,
          "thread");
  for (int i = 0; i < 8; i++)
    CHECK(pthread_join(threads[i], &wrong) == 0 && wrong == NULL, "%ld", (long)(intptr_t)wrong);
}

/* A section's own memory is not its source's: that fault is the user's. */
static void fault_in_the_source(void) {
  lck_region_spec spec = small_spec();
  install(SIG_DFL, 0);
  uint32_t crc = 0;
  lck_region *region = must_create(memory_path, &spec);
  (void)lck_persist_payload(region, slot_start(region, 0), (void *)(uintptr_t)foreign(), 8192,
                            &crc);
  _exit(1);
}

/* ---- a handler that is set after ours, and passes on what it does not know ------------------ */

static struct sigaction below;

/* As Python's faulthandler does: say a word, put back what was there, raise. */
static void on_top(int number) {
  calls++;
  CHECK(sigaction(SIGBUS, &below, NULL) == 0, "sigaction");
  raise(number);
}

static void set_on_top(void) {
  struct sigaction action = {.sa_handler = on_top, .sa_flags = SA_NODEFER};
  CHECK(sigaction(SIGBUS, &action, &below) == 0, "sigaction");
}

static void later_handler_and_our_fault(void) {
  install(SIG_DFL, 0);
  open_a_region();
  set_on_top();
  fault_ours();
  CHECK(calls == 1, "%d calls", (int)calls);
  fault_ours();
  CHECK(calls == 1, "it took itself away");
}

static void later_handler_and_another_fault(void) {
  install(SIG_DFL, 0);
  open_a_region();
  set_on_top();
  fault_foreign();
  _exit(1);
}

/* ---- poison -------------------------------------------------------------------------------- */

static void *held_base;

/* News of poison in a region that nobody has touched; after its close the range is anybody's. */
static void news_of_poison(void) {
  lck_region_spec spec = small_spec();
  install(SIG_DFL, 0);
  lck_region *region = must_create(memory_path, &spec);
  held_base = (void *)(uintptr_t)describe(region).base;
  inject(BUS_MCEERR_AO, (char *)held_base + 300000);
  CHECK(write_snapshot(region, 0, 1) == 0, "%s", lck_last_error());
  must_close(region);
  inject(BUS_MCEERR_AO, (char *)held_base + 300000);
  _exit(1);
}

static void sent_inside(void *memory) {
  (void)memory;
  inject(SI_TKILL, NULL);
  CHECK(calls == 0, "it waits for the end of the section");
}

static void sent_in_a_section(void) {
  unsigned char memory[64];
  lck_bus_fault fault;
  install(on_plain, 0);
  CHECK(lck_bus_run(memory, sizeof(memory), sent_inside, memory, &fault) == 0, "no fault");
  CHECK(calls == 1, "%d calls", (int)calls);
}

/* ---- children ------------------------------------------------------------------------------ */

static void with_a_region_of_its_own(void) {
  char path[300];
  snprintf(path, sizeof(path), "%s-child", memory_path);
  memory_path = path;
  open_a_region();
  fault_ours();
  unlink(path);
  fault_foreign();
}

static void forked_child(void) {
  lck_region_spec spec = small_spec();
  install(SIG_DFL, 0);
  lck_region *region = must_create(memory_path, &spec);
  CHECK(end_of(fault_foreign) == SIGBUS, "the child of an owner dies of its own SIGBUS");
  CHECK(end_of(with_a_region_of_its_own) == SIGBUS, "also after it has opened a region itself");
  must_close(region);
  fault_ours();
}

/* As with torch.set_flush_denormal: a fault that is told changes nothing of what is computed. */
static void fault_of_a_thread_that_flushes_denormals(void) {
#ifdef __x86_64__
  unsigned mode = _mm_getcsr() | 0x8040;
  _mm_setcsr(mode);
  fault_ours();
  CHECK((_mm_getcsr() & 0x8040) == (mode & 0x8040), "0x%x instead of 0x%x", _mm_getcsr(), mode);
#endif
}

int main(void) {
  memory_path = strdup(path_in("/dev/shm"));
  CHECK(end_of(earlier_with_information) == 0, "SA_SIGINFO");
  CHECK(end_of(earlier_plain) == 0, "plain");
  CHECK(end_of(serves_once) == SIGBUS, "SA_RESETHAND");
  CHECK(end_of(nobody_before) == SIGBUS, "SIG_DFL, fault");
  CHECK(end_of(nobody_before_sent) == SIGBUS, "SIG_DFL, sent");
  CHECK(end_of(ignored_fault) == SIGBUS, "SIG_IGN, fault");
  CHECK(end_of(ignored_sent) == 0, "SIG_IGN, sent");
  CHECK(end_of(blocked) == 0, "blocked");
  CHECK(end_of(many_threads) == 0, "threads");
  CHECK(end_of(fault_in_the_source) == SIGBUS, "source");
  CHECK(end_of(later_handler_and_our_fault) == 0, "later handler, ours");
  CHECK(end_of(later_handler_and_another_fault) == SIGBUS, "later handler, foreign");
  CHECK(end_of(news_of_poison) == SIGBUS, "BUS_MCEERR_AO");
  CHECK(end_of(sent_in_a_section) == 0, "sent into a section");
  CHECK(end_of(forked_child) == 0, "fork");
  CHECK(end_of(fault_of_a_thread_that_flushes_denormals) == 0, "floating point");
  unlink(memory_path);
  free((void *)(uintptr_t)memory_path);
  return checks_end();
}
