/* One instruction at a time, one thread at a time: what a thread did is recorded before any other
 * thread goes on, so that the events come in the order in which they happened. A thread that is in
 * a system call, which stores nothing in a region, may stay there while others go on. */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "order.h"

#define THREADS 32u
#define TURN 64u /* instructions of one thread before the next one's turn */
#define DIRECTION (UINT64_C(1) << 10)

typedef struct thread {
  pid_t id; /* 0: no thread */
  uint32_t number;
  int in_kernel;
  int known;                    /* `regs` are its registers now */
  struct user_regs_struct regs; /* fetched once for each instruction */
  uint64_t call, arguments[4];  /* system call that it is in */
} thread;

typedef struct tracer {
  recording *r;
  decoder decoder;
  pid_t leader;
  thread threads[THREADS];
  uint32_t count, numbers;
} tracer;

/* ---- threads -------------------------------------------------------------------------------- */

static thread *thread_of(tracer *t, pid_t id) {
  for (uint32_t i = 0; i < t->count; i++)
    if (t->threads[i].id == id)
      return &t->threads[i];
  if (t->count == THREADS)
    DIE("more than %u threads", THREADS);
  t->threads[t->count] = (thread){.id = id, .number = ++t->numbers, .in_kernel = 1};
  return &t->threads[t->count++];
}

static void forget_thread(tracer *t, thread *gone) {
  *gone = t->threads[--t->count];
}

static void go_on(thread *one) {
  one->known = 0;
  if (ptrace(PTRACE_SINGLESTEP, one->id, NULL, NULL) != 0 && errno != ESRCH)
    DIE("step thread %d: %s", (int)one->id, strerror(errno));
}

static struct user_regs_struct *registers(thread *one) {
  if (!one->known && ptrace(PTRACE_GETREGS, one->id, NULL, &one->regs) != 0)
    DIE("registers of thread %d: %s", (int)one->id, strerror(errno));
  one->known = 1;
  return &one->regs;
}

/* It has come out of a system call. */
static void returned(tracer *t, thread *one) {
  one->in_kernel = 0;
  if (one->call == SYS_fallocate && registers(one)->rax == 0)
    record_extended(t->r, one->number, one->arguments[2] + one->arguments[3]);
  one->call = 0;
}

/* A thread has stopped, or is no more. */
static void stopped(tracer *t, pid_t id, int status) {
  thread *one = thread_of(t, id);
  if (WIFEXITED(status) || WIFSIGNALED(status)) {
    if (id == t->leader) {
      t->r->finished = 1;
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        WRONG(t->r, "the program under trace ended with status 0x%x", (unsigned)status);
    }
    forget_thread(t, one);
  } else if (status >> 16 != 0) {
    go_on(one); /* it has made a thread; its system call is not over */
  } else if (WSTOPSIG(status) == SIGTRAP || WSTOPSIG(status) == SIGSTOP) {
    returned(t, one); /* or has just been made */
  } else {
    DIE("thread %d got signal %d", (int)id, WSTOPSIG(status));
  }
}

/* Those that have come out of the kernel; if nobody else can run, wait until one does. */
static void look_into_kernel(tracer *t, int wait) {
  int status;
  for (pid_t id; (id = waitpid(-1, &status, __WALL | (wait ? 0 : WNOHANG))) > 0; wait = 0)
    stopped(t, id, status);
}

/* ---- one instruction ------------------------------------------------------------------------ */

static const instruction *fetch(tracer *t, const thread *one, uint64_t address) {
  uint8_t code[16];
  instruction *place = decoder_place(&t->decoder, address);
  if (place->address != 0)
    return place;
  struct iovec here = {code, sizeof(code)}, there = {(void *)(uintptr_t)address, sizeof(code)};
  ssize_t got = process_vm_readv(one->id, &here, 1, &there, 1, 0);
  if (got <= 0)
    DIE("no code at %lx", (unsigned long)address);
  decode(&t->decoder, place, address, code, (uint64_t)got);
  return place;
}

static void heard(tracer *t, const thread *one, const struct user_regs_struct *regs) {
  if (regs->rax != SAYING)
    DIE("int3 at %lx", (unsigned long)regs->rip);
  record_saying(t->r, one->number, regs->rdi, regs->rsi, regs->rdx);
}

