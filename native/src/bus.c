/* bus.c -- the handler of SIGBUS: sections end, everything else is passed on. */
#include "bus.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "error.h"
#include "lightck.h"
#include "revoke.h"

typedef struct section {
  sigjmp_buf jump;
  uintptr_t first, end;
  lck_bus_fault fault;
  sigset_t mask;              /* at the fault */
  volatile sig_atomic_t sent; /* `held` came in meanwhile and is due when the section is over */
  siginfo_t held;
} section;

/* Stands for the section of a library thread that is between two sections. */
static section idle;

/* Each thread's section. A key and not a thread-local variable: that one's memory would be
 * allocated at its first use, which may be in the handler, inside somebody's malloc. */
static pthread_key_t current;

static struct sigaction earlier;
static atomic_int spent; /* `earlier` was to serve once (SA_RESETHAND), and has */

/* ---- watched ranges ----------------------------------------------------------------------- */

/* Never freed, because a handler may be walking the list; `first` 0 marks one to use again. */
typedef struct range {
  _Atomic uintptr_t first, end;
  struct range *next;
} range;

static _Atomic(range *) ranges;

/* `end` is stored last and read first: a range that is being made matches nothing. */
static int is_watched(uintptr_t address) {
  for (range *at = atomic_load(&ranges); at != NULL; at = at->next)
    if (address < atomic_load(&at->end) && address >= atomic_load(&at->first))
      return 1;
  return 0;
}

/* ---- everything that is not ours ---------------------------------------------------------- */

/* The kernel found it, while an instruction ran that will run again when the handler returns. */
static int is_synchronous(const siginfo_t *info) {
  return info->si_code > 0 && info->si_code != BUS_MCEERR_AO;
}

static void send_again(siginfo_t *info) {
  (void)syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS, info);
}

/* Pass the signal on as if there were no handler: a fault happens once more, at the same
 * instruction, and ends the process there; what somebody sent is sent once more. */
static void die(siginfo_t *info) {
  struct sigaction fatal = {.sa_handler = SIG_DFL};
  (void)sigaction(SIGBUS, &fatal, NULL);
  if (!is_synchronous(info))
    send_again(info);
}

static void call_earlier(int number, siginfo_t *info, void *context) {
  sigset_t blocked = earlier.sa_mask;
  sigset_t before;
  if (!(earlier.sa_flags & SA_NODEFER))
    sigaddset(&blocked, SIGBUS);
  (void)pthread_sigmask(SIG_BLOCK, &blocked, &before);
  if (earlier.sa_flags & SA_SIGINFO)
    earlier.sa_sigaction(number, info, context);
  else
    earlier.sa_handler(number);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void pass_on(int number, siginfo_t *info, void *context) {
  int plain = !(earlier.sa_flags & SA_SIGINFO);
  if (plain && earlier.sa_handler == SIG_IGN) {
    /* The kernel lets nobody ignore a fault of its own. */
    if (is_synchronous(info))
      die(info);
  } else if ((plain && earlier.sa_handler == SIG_DFL) ||
             ((unsigned)earlier.sa_flags & SA_RESETHAND && atomic_exchange(&spent, 1))) {
    die(info);
  } else {
    call_earlier(number, info, context);
  }
}

/* ---- the handler -------------------------------------------------------------------------- */

/* The mask that the jump must bring back is in the context; sections save none on the way in, which
 * would be a system call each. The kernel changes nothing for SA_NODEFER and an empty sa_mask, but
 * ThreadSanitizer blocks everything.
 *
 * A signal that somebody sends to a thread inside a section waits for the section's end, for it may
 * be the fault itself: a handler installed after this one that has said its word (Python's
 * faulthandler) puts this one back and raises the signal. Then the instruction, run again, faults
 * again, and the one that waits is dropped. */
static void on_bus(int number, siginfo_t *info, void *context) {
  int saved = errno;
  uintptr_t address = (uintptr_t)info->si_addr;
  section *here = pthread_getspecific(current);
  int inside = here != NULL && here != &idle;
  if (info->si_code <= 0 && inside) {
    here->held = *info;
    here->sent = 1;
  } else if (is_synchronous(info) && inside && address >= here->first && address < here->end) {
    unsigned bits = info->si_code == BUS_MCEERR_AR ? (unsigned)info->si_addr_lsb : 0;
    here->fault = (lck_bus_fault){address, info->si_code, bits < 63 ? bits : 0};
    here->mask = ((const ucontext_t *)context)->uc_sigmask;
    here->sent = 0;
    lck_revoke_leave();
    siglongjmp(here->jump, 1);
  } else if (info->si_code != BUS_MCEERR_AO || !is_watched(address)) {
    pass_on(number, info, context);
  }
  errno = saved;
}

static int install_error;
static struct sigaction ours = {.sa_sigaction = on_bus};

static void install(void) {
  Dl_info self;
  install_error = pthread_key_create(&current, NULL);
  if (install_error != 0)
    return;
  /* The handler outlives a dlclose. */
  if (dladdr((const void *)(uintptr_t)on_bus, &self) != 0 && self.dli_fname != NULL)
    (void)dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  /* `earlier` is complete before the handler can run. */
  install_error = sigaction(SIGBUS, NULL, &earlier) == 0 ? 0 : errno;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK | (earlier.sa_flags & SA_RESTART);
  sigemptyset(&ours.sa_mask);
  if (install_error == 0 && sigaction(SIGBUS, &ours, NULL) != 0)
    install_error = errno;
}

static void prepare(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, install);
}

