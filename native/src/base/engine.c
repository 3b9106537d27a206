/* engine.c - the handle everything else is made from: tier, threads, scratch memory, words of the last failure. */
#include "base/base.h"
#include "kernels/kernels.h"

#include <stdlib.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weights, images and packed files are used as they lie in memory: a little-endian machine is needed"
#endif

#define ENGINE_MAX_THREADS 256u

enum geist_status geist_engine_create(const struct geist_engine_options *options, struct geist_engine **out)
{
    enum geist_tier tier = options ? options->tier : GEIST_TIER_AUTO;
    uint32_t n_threads = options && options->n_threads ? options->n_threads : 1;
    const struct gst_kernels *kernels;
    struct geist_engine *e;
    enum geist_status status;

    if (!out)
        return GEIST_E_ARGUMENT;
    *out = NULL;
    if (n_threads > ENGINE_MAX_THREADS || (int)tier < GEIST_TIER_AUTO || tier > GEIST_TIER_AVX512)
        return GEIST_E_ARGUMENT;
    kernels = gst_kernels_for((int)tier);
    if (!kernels)
        return GEIST_E_UNSUPPORTED;

    e = calloc(1, sizeof *e);
    if (!e)
        return GEIST_E_MEMORY;
    e->kernels = kernels;
    status = gst_threads_create(n_threads, &e->threads);
    if (status) {
        free(e);
        return status;
    }
    *out = e;
    return GEIST_OK;
}

void geist_engine_destroy(struct geist_engine *e)
{
    if (!e)
        return;
    gst_threads_destroy(e->threads);
    gst_free(e->scratch);
    free(e);
}

const char *geist_engine_error(const struct geist_engine *e)
{
    return e ? e->error : "";
}

enum geist_tier geist_engine_tier(const struct geist_engine *e)
{
    return (enum geist_tier)e->kernels->tier;
}

int geist_tier_available(enum geist_tier tier)
{
    return (int)tier >= GEIST_TIER_AUTO && tier <= GEIST_TIER_AVX512 && gst_kernels_for((int)tier) != NULL;
}

const char *geist_tier_name(enum geist_tier tier)
{
    switch (tier) {
    case GEIST_TIER_AUTO:
        return "auto";
    case GEIST_TIER_SCALAR:
        return "scalar";
    case GEIST_TIER_AVX2:
        return "avx2";
    case GEIST_TIER_AVX512:
        return "avx512";
    }
    return "unknown";
}

void *gst_engine_scratch(struct geist_engine *e, size_t n)
{
    if (n > e->scratch_bytes || !e->scratch) {
        gst_free(e->scratch);
        e->scratch_bytes = 0;
        e->scratch = gst_alloc(n);
        if (e->scratch)
            e->scratch_bytes = n;
    }
    return e->scratch;
}
