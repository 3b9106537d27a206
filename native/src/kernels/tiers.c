/* tiers.c - which tables this machine can run. __builtin_cpu_supports asks the operating system too (XGETBV): a CPU whose wide registers
 * are not saved across task switches counts as one without them. */
#include "geist.h"
#include "kernels/tables.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* Not every compiler's __builtin_cpu_supports knows "f16c". Beside AVX2 the operating system's part is settled. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static int runs_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static int runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

const struct gst_kernels *gst_kernels_for(int tier)
{
    switch (tier) {
    case GEIST_TIER_AUTO:
        return runs_avx512() ? &gst_kernels_avx512 : runs_avx2() ? &gst_kernels_avx2 : &gst_kernels_scalar;
    case GEIST_TIER_SCALAR:
        return &gst_kernels_scalar;
    case GEIST_TIER_AVX2:
        return runs_avx2() ? &gst_kernels_avx2 : NULL;
    case GEIST_TIER_AVX512:
        return runs_avx512() ? &gst_kernels_avx512 : NULL;
    default:
        return NULL;
    }
}

#else

const struct gst_kernels *gst_kernels_for(int tier)
{
    return tier == GEIST_TIER_AUTO || tier == GEIST_TIER_SCALAR ? &gst_kernels_scalar : NULL;
}

#endif
