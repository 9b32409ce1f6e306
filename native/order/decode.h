/* decode.h -- what one x86 instruction does to memory that persists. */
#ifndef LCK_ORDER_DECODE_H
#define LCK_ORDER_DECODE_H

#include <capstone/capstone.h>
#include <stdint.h>
#include <sys/user.h>

typedef enum deed {
  DEED_NONE,    /* writes no memory but the stack */
  DEED_STORE,   /* `bytes` of them, through the cache */
  DEED_NT,      /* non-temporal */
  DEED_STRING,  /* stos and movs: one element at rdi for each step */
  DEED_INEXACT, /* somewhere in `bytes` from its address: masked stores, saved register state */
  DEED_FLUSH,
  DEED_FENCE,
  DEED_SYSCALL,
  DEED_MARK,    /* int3: the program under trace says something */
  DEED_UNKNOWN, /* may write memory for all that is known of it */
} deed;

typedef struct instruction {
  uint64_t address; /* 0: an empty place in the cache */
  int64_t displacement;
  deed deed;
  uint32_t bytes;
  x86_reg base, index, segment;
  uint8_t scale, length, repeated;
  uint8_t jumps; /* or its length is not known: what follows it need not be the next address */
  char text[96];
} instruction;

typedef struct decoder {
  csh handle;
  instruction *cache; /* by address; code does not change */
} decoder;

#define DECODED_MOST (1u << 16)

void decoder_make(decoder *d);
void decoder_free(decoder *d);

/* The place of the instruction at `address` in the cache; its `address` is 0 if it is not there. */
instruction *decoder_place(decoder *d, uint64_t address);

/* Fill a place from the `length` bytes of code there. */
void decode(decoder *d, instruction *place, uint64_t address, const uint8_t *code, uint64_t length);

/* Where it stores or flushes, with the registers before it; 0 if that takes more than them. */
int target_of(const instruction *i, const struct user_regs_struct *regs, uint64_t *address);

#endif
