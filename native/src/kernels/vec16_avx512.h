/* vec16_avx512.h - sixteen float lanes as one AVX-512 register: what vector_kernels.h is written in. vec16_avx2.h has the same names, so
 * that both tiers share one text and with it one order of operations. Every operation rounds once, to nearest. Pointers need no alignment.
 */
#ifndef GEIST_VEC16_H
#define GEIST_VEC16_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* How many values the registers hold beside each other in the loops of the shared kernels. */
#define VEC16_ROWS 4   /* matmul_float: weight rows at once */
#define VEC16_TOKENS 4 /* matmul_float: tokens at once */
#define VEC16_KEYS 8   /* attend: keys at once */
#define VEC16_SPAN 8   /* attend: vectors of the output at once */
#define VEC16_STATE 4  /* delta_rule: vectors of state columns at once */

struct vec16 {
    __m512 v;
};

struct vec16_mask {
    __mmask16 k;
};

static inline struct vec16 vec16_set1(float x)
{
    return (struct vec16){_mm512_set1_ps(x)};
}

static inline struct vec16 vec16_load(const void *p)
{
    return (struct vec16){_mm512_loadu_ps(p)};
}

static inline void vec16_store(float *p, struct vec16 a)
{
    _mm512_storeu_ps(p, a.v);
}

/* The first n lanes; all where n >= 16. */
static inline struct vec16_mask vec16_first(size_t n)
{
    return (struct vec16_mask){(__mmask16)(n < 16 ? (1u << n) - 1 : 0xffffu)};
}

/* Loads and stores of the first n <= 16 elements; the memory behind them is not touched, lanes behind them are +0. */
static inline struct vec16 vec16_load_first(const void *p, size_t n)
{
    return (struct vec16){_mm512_maskz_loadu_ps(vec16_first(n).k, p)};
}

static inline void vec16_store_first(float *p, size_t n, struct vec16 a)
{
    _mm512_mask_storeu_ps(p, vec16_first(n).k, a.v);
}

static inline struct vec16 vec16_load_f16(const void *p)
{
    return (struct vec16){_mm512_cvtph_ps(_mm256_loadu_si256(p))};
}

static inline struct vec16 vec16_load_f16_first(const void *p, size_t n)
{
    return (struct vec16){_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vec16_first(n).k, p))};
}

static inline struct vec16 vec16_load_bf16(const void *p)
{
    return (struct vec16){_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16))};
}

static inline struct vec16 vec16_load_bf16_first(const void *p, size_t n)
{
    __m256i h = _mm256_maskz_loadu_epi16(vec16_first(n).k, p);
    return (struct vec16){_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}

/* Sixteen small integers as floats. */
static inline struct vec16 vec16_load_u8(const void *p)
{
    return (struct vec16){_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)))};
}

static inline struct vec16 vec16_load_i8(const void *p)
{
    return (struct vec16){_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)))};
}

static inline void vec16_store_f16(uint16_t *p, struct vec16 a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

static inline struct vec16 vec16_add(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm512_add_ps(a.v, b.v)};
}

static inline struct vec16 vec16_sub(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm512_sub_ps(a.v, b.v)};
}

static inline struct vec16 vec16_mul(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm512_mul_ps(a.v, b.v)};
}

static inline struct vec16 vec16_div(struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm512_div_ps(a.v, b.v)};
}

/* a * b + c */
static inline struct vec16 vec16_fma(struct vec16 a, struct vec16 b, struct vec16 c)
{
    return (struct vec16){_mm512_fmadd_ps(a.v, b.v, c.v)};
}

static inline struct vec16 vec16_negate(struct vec16 a)
{
    return (struct vec16){_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))};
}

/* Lane by lane a where m, else b. */
static inline struct vec16 vec16_select(struct vec16_mask m, struct vec16 a, struct vec16 b)
{
    return (struct vec16){_mm512_mask_blend_ps(m.k, b.v, a.v)};
}

static inline struct vec16_mask vec16_less(struct vec16 a, struct vec16 b)
{
    return (struct vec16_mask){_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
}

static inline struct vec16_mask vec16_is_nan(struct vec16 a)
{
    return (struct vec16_mask){_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)};
}

/* The bits of p plus the last bits of t moved to the exponent's place. */
static inline struct vec16 vec16_add_exponent(struct vec16 p, struct vec16 t)
{
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
    return (struct vec16){_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
}

/* The first step of the tree that ends a 16-lane sum: lane j + lane j + 8. */
static inline __m256 vec16_halves(struct vec16 a)
{
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}

/* Lanes 0..7. */
static inline __m256 vec16_low(struct vec16 a)
{
    return _mm512_castps512_ps256(a.v);
}

/* ---- sixteen 32-bit integers in the lanes ---- */

struct vec16_bits {
    __m512i v;
};

static inline struct vec16_bits vec16_bits_set1(int32_t x)
{
    return (struct vec16_bits){_mm512_set1_epi32(x)};
}

/* The bits without the sign. */
static inline struct vec16_bits vec16_magnitude(struct vec16 a)
{
    return (struct vec16_bits){_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}

/* Integers ordered as the floats are, -0 below +0. The mapping is its own inverse. */
static inline struct vec16_bits vec16_order(struct vec16 a)
{
    __m512i bits = _mm512_castps_si512(a.v);
    return (struct vec16_bits){_mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1))};
}

static inline struct vec16_bits vec16_bits_max(struct vec16_bits a, struct vec16_bits b)
{
    return (struct vec16_bits){_mm512_max_epi32(a.v, b.v)};
}

static inline int32_t vec16_bits_largest(struct vec16_bits a)
{
    return _mm512_reduce_max_epi32(a.v);
}

/* Nearest integers, even on ties, of values within -128..127: stored as int8 [16]; returns their sum. */
static inline int32_t vec16_store_i8(int8_t *p, struct vec16 a)
{
    __m512i v = _mm512_cvtps_epi32(a.v);
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(v));
    return _mm512_reduce_add_epi32(v);
}

#endif