/* Another's handler is left alone: it may call this one. */
void lck_bus_install_again(void) {
  struct sigaction now;
  if (sigaction(SIGBUS, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) &&
      now.sa_handler == SIG_DFL)
    (void)sigaction(SIGBUS, &ours, NULL);
}

int lck_bus_watch(const void *start, uint64_t length) {
  prepare();
  if (install_error != 0) {
    errno = install_error;
    return lck_fail_errno(LCK_E_IO, "install a handler of SIGBUS");
  }
  lck_bus_install_again();
  uintptr_t first = (uintptr_t)start;
  for (range *at = atomic_load(&ranges); at != NULL; at = at->next) {
    uintptr_t nobody = 0;
    if (atomic_compare_exchange_strong(&at->first, &nobody, first)) {
      atomic_store(&at->end, first + length);
      return 0;
    }
  }
  range *added = calloc(1, sizeof(*added));
  if (added == NULL)
    return lck_fail(LCK_E_NOMEM, "%zu bytes to watch a range of addresses", sizeof(*added));
  atomic_store(&added->first, first);
  atomic_store(&added->end, first + length);
  added->next = atomic_load(&ranges);
  while (!atomic_compare_exchange_weak(&ranges, &added->next, added)) {
  }
  return 0;
}

void lck_bus_forget(const void *start) {
  for (range *at = atomic_load(&ranges); at != NULL; at = at->next)
    if (atomic_load(&at->first) == (uintptr_t)start) {
      atomic_store(&at->end, 0);
      atomic_store(&at->first, 0);
      return;
    }
}

/* ---- sections ----------------------------------------------------------------------------- */

/* Returns 1 if it was blocked. A fault that finds its signal blocked ends the process. */
static int unblock(void) {
  sigset_t bus;
  sigset_t before;
  sigemptyset(&bus);
  sigaddset(&bus, SIGBUS);
  return pthread_sigmask(SIG_UNBLOCK, &bus, &before) == 0 && sigismember(&before, SIGBUS);
}

static void block(void) {
  sigset_t bus;
  sigemptyset(&bus);
  sigaddset(&bus, SIGBUS);
  (void)pthread_sigmask(SIG_BLOCK, &bus, NULL);
}

void lck_bus_own_thread(void) {
  prepare();
  (void)unblock();
  (void)pthread_setspecific(current, &idle);
}

/* How the thread computes (whether denormals are flushed, how is rounded). The kernel gives a
 * handler the defaults on x86, and a jump out of it keeps them. */
static unsigned float_mode(void) {
#ifdef __x86_64__
  return _mm_getcsr();
#else
  return 0;
#endif
}

static void set_float_mode(unsigned mode) {
#ifdef __x86_64__
  _mm_setcsr(mode);
#else
  (void)mode;
#endif
}

/* Apart, so that no variable of the caller lives in a register that a jump would bring back. */
__attribute__((noinline)) static int enter(section *here, void (*body)(void *), void *argument) {
  if (sigsetjmp(here->jump, 0) != 0)
    return 1;
  body(argument);
  return 0;
}

int lck_bus_run(const void *start, uint64_t length, void (*body)(void *), void *argument,
                lck_bus_fault *fault) {
  section here;
  prepare();
  section *outer = pthread_getspecific(current);
  here.first = (uintptr_t)start;
  here.end = here.first + length;
  here.sent = 0;
  if (outer != NULL && outer->first == here.first && outer->end == here.end) {
    body(argument);
    return 0;
  }
  int blocked = outer == NULL && unblock();
  unsigned mode = float_mode();
  /* Fails only without memory for a thread's first key beyond the 31st: then a fault would not be
   * ours, and ends the process as it would without this handler. */
  (void)pthread_setspecific(current, &here);
  int faulted = enter(&here, body, argument);
  (void)pthread_setspecific(current, outer);
  if (faulted) {
    (void)pthread_sigmask(SIG_SETMASK, &here.mask, NULL);
    set_float_mode(mode);
    *fault = here.fault;
  }
  if (blocked)
    block();
  if (here.sent)
    send_again(&here.held);
  return faulted;
}
