/* scalar.c - the definition of every kernel, in portable C. What is written at a function of struct gst_kernels is done here in just that
 * order, one element at a time; the vector tiers are tested against it bit for bit.
 *
 * Compiled without instruction-set flags and with -ffp-contract=off: a fused operation is one that is written as fmaf. */
#include "base/base.h"
#include "kernels/exp.h"
#include "kernels/kernels.h"
#include "kernels/tables.h"

#define LANES 16

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static float fma_f32(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

static float exp_f32(float x)
{
    if (x != x)
        return x;
    if (x < EXP_LOWEST)
        return 0.0f;
    if (x > EXP_HIGHEST)
        return __builtin_inff();

    float t = fma_f32(x, EXP_LOG2E, EXP_MAGIC);
    float n = t - EXP_MAGIC;
    float r = fma_f32(n, -EXP_LN2_HIGH, x);
    r = fma_f32(n, -EXP_LN2_LOW, r);

    float p = EXP_C6;
    p = fma_f32(p, r, EXP_C5);
    p = fma_f32(p, r, EXP_C4);
    p = fma_f32(p, r, EXP_C3);
    p = fma_f32(p, r, EXP_C2);
    p = fma_f32(p, r, 1.0f);
    p = fma_f32(p, r, 1.0f);
    return float_of(bits_of(p) + (bits_of(t) << 23));
}

static float sigmoid_f32(float t)
{
    return 1.0f / (1.0f + exp_f32(-t));
}

static float silu_f32(float t)
{
    return t / (1.0f + exp_f32(-t));
}

static float gelu_f32(float t)
{
    float u = t * fma_f32(GELU_C3, t * t, GELU_C1);
    return t / (1.0f + exp_f32(-u));
}

/* The tree that ends a 16-lane sum. */
static float lanes_total(float lane[LANES])
{
    for (size_t step = LANES / 2; step > 0; step /= 2)
        for (size_t j = 0; j < step; j++)
            lane[j] = lane[j] + lane[j + step];
    return lane[0];
}

static float dot_f32(const float *x, const float *y, size_t n)
{
    float lane[LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % LANES] = fma_f32(x[i], y[i], lane[i % LANES]);
    return lanes_total(lane);
}

/* Element i of an array of `type` that starts anywhere. */
static float element_at(const void *array, enum gst_float_type type, size_t i)
{
    const uint8_t *bytes = array;
    float f;
    uint16_t h;
    switch (type) {
    case GST_F16:
        memcpy(&h, bytes + 2 * i, 2);
        return gst_f16_to_f32(h);
    case GST_BF16:
        memcpy(&h, bytes + 2 * i, 2);
        return gst_bf16_to_f32(h);
    case GST_F32:
        break;
    }
    memcpy(&f, bytes + 4 * i, 4);
    return f;
}

/* ---- quantised products ---- */

static void quantize(const float *x, size_t n, int8_t *q, float *scale, int32_t *sum)
{
    for (size_t b = 0; b < n / GST_QUANT_BLOCK; b++) {
        const float *block = x + b * GST_QUANT_BLOCK;
        uint32_t largest = 0;
        for (size_t i = 0; i < GST_QUANT_BLOCK; i++) {
            uint32_t magnitude = bits_of(block[i]) & 0x7fffffffu;
            if (magnitude > largest)
                largest = magnitude;
        }
        float amax = float_of(largest);
        bool finite = largest < 0x7f800000u;
        bool rounds = finite && amax >= 0x1p-100f;

        float inverse = rounds ? 127.0f / amax : 0.0f;
        int32_t total = 0;
        for (size_t i = 0; i < GST_QUANT_BLOCK; i++) {
            /* The sum with 1.5 * 2^23 rounds to an integer, nearest even; it stands in the last bits. */
            int32_t v = rounds ? (int32_t)(bits_of(block[i] * inverse + 0x1.8p23f) - bits_of(0x1.8p23f)) : 0;
            q[b * GST_QUANT_BLOCK + i] = (int8_t)v;
            total += v;
        }
        scale[b] = rounds ? amax / 127.0f : finite ? 0.0f : __builtin_nanf("");
        sum[b] = total;
    }
}

/* Quantised value i (0..31) of row r of a tile's block: w. */
static int32_t quant_at(enum gst_pack pack, const uint8_t *block, size_t r, size_t i)
{
    size_t group = i / 4, byte = 4 * r + i % 4, n = 4 * GST_TILE_ROWS; /* n: bytes of a group */
    unsigned bits = gst_pack_bits(pack);
    if (bits == 8)
        return (int32_t)block[group * n + byte] - gst_pack_offset(pack);
    uint8_t pair = block[group % 4 * n + byte];
    unsigned u = group < 4 ? pair & 15u : pair >> 4;
    if (bits == 5)
        u |= (block[4 * n + byte] >> group & 1u) << 4;
    if (bits == 6)
        u |= (block[(4 + group / 4) * n + byte] >> 2 * (group % 4) & 3u) << 4;
    return (int32_t)u - gst_pack_offset(pack);
}

static void matmul_packed(enum gst_pack pack, const struct gst_packed *w, size_t tile_begin, size_t tile_end, const struct gst_qact *a,
                          size_t n_tokens, float *y, size_t y_stride)
{
    size_t n_blocks = w->n_cols / GST_QUANT_BLOCK;
    size_t block_bytes = gst_pack_quant_bytes(pack), group = gst_pack_group(pack);
    struct gst_tile_parts parts = gst_pack_parts(pack, n_blocks);

    for (size_t tile = tile_begin; tile < tile_end; tile++) {
        const uint8_t *quants = w->tiles + tile * w->tile_bytes; /* [n_blocks][block_bytes] */
        const uint8_t *scales = quants + parts.scales;           /* [n_blocks / group][16] f16 */
        const uint8_t *minimums = quants + parts.minimums;       /* the same */
        const uint8_t *factors = quants + parts.factors;         /* [n_blocks][2][16] */

        for (size_t r = 0; r < GST_TILE_ROWS && tile * GST_TILE_ROWS + r < w->n_rows; r++) {
            for (size_t t = 0; t < n_tokens; t++) {
                float acc = 0.0f;
                for (size_t b = 0; b < n_blocks; b++) {
                    const int8_t *q = a->q + t * w->n_cols + b * GST_QUANT_BLOCK;
                    float scale = a->scale[t * n_blocks + b];
                    int32_t half[2] = {0, 0};
                    for (size_t i = 0; i < GST_QUANT_BLOCK; i++)
                        half[i / 16] += quant_at(pack, quants + b * block_bytes, r, i) * q[i];
                    int32_t dot = half[0] + half[1];

                    const uint8_t *s = factors + b * 2 * GST_TILE_ROWS + r;
                    float d = element_at(scales, GST_F16, b / group * GST_TILE_ROWS + r);
                    float m = gst_pack_has_minimum(pack) ? element_at(minimums, GST_F16, b / group * GST_TILE_ROWS + r) : 0.0f;
                    if (pack == GST_PACK_Q6_K) {
                        dot = half[0] * (int8_t)s[0] + half[1] * (int8_t)s[GST_TILE_ROWS];
                    } else if (group > 1) {
                        d = d * (float)s[0];
                        m = -(m * (float)s[GST_TILE_ROWS]);
                    }
                    acc = fma_f32((float)dot, scale * d, acc);
                    if (gst_pack_has_minimum(pack))
                        acc = fma_f32(m, scale * (float)a->sum[t * n_blocks + b], acc);
                }
                y[t * y_stride + tile * GST_TILE_ROWS + r] = acc;
            }
        }
    }
}

#define MATMUL(pack, name)                                                                                                                 \
    static void name(const struct gst_packed *w, size_t tile_begin, size_t tile_end, const struct gst_qact *a, size_t n_tokens, float *y,  \
                     size_t y_stride)                                                                                                      \
    {                                                                                                                                      \
        matmul_packed(pack, w, tile_begin, tile_end, a, n_tokens, y, y_stride);                                                            \
    }

MATMUL(GST_PACK_Q8_0, matmul_q8_0)
MATMUL(GST_PACK_Q4_0, matmul_q4_0)
MATMUL(GST_PACK_Q4_1, matmul_q4_1)
MATMUL(GST_PACK_Q5_0, matmul_q5_0)
MATMUL(GST_PACK_Q5_1, matmul_q5_1)
MATMUL(GST_PACK_Q4_K, matmul_q4_k)
MATMUL(GST_PACK_Q5_K, matmul_q5_k)
MATMUL(GST_PACK_Q6_K, matmul_q6_k)

static void matmul_float(const void *w, enum gst_float_type type, size_t n_cols, size_t row_begin, size_t row_end, const float *x,
                         size_t x_stride, size_t n_tokens, float *y, size_t y_stride)
{
    for (size_t r = row_begin; r < row_end; r++) {
        for (size_t t = 0; t < n_tokens; t++) {
            float lane[LANES] = {0};
            for (size_t k = 0; k < n_cols; k++)
                lane[k % LANES] = fma_f32(element_at(w, type, r * n_cols + k), x[t * x_stride + k], lane[k % LANES]);
            y[t * y_stride + r] = lanes_total(lane);
        }
    }
}

/* ---- rows ---- */

static void rms_norm(const float *x, const float *w, size_t n, float eps, float *y)
{
    float s = dot_f32(x, x, n);
    float r = 1.0f / __builtin_sqrtf(s / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] * r) * w[i];
}

