/* dequant.c - the values a quantised row stands for; blocks.c takes the blocks apart. Every operation rounds by itself.
 *
 *     Q8_0, Q4_0, Q5_0: d w        Q4_1, Q5_1: d u + m        Q4_K, Q5_K: (d s) u - (dmin n)        Q6_K: (d s) w
 */
#include "quant/quant.h"

static inline uint16_t u16_at(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static void float_row(const uint8_t *p, enum gst_float_type type, size_t n, float *y)
{
    switch (type) {
    case GST_F32:
        memcpy(y, p, n * sizeof *y);
        break;
    case GST_F16:
        for (size_t i = 0; i < n; i++)
            y[i] = gst_f16_to_f32(u16_at(p + 2 * i));
        break;
    case GST_BF16:
        for (size_t i = 0; i < n; i++)
            y[i] = gst_bf16_to_f32(u16_at(p + 2 * i));
        break;
    }
}

void quant_dequantize_row(const struct quant_type *t, const void *row, size_t n, float *y)
{
    const uint8_t *p = row;

    if (t->pack == GST_PACK_NONE) {
        float_row(p, t->float_type, n, y);
        return;
    }
    for (size_t b = 0; b < n / GST_QUANT_BLOCK; b++, y += GST_QUANT_BLOCK) {
        struct quant_block block;
        float d, m;

        quant_block_read(t->pack, p, b, &block);
        d = gst_f16_to_f32(u16_at(block.d));
        m = gst_f16_to_f32(u16_at(block.m));
        if (t->pack == GST_PACK_Q4_K || t->pack == GST_PACK_Q5_K) {
            d = d * (float)block.s[0];
            m = -(m * (float)block.s[1]);
        }
        for (int i = 0; i < GST_QUANT_BLOCK; i++) {
            float w = (float)((int32_t)block.u[i] - gst_pack_offset(t->pack));
            float scale = t->pack == GST_PACK_Q6_K ? d * (float)(int8_t)block.s[i / 16] : d;

            y[i] = gst_pack_has_minimum(t->pack) ? scale * w + m : scale * w;
        }
    }
}
