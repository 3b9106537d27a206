/* unroll.h - a kernel body written once for several constant sizes: inlined where it is called with them, and its short loops over
 * registers unrolled, so that arrays of vectors become registers. */
#ifndef GEIST_UNROLL_H
#define GEIST_UNROLL_H

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