static void l2_norm(const float *x, size_t n, float eps, float scale, float *y)
{
    float s = dot_f32(x, x, n);
    float r = 1.0f / __builtin_sqrtf(s + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] * r) * scale;
}

static void add(const float *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = y[i] + x[i];
}

static void silu_mul(const float *gate, const float *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = silu_f32(gate[i]) * x[i];
}

static void gelu_mul(const float *gate, const float *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = gelu_f32(gate[i]) * x[i];
}

static void sigmoid_mul(const float *gate, const float *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * sigmoid_f32(gate[i]);
}

static void sigmoid_row(const float *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = sigmoid_f32(x[i]);
}

static void exp_row(const float *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = exp_f32(x[i]);
}

static void rope(float *x, size_t n_rot, const float *cos, const float *sin, int neox)
{
    size_t half = n_rot / 2;
    for (size_t i = 0; i < half; i++) {
        size_t first = neox ? i : 2 * i, second = neox ? i + half : 2 * i + 1;
        float a = x[first], b = x[second];
        x[first] = a * cos[i] - b * sin[i];
        x[second] = a * sin[i] + b * cos[i];
    }
}

static void f32_to_f16(const float *x, size_t n, uint16_t *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = gst_f32_to_f16(x[i]);
}

static void f16_to_f32(const uint16_t *x, size_t n, float *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = gst_f16_to_f32(x[i]);
}

