/* calls.h -- the system calls that reach a region's medium, in one table.
 *
 * The release build calls them directly (native/crash/same_code.sh compares its instructions). A
 * test build (-DLCK_TESTING) visits a fault point first, so that any of them fails with any errno
 * after any number of calls. */
#ifndef LCK_CALLS_H
#define LCK_CALLS_H

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault.h"

/* fault point, result when it fails, result's type, name, parameters, arguments */
#define LCK_CALLS(CALL)                                                                            \
  CALL(ALLOCATE, -1, int, fallocate, (int fd, int mode, off_t offset, off_t length),               \
       (fd, mode, offset, length))                                                                 \
  CALL(SYNC, -1, int, fdatasync, (int fd), (fd))                                                   \
  CALL(SYNC, -1, int, fsync, (int fd), (fd))                                                       \
  CALL(TRUNCATE, -1, int, ftruncate, (int fd, off_t length), (fd, length))                         \
  CALL(MAP, MAP_FAILED, void *, mmap,                                                              \
       (void *at, size_t length, int protection, int flags, int fd, off_t offset),                 \
       (at, length, protection, flags, fd, offset))                                                \
  CALL(ADVISE, -1, int, madvise, (void *at, size_t length, int advice), (at, length, advice))      \
  CALL(WRITE, -1, ssize_t, pwrite, (int fd, const void *bytes, size_t length, off_t offset),       \
       (fd, bytes, length, offset))                                                                \
  CALL(READ, -1, ssize_t, pread, (int fd, void *bytes, size_t length, off_t offset),               \
       (fd, bytes, length, offset))                                                                \
  CALL(STAT, -1, int, fstat, (int fd, struct stat *file), (fd, file))                              \
  CALL(LIMIT, -1, int, getrlimit, (struct rlimit * limit), (RLIMIT_FSIZE, limit))                  \
  CALL(LOCK, -1, int, fcntl, (int fd, int command, const struct flock *lock), (fd, command, lock))

#define LCK_CALL(point, failed, type, name, parameters, arguments)                                 \
  static inline type lck_call_##name parameters {                                                  \
    int error = lck_fault_visit(LCK_FAULT_##point);                                                \
    if (error != 0) {                                                                              \
      errno = error;                                                                               \
      return failed;                                                                               \
    }                                                                                              \
    return name arguments;                                                                         \
  }

LCK_CALLS(LCK_CALL)

#endif
