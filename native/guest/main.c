/* lckguest COMMAND PATH [process] [node=N] [commits=N] [record|manifest|payload]
 *
 * info    what the region at PATH lies on
 * write   make the region when there is none, and commit snapshots
 * verify  recover as a reader and as the owner; both must find the same, contents compared
 * sector  where a part of the newest snapshot lies on its block device */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "guest.h"

/* BEGUN must have left the machine before the commit begins: whoever kills it reads on. */
void say(const char *format, ...) {
  char line[600];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof(line) - 1, format, arguments);
  va_end(arguments);
  if (length >= (int)sizeof(line) - 1)
    length = (int)sizeof(line) - 2;
  line[length++] = '\n';
  for (int at = 0; at < length;) {
    ssize_t count = write(STDOUT_FILENO, line + at, (size_t)(length - at));
    if (count < 0 && errno != EINTR)
      _exit(9);
    at += count < 0 ? 0 : (int)count;
  }
  (void)tcdrain(STDOUT_FILENO); /* no terminal on the host: nothing to wait for */
}

void must(int code, const char *what) {
  if (code == 0)
    return;
  say("FAILED %d %s: %s", code, what, lck_last_error());
  exit(1);
}

/* *opened stays 0 where nothing is. */
static found look(const options *o, uint32_t flags, int *opened) {
  lck_region *region;
  found result = {0};
  int code = region_open(o, flags, &region);
  *opened = code == 0;
  if (code != 0) {
    say("NOTHING %d %s", code, code == ABSENT ? "no such file" : lck_last_error());
    return result;
  }
  result = recover(region);
  must(lck_region_close(region), "close the region");
  return result;
}

/* An owner that cannot open it has said why: then the reader's word stands. */
static int verify(const options *o) {
  int opened;
  found result = look(o, LCK_READ_ONLY, &opened);
  found owner = opened ? look(o, o->flags, &opened) : result;
  if (opened && result.number != owner.number) {
    say("WRONG a reader recovers %" PRIu64 ", the owner %" PRIu64, result.number, owner.number);
    return 1;
  }
  if (result.number > 0)
    say("RECOVERED %" PRIu64, result.number);
  else
    say("RECOVERED none");
  return 0;
}

static int info(const options *o) {
  lck_region *region;
  must(region_open(o, LCK_READ_ONLY, &region), "open the region");
  must(lck_region_close(region), "close the region");
  return 0;
}

static int parse(int count, char **words, options *o) {
  *o = (options){.node = -1, .commits = UINT64_MAX, .part = "payload"};
  if (count < 3)
    return -1;
  o->path = words[2];
  for (int i = 3; i < count; i++) {
    if (strcmp(words[i], "process") == 0)
      o->flags |= LCK_PROCESS_DURABLE;
    else if (strcmp(words[i], "record") == 0 || strcmp(words[i], "manifest") == 0 ||
             strcmp(words[i], "payload") == 0)
      o->part = words[i];
    else if (sscanf(words[i], "node=%" SCNd32, &o->node) != 1 &&
             sscanf(words[i], "commits=%" SCNu64, &o->commits) != 1)
      return -1;
  }
  return 0;
}

int main(int count, char **words) {
  options o;
  if (parse(count, words, &o) == 0) {
    if (strcmp(words[1], "info") == 0)
      return info(&o);
    if (strcmp(words[1], "verify") == 0)
      return verify(&o);
    if (strcmp(words[1], "write") == 0) {
      commit_on(&o, region_own(&o));
      return 0;
    }
    if (strcmp(words[1], "sector") == 0) {
      say_sector(&o);
      return 0;
    }
  }
  fprintf(stderr, "usage: %s info|write|verify|sector PATH [OPTION...]\n", words[0]);
  return 2;
}
