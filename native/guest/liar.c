/* Region code that lies, for the controls: linked with --wrap=mmap --wrap=fsync.
 *
 * Every mapping is granted as if it were MAP_SYNC, and the sync that settles a new file's extents
 * does nothing: what a library does that takes "-o dax" or a successful mmap for a promise. A power
 * failure must then lose what was acknowledged, or the jobs that find nothing lost prove nothing.
 */
#include <sys/mman.h>
#include <sys/types.h>

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif

void *__real_mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset);
int __wrap_fsync(int fd);

void *__wrap_mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
  if ((flags & MAP_SYNC) != 0 && (flags & MAP_SHARED_VALIDATE) == MAP_SHARED_VALIDATE)
    flags = (flags & ~(MAP_SHARED_VALIDATE | MAP_SYNC)) | MAP_SHARED;
  return __real_mmap(at, length, protection, flags, fd, offset);
}

int __wrap_fsync(int fd) {
  (void)fd;
  return 0;
}
