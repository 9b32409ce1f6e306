/* Decoding by capstone, and what capstone 4 lacks by hand.
 *
 * Debian's capstone 4.0.2 marks many a store as a read, so its access bits are not used: a memory
 * operand that comes first is written unless the instruction is known to read only. Wrong either
 * way shows: a load taken for a store is one that the shim has not seen, and bytes that change
 * without a store are found by comparing the region. */
#include "decode.h"

#include <stdio.h>
#include <string.h>

#include "crash.h"

#define SAVED_STATE 16384u /* bytes that xsave and its kin write at most */

/* ---- what capstone 4 cannot decode --------------------------------------------------------- */

typedef struct opcode {
  uint8_t map, opcode;
} opcode;

/* Vector instructions of these maps and numbers read their memory operand: loads, compares and
 * tests into a mask, vpternlog, vpclmulqdq. */
static const opcode vector_readers[] = {
    {1, 0x10}, {1, 0x28}, {1, 0x6f}, {2, 0x2a}, {1, 0x74}, {1, 0x75}, {1, 0x76}, {2, 0x26},
    {2, 0x27}, {2, 0x29}, {3, 0x1e}, {3, 0x1f}, {3, 0x25}, {3, 0x3e}, {3, 0x3f}, {3, 0x44}};

static int writes_nothing(opcode of, uint8_t modrm) {
  if (modrm >> 6 == 3)
    return !(of.map == 1 && of.opcode == 0xf7); /* vmaskmovdqu stores at rdi */
  for (size_t i = 0; i < sizeof(vector_readers) / sizeof(vector_readers[0]); i++)
    if (vector_readers[i].map == of.map && vector_readers[i].opcode == of.opcode)
      return 1;
  return 0;
}

/* VEX and EVEX, the crc32 instruction, and hints (endbr64, rdssp). */
static int harmless_by_hand(const uint8_t *code) {
  int repeat = 0;
  if (code[0] == 0xc5)
    return writes_nothing((opcode){1, code[2]}, code[3]);
  if (code[0] == 0xc4)
    return writes_nothing((opcode){code[1] & 31, code[3]}, code[4]);
  if (code[0] == 0x62)
    return writes_nothing((opcode){code[1] & 7, code[4]}, code[5]);
  for (; *code == 0x66 || *code == 0xf2 || *code == 0xf3; code++)
    repeat = *code == 0x66 ? repeat : *code;
  code += *code >> 4 == 4; /* REX */
  if (code[0] != 0x0f)
    return 0;
  int crc = repeat == 0xf2 && code[1] == 0x38 && (code[2] == 0xf0 || code[2] == 0xf1);
  int hint = repeat == 0xf3 && code[1] == 0x1e && code[2] >> 6 == 3;
  return crc || hint;
}

/* An EVEX store of a whole vector: capstone 4 fails on some whose index register is r8 or higher.
 */
static int vector_store_by_hand(const uint8_t *code, instruction *out) {
  static const x86_reg by_number[] = {X86_REG_RAX, X86_REG_RCX, X86_REG_RDX, X86_REG_RBX,
                                      X86_REG_RSP, X86_REG_RBP, X86_REG_RSI, X86_REG_RDI,
                                      X86_REG_R8,  X86_REG_R9,  X86_REG_R10, X86_REG_R11,
                                      X86_REG_R12, X86_REG_R13, X86_REG_R14, X86_REG_R15};
  const uint8_t opcode = code[4], mod = code[5] >> 6, rm = code[5] & 7, sib = code[6];
  const int simd = code[2] & 3; /* 0: none, 1: 66, 2: F3, 3: F2 */
  int streams = (opcode == 0xe7 && simd == 1) || (opcode == 0x2b && simd < 2);
  int stores = (opcode == 0x7f && simd > 0) || ((opcode == 0x11 || opcode == 0x29) && simd < 2);
  if (code[0] != 0x62 || (code[1] & 7) != 1 || mod == 3 || (!streams && !stores))
    return 0;
  const uint8_t *at = code + 6 + (rm == 4);
  unsigned base = (rm == 4 ? sib & 7u : rm) | (code[1] & 0x20 ? 0 : 8u);
  unsigned index = (sib >> 3 & 7u) | (code[1] & 0x40 ? 0 : 8u);
  int32_t displacement = 0;
  out->deed = code[3] & 7 ? DEED_INEXACT : streams ? DEED_NT : DEED_STORE;
  out->bytes = 16u << (code[3] >> 5 & 3);
  out->base = by_number[base];
  if (rm == 4 && index != 4) {
    out->index = by_number[index];
    out->scale = (uint8_t)(1u << (sib >> 6));
  }
  if (mod == 0 && (base & 7) == 5)
    out->base = rm == 4 ? X86_REG_INVALID : X86_REG_RIP;
  if (mod == 2 || (mod == 0 && (base & 7) == 5))
    memcpy(&displacement, at, sizeof(displacement)), at += sizeof(displacement);
  else if (mod == 1) /* in units of the vector */
    displacement = (int8_t)*at++ * (int32_t)out->bytes;
  out->displacement = displacement;
  out->length = (uint8_t)(at - code);
  snprintf(out->text, sizeof(out->text), "EVEX %02x, %u bytes", opcode, out->bytes);
  return 1;
}

