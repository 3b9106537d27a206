/* cursor.c - reading bytes from outside. */
#include "gguf/cursor.h"

const uint8_t *cursor_take(struct cursor *c, uint64_t n)
{
    const uint8_t *p = c->bytes + c->at;

    if (n > cursor_left(c))
        return NULL;
    c->at += (size_t)n;
    return p;
}

uint32_t cursor_read_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t cursor_read_u64(const uint8_t *p)
{
    return cursor_read_u32(p) | (uint64_t)cursor_read_u32(p + 4) << 32;
}

bool cursor_u32(struct cursor *c, uint32_t *out)
{
    const uint8_t *p = cursor_take(c, 4);

    *out = p ? cursor_read_u32(p) : 0;
    return p != NULL;
}

bool cursor_u64(struct cursor *c, uint64_t *out)
{
    const uint8_t *p = cursor_take(c, 8);

    *out = p ? cursor_read_u64(p) : 0;
    return p != NULL;
}
