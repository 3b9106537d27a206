/* vec16_avx2.h - sixteen float lanes as two AVX2 registers. The same names as vec16_avx512.h; see there. */
#ifndef GEIST_VEC16_H
#define GEIST_VEC16_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* How many values the registers hold beside each other in the loops of the shared kernels. */
#define VEC16_ROWS 2   /* matmul_float: weight rows at once */
#define VEC16_TOKENS 2 /* matmul_float: tokens at once */
#define VEC16_KEYS 4   /* attend: keys at once */
#define VEC16_SPAN 4   /* attend: vectors of the output at once */
#define VEC16_STATE 2  /* delta_rule: vectors of state columns at once */

struct vec16 {
    __m256 lo, hi; /* lanes 0..7, 8..15 */
};

struct vec16_mask {
    __m256 lo, hi; /* all bits of a lane that is chosen */
};

static inline struct vec16 vec16_set1(float x)
{
    return (struct vec16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

static inline struct vec16 vec16_load(const void *p)
{
    const float *f = p;
    return (struct vec16){_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)};
}

static inline void vec16_store(float *p, struct vec16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

static inline struct vec16_mask vec16_first(size_t n)
{
    __m256i count = _mm256_set1_epi32(n < 16 ? (int)n : 16);
    __m256i lo = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), hi = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    return (struct vec16_mask){_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, hi))};
}

static inline struct vec16 vec16_load_first(const void *p, size_t n)
{
    struct vec16_mask m = vec16_first(n);
    const uint8_t *bytes = p;
    struct vec16 r = {_mm256_maskload_ps((const float *)(const void *)bytes, _mm256_castps_si256(m.lo)), _mm256_setzero_ps()};
    if (n > 8)
        r.hi = _mm256_maskload_ps((const float *)(const void *)(bytes + 32), _mm256_castps_si256(m.hi));
    return r;
}

static inline void vec16_store_first(float *p, size_t n, struct vec16 a)
{
    struct vec16_mask m = vec16_first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}

static inline struct vec16 vec16_load_f16(const void *p)
{
    const uint8_t *bytes = p;
    return (struct vec16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)bytes)),
                          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(bytes + 16)))};
}

static inline struct vec16 vec16_load_f16_first(const void *p, size_t n)
{
    uint16_t h[16] = {0};
    memcpy(h, p, 2 * n);
    return vec16_load_f16(h);
}

static inline struct vec16 vec16_load_bf16(const void *p)
{
    const uint8_t *bytes = p;
    __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)bytes));
    __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(bytes + 16)));
    return (struct vec16){_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}

static inline struct vec16 vec16_load_bf16_first(const void *p, size_t n)
{
    uint16_t h[16] = {0};
    memcpy(h, p, 2 * n);
    return vec16_load_bf16(h);
}

static inline struct vec16 vec16_load_u8(const void *p)
{
    __m128i bytes = _mm_loadu_si128(p);
    return (struct vec16){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}

static inline struct vec16 vec16_load_i8(const void *p)
{
    __m128i bytes = _mm_loadu_si128(p);
    return (struct vec16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

static inline void vec16_store_f16(uint16_t *p, struct vec16 a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

static inline struct vec16 vec16_add(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

static inline struct vec16 vec16_sub(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

static inline struct vec16 vec16_mul(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

static inline struct vec16 vec16_div(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

static inline struct vec16 vec16_fma(struct vec16 a, struct vec16 b, struct vec16 c)
{
    return (struct vec16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

static inline struct vec16 vec16_negate(struct vec16 a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (struct vec16){_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}

static inline struct vec16 vec16_select(struct vec16_mask m, struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}

static inline struct vec16_mask vec16_less(struct vec16 a, struct vec16 b)
{
    return (struct vec16_mask){_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}

static inline struct vec16_mask vec16_is_nan(struct vec16 a)
{
    return (struct vec16_mask){_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}

static inline struct vec16 vec16_add_exponent(struct vec16 p, struct vec16 t)
{
    __m256i lo = _mm256_add_epi32(_mm256_castps_si256(p.lo), _mm256_slli_epi32(_mm256_castps_si256(t.lo), 23));
    __m256i hi = _mm256_add_epi32(_mm256_castps_si256(p.hi), _mm256_slli_epi32(_mm256_castps_si256(t.hi), 23));
    return (struct vec16){_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}

static inline __m256 vec16_halves(struct vec16 a)
{
    return _mm256_add_ps(a.lo, a.hi);
}

static inline __m256 vec16_low(struct vec16 a)
{
    return a.lo;
}

/* ---- sixteen 32-bit integers in the lanes ---- */

struct vec16_bits {
    __m256i lo, hi;
};

static inline struct vec16_bits vec16_bits_set1(int32_t x)
{
    return (struct vec16_bits){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}

static inline struct vec16_bits vec16_magnitude(struct vec16 a)
{
    __m256i m = _mm256_set1_epi32(0x7fffffff);
    return (struct vec16_bits){_mm256_and_si256(_mm256_castps_si256(a.lo), m), _mm256_and_si256(_mm256_castps_si256(a.hi), m)};
}

static inline __m256i vec16_order_half(__m256 a)
{
    __m256i bits = _mm256_castps_si256(a);
    return _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
}

static inline struct vec16_bits vec16_order(struct vec16 a)
{
    return (struct vec16_bits){vec16_order_half(a.lo), vec16_order_half(a.hi)};
}

static inline struct vec16_bits vec16_bits_max(struct vec16_bits a, struct vec16_bits b)
{
    return (struct vec16_bits){_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}

static inline int32_t vec16_bits_largest(struct vec16_bits a)
{
    __m256i m8 = _mm256_max_epi32(a.lo, a.hi);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

/* Nearest integers, even on ties, of values within -128..127: stored as int8 [16]; returns their sum. */
static inline int32_t vec16_store_i8(int8_t *p, struct vec16 a)
{
    __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)(void *)p, bytes);

    __m256i s8 = _mm256_add_epi32(lo, hi);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

#endif