/* Of two zeros the positive one is the larger, so that the order of comparisons does not matter. */
static float max_row(const float *x, size_t n)
{
    float m = x[0];
    for (size_t i = 0; i < n; i++) {
        if (x[i] != x[i])
            return __builtin_nanf("");
        if (x[i] > m || (x[i] == m && bits_of(m) == 0x80000000u))
            m = x[i];
    }
    return m;
}

static float sum_exp(const float *x, size_t n, float shift)
{
    float lane[LANES] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % LANES] = lane[i % LANES] + exp_f32(x[i] - shift);
    return lanes_total(lane);
}

static int all_finite(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((bits_of(x[i]) & 0x7fffffffu) >= 0x7f800000u)
            return 0;
    return 1;
}

/* ---- attention ---- */

static void attend(const float *q, const void *k, const void *v, enum gst_float_type kv_type, size_t n_live, size_t dim, float scale,
                   float *m, float *l, float *o)
{
    float p[65]; /* [n_live] scores, then their exponentials; behind them the maximum so far */
    for (size_t j = 0; j < n_live; j++) {
        float lane[LANES] = {0};
        for (size_t d = 0; d < dim; d++)
            lane[d % LANES] = fma_f32(q[d], element_at(k, kv_type, j * dim + d), lane[d % LANES]);
        p[j] = lanes_total(lane) * scale;
    }
    p[n_live] = *m;

    float m_new = max_row(p, n_live + 1);
    float c = exp_f32(*m - m_new);
    for (size_t j = 0; j < n_live; j++)
        p[j] = exp_f32(p[j] - m_new);

    float lane[LANES] = {0};
    for (size_t j = 0; j < n_live; j++)
        lane[j % LANES] = lane[j % LANES] + p[j];
    *m = m_new;
    *l = fma_f32(*l, c, lanes_total(lane));

    for (size_t d = 0; d < dim; d++) {
        float sum = o[d] * c;
        for (size_t j = 0; j < n_live; j++)
            sum = fma_f32(p[j], element_at(v, kv_type, j * dim + d), sum);
        o[d] = sum;
    }
}

