/* vector_mixers.h - the kernels that mix positions, for both vector tiers: attention, convolution, gated delta rule. Included after
 * vector_kernels.h, whose rules hold. */
#ifndef GEIST_VECTOR_MIXERS_H
#define GEIST_VECTOR_MIXERS_H

#include "kernels/vector_kernels.h"

#include <stdalign.h>

/* ---- attention ---- */

/* s[j] = (q . k_j) * scale of VEC16_KEYS keys from key `first`; keys behind the last live one repeat it, their scores mean nothing. Each
 * key has its own lanes: several beside each other hide the latency of one. */
ALWAYS_INLINE void attend_keys(const float *q, const void *k, enum gst_float_type type, size_t first, size_t n_live, size_t dim,
                               float scale, float *s)
{
    struct vec16 lanes[VEC16_KEYS];
    size_t at[VEC16_KEYS];
    UNROLL
    for (size_t j = 0; j < VEC16_KEYS; j++) {
        at[j] = (first + j < n_live ? first + j : n_live - 1) * dim;
        lanes[j] = vec16_set1(0.0f);
    }
    size_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        struct vec16 a = vec16_load(q + d);
        UNROLL
        for (size_t j = 0; j < VEC16_KEYS; j++)
            lanes[j] = vec16_fma(a, vec16_widen(k, type, at[j] + d), lanes[j]);
    }
    if (d < dim) {
        struct vec16 a = vec16_load_first(q + d, dim - d);
        struct vec16_mask live = vec16_first(dim - d);
        UNROLL
        for (size_t j = 0; j < VEC16_KEYS; j++)
            lanes[j] = vec16_select(live, vec16_fma(a, vec16_widen_first(k, type, at[j] + d, dim - d), lanes[j]), lanes[j]);
    }
    UNROLL
    for (size_t j = 0; j < VEC16_KEYS; j += 4)
        _mm_storeu_ps(s + first + j, _mm_mul_ps(vec16_totals(lanes + j), _mm_set1_ps(scale)));
}

/* o = o * c, then fma(p_j, v_j, o) in order, over n_vec whole vectors from d. */
ALWAYS_INLINE void attend_values(const float *p, const void *v, enum gst_float_type type, size_t n_live, size_t dim, float c, size_t d,
                                 size_t n_vec, float *o)
{
    struct vec16 acc[VEC16_SPAN];
    UNROLL
    for (size_t i = 0; i < n_vec; i++)
        acc[i] = vec16_mul(vec16_load(o + d + 16 * i), vec16_set1(c));
    for (size_t j = 0; j < n_live; j++) {
        struct vec16 weight = vec16_set1(p[j]);
        UNROLL
        for (size_t i = 0; i < n_vec; i++)
            acc[i] = vec16_fma(weight, vec16_widen(v, type, j * dim + d + 16 * i), acc[i]);
    }
    UNROLL
    for (size_t i = 0; i < n_vec; i++)
        vec16_store(o + d + 16 * i, acc[i]);
}

ALWAYS_INLINE void attend_block(const float *q, const void *k, const void *v, enum gst_float_type type, size_t n_live, size_t dim,
                                float scale, float *m, float *l, float *o)
{
    float p[64 + 16] = {0}; /* [n_live] scores, then their exponentials; the loops below run over whole vectors */
    for (size_t j = 0; j < n_live; j += VEC16_KEYS)
        attend_keys(q, k, type, j, n_live, dim, scale, p);
    p[n_live] = *m;

    float m_new = max_row(p, n_live + 1);
    struct vec16 first = vec16_exp(vec16_set1(*m - m_new));
    float c = _mm_cvtss_f32(_mm256_castps256_ps128(vec16_low(first)));
    struct vec16 lanes = vec16_set1(0.0f);
    for (size_t j = 0; j < n_live; j += 16) {
        struct vec16 e = vec16_exp(vec16_sub(vec16_load(p + j), vec16_set1(m_new)));
        vec16_store(p + j, e);
        lanes = vec16_select(vec16_first(n_live - j), vec16_add(lanes, e), lanes);
    }
    *m = m_new;
    *l = __builtin_fmaf(*l, c, vec16_total(lanes));

    size_t d = 0;
    for (; d + 16 * VEC16_SPAN <= dim; d += 16 * VEC16_SPAN)
        attend_values(p, v, type, n_live, dim, c, d, VEC16_SPAN, o);
    for (; d + 16 * VEC16_SPAN / 2 <= dim; d += 16 * VEC16_SPAN / 2)
        attend_values(p, v, type, n_live, dim, c, d, VEC16_SPAN / 2, o);
    for (; d + 16 <= dim; d += 16)
        attend_values(p, v, type, n_live, dim, c, d, 1, o);
    if (d < dim) {
        struct vec16 acc = vec16_mul(vec16_load_first(o + d, dim - d), vec16_set1(c));
        for (size_t j = 0; j < n_live; j++)
            acc = vec16_fma(vec16_set1(p[j]), vec16_widen_first(v, type, j * dim + d, dim - d), acc);
        vec16_store_first(o + d, dim - d, acc);
    }
}

