/* exp.h - the constants of the one exponential in f32 that every tier computes.
 *
 *     n = nearest integer of x / ln 2        t = fma(x, log2e, 1.5 * 2^23): the sum's last bits are n;  n = t - 1.5 * 2^23
 *     r = x - n ln 2, |r| <= 0.347           r = fma(n, -ln2_high, x): exact, since it is a multiple of 2^-25 below 1/2;
 *                                            r = fma(n, -ln2_low, r)
 *     p = exp(r)                             Horner with fma: (((((c6 r + c5) r + c4) r + c3) r + c2) r + 1) r + 1
 *     exp(x) = p 2^n                         n added to the exponent field of p
 *
 * For -87.3 <= x <= 88.7 the result is a normal number, so that adding to the exponent field is exact: with n = -126, x >= -87.3 means r >
 * 0 and p >= 1; with n = 128, x <= 88.7 means r < 0 and p < 1. Outside of it the result is 0 or infinity. exp(+-0) is 1.
 *
 * c2 .. c6 minimise the relative error of exp(r) over |r| <= 0.347 (weighted least squares with weights iterated towards the largest
 * error), then were rounded to f32: 4.4e-9 relative, far below half an ulp (6e-8). */
#ifndef GEIST_EXP_H
#define GEIST_EXP_H

#define EXP_LOWEST (-87.3f) /* below: 0 */
#define EXP_HIGHEST 88.7f   /* above: infinity */
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_MAGIC 0x1.8p+23f
#define EXP_LN2_HIGH 0x1.62e43p-1f
#define EXP_LN2_LOW (-0x1.05c61p-29f)
#define EXP_C2 0x1.fffffcp-2f
#define EXP_C3 0x1.55549p-3f
#define EXP_C4 0x1.5558f6p-5f
#define EXP_C5 0x1.123a8ep-7f
#define EXP_C6 0x1.6a2318p-10f

/* 2 sqrt(2 / pi) and 0.044715 times that, of the tanh form of GELU (Hendrycks and Gimpel, 2016). */
#define GELU_C1 0x1.988454p+0f
#define GELU_C3 0x1.2444f2p-4f

#endif
