/* f16.c - IEEE half precision in integer arithmetic. */
#include "base/base.h"

float gst_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t exponent = (h >> 10) & 31;
    uint32_t mantissa = h & 0x3ff;
    uint32_t bits;
    float f;

    if (exponent == 31) { /* infinity; a NaN is made quiet, as the instruction does */
        bits = sign | 0x7f800000u | (mantissa ? 0x400000u | mantissa << 13 : 0);
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else if (mantissa) {                                       /* mantissa * 2^-24, normal in f32 */
        uint32_t shift = (uint32_t)__builtin_clz(mantissa) - 21; /* brings the leading one to bit 10 */

        bits = sign | (113 - shift) << 23 | ((mantissa << shift) & 0x3ff) << 13;
    } else {
        bits = sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}

/* x / 2^shift rounded to nearest, ties to even; 1 <= shift <= 31. */
static uint32_t shift_even(uint32_t x, uint32_t shift)
{
    uint32_t half = 1u << (shift - 1);
    uint32_t rest = x & ((half << 1) - 1);
    uint32_t q = x >> shift;

    return q + (rest > half || (rest == half && (q & 1)));
}

uint16_t gst_f32_to_f16(float f)
{
    uint32_t bits, magnitude;
    uint16_t sign;

    memcpy(&bits, &f, 4);
    sign = (uint16_t)(bits >> 16 & 0x8000);
    magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000) /* NaN: quiet, upper payload kept */
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x47800000) /* 65536 and more, infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) /* normal in f16; a carry out of the mantissa is the next exponent, up to infinity */
        return (uint16_t)(sign | shift_even(magnitude - (112u << 23), 13));
    if (magnitude < 0x33000000) /* below half of the smallest */
        return sign;
    /* Units of 2^-24: (1.m) * 2^(e - 127) = significand * 2^(e - 150), so shifted by 126 - e. */
    return (uint16_t)(sign | shift_even((magnitude & 0x7fffff) | 0x800000, 126 - (magnitude >> 23)));
}
