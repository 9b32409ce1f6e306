/* The images that a crash can leave at a cut: which pending 8-byte words are in, which are not.
 *
 * A choice is one bit per word of each pending piece. In a line, or a sector, ordinary stores come
 * in the order in which they were made; of one store any words may be in, because nothing orders
 * the words of a memcpy. Words in a write-combining buffer come in any order. */
#include "crash.h"

#define EXHAUSTIVE_UNITS 24u

/* ---- choices -------------------------------------------------------------------------------- */

static void choose_unit(cut *c, uint32_t unit, int in) {
  for (uint32_t i = 0; i < c->m->count; i++)
    if (c->unit_of[i] == unit)
      c->words[i] = in ? all_words(&c->m->pieces[i]) : 0;
}

static void choose_all(cut *c, int in) {
  for (uint32_t i = 0; i < c->m->count; i++)
    c->words[i] = in ? all_words(&c->m->pieces[i]) : 0;
}

/* The first `stores` of a unit's pieces whole, and `words` of the next. */
static void choose_prefix(cut *c, uint32_t unit, uint32_t stores, uint64_t words) {
  for (uint32_t i = 0, at = 0; i < c->m->count; i++)
    if (c->unit_of[i] == unit) {
      uint64_t all = all_words(&c->m->pieces[i]);
      c->words[i] = at < stores ? all : at == stores ? words & all : 0;
      at++;
    }
}

static uint32_t stores_in(const cut *c, uint32_t unit) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < c->m->count; i++)
    count += c->unit_of[i] == unit;
  return count;
}

/* Words in a write-combining buffer, whatever else was chosen. */
static void scatter_nt(cut *c) {
  uint64_t bias = draw_below(&c->m->random, 3);
  for (uint32_t i = 0; i < c->m->count; i++)
    if (c->m->pieces[i].nt) {
      uint64_t words = draw(&c->m->random);
      words = bias == 0   ? words & draw(&c->m->random) & draw(&c->m->random)
              : bias == 1 ? words | draw(&c->m->random) | draw(&c->m->random)
                          : words;
      c->words[i] = words & all_words(&c->m->pieces[i]);
    }
}

static void choose_random(cut *c) {
  model *m = c->m;
  uint64_t bias = draw_below(&m->random, 4);
  for (uint32_t unit = 0; unit < c->units; unit++) {
    uint32_t stores = stores_in(c, unit);
    uint64_t roll = draw_below(&m->random, 8);
    if (bias < 2 && roll != 0)
      choose_unit(c, unit, (int)bias);
    else
      choose_prefix(c, unit, (uint32_t)draw_below(&m->random, stores + 1), draw(&m->random));
  }
  if (bias != 1 || draw_below(&m->random, 2))
    scatter_nt(c);
}

/* Of each thread's ordinary stores those before a point, of the one there any words. */
static void choose_in_order(cut *c, uint32_t store, int each_its_own) {
  model *m = c->m;
  uint32_t until[64];
  uint32_t first = m->count ? m->pieces[0].store : 0;
  uint32_t span = m->count ? m->pieces[m->count - 1].store - first + 2 : 1;
  for (uint32_t i = 0; i < 64; i++)
    until[i] = each_its_own ? first + (uint32_t)draw_below(&m->random, span) : store;
  for (uint32_t i = 0; i < m->count; i++) {
    const piece *p = &m->pieces[i];
    uint32_t end = until[p->thread % 64];
    c->words[i] = p->store < end    ? all_words(p)
                  : p->store == end ? draw(&m->random) & all_words(p)
                                    : 0;
  }
}

/* ---- what is looked at ---------------------------------------------------------------------- */

static void look_in_order(cut *c) {
  model *m = c->m;
  uint32_t last = UINT32_MAX;
  for (uint32_t i = 0; i < m->count && c->attempts < m->per_cut; i++) {
    if (m->pieces[i].store == last)
      continue;
    last = m->pieces[i].store;
    choose_in_order(c, last, 0);
    look(c);
  }
}

/* Every combination of prefixes of the units that recovery reads first, with and without the rest.
 */
static void look_exhaustively(cut *c) {
  model *m = c->m;
  uint32_t at[EXHAUSTIVE_UNITS] = {0}, units[EXHAUSTIVE_UNITS], count = 0;
  uint64_t combinations = 2;
  for (uint32_t unit = 0; unit < c->units; unit++) {
    if (!c->read_first[unit])
      continue;
    if (count == EXHAUSTIVE_UNITS)
      return;
    units[count++] = unit;
    combinations *= stores_in(c, unit) + 1;
    if (combinations > m->per_cut)
      return;
  }
  if (count == 0)
    return;
  m->tally->exhaustive++;
  for (int rest = 0; rest < 2; rest++) {
    for (uint32_t i = 0; i < count;) {
      choose_all(c, rest);
      for (uint32_t k = 0; k < count; k++)
        choose_prefix(c, units[k], at[k], 0);
      look(c);
      for (i = 0; i < count && ++at[i] > stores_in(c, units[i]); i++)
        at[i] = 0;
    }
  }
}

