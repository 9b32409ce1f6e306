/* memory.h -- how much memory is left to take, as far as the kernel says. */
#ifndef LCK_MEMORY_H
#define LCK_MEMORY_H

#include "lightck.h"

#define LCK_MEMORY_UNKNOWN LCK_ALL

/* lck_memory_available by the proc and sys below `root`, a folder; "": the machine's own. */
uint64_t lck_memory_left(const char *root, int swap);

#endif
