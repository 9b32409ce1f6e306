/* revoke.c -- the signal and the membarrier that take work from a thread without a CPU. */
#include "revoke.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

/* <linux/membarrier.h>, which not every system has. */
#define PRIVATE_EXPEDITED (1 << 3)
#define REGISTER_PRIVATE_EXPEDITED (1 << 4)

/* A key and not a thread-local variable, for the reason that bus.c gives. */
static pthread_key_t own_revocable;
static int signal_number; /* 0: none */

static int still_held(const lck_revocable *revocable) {
  return atomic_load(revocable->word) == revocable->held;
}

/* A signal that comes late finds the thread between two calls, or at work that is its own. */
static void on_revoke(int number) {
  (void)number;
  int saved = errno;
  lck_revocable *revocable = pthread_getspecific(own_revocable);
  if (revocable && revocable->inside && !still_held(revocable)) {
    revocable->inside = 0;
    siglongjmp(revocable->jump, 1);
  }
  errno = saved;
}

static struct sigaction ours = {.sa_handler = on_revoke, .sa_flags = SA_NODEFER};

static int is_free(const struct sigaction *action) {
  return !(action->sa_flags & SA_SIGINFO) && action->sa_handler == SIG_DFL;
}

static void install(void) {
#if !defined(__SANITIZE_THREAD__) && !defined(LCK_TRACE)
  Dl_info self;
  sigemptyset(&ours.sa_mask);
  if (syscall(SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0 ||
      pthread_key_create(&own_revocable, NULL) != 0)
    return;
  /* The handler outlives a dlclose. */
  if (dladdr((const void *)(uintptr_t)on_revoke, &self) != 0 && self.dli_fname != NULL)
    (void)dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  for (int number = SIGRTMAX; number >= SIGRTMIN && signal_number == 0; number--) {
    struct sigaction theirs;
    if (sigaction(number, NULL, &theirs) == 0 && is_free(&theirs) &&
        sigaction(number, &ours, NULL) == 0)
      signal_number = number;
  }
#endif
}

/* Lightning brings back at its end every handler that Python knows of, and Python does not know of
 * this one: then the default stands there. Another's handler is left alone. */
int lck_revoke_possible(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  struct sigaction now;
  (void)pthread_once(&once, install);
  if (signal_number == 0 || sigaction(signal_number, NULL, &now) != 0)
    return 0;
  return now.sa_handler == on_revoke ||
         (is_free(&now) && sigaction(signal_number, &ours, NULL) == 0);
}

void lck_revoke_enter(lck_revocable *revocable) {
  sigset_t revoke;
  (void)pthread_setspecific(own_revocable, revocable);
  sigemptyset(&revoke);
  sigaddset(&revoke, signal_number);
  (void)pthread_sigmask(SIG_UNBLOCK, &revoke, NULL);
}

void lck_revoke_leave(void) {
  lck_revocable *revocable = signal_number ? pthread_getspecific(own_revocable) : NULL;
  if (revocable)
    revocable->inside = 0;
}

/* The word is read when the signal would be heard: it changed before and is seen here, or changes
 * later and the signal comes later, too. */
__attribute__((noinline)) int lck_revocable_run(lck_revocable *revocable,
                                                const _Atomic uint32_t *word, uint32_t held,
                                                void (*body)(void *), void *argument) {
  revocable->word = word;
  revocable->held = held;
  if (sigsetjmp(revocable->jump, 0) != 0)
    return 0;
  revocable->inside = 1;
  atomic_signal_fence(memory_order_seq_cst);
  int ours = still_held(revocable);
  if (ours)
    body(argument);
  atomic_signal_fence(memory_order_seq_cst);
  revocable->inside = 0;
  return ours;
}

/* The kernel may have no room for a signal just now (RLIMIT_SIGPENDING); there is no other way. */
void lck_revoke(pid_t thread) {
  while (syscall(SYS_tgkill, getpid(), thread, signal_number) != 0 && errno == EAGAIN)
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
  (void)syscall(SYS_membarrier, PRIVATE_EXPEDITED, 0, 0);
}
