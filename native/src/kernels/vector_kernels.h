/* vector_kernels.h - the kernels over floats, written once for both vector tiers in the sixteen lanes of vec16_*.h. A tier's file includes
 * its lanes, then this. What an element goes through is what scalar.c writes, in the same order; only elements stand beside each other.
 *
 * A tail takes its elements with the first lanes; where lanes are sums, the others keep their value (adding even +0 would turn -0 into +0).
 */
#ifndef GEIST_VECTOR_KERNELS_H
#define GEIST_VECTOR_KERNELS_H

#include "kernels/exp.h"
#include "kernels/kernels.h"
#include "kernels/unroll.h"

#include <string.h>

/* ---- pieces ---- */

static inline struct vec16 vec16_exp(struct vec16 x)
{
    struct vec16 one = vec16_set1(1.0f);
    struct vec16 t = vec16_fma(x, vec16_set1(EXP_LOG2E), vec16_set1(EXP_MAGIC));
    struct vec16 n = vec16_sub(t, vec16_set1(EXP_MAGIC));
    struct vec16 r = vec16_fma(n, vec16_set1(-EXP_LN2_HIGH), x);
    r = vec16_fma(n, vec16_set1(-EXP_LN2_LOW), r);

    struct vec16 p = vec16_set1(EXP_C6);
    p = vec16_fma(p, r, vec16_set1(EXP_C5));
    p = vec16_fma(p, r, vec16_set1(EXP_C4));
    p = vec16_fma(p, r, vec16_set1(EXP_C3));
    p = vec16_fma(p, r, vec16_set1(EXP_C2));
    p = vec16_fma(p, r, one);
    p = vec16_fma(p, r, one);
    p = vec16_add_exponent(p, t);

    p = vec16_select(vec16_less(x, vec16_set1(EXP_LOWEST)), vec16_set1(0.0f), p);
    p = vec16_select(vec16_less(vec16_set1(EXP_HIGHEST), x), vec16_set1(__builtin_inff()), p);
    return vec16_select(vec16_is_nan(x), x, p);
}

static inline struct vec16 vec16_sigmoid(struct vec16 t)
{
    struct vec16 one = vec16_set1(1.0f);
    return vec16_div(one, vec16_add(one, vec16_exp(vec16_negate(t))));
}

static inline struct vec16 vec16_silu(struct vec16 t)
{
    return vec16_div(t, vec16_add(vec16_set1(1.0f), vec16_exp(vec16_negate(t))));
}

static inline struct vec16 vec16_gelu(struct vec16 t)
{
    struct vec16 u = vec16_mul(t, vec16_fma(vec16_set1(GELU_C3), vec16_mul(t, t), vec16_set1(GELU_C1)));
    return vec16_div(t, vec16_add(vec16_set1(1.0f), vec16_exp(vec16_negate(u))));
}

