/* kernels.h - the arithmetic of a pass, once per instruction-set tier.
 *
 * kernels/scalar.c is the definition of every function here; a tier is right when it equals it bit for bit, on any input.
 * Contract common to all:
 *   - Order of float operations is written at each function. `fma` is one rounding; elsewhere each operation rounds. No contraction.
 *   - "16-lane sum of f(i)": lane[i mod 16] takes its terms in index order, by fma where a product is summed, else by add, from +0;
 *     then the tree lane[j] += lane[j + 8], then + 4, + 2, + 1. A lane without a term stays +0 and is not touched by a tail.
 *   - Pointers need no more alignment than their type, except packed weights (64 bytes). Buffers do not overlap unless said.
 *   - Nothing allocates, nothing fails, nothing reads past the counts given. Values may be any float, NaN included; where an input is
 *     NaN or infinite the output may be any NaN, but finite inputs give the defined bits.
 *   - x, y, w: float arrays; K: row length of a matrix; T: tokens (rows of activations) of a pass.
 */
#ifndef GEIST_KERNELS_H
#define GEIST_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- packed quantised matrices (layout GEIST_PACKED_LAYOUT 1) ----
 *
 * Rows are taken in tiles of 16, the last padded with zero rows; a row is K / 32 blocks. A tile is
 *
 *     quants [K/32][quant bytes of 16 rows]      scales [K/32][16] f16 d          minimums [K/32][16] f16 m (Q4_1, Q5_1)
 *
 * and its size is rounded up to 64 bytes. Of the K types a row is K / 256 superblocks of eight blocks, and a tile is
 *
 *     quants [K/32][quant bytes of 16 rows]      scales [K/256][16] f16 d         minimums [K/256][16] f16 dmin (Q4_K, Q5_K)
 *     factors [K/32][2][16]: Q4_K, Q5_K uint8 s and n, 0..63; Q6_K int8 s of the block's values 0..15 and s' of 16..31
 *
 * Quants of one block of 16 rows hold an unsigned number u a value, w = u - offset:
 *   8 bits: uint8 [8][16][4]: group g, row r, the values 4g .. 4g+3 of the block.                                        512 bytes
 *   4 bits: uint8 [4][16][4]: low nibbles are group g (0..3), high nibbles group g + 4.                                  256 bytes
 *   5 bits: the low four so, then uint8 [16][4] with the fifth: bit g of byte i belongs to value i of group g.           320 bytes
 *   6 bits: the low four so, then uint8 [2][16][4] with the others: bits 2g, 2g + 1 of byte i of [h] belong to
 *           value i of group 4h + g.                                                                                     384 bytes
 *
 *          Q8_0   Q4_0   Q4_1     Q5_0   Q5_1     Q4_K             Q5_K             Q6_K
 *   bits   8      4      4        5      5        4                5                6
 *   offset 128    8      0        16     0        0                0                32
 *   value  d w    d w    d w + m  d w    d w + m  d s w - dmin n   d s w - dmin n   d s w
 *
 * Rows that are not there hold u = offset and otherwise zeros.
 */
#define GST_TILE_ROWS 16
#define GST_QUANT_BLOCK 32

enum gst_pack {
    GST_PACK_Q8_0 = 0,
    GST_PACK_Q4_0 = 1,
    GST_PACK_Q4_1 = 2,
    GST_PACK_Q5_0 = 3,
    GST_PACK_Q5_1 = 4,
    GST_PACK_Q4_K = 5,
    GST_PACK_Q5_K = 6,
    GST_PACK_Q6_K = 7,
    GST_PACK_COUNT = 8,
    GST_PACK_NONE = -1, /* a float matrix, used as it lies in the file */
};

static inline unsigned gst_pack_bits(enum gst_pack pack)
{
    return pack == GST_PACK_Q8_0                                                     ? 8
           : pack == GST_PACK_Q6_K                                                   ? 6
           : pack == GST_PACK_Q5_0 || pack == GST_PACK_Q5_1 || pack == GST_PACK_Q5_K ? 5
                                                                                     : 4;
}

static inline int32_t gst_pack_offset(enum gst_pack pack)
{
    return pack == GST_PACK_Q8_0 ? 128 : pack == GST_PACK_Q4_0 ? 8 : pack == GST_PACK_Q5_0 ? 16 : pack == GST_PACK_Q6_K ? 32 : 0;
}

/* Blocks that share an f16 scale. */
static inline size_t gst_pack_group(enum gst_pack pack)
{
    return pack == GST_PACK_Q4_K || pack == GST_PACK_Q5_K || pack == GST_PACK_Q6_K ? 8 : 1;
}

