/* error.c -- the calling thread's error text, and the first failure of several threads. */
#include "error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "api.h"

static _Thread_local char last_error[LCK_TEXT_BYTES];

/* The text is composed beside the old one, because an argument may be lck_last_error() itself. */
__attribute__((format(printf, 2, 0))) static void compose(const char *suffix, const char *format,
                                                          va_list arguments) {
  char text[LCK_TEXT_BYTES];
  int length = vsnprintf(text, sizeof(text), format, arguments);
  if (length < 0)
    text[length = 0] = '\0';
  if (suffix != NULL && (size_t)length < sizeof(text))
    (void)snprintf(text + length, sizeof(text) - (size_t)length, ": %s", suffix);
  memcpy(last_error, text, sizeof(text));
}

int lck_fail(int code, const char *format, ...) {
  int saved = errno;
  va_list arguments;
  va_start(arguments, format);
  compose(NULL, format, arguments);
  va_end(arguments);
  errno = saved;
  return code;
}

int lck_fail_errno(int code, const char *format, ...) {
  int saved = errno;
  char buffer[128];
  const char *reason = strerror_r(saved, buffer, sizeof(buffer));
  va_list arguments;
  va_start(arguments, format);
  compose(reason, format, arguments);
  va_end(arguments);
  errno = saved;
  return code;
}

void lck_error_record(lck_first_error *first, int code) {
  int none = 0;
  if (code == 0 || !atomic_compare_exchange_strong(&first->code, &none, 1))
    return;
  memcpy(first->text, last_error, sizeof(last_error));
  atomic_store(&first->code, code);
}

int lck_error_recorded(const lck_first_error *first) {
  return atomic_load(&first->code) != 0;
}

int lck_error_report(const lck_first_error *first) {
  int code = atomic_load(&first->code);
  return code == 0 ? 0 : lck_fail(code, "%s", first->text);
}

LCK_API const char *lck_last_error(void) {
  return last_error;
}

LCK_API uint32_t lck_abi_version(void) {
  return LCK_ABI;
}
