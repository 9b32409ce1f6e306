/* error.h -- one thread-local error text behind lck_last_error(). */
#ifndef LCK_ERROR_H
#define LCK_ERROR_H

#include "lightck.h"

/* Set the calling thread's error text and return `code`. */
__attribute__((format(printf, 2, 3))) int lck_fail(int code, const char *format, ...);

/* The same with ": strerror(errno)" appended; errno is read first. */
__attribute__((format(printf, 2, 3))) int lck_fail_errno(int code, const char *format, ...);

#endif
