/* allocate.c -- allocating a file's bytes in pieces that no signal can starve. */
#include "allocate.h"

#include <signal.h>
#include <time.h>

#include "calls.h"

/* One call to fallocate: on tmpfs a signal undoes a whole call, so that a profiler's timer would
 * starve a long one. */
#define PIECE (UINT64_C(16) << 20)

static int write_zeros(int fd, uint64_t offset, uint64_t length) {
  static const char zeros[1 << 16];
  while (length > 0) {
    size_t part = length < sizeof(zeros) ? (size_t)length : sizeof(zeros);
    ssize_t count = lck_call_pwrite(fd, zeros, part, (off_t)offset);
    if (count < 0 && errno == EINTR)
      continue;
    if (count <= 0)
      return count < 0 ? errno : EIO;
    offset += (uint64_t)count;
    length -= (uint64_t)count;
  }
  return 0;
}

static int allocate_pieces(const lck_region *region, uint64_t offset, uint64_t length, int fresh) {
  int error = 0;
  for (uint64_t done = 0; error == 0 && done < length; done += PIECE) {
    uint64_t piece = length - done < PIECE ? length - done : PIECE;
    do
      error =
          lck_call_fallocate(region->fd, 0, (off_t)(offset + done), (off_t)piece) == 0 ? 0 : errno;
    while (error == EINTR);
    if (error != EOPNOTSUPP && error != ENOSYS)
      continue;
    if (!fresh)
      return 0;
    return region->medium == LCK_HUGETLBFS
               ? lck_call_ftruncate(region->fd, (off_t)(offset + length)) ? errno : 0
               : write_zeros(region->fd, offset + done, length - done);
  }
  return error;
}

/* Beyond the limit the kernel also sends this thread SIGXFSZ, whose default is to end the process.
 * One that was waiting before, sent by somebody else, is left to wait. */
int lck_allocate(const lck_region *region, uint64_t offset, uint64_t length, int fresh) {
  static const struct timespec at_once;
  sigset_t signals;
  sigset_t waiting;
  sigset_t before;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  (void)pthread_sigmask(SIG_BLOCK, &signals, &before);
  (void)sigpending(&waiting);
  int error = allocate_pieces(region, offset, length, fresh);
  if (error == EFBIG && !sigismember(&waiting, SIGXFSZ))
    (void)sigtimedwait(&signals, NULL, &at_once);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}