/* Where the instruction is about to store or flush; 0: nowhere. */
static uint64_t aim(tracer *t, const instruction *i, const struct user_regs_struct *regs,
                    instruction *element) {
  uint64_t target = 0;
  if (i->deed == DEED_UNKNOWN) {
    t->r->unknown++;
    WRONG(t->r, "at %lx: %s: may write memory for all that is known of it",
          (unsigned long)i->address, i->text);
  } else if (i->deed == DEED_STRING) {
    *element = *i;
    element->deed = DEED_STORE;
    if (regs->eflags & DIRECTION)
      WRONG(t->r, "at %lx: %s goes backwards", (unsigned long)i->address, i->text);
    target = i->repeated && regs->rcx == 0 ? 0 : regs->rdi;
  } else if (i->deed != DEED_NONE && i->deed != DEED_FENCE && !target_of(i, regs, &target)) {
    WRONG(t->r, "at %lx: %s: the address is not known", (unsigned long)i->address, i->text);
  }
  return target;
}

static void step_once(tracer *t, thread *one) {
  struct user_regs_struct regs = *registers(one);
  instruction element;
  int status;
  const instruction *i = fetch(t, one, regs.rip);
  if (i->deed == DEED_MARK) {
    heard(t, one, &regs);
    regs.rip++;
    one->known = 0;
    if (ptrace(PTRACE_SETREGS, one->id, NULL, &regs) != 0)
      DIE("registers: %s", strerror(errno));
    return;
  }
  t->r->steps++;
  if (i->deed == DEED_SYSCALL) {
    one->in_kernel = 1;
    one->call = regs.rax;
    memcpy(one->arguments, (uint64_t[]){regs.rdi, regs.rsi, regs.rdx, regs.r10},
           sizeof(one->arguments));
    go_on(one);
    return;
  }
  uint64_t target = aim(t, i, &regs, &element);
  go_on(one);
  if (waitpid(one->id, &status, __WALL) != one->id || !WIFSTOPPED(status) ||
      WSTOPSIG(status) != SIGTRAP)
    DIE("at %lx: %s: status 0x%x", (unsigned long)i->address, i->text, (unsigned)status);
  if (i->deed != DEED_NONE && (target != 0 || i->deed == DEED_FENCE))
    record_deed(t->r, one->number, i->deed == DEED_STRING ? &element : i, target);
  if (i->jumps)
    return;
  if (registers(one)->rip != i->address + i->length)
    WRONG(t->r, "at %lx: %s: decoded as %u bytes, the next instruction is at %lx",
          (unsigned long)i->address, i->text, i->length, (unsigned long)registers(one)->rip);
}

/* ---- the whole ------------------------------------------------------------------------------ */

static void launch(tracer *t, const char *const *arguments) {
  int status;
  t->leader = fork();
  if (t->leader == 0) {
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    execv(arguments[0], (char *const *)(uintptr_t)arguments);
    _exit(127);
  }
  if (t->leader < 0 || waitpid(t->leader, &status, 0) != t->leader || !WIFSTOPPED(status))
    DIE("%s does not start", arguments[0]);
  if (ptrace(PTRACE_SETOPTIONS, t->leader, NULL, PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL) != 0)
    DIE("trace %s: %s", arguments[0], strerror(errno));
  thread_of(t, t->leader)->in_kernel = 0;
}

/* At full speed while no trace is wanted, when there is only one thread, to the next int3. */
static void run_freely(tracer *t) {
  thread *one = thread_of(t, t->leader);
  int status;
  one->known = 0;
  if (ptrace(PTRACE_CONT, t->leader, NULL, NULL) != 0 ||
      waitpid(t->leader, &status, __WALL) != t->leader)
    DIE("the program under trace is lost");
  if (!WIFSTOPPED(status)) {
    stopped(t, t->leader, status);
    return;
  }
  if (WSTOPSIG(status) != SIGTRAP)
    DIE("the program under trace got signal %d", WSTOPSIG(status));
  heard(t, one, registers(one));
}

static void step_all(tracer *t) {
  int ready = 0;
  for (uint32_t i = 0; i < t->count && t->r->running && !t->r->finished; i++)
    for (uint32_t turn = 0; turn < TURN && !t->threads[i].in_kernel && t->r->running; turn++) {
      step_once(t, &t->threads[i]);
      ready = 1;
    }
  if (t->r->running && !t->r->finished)
    look_into_kernel(t, !ready);
}

void step_through(recording *r, const char *const *arguments) {
  tracer t = {.r = r};
  decoder_make(&t.decoder);
  launch(&t, arguments);
  while (!r->finished && r->wrong[0] == '\0') {
    if (r->running)
      step_all(&t);
    else
      run_freely(&t);
  }
  if (t.count > 0) {
    kill(t.leader, SIGKILL);
    for (int status; waitpid(-1, &status, __WALL) > 0 || errno == EINTR;)
      continue;
  }
  decoder_free(&t.decoder);
}
