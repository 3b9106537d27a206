/* alloc.c - aligned, zeroed memory. */
#include "base/base.h"

#include <stdlib.h>

void *gst_alloc(size_t n)
{
    size_t rounded;
    void *p;

    if (!gst_add_size(n, 63, &rounded))
        return NULL;
    rounded &= ~(size_t)63;
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
