/* blocks.c - how a file lays out the blocks of a quantised row. Rows lie at any address.
 *
 *     Q8_0: f16 d, int8 q[32]
 *     Q4_0: f16 d, nibbles[16]                        Q4_1: f16 d, f16 m, nibbles[16]
 *     Q5_0: f16 d, u32 high, nibbles[16]              Q5_1: f16 d, f16 m, u32 high, nibbles[16]       bit i of `high`: fifth bit of value i
 *     Nibbles of these: byte j holds value j below and value j + 16 above.
 *
 *     Superblocks of eight blocks:
 *     Q4_K: f16 d, f16 dmin, scales[12], nibbles[4][32]             byte i of [c]: value i of block 2c below, of block 2c + 1 above
 *     Q5_K: f16 d, f16 dmin, scales[12], high[32], nibbles[4][32]   bit b of high[i]: fifth bit of value i of block b
 *     Q6_K: nibbles[2][2][32], high[2][32], int8 scales[16], f16 d  half h has blocks 4h + k: value i is nibble k / 2 of [h][k % 2][i] and
 *                                                                   bits 2k, 2k + 1 of high[h][i]; scales 2b and 2b + 1 are of block b
 *
 *     scales[12] are eight pairs (s, n) of 6 bits. Byte j < 4 ends with s_j, byte j + 4 with n_j; byte j + 8 is s_(j+4) below and n_(j+4) above,
 *     four bits each, whose upper two bits are those of bytes j and j + 4.
 */
#include "quant/quant.h"

/* Of the file. */
static const uint8_t group_bytes[GST_PACK_COUNT] = {
    [GST_PACK_Q8_0] = 34, [GST_PACK_Q4_0] = 18,  [GST_PACK_Q4_1] = 20,  [GST_PACK_Q5_0] = 22,
    [GST_PACK_Q5_1] = 24, [GST_PACK_Q4_K] = 144, [GST_PACK_Q5_K] = 176, [GST_PACK_Q6_K] = 210,
};

size_t quant_group_bytes(enum gst_pack pack)
{
    return group_bytes[pack];
}

static void nibbles_read(const uint8_t *p, uint8_t *u)
{
    for (int j = 0; j < 16; j++) {
        u[j] = p[j] & 15;
        u[j + 16] = p[j] >> 4;
    }
}

static void fifth_bits_read(const uint8_t *p, uint8_t *u)
{
    for (int i = 0; i < GST_QUANT_BLOCK; i++)
        u[i] = (uint8_t)(u[i] | (p[i / 8] >> i % 8 & 1) << 4);
}

static void six_bit_scales_read(const uint8_t *p, size_t b, uint8_t s[2])
{
    if (b < 4) {
        s[0] = p[b] & 63;
        s[1] = p[b + 4] & 63;
    } else {
        s[0] = (uint8_t)((p[b + 4] & 15) | p[b - 4] >> 6 << 4);
        s[1] = (uint8_t)(p[b + 4] >> 4 | p[b] >> 6 << 4);
    }
}

static void q6_k_read(const uint8_t *p, size_t b, struct quant_block *out)
{
    size_t h = b / 4, k = b % 4;
    const uint8_t *low = p + 64 * h + 32 * (k % 2), *high = p + 128 + 32 * h;

    for (size_t i = 0; i < GST_QUANT_BLOCK; i++)
        out->u[i] = (uint8_t)((low[i] >> 4 * (k / 2) & 15) | (high[i] >> 2 * k & 3) << 4);
    memcpy(out->s, p + 192 + 2 * b, 2);
    memcpy(out->d, p + 208, 2);
}

void quant_block_read(enum gst_pack pack, const uint8_t *row, size_t b, struct quant_block *out)
{
    const uint8_t *p = row + b / gst_pack_group(pack) * group_bytes[pack];

    b %= gst_pack_group(pack);
    if (pack == GST_PACK_Q6_K) {
        memset(out->m, 0, 2);
        q6_k_read(p, b, out);
        return;
    }
    memcpy(out->d, p, 2);
    memset(out->m, 0, 2);
    memset(out->s, 0, 2);
    p += 2;
    if (gst_pack_has_minimum(pack)) {
        memcpy(out->m, p, 2);
        p += 2;
    }
    switch (pack) {
    case GST_PACK_Q8_0:
        for (int i = 0; i < GST_QUANT_BLOCK; i++)
            out->u[i] = p[i] ^ 0x80;
        break;
    case GST_PACK_Q4_0:
    case GST_PACK_Q4_1:
        nibbles_read(p, out->u);
        break;
    case GST_PACK_Q5_0:
    case GST_PACK_Q5_1:
        nibbles_read(p + 4, out->u);
        fifth_bits_read(p, out->u);
        break;
    case GST_PACK_Q4_K:
    case GST_PACK_Q5_K: {
        const uint8_t *high = p + 12, *low = high + (pack == GST_PACK_Q5_K ? 32 : 0) + b / 2 * 32;

        six_bit_scales_read(p, b, out->s);
        for (int i = 0; i < GST_QUANT_BLOCK; i++) {
            out->u[i] = low[i] >> 4 * (b % 2) & 15;
            if (pack == GST_PACK_Q5_K)
                out->u[i] = (uint8_t)(out->u[i] | (high[i] >> b & 1) << 4);
        }
        break;
    }
    case GST_PACK_Q6_K:
    case GST_PACK_COUNT:
    case GST_PACK_NONE:
        break;
    }
}
