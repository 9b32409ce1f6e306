/* lock.c -- the owner lock, leases and claims of slots, and what a forked child closes. */
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "api.h"
#include "calls.h"
#include "error.h"

#define OWNER_BYTE (INT64_MAX / 2)
#define SLOT_BYTE(slot) (OWNER_BYTE + 1 + (int64_t)(slot))

/* Guards the list of open regions and their `leased` bits; a fork waits for it. Never held across
 * anything that blocks. */
static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static lck_region *list;

/* ---- fork --------------------------------------------------------------------------------- */

static void before_fork(void) {
  pthread_mutex_lock(&list_mutex);
}

static void after_fork_in_parent(void) {
  pthread_mutex_unlock(&list_mutex);
}

/* The child shares the parent's open file descriptions, and with them the locks: a child that
 * outlives its parent would keep the region busy. Closing the duplicates drops nothing that the
 * parent holds, because the parent's own descriptors keep the descriptions alive. Only
 * async-signal-safe calls. */
static void after_fork_in_child(void) {
  for (lck_region *region = list; region != NULL; region = region->next) {
    close(region->fd);
    close(region->lock_fd);
    region->fd = region->lock_fd = -1;
    atomic_store(&region->owner, -1);
  }
  list = NULL;
  pthread_mutex_unlock(&list_mutex);
}

static int install_result;

static void install_handlers(void) {
  install_result = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int lck_lock_adopt(lck_region *region, int fd, int lock_fd) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, install_handlers);
  if (install_result != 0)
    return lck_fail(LCK_E_NOMEM, "pthread_atfork: error %d", install_result);
  pthread_mutex_lock(&list_mutex);
  int error = 0;
  region->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (region->fd < 0)
    error = errno;
  region->lock_fd = error ? -1 : fcntl(lock_fd, F_DUPFD_CLOEXEC, 3);
  if (!error && region->lock_fd < 0) {
    error = errno;
    close(region->fd);
  }
  if (!error) {
    atomic_store(&region->owner, getpid());
    region->next = list;
    list = region;
  }
  pthread_mutex_unlock(&list_mutex);
  if (!error)
    return 0;
  errno = error;
  return lck_fail_errno(error == EBADF ? LCK_E_INVALID : LCK_E_IO,
                        "duplicate descriptors %d and %d", fd, lock_fd);
}

/* ---- locks -------------------------------------------------------------------------------- */

static int set_lock(const lck_region *region, short type, int64_t byte) {
  struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
  return lck_call_fcntl(region->lock_fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

static int held_elsewhere(int error) {
  return error == EAGAIN || error == EACCES;
}

int lck_lock_own(lck_region *region) {
  int error = set_lock(region, F_WRLCK, OWNER_BYTE);
  if (error == 0)
    return 0;
  if (held_elsewhere(error))
    return lck_fail(LCK_E_BUSY, "another process or handle owns the region");
  errno = error;
  return lck_fail_errno(LCK_E_IO, "take the owner lock on descriptor %d", region->lock_fd);
}

/* A handle's own lock does not conflict with what it asks for. */
int lck_lock_owned(const lck_region *region, int *owned) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = OWNER_BYTE, .l_len = 1};
  if (fcntl(region->lock_fd, F_OFD_GETLK, &lock) != 0)
    return lck_fail_errno(LCK_E_IO, "look at the owner lock on descriptor %d", region->lock_fd);
  *owned = lock.l_type != F_UNLCK || !(region->flags & LCK_READ_ONLY);
  return 0;
}

void lck_lock_release(lck_region *region) {
  pthread_mutex_lock(&list_mutex);
  /* The caller may keep the descriptor it passed: closing the duplicate alone would drop nothing.
   */
  struct flock all = {
      .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = OWNER_BYTE, .l_len = 1 + LCK_MAX_SLOTS};
  (void)fcntl(region->lock_fd, F_OFD_SETLK, &all);
  close(region->fd);
  close(region->lock_fd);
  for (lck_region **link = &list; *link != NULL; link = &(*link)->next) {
    if (*link == region) {
      *link = region->next;
      break;
    }
  }
  pthread_mutex_unlock(&list_mutex);
}

/* A lock that this handle already holds never conflicts with itself: the bits `writing` and
 * `leased` exclude one another within the handle, the file locks between handles. */
static int claim(lck_region *region, uint32_t slot) {
  uint32_t bit = 1u << slot;
  if (atomic_load(&region->writing) & bit)
    return lck_fail(LCK_E_BUSY, "slot %u: a snapshot is open in it", slot);
  if (region->leased & bit)
    return lck_fail(LCK_E_LEASED, "slot %u: leased through this handle", slot);
  int error = set_lock(region, F_WRLCK, SLOT_BYTE(slot));
  if (held_elsewhere(error))
    return lck_fail(LCK_E_LEASED, "slot %u: a reader holds a lease", slot);
  if (error != 0) {
    errno = error;
    return lck_fail_errno(LCK_E_IO, "slot %u: claim", slot);
  }
  atomic_fetch_or(&region->writing, bit);
  return 0;
}

int lck_slot_claim(lck_region *region, uint32_t slot) {
  int rc = lck_region_writable(region);
  if (rc != 0)
    return rc;
  if (slot >= region->super.slot_count)
    return lck_fail(LCK_E_INVALID, "slot %u of %u", slot, region->super.slot_count);
  pthread_mutex_lock(&list_mutex);
  rc = claim(region, slot);
  pthread_mutex_unlock(&list_mutex);
  return rc;
}

void lck_slot_unclaim(lck_region *region, uint32_t slot) {
  if (atomic_load(&region->owner) != getpid())
    return;
  pthread_mutex_lock(&list_mutex);
  (void)set_lock(region, F_UNLCK, SLOT_BYTE(slot));
  atomic_fetch_and(&region->writing, ~(1u << slot));
  pthread_mutex_unlock(&list_mutex);
}

static int lease(lck_region *region, uint32_t slot, int hold) {
  uint32_t bit = 1u << slot;
  if (atomic_load(&region->writing) & bit)
    return hold ? lck_fail(LCK_E_LEASED, "slot %u: this handle is writing it", slot) : 0;
  int error = set_lock(region, hold ? F_RDLCK : F_UNLCK, SLOT_BYTE(slot));
  if (held_elsewhere(error))
    return lck_fail(LCK_E_LEASED, "slot %u: the owner is writing it", slot);
  if (error != 0) {
    errno = error;
    return lck_fail_errno(LCK_E_IO, "slot %u: %s the lease", slot, hold ? "take" : "drop");
  }
  region->leased = hold ? region->leased | bit : region->leased & ~bit;
  return 0;
}

LCK_API int lck_slot_lease(lck_region *region, uint32_t slot, int hold) {
  int rc = lck_region_alive(region);
  if (rc != 0)
    return rc;
  if (slot >= region->super.slot_count)
    return lck_fail(LCK_E_INVALID, "slot %u of %u", slot, region->super.slot_count);
  pthread_mutex_lock(&list_mutex);
  rc = lease(region, slot, hold);
  pthread_mutex_unlock(&list_mutex);
  return rc;
}