static void attend(const float *q, const void *k, const void *v, enum gst_float_type kv_type, size_t n_live, size_t dim, float scale,
                   float *m, float *l, float *o)
{
    if (kv_type == GST_F16)
        attend_block(q, k, v, GST_F16, n_live, dim, scale, m, l, o);
    else
        attend_block(q, k, v, GST_F32, n_live, dim, scale, m, l, o);
}

/* ---- convolution ---- */

static void conv_silu(const float *taps, size_t width, size_t n_channels, size_t begin, size_t end, const float *window_in, const float *u,
                      size_t u_stride, size_t n_tokens, float *y, size_t y_stride, float *window_out)
{
    /* Inputs in order: the window's width - 1 rows, then u's. Token t sees inputs t .. t + width - 1. */
    size_t n_window = width - 1;
    for (size_t t = 0; t < n_tokens; t++) {
        const float *input[8];
        for (size_t j = 0; j < width; j++)
            input[j] = t + j < n_window ? window_in + (t + j) * n_channels : u + (t + j - n_window) * u_stride;

        size_t c = begin;
        for (; c + 16 <= end; c += 16) {
            struct vec16 acc = vec16_set1(0.0f);
            for (size_t j = 0; j < width; j++)
                acc = vec16_fma(vec16_load(taps + j * n_channels + c), vec16_load(input[j] + c), acc);
            vec16_store(y + t * y_stride + c, vec16_silu(acc));
        }
        if (c < end) {
            struct vec16 acc = vec16_set1(0.0f);
            for (size_t j = 0; j < width; j++)
                acc = vec16_fma(vec16_load_first(taps + j * n_channels + c, end - c), vec16_load_first(input[j] + c, end - c), acc);
            vec16_store_first(y + t * y_stride + c, end - c, vec16_silu(acc));
        }
    }
    /* Row j takes input n_tokens + j, which lies behind it: in this order window_out may be window_in. */
    for (size_t j = 0; j < n_window && begin < end; j++) {
        size_t i = n_tokens + j;
        const float *from = i < n_window ? window_in + i * n_channels : u + (i - n_window) * u_stride;
        memmove(window_out + j * n_channels + begin, from + begin, (end - begin) * sizeof(float));
    }
}

/* ---- gated delta rule ---- */

/* One block of columns: n_vec vectors of them from column c, or with n_vec = 1 only the first `live` < 16. The block stays in the
 * first-level cache, decayed and with p summed ahead for the next token, so that a token is one walk through it; the last one's goes to
 * state_out. */