/* ---- what it can --------------------------------------------------------------------------- */

/* By the beginning of their names. The stack that push and call write is not the region. */
static const char *const readers[] = {
    "cmp",  "test", "bt",   "push", "call",    "lcall",    "jmp",    "ljmp",    "mul",  "imul",
    "div",  "idiv", "nop",  "pref", "ldmxcsr", "vldmxcsr", "xrstor", "fxrstor", "fld",  "fild",
    "fadd", "fsub", "fmul", "fdiv", "fcom",    "frstor",   "scas",   "lods",    "outs", "cmps"};
static const char *const not_readers[] = {"cmpxchg", "bts", "btr", "btc"};
static const char *const streamed[] = {"movnti", "movntdq",  "movntps",  "movntpd",
                                       "movntq", "vmovntdq", "vmovntps", "vmovntpd"};
static const char *const unknown[] = {"maskmov", "vmaskmov", "vpmaskmov", "vpscatter", "vscatter",
                                      "bts",     "btr",      "btc",       "ins",       "int1",
                                      "enter",   "movdir",   "enqcmd"};
static const char *const saving[] = {"xsave", "fxsave", "fnsave", "fnstenv"};

#define BEGINS(name, list) begins_with(name, list, sizeof(list) / sizeof((list)[0]))

static int begins_with(const char *name, const char *const *list, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (strncmp(name, list[i], strlen(list[i])) == 0)
      return 1;
  return 0;
}

static int is(const char *name, const char *wanted) {
  return strcmp(name, wanted) == 0;
}

static const cs_x86_op *first_in_memory(const cs_insn *insn) {
  const cs_x86 *x86 = &insn->detail->x86;
  return x86->op_count > 0 && x86->operands[0].type == X86_OP_MEM ? &x86->operands[0] : NULL;
}

static int is_streamed(const char *name) {
  for (size_t i = 0; i < sizeof(streamed) / sizeof(streamed[0]); i++)
    if (is(name, streamed[i]))
      return 1;
  return 0;
}

static deed deed_of_store(const cs_insn *insn) {
  if (BEGINS(insn->mnemonic, saving) || strstr(insn->op_str, "{k") != NULL)
    return DEED_INEXACT;
  return is_streamed(insn->mnemonic) ? DEED_NT : DEED_STORE;
}

static deed deed_of(const cs_insn *insn, const cs_x86_op *memory) {
  const char *name = insn->mnemonic;
  const char *bare = strncmp(name, "rep ", 4) == 0 ? name + 4 : name;
  if (is(name, "clwb") || is(name, "clflushopt") || is(name, "clflush"))
    return DEED_FLUSH;
  if (is(name, "sfence") || is(name, "mfence"))
    return DEED_FENCE;
  if (is(name, "syscall"))
    return DEED_SYSCALL;
  if (is(name, "int3"))
    return DEED_MARK;
  if (strncmp(bare, "stos", 4) == 0 ||
      (strncmp(bare, "movs", 4) == 0 && memory != NULL && memory->mem.base == X86_REG_RDI))
    return DEED_STRING;
  if (BEGINS(bare, unknown) && (memory != NULL || BEGINS(bare, not_readers) == 0))
    return DEED_UNKNOWN;
  if (memory == NULL || (BEGINS(bare, readers) && !BEGINS(bare, not_readers)))
    return DEED_NONE;
  return deed_of_store(insn);
}

static int leaves(csh handle, const cs_insn *insn) {
  static const uint8_t groups[] = {CS_GRP_JUMP, CS_GRP_CALL, CS_GRP_RET, CS_GRP_INT, CS_GRP_IRET};
  for (size_t i = 0; i < sizeof(groups); i++)
    if (cs_insn_group(handle, insn, groups[i]))
      return 1;
  return strncmp(insn->mnemonic, "rep", 3) == 0 || is(insn->mnemonic, "syscall") ||
         is(insn->mnemonic, "xbegin");
}

static void take(const decoder *d, instruction *place, const cs_insn *insn) {
  const cs_x86_op *memory = first_in_memory(insn);
  place->length = (uint8_t)insn->size;
  place->deed = deed_of(insn, memory);
  place->jumps = (uint8_t)leaves(d->handle, insn);
  place->repeated = strncmp(insn->mnemonic, "rep", 3) == 0;
  if (memory != NULL) {
    place->base = memory->mem.base;
    place->index = memory->mem.index;
    place->segment = memory->mem.segment;
    place->scale = (uint8_t)memory->mem.scale;
    place->displacement = memory->mem.disp;
    place->bytes = memory->size;
  }
  if (BEGINS(insn->mnemonic, saving))
    place->bytes = SAVED_STATE;
  if (place->deed == DEED_STRING && memory == NULL)
    place->deed = DEED_UNKNOWN;
  if (place->deed == DEED_FLUSH)
    place->bytes = LCK_LINE;
  snprintf(place->text, sizeof(place->text), "%s %.40s", insn->mnemonic, insn->op_str);
}

