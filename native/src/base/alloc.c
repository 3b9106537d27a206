/* alloc.c - aligned, zeroed memory. */
#include "base/base.h"

#include <stdlib.h>

void *gst_alloc(size_t n)
{
    size_t rounded;
    void *p;

    if (n > PTRDIFF_MAX - 64) /* no object is that large, and the rounding below cannot overflow */
        return NULL;
    rounded = gst_round_up(n, 64);
    if (!rounded)
        rounded = 64;
    p = aligned_alloc(64, rounded);
    if (p)
        memset(p, 0, rounded);
    return p;
}

void gst_free(void *p)
{
    free(p);
}