ALWAYS_INLINE void delta_columns(size_t n_vec, size_t live, const float *state_in, float *state_out, size_t dk, size_t dv, size_t c,
                                 const float *q, const float *k, size_t qk_stride, const float *v, size_t v_stride, const float *decay,
                                 const float *beta, size_t gate_stride, size_t n_tokens, float *o, size_t o_stride)
{
    alignas(64) float state[256 * 16 * VEC16_STATE]; /* [dk][16 n_vec] */
    struct vec16 p[VEC16_STATE], d[VEC16_STATE], out[VEC16_STATE];

    struct vec16 g = vec16_set1(decay[0]);
    UNROLL
    for (size_t j = 0; j < n_vec; j++)
        p[j] = vec16_set1(0.0f);
    for (size_t i = 0; i < dk; i++) {
        struct vec16 ki = vec16_set1(k[i]);
        UNROLL
        for (size_t j = 0; j < n_vec; j++) {
            const float *at = state_in + i * dv + c + 16 * j;
            struct vec16 s = vec16_mul(live < 16 ? vec16_load_first(at, live) : vec16_load(at), g);
            p[j] = vec16_fma(s, ki, p[j]);
            vec16_store(state + (i * n_vec + j) * 16, s);
        }
    }

    for (size_t t = 0; t < n_tokens; t++) {
        struct vec16 b = vec16_set1(beta[t * gate_stride]);
        UNROLL
        for (size_t j = 0; j < n_vec; j++) {
            const float *at = v + t * v_stride + c + 16 * j;
            d[j] = vec16_mul(b, vec16_sub(live < 16 ? vec16_load_first(at, live) : vec16_load(at), p[j]));
            out[j] = p[j] = vec16_set1(0.0f);
        }

        const float *kt = k + t * qk_stride, *qt = q + t * qk_stride;
        if (t + 1 < n_tokens) {
            g = vec16_set1(decay[(t + 1) * gate_stride]);
            for (size_t i = 0; i < dk; i++) {
                struct vec16 ki = vec16_set1(kt[i]), qi = vec16_set1(qt[i]), ki_next = vec16_set1(kt[qk_stride + i]);
                UNROLL
                for (size_t j = 0; j < n_vec; j++) {
                    float *at = state + (i * n_vec + j) * 16;
                    struct vec16 s = vec16_fma(ki, d[j], vec16_load(at));
                    out[j] = vec16_fma(s, qi, out[j]);
                    s = vec16_mul(s, g);
                    p[j] = vec16_fma(s, ki_next, p[j]);
                    vec16_store(at, s);
                }
            }
        } else {
            for (size_t i = 0; i < dk; i++) {
                struct vec16 ki = vec16_set1(kt[i]), qi = vec16_set1(qt[i]);
                UNROLL
                for (size_t j = 0; j < n_vec; j++) {
                    float *at = state_out + i * dv + c + 16 * j;
                    struct vec16 s = vec16_fma(ki, d[j], vec16_load(state + (i * n_vec + j) * 16));
                    out[j] = vec16_fma(s, qi, out[j]);
                    if (live < 16)
                        vec16_store_first(at, live, s);
                    else
                        vec16_store(at, s);
                }
            }
        }
        UNROLL
        for (size_t j = 0; j < n_vec; j++) {
            float *at = o + t * o_stride + c + 16 * j;
            if (live < 16)
                vec16_store_first(at, live, out[j]);
            else
                vec16_store(at, out[j]);
        }
    }
}

static void delta_rule(const float *state_in, float *state_out, size_t dk, size_t dv, size_t begin, size_t end, const float *q,
                       const float *k, size_t qk_stride, const float *v, size_t v_stride, const float *decay, const float *beta,
                       size_t gate_stride, size_t n_tokens, float *o, size_t o_stride)
{
    if (n_tokens == 0) {
        for (size_t i = 0; i < dk && begin < end; i++)
            memmove(state_out + i * dv + begin, state_in + i * dv + begin, (end - begin) * sizeof(float));
        return;
    }
    size_t c = begin;
    for (; c + 16 * VEC16_STATE <= end; c += 16 * VEC16_STATE)
        delta_columns(VEC16_STATE, 16, state_in, state_out, dk, dv, c, q, k, qk_stride, v, v_stride, decay, beta, gate_stride, n_tokens, o,
                      o_stride);
    for (; c + 16 <= end; c += 16)
        delta_columns(1, 16, state_in, state_out, dk, dv, c, q, k, qk_stride, v, v_stride, decay, beta, gate_stride, n_tokens, o, o_stride);
    if (c < end)
        delta_columns(1, end - c, state_in, state_out, dk, dv, c, q, k, qk_stride, v, v_stride, decay, beta, gate_stride, n_tokens, o,
                      o_stride);
}

/* ---- the table's entries that both tiers fill with the same names ---- */

#define VECTOR_KERNELS                                                                                                                     \
    .quantize = quantize, .matmul = {MATMUL_KERNELS}, .matmul_float = matmul_float, .rms_norm = rms_norm, .l2_norm = l2_norm, .add = add,  \
    .silu_mul = silu_mul, .gelu_mul = gelu_mul, .sigmoid_mul = sigmoid_mul, .sigmoid = sigmoid_row, .exp = exp_row, .rope = rope,          \
    .f32_to_f16 = f32_to_f16, .f16_to_f32 = f16_to_f32, .max = max_row, .sum_exp = sum_exp, .all_finite = all_finite, .attend = attend,    \
    .scale_by_inverse = scale_by_inverse, .conv_silu = conv_silu, .delta_rule = delta_rule

#endif
