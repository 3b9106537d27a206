/* dequant.c - the values a quantised row stands for. Rows are read in place: blocks lie at any address.
 *
 *     Q8_0: f16 d, int8 q[32]                    w = d q
 *     Q4_0: f16 d, nibbles q[32]                 w = d (q - 8)
 *     Q4_1: f16 d, f16 m, nibbles q[32]          w = d q + m, both operations rounded
 *
 * Nibbles: byte j holds value j below and value j + 16 above. */
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
    for (size_t b = 0; b < n / t->block_values; b++, p += t->block_bytes, y += GST_QUANT_BLOCK) {
        float d = gst_f16_to_f32(u16_at(p));

        switch (t->pack) {
        case GST_PACK_Q8_0:
            for (int i = 0; i < GST_QUANT_BLOCK; i++)
                y[i] = d * (float)(int8_t)p[2 + i];
            break;
        case GST_PACK_Q4_0:
            for (int i = 0; i < GST_QUANT_BLOCK / 2; i++) {
                y[i] = d * (float)((p[2 + i] & 15) - 8);
                y[i + 16] = d * (float)((p[2 + i] >> 4) - 8);
            }
            break;
        case GST_PACK_Q4_1: {
            float m = gst_f16_to_f32(u16_at(p + 2));

            for (int i = 0; i < GST_QUANT_BLOCK / 2; i++) {
                y[i] = d * (float)(p[4 + i] & 15) + m;
                y[i + 16] = d * (float)(p[4 + i] >> 4) + m;
            }
            break;
        }
        case GST_PACK_COUNT:
        case GST_PACK_NONE:
            break;
        }
    }
}
