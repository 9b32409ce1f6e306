/* Memory that is about to be read, asked for ahead. */
#include "api.h"
#include "lightck.h"

/* A prefetch never faults, whatever the address: what was there may be gone. */
LCK_API void lck_prefetch(const uint64_t *addresses, uint64_t count) {
  for (uint64_t i = 0; i < count; i++)
    __builtin_prefetch((const void *)(uintptr_t)addresses[i], 0, 3);
}