static inline bool gst_pack_has_minimum(enum gst_pack pack)
{
    return pack == GST_PACK_Q4_1 || pack == GST_PACK_Q5_1 || pack == GST_PACK_Q4_K || pack == GST_PACK_Q5_K;
}

/* Bytes of one block of 16 rows. */
static inline size_t gst_pack_quant_bytes(enum gst_pack pack)
{
    return (size_t)gst_pack_bits(pack) * (GST_TILE_ROWS * GST_QUANT_BLOCK / 8);
}

/* Where a tile's parts begin, for rows of n_blocks blocks; `end` is what is used of it. */
struct gst_tile_parts {
    size_t scales, minimums, factors, end;
};

static inline struct gst_tile_parts gst_pack_parts(enum gst_pack pack, size_t n_blocks)
{
    size_t halves = n_blocks / gst_pack_group(pack) * GST_TILE_ROWS * 2;
    struct gst_tile_parts p;
    p.scales = n_blocks * gst_pack_quant_bytes(pack);
    p.minimums = p.scales + halves;
    p.factors = p.minimums + (gst_pack_has_minimum(pack) ? halves : 0);
    p.end = p.factors + (gst_pack_group(pack) > 1 ? n_blocks * GST_TILE_ROWS * 2 : 0);
    return p;
}

struct gst_packed {
    const uint8_t *tiles; /* [ceil(n_rows / 16)][tile_bytes], 64-byte aligned, borrowed */
    size_t tile_bytes;
    size_t n_rows, n_cols; /* n_cols = K, a multiple of 32; of 256 for the K types */
};

/* Activations rounded per block of 32: q in -127..127. */
struct gst_qact {
    const int8_t *q;    /* [T, K] */
    const float *scale; /* [T, K/32] */
    const int32_t *sum; /* [T, K/32] sum of the block's q */
};

enum gst_float_type { GST_F32 = 0, GST_F16 = 1, GST_BF16 = 2 };

struct gst_kernels {
    const char *name;
    int tier; /* enum geist_tier */

    /* Rounds x [n], n a multiple of 32, per block: amax = largest |x|, found as the largest bit pattern without sign.
     * amax not finite: scale = NaN, q = 0. amax < 2^-100: scale = 0, q = 0. Else scale = amax / 127, inv = 127 / amax,
     * q = nearest-even integer of x * inv. */
    void (*quantize)(const float *x, size_t n, int8_t *q, float *scale, int32_t *sum);

    /* y[t * y_stride + r] for rows r of tiles [tile_begin, tile_end) (rows behind n_rows are not written), t < T. Per element, blocks b in
     * order from acc = +0:
     *   dot = exact integer sum of w * q;  acc = fma((float)dot, scale[t,b] * dw[r,b], acc);
     *   types with a minimum then: acc = fma(mw[r,b], scale[t,b] * (float)sum[t,b], acc)
     * dw is d, mw is m. Q4_K, Q5_K: dw = d * (float)s and mw = -(dmin * (float)n), both exact (11 and 6 bits).
     * Q6_K: dot = s * (sum over values 0..15) + s' * (sum over 16..31), below 2 * 128 * 16 * 32 * 127 < 2^24, so exact in f32 too. */
    void (*matmul[GST_PACK_COUNT])(const struct gst_packed *w, size_t tile_begin, size_t tile_end, const struct gst_qact *a,
                                   size_t n_tokens, float *y, size_t y_stride);

    /* y[t * y_stride + r] = 16-lane sum over k of w[r,k] * x[t,k], rows [row_begin, row_end) of w [n_rows, n_cols] of `type`,
     * little-endian, 2-byte aligned at least; F16 and BF16 are widened exactly. x [T, x_stride]. Any n_cols >= 1. */
    void (*matmul_float)(const void *w, enum gst_float_type type, size_t n_cols, size_t row_begin, size_t row_end, const float *x,
                         size_t x_stride, size_t n_tokens, float *y, size_t y_stride);

    /* s = 16-lane sum of x*x; r = 1 / sqrt(s / n + eps); y[i] = (x[i] * r) * w[i]. y may be x. */
    void (*rms_norm)(const float *x, const float *w, size_t n, float eps, float *y);
    /* s as above; r = 1 / sqrt(s + eps); y[i] = (x[i] * r) * scale. y may be x. */
    void (*l2_norm)(const float *x, size_t n, float eps, float scale, float *y);
    void (*add)(const float *x, size_t n, float *y); /* y[i] = y[i] + x[i] */
    /* sigmoid(t) = 1 / (1 + exp(-t)); silu(t) = t / (1 + exp(-t)) */
    void (*silu_mul)(const float *gate, const float *x, size_t n, float *y); /* y[i] = silu(gate[i]) * x[i]; y may be x or gate */
    /* gelu(t) = t / (1 + exp(-u)), u = t * fma(c3, t * t, c1): 0.5 t (1 + tanh(u / 2)), the tanh form. c1, c3 in kernels/exp.h. */
    void (*gelu_mul)(const float *gate, const float *x, size_t n, float *y);    /* y[i] = gelu(gate[i]) * x[i]; y may be x or gate */
    void (*sigmoid_mul)(const float *gate, const float *x, size_t n, float *y); /* y[i] = x[i] * sigmoid(gate[i]); y may be x or gate */
    void (*sigmoid)(const float *x, size_t n, float *y);
    void (*exp)(const float *x, size_t n, float *y); /* within 2 ulp; 0 below -87.3, infinity above 88.7; NaN stays NaN */

