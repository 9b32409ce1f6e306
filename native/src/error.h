/* error.h -- one thread-local error text behind lck_last_error(). */
#ifndef LCK_ERROR_H
#define LCK_ERROR_H

#include <stdatomic.h>

#include "lightck.h"

#define LCK_TEXT_BYTES 512u

/* Set the calling thread's error text and return `code`. */
__attribute__((format(printf, 2, 3))) int lck_fail(int code, const char *format, ...);

/* Set the text with ": strerror(errno)" appended and return `code`; errno is read first. */
__attribute__((format(printf, 2, 3))) int lck_fail_errno(int code, const char *format, ...);

/* The first failure of several threads, for the one that waits for them. Zero: none. */
typedef struct lck_first_error {
  atomic_int code; /* 1: its text is being written */
  char text[LCK_TEXT_BYTES];
} lck_first_error;

/* Note the calling thread's failure unless there is one, or code is 0. */
void lck_error_record(lck_first_error *first, int code);

/* Return whether a failure was noted. */
int lck_error_recorded(const lck_first_error *first);

/* Return 0, or the failure's code with its text set for the calling thread. Call it once the other
 * threads are done. */
int lck_error_report(const lck_first_error *first);

#endif
