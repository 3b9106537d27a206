/* alloc.c - aligned memory. */
#include "base/base.h"

#include <stdlib.h>

void *gst_alloc_raw(size_t n)
{
    if (n > PTRDIFF_MAX - 64) /* no object is that large, and the rounding below cannot overflow */
        return NULL;
    return aligned_alloc(64, n ? gst_round_up(n, 64) : 64);
}

void *gst_alloc(size_t n)
{
    void *p = gst_alloc_raw(n);

    if (p)
        memset(p, 0, n);
    return p;
}

void gst_free(void *p)
{
    free(p);
}