    /* Rotates one head: half = n_rot / 2 pairs with cos / sin [half].
     * neox: (i, i + half); else adjacent: (2i, 2i + 1). a' = a*c - b*s, b' = a*s + b*c, each product rounded. x in place. */
    void (*rope)(float *x, size_t n_rot, const float *cos, const float *sin, int neox);

    void (*f32_to_f16)(const float *x, size_t n, uint16_t *y); /* nearest even */
    void (*f16_to_f32)(const uint16_t *x, size_t n, float *y);

    float (*max)(const float *x, size_t n);                  /* n >= 1; +0 counts as above -0; NaN if any is NaN */
    float (*sum_exp)(const float *x, size_t n, float shift); /* 16-lane sum of exp(x[i] - shift) */
    int (*all_finite)(const float *x, size_t n);

    /* Online softmax over one KV block, one query row and head. k, v: [n_live.., dim] rows of `kv_type` (GST_F16 or GST_F32), row stride
     * dim, from the block's first live position on (behind its first one where a sliding window begins inside the block). Only rows
     * 0 .. n_live-1 are read, 1 <= n_live <= 64; lanes count from row 0.
     *   s_j = (16-lane sum of q*k_j) * scale
     *   m' = max(m, s_0 .. s_{n-1});  c = exp(m - m');  p_j = exp(s_j - m')
     *   l = fma(l, c, 16-lane sum of p_j)
     *   o[d] = o[d] * c, then for j in order o[d] = fma(p_j, v_j[d], o[d])
     * Start: m = -infinity, l = 0, o = 0. Among equal scores +0 counts as above -0, so the order of comparisons does not matter. */
    void (*attend)(const float *q, const void *k, const void *v, enum gst_float_type kv_type, size_t n_live, size_t dim, float scale,
                   float *m, float *l, float *o);
    /* y[i] = x[i] * (1 / l). y may be x. */
    void (*scale_by_inverse)(const float *x, size_t n, float l, float *y);

    /* Causal depthwise convolution and SiLU over channels [begin, end) of n_channels, kernel width `width` <= 8.
     * taps [width, n_channels], oldest input first; window_in [width-1, n_channels] the last inputs, oldest first; u [T, u_stride].
     * acc = +0; for each tap oldest first acc = fma(tap, input, acc); y[t * y_stride + c] = silu(acc).
     * window_out [width-1, n_channels] gets the last width-1 inputs (of window_in followed by u); it may be window_in. */
    void (*conv_silu)(const float *taps, size_t width, size_t n_channels, size_t begin, size_t end, const float *window_in, const float *u,
                      size_t u_stride, size_t n_tokens, float *y, size_t y_stride, float *window_out);

    /* Gated delta rule of one head over value columns [begin, end), token by token. state [dk, dv] row-major; state_in is only read,
     * state_out gets the columns after the last token and may be state_in. q, k [T, *_stride] of dk values, v and o [T, *_stride] of dv
     * values (pointers to the head's first value of token 0), decay and beta [T, gate_stride] (one value a token). dk <= 256.
     * Per token, per column c:
     *   S[i,c] = S[i,c] * decay
     *   p = +0, for i in order p = fma(S[i,c], k[i], p)
     *   d = beta * (v[c] - p)
     *   S[i,c] = fma(k[i], d, S[i,c])
     *   o[c] = +0, for i in order fma(S[i,c], q[i], o[c]) */
    void (*delta_rule)(const float *state_in, float *state_out, size_t dk, size_t dv, size_t begin, size_t end, const float *q,
                       const float *k, size_t qk_stride, const float *v, size_t v_stride, const float *decay, const float *beta,
                       size_t gate_stride, size_t n_tokens, float *o, size_t o_stride);
};

/* The table of a tier, or NULL where this machine (or this build) cannot run it. GEIST_TIER_AUTO: the best. In kernels/tiers.c, the only
 * file that names the tiers and asks the CPU. */
const struct gst_kernels *gst_kernels_for(int tier);

#endif