static void scale_by_inverse(const float *x, size_t n, float l, float *y)
{
    float inverse = 1.0f / l;
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * inverse;
}

/* ---- recurrent layers ---- */

static void conv_silu(const float *taps, size_t width, size_t n_channels, size_t begin, size_t end, const float *window_in, const float *u,
                      size_t u_stride, size_t n_tokens, float *y, size_t y_stride, float *window_out)
{
    /* Inputs in order: the window's width - 1 rows, then u's. Token t sees inputs t .. t + width - 1, the last being its own. */
    size_t n_window = width - 1;
    for (size_t t = 0; t < n_tokens; t++) {
        for (size_t c = begin; c < end; c++) {
            float acc = 0.0f;
            for (size_t j = 0; j < width; j++) {
                size_t i = t + j;
                float input = i < n_window ? window_in[i * n_channels + c] : u[(i - n_window) * u_stride + c];
                acc = fma_f32(taps[j * n_channels + c], input, acc);
            }
            y[t * y_stride + c] = silu_f32(acc);
        }
    }
    /* Row j takes input n_tokens + j, which lies behind it: in this order window_out may be window_in. */
    for (size_t j = 0; j < n_window; j++) {
        for (size_t c = begin; c < end; c++) {
            size_t i = n_tokens + j;
            window_out[j * n_channels + c] = i < n_window ? window_in[i * n_channels + c] : u[(i - n_window) * u_stride + c];
        }
    }
}

static void delta_rule(const float *state_in, float *state_out, size_t dk, size_t dv, size_t begin, size_t end, const float *q,
                       const float *k, size_t qk_stride, const float *v, size_t v_stride, const float *decay, const float *beta,
                       size_t gate_stride, size_t n_tokens, float *o, size_t o_stride)
{
    for (size_t c = begin; c < end; c++) {
        float column[256]; /* S[., c] */
        for (size_t i = 0; i < dk; i++)
            column[i] = state_in[i * dv + c];

        for (size_t t = 0; t < n_tokens; t++) {
            float p = 0.0f;
            for (size_t i = 0; i < dk; i++) {
                column[i] = column[i] * decay[t * gate_stride];
                p = fma_f32(column[i], k[t * qk_stride + i], p);
            }
            float d = beta[t * gate_stride] * (v[t * v_stride + c] - p);
            float out = 0.0f;
            for (size_t i = 0; i < dk; i++) {
                column[i] = fma_f32(k[t * qk_stride + i], d, column[i]);
                out = fma_f32(column[i], q[t * qk_stride + i], out);
            }
            o[t * o_stride + c] = out;
        }
        for (size_t i = 0; i < dk; i++)
            state_out[i * dv + c] = column[i];
    }
}

const struct gst_kernels gst_kernels_scalar = {
    .name = "scalar",
    .tier = GEIST_TIER_SCALAR,
    .quantize = quantize,
    .matmul = {[GST_PACK_Q8_0] = matmul_q8_0,
               [GST_PACK_Q4_0] = matmul_q4_0,
               [GST_PACK_Q4_1] = matmul_q4_1,
               [GST_PACK_Q5_0] = matmul_q5_0,
               [GST_PACK_Q5_1] = matmul_q5_1,
               [GST_PACK_Q4_K] = matmul_q4_k,
               [GST_PACK_Q5_K] = matmul_q5_k,
               [GST_PACK_Q6_K] = matmul_q6_k},
    .matmul_float = matmul_float,
    .rms_norm = rms_norm,
    .l2_norm = l2_norm,
    .add = add,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .sigmoid_mul = sigmoid_mul,
    .sigmoid = sigmoid_row,
    .exp = exp_row,
    .rope = rope,
    .f32_to_f16 = f32_to_f16,
    .f16_to_f32 = f16_to_f32,
    .max = max_row,
    .sum_exp = sum_exp,
    .all_finite = all_finite,
    .attend = attend,
    .scale_by_inverse = scale_by_inverse,
    .conv_silu = conv_silu,
    .delta_rule = delta_rule,
};
