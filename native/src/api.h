/* api.h -- marks the definition of a function that lightck.h declares; all others stay hidden. */
#ifndef LCK_API_H
#define LCK_API_H

#define LCK_API __attribute__((visibility("default")))

#endif
