/* fpenv.c - the floating-point environment. Any object of the process that was linked with fast-math may have switched subnormals off. */
#include "base/base.h"

#if defined(__x86_64__)

/* All exceptions masked, nearest, FTZ (bit 15) and DAZ (bit 6) off, no sticky flags. */
#define FPENV_MXCSR 0x1f80u

uint64_t gst_fpenv_enter(void)
{
    uint32_t saved = __builtin_ia32_stmxcsr();

    if (saved != FPENV_MXCSR)
        __builtin_ia32_ldmxcsr(FPENV_MXCSR);
    return saved;
}

void gst_fpenv_leave(uint64_t saved)
{
    __builtin_ia32_ldmxcsr((uint32_t)saved);
}

#elif defined(__aarch64__)

/* 0: nearest, FZ and FZ16 off, default-NaN off, traps off. */
uint64_t gst_fpenv_enter(void)
{
    uint64_t saved;

    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    if (saved)
        __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return saved;
}

void gst_fpenv_leave(uint64_t saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
}

#else

#include <fenv.h>

/* Only the rounding direction is portable. */
uint64_t gst_fpenv_enter(void)
{
    int saved = fegetround();

    fesetround(FE_TONEAREST);
    return (uint64_t)(int64_t)saved;
}

void gst_fpenv_leave(uint64_t saved)
{
    fesetround((int)(int64_t)saved);
}

#endif