void decoder_make(decoder *d) {
  d->cache = calloc(DECODED_MOST, sizeof(*d->cache));
  if (d->cache == NULL || cs_open(CS_ARCH_X86, CS_MODE_64, &d->handle) != CS_ERR_OK ||
      cs_option(d->handle, CS_OPT_DETAIL, CS_OPT_ON) != CS_ERR_OK)
    DIE("capstone does not start");
}

void decoder_free(decoder *d) {
  free(d->cache);
  cs_close(&d->handle);
}

instruction *decoder_place(decoder *d, uint64_t address) {
  uint64_t at = address * UINT64_C(0x9E3779B97F4A7C15) >> 48;
  for (uint32_t tries = 0; tries < DECODED_MOST; tries++, at = (at + 1) % DECODED_MOST)
    if (d->cache[at].address == address || d->cache[at].address == 0)
      return &d->cache[at];
  DIE("more than %u instructions", DECODED_MOST);
}

static int same_store(const instruction *a, const instruction *b) {
  return a->deed == b->deed && a->bytes == b->bytes && a->base == b->base && a->index == b->index &&
         (a->index == X86_REG_INVALID || a->scale == b->scale) &&
         a->displacement == b->displacement && a->length == b->length;
}

void decode(decoder *d, instruction *place, uint64_t address, const uint8_t *code,
            uint64_t length) {
  uint8_t padded[32] = {0};
  instruction hand = {.address = address};
  cs_insn *insn = NULL;
  memset(place, 0, sizeof(*place));
  place->address = address;
  memcpy(padded, code, length < 16 ? length : 16);
  int by_hand = vector_store_by_hand(padded, &hand);
  if (harmless_by_hand(padded)) {
    place->jumps = 1;
    snprintf(place->text, sizeof(place->text), "%02x %02x %02x %02x %02x", padded[0], padded[1],
             padded[2], padded[3], padded[4]);
  } else if (cs_disasm(d->handle, code, length, address, 1, &insn) == 1) {
    take(d, place, insn);
    cs_free(insn, 1);
    if (by_hand && !same_store(place, &hand))
      place->deed = DEED_UNKNOWN; /* one of the two is wrong */
  } else if (by_hand) {
    *place = hand;
  } else {
    place->deed = DEED_UNKNOWN;
    place->jumps = 1;
    snprintf(place->text, sizeof(place->text), "undecoded: %02x %02x %02x %02x %02x %02x",
             padded[0], padded[1], padded[2], padded[3], padded[4], padded[5]);
  }
}

/* ---- addresses ----------------------------------------------------------------------------- */

static int value_of(x86_reg reg, const struct user_regs_struct *r, uint64_t next, uint64_t *out) {
  const struct {
    x86_reg reg;
    uint64_t value;
  } values[] = {{X86_REG_INVALID, 0},  {X86_REG_RAX, r->rax},    {X86_REG_RBX, r->rbx},
                {X86_REG_RCX, r->rcx}, {X86_REG_RDX, r->rdx},    {X86_REG_RSI, r->rsi},
                {X86_REG_RDI, r->rdi}, {X86_REG_RBP, r->rbp},    {X86_REG_RSP, r->rsp},
                {X86_REG_R8, r->r8},   {X86_REG_R9, r->r9},      {X86_REG_R10, r->r10},
                {X86_REG_R11, r->r11}, {X86_REG_R12, r->r12},    {X86_REG_R13, r->r13},
                {X86_REG_R14, r->r14}, {X86_REG_R15, r->r15},    {X86_REG_RIP, next},
                {X86_REG_RIZ, 0},      {X86_REG_FS, r->fs_base}, {X86_REG_GS, r->gs_base}};
  for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++)
    if (values[i].reg == reg) {
      *out = values[i].value;
      return 1;
    }
  return 0;
}

int target_of(const instruction *i, const struct user_regs_struct *regs, uint64_t *address) {
  uint64_t base, index, segment = 0;
  uint64_t next = regs->rip + i->length;
  if (!value_of(i->base, regs, next, &base) || !value_of(i->index, regs, next, &index))
    return 0;
  if ((i->segment == X86_REG_FS || i->segment == X86_REG_GS) &&
      !value_of(i->segment, regs, next, &segment))
    return 0;
  *address = segment + base + index * i->scale + (uint64_t)i->displacement;
  return 1;
}
