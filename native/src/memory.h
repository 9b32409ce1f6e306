/* memory.h -- how much memory is left to take, as far as the kernel says. */
#ifndef LCK_MEMORY_H
#define LCK_MEMORY_H

#include <stdint.h>

#define LCK_MEMORY_UNKNOWN UINT64_MAX

/* Bytes that this process can still take without waking the OOM killer: of the machine and of its
 * own control group; of swap, what both have left. */
uint64_t lck_memory_available(void);

/* The same by the proc and sys below `root`, a folder; "": the machine's own. */
uint64_t lck_memory_left(const char *root);

#endif
