/* check.h -- the native tests' only tool. A failed check ends the program: what follows would only
 * report its consequences. */
#ifndef LCK_CHECK_H
#define LCK_CHECK_H

#include <stdio.h>
#include <stdlib.h>

/* ThreadSanitizer makes every access some ten times slower and has few addresses to give. */
#ifdef __SANITIZE_THREAD__
enum { UNDER_TSAN = 1 };
#else
enum { UNDER_TSAN = 0 };
#endif

static int checks_passed;

#define CHECK(condition, ...)                                                                      \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: %s does not hold:", __FILE__, __LINE__, #condition);                 \
      fprintf(stderr, " " __VA_ARGS__);                                                            \
      fprintf(stderr, "\n%d passed, 1 failed\n", checks_passed);                                   \
      exit(1);                                                                                     \
    }                                                                                              \
    checks_passed++;                                                                               \
  } while (0)

/* Last line of main. */
static inline int checks_end(void) {
  printf("%d passed, 0 failed\n", checks_passed);
  return 0;
}

#endif
