/* revoke.h -- taking a piece of work from a thread that has lost its CPU.
 *
 * A thread of the idle class may lose its CPU between two stores, and for as long as others want
 * it: for seconds. Nobody can wait for that, and nobody else may do its work while it could still
 * store something. A *revocable* call is a function that runs only while a word says that its work
 * is the thread's own. Whoever wants the work changes the word and revokes; when that returns, the
 * thread has left the function, or leaves it before it executes another of its instructions:
 *
 *   1. A signal is pending for it. A thread that does not run, or runs in the kernel, finds it
 *      before it goes on in user space.
 *   2. membarrier interrupts every CPU that runs a thread of this process and returns when all have
 *      been interrupted. A thread that ran finds the signal on its way back from there; and what it
 *      had stored is visible, non-temporal stores included. */
#ifndef LCK_REVOKE_H
#define LCK_REVOKE_H

#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

/* A thread's part in it. */
typedef struct lck_revocable {
  sigjmp_buf jump;
  const _Atomic uint32_t *word; /* the work is the thread's while *word == held */
  uint32_t held;
  volatile sig_atomic_t inside;
} lck_revocable;

/* 1 if work can be taken from threads here and now. Installs a handler for a free real-time signal,
 * again where the default has come back. 0: another's handler is there; no membarrier, no free
 * signal, or a build whose stores take locks (trace) or which sees a race in it (TSan). */
int lck_revoke_possible(void);

/* The calling thread, which blocks all signals, may have work taken from it. */
void lck_revoke_enter(lck_revocable *revocable);

/* Run body(argument) while *word == held; 1: it ran to its end, 0: it did not, since the word has
 * changed. The body is left in the middle: it holds no lock, allocates nothing and calls nothing
 * that does. */
int lck_revocable_run(lck_revocable *revocable, const _Atomic uint32_t *word, uint32_t held,
                      void (*body)(void *), void *argument);

/* A jump past a revocable call, from a handler on this thread. */
void lck_revoke_leave(void);

/* After the word has changed: when this returns, `thread` does nothing more of its work. */
void lck_revoke(pid_t thread);

#endif
