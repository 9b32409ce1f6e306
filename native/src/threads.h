/* threads.h -- a few threads for the length of one call. */
#ifndef LCK_THREADS_H
#define LCK_THREADS_H

#include <stdint.h>

#define LCK_THREADS_MOST 64u

/* Run `body` on up to `threads` threads, the caller being one of them, and return when all are
 * done. A thread that cannot be had only costs time: the body must find its share by itself. */
void lck_threads_run(void *(*body)(void *), void *argument, uint64_t threads);

#endif