static void look_one_apart(cut *c) {
  model *m = c->m;
  for (uint32_t i = 0; i < 16 && i < c->units && c->attempts < m->per_cut; i++) {
    uint32_t unit = c->units <= 16 ? i : (uint32_t)draw_below(&m->random, c->units);
    for (int in = 0; in < 2; in++) {
      choose_all(c, in);
      choose_unit(c, unit, !in);
      look(c);
    }
  }
}

/* All words of one store in one unit, each subset of them, the other units in or out. */
static void look_inside(cut *c) {
  model *m = c->m;
  uint32_t unit = (uint32_t)draw_below(&m->random, c->units);
  for (uint32_t tries = 0; tries < 8 && !c->read_first[unit]; tries++)
    unit = (uint32_t)draw_below(&m->random, c->units);
  uint32_t stores = (uint32_t)draw_below(&m->random, stores_in(c, unit));
  for (uint32_t words = 0; words < 256 && c->attempts < 3 * m->per_cut / 4; words++) {
    choose_all(c, (int)(words & 1));
    choose_prefix(c, unit, stores, m->unit == LCK_LINE ? words : draw(&m->random));
    look(c);
  }
}

static void look_without_lines(cut *c) {
  model *m = c->m;
  for (uint32_t i = 0; i < m->per_cut / 2 && m->history_count > 0; i++) {
    uint32_t reach = 1 + (uint32_t)draw_below(&m->random, m->history_count);
    c->dropped = 0;
    for (uint64_t k = draw_below(&m->random, 4) + 1; k > 0; k--)
      c->dropped |= 1u << draw_below(&m->random, reach);
    if (i % 2)
      choose_random(c);
    else
      choose_all(c, (int)(i / 2 % 2));
    look(c);
  }
  c->dropped = 0;
}

/* ---- the cut -------------------------------------------------------------------------------- */

static int in_tables(uint64_t offset) {
  if (in_journal(offset))
    return offset % LCK_HEADER_PAGE < sizeof(journal_disk);
  return offset < LCK_JOURNAL_OFFSET || offset % SLOT_BYTES < TABLES_BYTES;
}

static void find_units(cut *c) {
  model *m = c->m;
  for (uint32_t i = 0; i < m->count; i++) {
    uint64_t number = m->pieces[i].offset / m->unit;
    uint32_t unit = 0;
    while (unit < c->units && c->of_unit[unit] != number)
      unit++;
    if (unit == c->units) {
      c->of_unit[c->units] = number;
      c->read_first[c->units++] = (uint8_t)in_tables(m->pieces[i].offset);
    }
    c->unit_of[i] = unit;
  }
}

static void look_at_pending(cut *c) {
  model *m = c->m;
  if (m->medium == MEDIUM_EADR) {
    look_in_order(c);
    while (c->attempts < m->per_cut) {
      choose_in_order(c, 0, 1);
      scatter_nt(c);
      look(c);
    }
    return;
  }
  look_exhaustively(c);
  look_in_order(c);
  look_one_apart(c);
  look_inside(c);
  while (c->attempts < m->per_cut) {
    choose_random(c);
    look(c);
  }
}

int images_cut(model *m) {
  cut c = {.m = m};
  c.words = calloc(m->count + 1, sizeof(*c.words));
  c.unit_of = calloc(m->count + 1, sizeof(*c.unit_of));
  c.of_unit = calloc(m->count + 1, sizeof(*c.of_unit));
  c.read_first = calloc(m->count + 1, 1);
  if (!c.words || !c.unit_of || !c.of_unit || !c.read_first)
    DIE("no memory for a cut of %u pieces", m->count);
  m->changed = 0;
  m->tally->cuts++;
  find_units(&c);
  for (c.short_file = m->size < m->next_size; c.short_file >= 0; c.short_file--) {
    c.attempts = 0;
    choose_all(&c, 0);
    look(&c);
    choose_all(&c, 1);
    look(&c);
    if (m->count > 0)
      look_at_pending(&c);
    if (m->medium == MEDIUM_CXL)
      look_without_lines(&c);
  }
  free(c.words);
  free(c.unit_of);
  free(c.of_unit);
  free(c.read_first);
  m->stopped |= c.bad && m->stop_at_bad;
  return m->stopped;
}