/* Lanes j and j + 8, then j and j + 4 added. */
static inline __m128 vec16_quarters(struct vec16 a)
{
    __m256 h = vec16_halves(a);
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

/* The whole tree. */
static inline float vec16_total(struct vec16 a)
{
    __m128 q = vec16_quarters(a);
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

/* Four trees beside each other. */
static inline __m128 vec16_totals(const struct vec16 a[4])
{
    __m128 q0 = vec16_quarters(a[0]), q1 = vec16_quarters(a[1]), q2 = vec16_quarters(a[2]), q3 = vec16_quarters(a[3]);
    __m128 r01 = _mm_add_ps(_mm_movelh_ps(q0, q1), _mm_movehl_ps(q1, q0)); /* q0[0]+q0[2], q0[1]+q0[3], then q1's */
    __m128 r23 = _mm_add_ps(_mm_movelh_ps(q2, q3), _mm_movehl_ps(q3, q2));
    return _mm_add_ps(_mm_shuffle_ps(r01, r23, 0x88), _mm_shuffle_ps(r01, r23, 0xdd));
}

/* Sixteen elements from element i of an array, or its last n < 16. */
ALWAYS_INLINE struct vec16 vec16_widen(const void *array, enum gst_float_type type, size_t i)
{
    const uint8_t *bytes = array;
    return type == GST_F16 ? vec16_load_f16(bytes + 2 * i) : type == GST_BF16 ? vec16_load_bf16(bytes + 2 * i) : vec16_load(bytes + 4 * i);
}

ALWAYS_INLINE struct vec16 vec16_widen_first(const void *array, enum gst_float_type type, size_t i, size_t n)
{
    const uint8_t *bytes = array;
    return type == GST_F16    ? vec16_load_f16_first(bytes + 2 * i, n)
           : type == GST_BF16 ? vec16_load_bf16_first(bytes + 2 * i, n)
                              : vec16_load_first(bytes + 4 * i, n);
}

static inline float squares_total(const float *x, size_t n)
{
    struct vec16 lanes = vec16_set1(0.0f);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        struct vec16 v = vec16_load(x + i);
        lanes = vec16_fma(v, v, lanes);
    }
    if (i < n) {
        struct vec16 v = vec16_load_first(x + i, n - i);
        lanes = vec16_select(vec16_first(n - i), vec16_fma(v, v, lanes), lanes);
    }
    return vec16_total(lanes);
}

/* ---- rows ---- */

static void quantize(const float *x, size_t n, int8_t *q, float *scale, int32_t *sum)
{
    for (size_t b = 0; b < n / GST_QUANT_BLOCK; b++) {
        struct vec16 v0 = vec16_load(x + b * GST_QUANT_BLOCK), v1 = vec16_load(x + b * GST_QUANT_BLOCK + 16);
        int32_t largest = vec16_bits_largest(vec16_bits_max(vec16_magnitude(v0), vec16_magnitude(v1)));
        float amax;
        memcpy(&amax, &largest, 4);

        if (largest >= 0x7f800000 || amax < 0x1p-100f) {
            memset(q + b * GST_QUANT_BLOCK, 0, GST_QUANT_BLOCK);
            scale[b] = largest >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
            sum[b] = 0;
            continue;
        }
        struct vec16 inverse = vec16_set1(127.0f / amax);
        sum[b] = vec16_store_i8(q + b * GST_QUANT_BLOCK, vec16_mul(v0, inverse));
        sum[b] += vec16_store_i8(q + b * GST_QUANT_BLOCK + 16, vec16_mul(v1, inverse));
        scale[b] = amax / 127.0f;
    }
}

static void rms_norm(const float *x, const float *w, size_t n, float eps, float *y)
{
    struct vec16 r = vec16_set1(1.0f / __builtin_sqrtf(squares_total(x, n) / (float)n + eps));
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        vec16_store(y + i, vec16_mul(vec16_mul(vec16_load(x + i), r), vec16_load(w + i)));
    if (i < n)
        vec16_store_first(y + i, n - i, vec16_mul(vec16_mul(vec16_load_first(x + i, n - i), r), vec16_load_first(w + i, n - i)));
}

static void l2_norm(const float *x, size_t n, float eps, float scale, float *y)
{
    struct vec16 r = vec16_set1(1.0f / __builtin_sqrtf(squares_total(x, n) + eps)), s = vec16_set1(scale);
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        vec16_store(y + i, vec16_mul(vec16_mul(vec16_load(x + i), r), s));
    if (i < n)
        vec16_store_first(y + i, n - i, vec16_mul(vec16_mul(vec16_load_first(x + i, n - i), r), s));
}

/* y[i] = f(a[i], b[i]), whole vectors and then the rest. */
#define ELEMENTWISE(a, b, n, y, f)                                                                                                         \
    do {                                                                                                                                   \
        size_t i_ = 0;                                                                                                                     \
        for (; i_ + 16 <= (n); i_ += 16)                                                                                                   \
            vec16_store((y) + i_, f(vec16_load((a) + i_), vec16_load((b) + i_)));                                                          \
        if (i_ < (n))                                                                                                                      \
            vec16_store_first((y) + i_, (n)-i_, f(vec16_load_first((a) + i_, (n)-i_), vec16_load_first((b) + i_, (n)-i_)));                \
    } while (0)

static inline struct vec16 vec16_silu_mul(struct vec16 gate, struct vec16 x)
{
    return vec16_mul(vec16_silu(gate), x);
}

static inline struct vec16 vec16_gelu_mul(struct vec16 gate, struct vec16 x)
{
    return vec16_mul(vec16_gelu(gate), x);
}

static inline struct vec16 vec16_sigmoid_mul(struct vec16 gate, struct vec16 x)
{
    return vec16_mul(x, vec16_sigmoid(gate));
}

static inline struct vec16 vec16_sigmoid_of(struct vec16 x, struct vec16 same)
{
    (void)same;
    return vec16_sigmoid(x);
}

static inline struct vec16 vec16_exp_of(struct vec16 x, struct vec16 same)
{
    (void)same;
    return vec16_exp(x);
}

static void add(const float *x, size_t n, float *y)
{
    ELEMENTWISE(y, x, n, y, vec16_add);
}

static void silu_mul(const float *gate, const float *x, size_t n, float *y)
{
    ELEMENTWISE(gate, x, n, y, vec16_silu_mul);
}

static void gelu_mul(const float *gate, const float *x, size_t n, float *y)
{
    ELEMENTWISE(gate, x, n, y, vec16_gelu_mul);
}

static void sigmoid_mul(const float *gate, const float *x, size_t n, float *y)
{
    ELEMENTWISE(gate, x, n, y, vec16_sigmoid_mul);
}

static void sigmoid_row(const float *x, size_t n, float *y)
{
    ELEMENTWISE(x, x, n, y, vec16_sigmoid_of);
}

static void exp_row(const float *x, size_t n, float *y)
{
    ELEMENTWISE(x, x, n, y, vec16_exp_of);
}

static void scale_by_inverse(const float *x, size_t n, float l, float *y)
{
    struct vec16 inverse = vec16_set1(1.0f / l);
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        vec16_store(y + i, vec16_mul(vec16_load(x + i), inverse));
    if (i < n)
        vec16_store_first(y + i, n - i, vec16_mul(vec16_load_first(x + i, n - i), inverse));
}

static void rope(float *x, size_t n_rot, const float *cos, const float *sin, int neox)
{
    size_t half = n_rot / 2, i = 0;
    if (neox) {
        for (; i + 16 <= half; i += 16) {
            struct vec16 a = vec16_load(x + i), b = vec16_load(x + half + i), c = vec16_load(cos + i), s = vec16_load(sin + i);
            vec16_store(x + i, vec16_sub(vec16_mul(a, c), vec16_mul(b, s)));
            vec16_store(x + half + i, vec16_add(vec16_mul(a, s), vec16_mul(b, c)));
        }
    }
    /* Adjacent pairs and the rest: a pass rotates few of them. */
    for (; i < half; i++) {
        size_t first = neox ? i : 2 * i, second = neox ? i + half : 2 * i + 1;
        float a = x[first], b = x[second];
        x[first] = a * cos[i] - b * sin[i];
        x[second] = a * sin[i] + b * cos[i];
    }
}

static void f32_to_f16(const float *x, size_t n, uint16_t *y)
{
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        vec16_store_f16(y + i, vec16_load(x + i));
    if (i < n) {
        uint16_t rest[16];
        vec16_store_f16(rest, vec16_load_first(x + i, n - i));
        memcpy(y + i, rest, 2 * (n - i));
    }
}

static void f16_to_f32(const uint16_t *x, size_t n, float *y)
{
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        vec16_store(y + i, vec16_load_f16(x + i));
    if (i < n)
        vec16_store_first(y + i, n - i, vec16_load_f16_first(x + i, n - i));
}

static float max_row(const float *x, size_t n)
{
    struct vec16_bits order = vec16_bits_set1(INT32_MIN), magnitude = vec16_bits_set1(0);
    for (size_t i = 0; i < n; i += 16) {
        size_t rest = n - i;
        struct vec16 v = rest >= 16 ? vec16_load(x + i) : vec16_select(vec16_first(rest), vec16_load_first(x + i, rest), vec16_set1(x[0]));
        order = vec16_bits_max(order, vec16_order(v));
        magnitude = vec16_bits_max(magnitude, vec16_magnitude(v));
    }
    if (vec16_bits_largest(magnitude) > 0x7f800000)
        return __builtin_nanf("");
    int32_t key = vec16_bits_largest(order);
    uint32_t bits = key < 0 ? (uint32_t)key ^ 0x7fffffffu : (uint32_t)key;
    float m;
    memcpy(&m, &bits, 4);
    return m;
}

static float sum_exp(const float *x, size_t n, float shift)
{
    struct vec16 lanes = vec16_set1(0.0f), s = vec16_set1(shift);
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        lanes = vec16_add(lanes, vec16_exp(vec16_sub(vec16_load(x + i), s)));
    if (i < n) {
        struct vec16 e = vec16_exp(vec16_sub(vec16_load_first(x + i, n - i), s));
        lanes = vec16_select(vec16_first(n - i), vec16_add(lanes, e), lanes);
    }
    return vec16_total(lanes);
}

static int all_finite(const float *x, size_t n)
{
    struct vec16_bits magnitude = vec16_bits_set1(0);
    for (size_t i = 0; i < n; i += 16)
        magnitude = vec16_bits_max(magnitude, vec16_magnitude(n - i >= 16 ? vec16_load(x + i) : vec16_load_first(x + i, n - i)));
    return vec16_bits_largest(magnitude) < 0x7f800000;
}

/* ---- products with a float matrix ---- */

/* n_rows rows from row r with n_group tokens from token t, both constants where inlined. */
ALWAYS_INLINE void float_tile(const void *w, enum gst_float_type type, size_t n_cols, size_t r, size_t n_rows, const float *x,
                              size_t x_stride, size_t t, size_t n_group, float *y, size_t y_stride)
{
    struct vec16 lanes[VEC16_ROWS][VEC16_TOKENS];
    UNROLL
    for (size_t i = 0; i < n_rows; i++)
        UNROLL
    for (size_t j = 0; j < n_group; j++)
        lanes[i][j] = vec16_set1(0.0f);

    size_t k = 0;
    for (; k + 16 <= n_cols; k += 16) {
        struct vec16 a[VEC16_TOKENS];
        UNROLL
        for (size_t j = 0; j < n_group; j++)
            a[j] = vec16_load(x + (t + j) * x_stride + k);
        UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            struct vec16 b = vec16_widen(w, type, (r + i) * n_cols + k);
            UNROLL
            for (size_t j = 0; j < n_group; j++)
                lanes[i][j] = vec16_fma(b, a[j], lanes[i][j]);
        }
    }
    if (k < n_cols) {
        size_t rest = n_cols - k;
        struct vec16_mask live = vec16_first(rest);
        UNROLL
        for (size_t i = 0; i < n_rows; i++) {
            struct vec16 b = vec16_widen_first(w, type, (r + i) * n_cols + k, rest);
            UNROLL
            for (size_t j = 0; j < n_group; j++) {
                struct vec16 a = vec16_load_first(x + (t + j) * x_stride + k, rest);
                lanes[i][j] = vec16_select(live, vec16_fma(b, a, lanes[i][j]), lanes[i][j]);
            }
        }
    }
    UNROLL
    for (size_t i = 0; i < n_rows; i++)
        UNROLL
    for (size_t j = 0; j < n_group; j++)
        y[(t + j) * y_stride + r + i] = vec16_total(lanes[i][j]);
}

