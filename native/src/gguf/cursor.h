/* cursor.h - reading bytes from outside: a position that never passes the end.
 *
 * Once a take fails, nothing is consumed. Lengths are compared with what remains, never added to a position. */
#ifndef GEIST_CURSOR_H
#define GEIST_CURSOR_H

#include "base/base.h"

struct cursor {
    const uint8_t *bytes; /* borrows [n] */
    size_t n, at;
};

static inline size_t cursor_left(const struct cursor *c)
{
    return c->n - c->at;
}

/* The next `n` bytes, or NULL. */
const uint8_t *cursor_take(struct cursor *c, uint64_t n);
bool cursor_u32(struct cursor *c, uint32_t *out);
bool cursor_u64(struct cursor *c, uint64_t *out);

/* Little-endian integers at any address. */
uint32_t cursor_read_u32(const uint8_t *p);
uint64_t cursor_read_u64(const uint8_t *p);

#endif
