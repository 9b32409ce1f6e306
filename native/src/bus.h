/* bus.h -- SIGBUS as a return value: a mapped file was cut, or its memory is poisoned.
 *
 * A *section* is one call of a function that touches memory which may be gone. SIGBUS inside it, at
 * an address of that memory, ends the section; every other SIGBUS goes to the handler that was
 * there before, as if this one did not exist. */
#ifndef LCK_BUS_H
#define LCK_BUS_H

#include <stdint.h>

typedef struct lck_bus_fault {
  uintptr_t address;
  int code;      /* si_code: BUS_ADRERR, BUS_MCEERR_AR, ... */
  uint32_t bits; /* the 2^bits bytes around the address are lost; 0: unknown */
} lck_bus_fault;

/* Install the handler and take [start, +length) for a region until it is forgotten: news of poison
 * there that no access has met (BUS_MCEERR_AO) ends no process.
 * Returns 0, or LCK_E_NOMEM / LCK_E_IO with text. */
int lck_bus_watch(const void *start, uint64_t length);
void lck_bus_forget(const void *start);

/* Install the handler again where the default has replaced it, as it does where somebody puts back
 * all handlers that Python knows of, for Python has never seen this one (Lightning, at the end of a
 * fit). Called where a region is opened and where a snapshot begins; the handler was installed. */
void lck_bus_install_again(void);

/* The calling thread is the library's own: SIGBUS stays unblocked in it. Saves each of its sections
 * a system call. */
void lck_bus_own_thread(void);

/* Run body(argument); 0, or 1 with *fault when an access to [start, +length) raised SIGBUS. The
 * body is left in the middle: it holds no lock, allocates nothing and calls nothing that does.
 * A section inside one over the same memory is part of that one. Any thread, also with SIGBUS
 * blocked. */
int lck_bus_run(const void *start, uint64_t length, void (*body)(void *), void *argument,
                lck_bus_fault *fault);

#endif