ALWAYS_INLINE void float_rows(const void *w, enum gst_float_type type, size_t n_cols, size_t r, size_t n_rows, const float *x,
                              size_t x_stride, size_t n_tokens, float *y, size_t y_stride)
{
    size_t t = 0;
    for (; t + VEC16_TOKENS <= n_tokens; t += VEC16_TOKENS)
        float_tile(w, type, n_cols, r, n_rows, x, x_stride, t, VEC16_TOKENS, y, y_stride);
    for (; t < n_tokens; t++)
        float_tile(w, type, n_cols, r, n_rows, x, x_stride, t, 1, y, y_stride);
}

ALWAYS_INLINE void float_product(const void *w, enum gst_float_type type, size_t n_cols, size_t row_begin, size_t row_end, const float *x,
                                 size_t x_stride, size_t n_tokens, float *y, size_t y_stride)
{
    size_t r = row_begin;
    for (; r + VEC16_ROWS <= row_end; r += VEC16_ROWS)
        float_rows(w, type, n_cols, r, VEC16_ROWS, x, x_stride, n_tokens, y, y_stride);
    for (; r < row_end; r++)
        float_rows(w, type, n_cols, r, 1, x, x_stride, n_tokens, y, y_stride);
}

static void matmul_float(const void *w, enum gst_float_type type, size_t n_cols, size_t row_begin, size_t row_end, const float *x,
                         size_t x_stride, size_t n_tokens, float *y, size_t y_stride)
{
    switch (type) {
    case GST_F32:
        float_product(w, GST_F32, n_cols, row_begin, row_end, x, x_stride, n_tokens, y, y_stride);
        break;
    case GST_F16:
        float_product(w, GST_F16, n_cols, row_begin, row_end, x, x_stride, n_tokens, y, y_stride);
        break;
    case GST_BF16:
        float_product(w, GST_BF16, n_cols, row_begin, row_end, x, x_stride, n_tokens, y, y_stride);
        break;
    }
}

#endif
