/* pack.c - rows of a file into tiles of 16 rows; kernels/kernels.h draws them.
 *
 * A block's nibbles keep their bytes: in the file byte j holds values j and j + 16, in a tile byte 4g + i holds values 4g + i (group g) and
 * 4(g + 4) + i (group g + 4), which is the same pairing. Only the order of rows and blocks changes. */
#include "quant/quant.h"

struct layout {
    size_t block_bytes;  /* in the file */
    size_t header_bytes; /* of it: d, and m */
    size_t quant_bytes;  /* of it: the values */
    bool has_minimum;
    uint8_t flip; /* xor over the values: int8 becomes u8 with an offset of 128 */
    uint8_t zero; /* the packed byte of rows that are not there */
};

static const struct layout layouts[GST_PACK_COUNT] = {
    [GST_PACK_Q8_0] = {34, 2, 32, false, 0x80, 0x80},
    [GST_PACK_Q4_0] = {18, 2, 16, false, 0, 0x88},
    [GST_PACK_Q4_1] = {20, 4, 16, true, 0, 0},
};

bool quant_packed_bytes(enum gst_pack pack, size_t n_rows, size_t n_cols, size_t *tile_bytes, size_t *bytes)
{
    const struct layout *l;
    size_t n_blocks = n_cols / GST_QUANT_BLOCK;
    size_t n_tiles = n_rows / GST_TILE_ROWS + (n_rows % GST_TILE_ROWS != 0);

    *tile_bytes = *bytes = 0;
    if (pack < 0 || pack >= GST_PACK_COUNT || n_cols % GST_QUANT_BLOCK)
        return false;
    l = &layouts[pack];
    if (!gst_mul_size(n_blocks, GST_TILE_ROWS * (l->quant_bytes + l->header_bytes), tile_bytes) || *tile_bytes > SIZE_MAX - 63)
        return false;
    *tile_bytes = gst_round_up(*tile_bytes, 64);
    return gst_mul_size(n_tiles, *tile_bytes, bytes);
}

void quant_pack(enum gst_pack pack, const uint8_t *rows, size_t n_rows, size_t n_cols, size_t tile_begin, size_t tile_end, uint8_t *tiles)
{
    const struct layout *l = &layouts[pack];
    size_t n_blocks = n_cols / GST_QUANT_BLOCK;
    size_t row_bytes = n_blocks * l->block_bytes;
    size_t tile_bytes, bytes;

    if (!quant_packed_bytes(pack, n_rows, n_cols, &tile_bytes, &bytes))
        return;
    for (size_t t = tile_begin; t < tile_end; t++) {
        uint8_t *quants = tiles + t * tile_bytes;                             /* [n_blocks][quant_bytes / 4][16][4] */
        uint8_t *scales = quants + n_blocks * l->quant_bytes * GST_TILE_ROWS; /* [n_blocks][16] f16 */
        uint8_t *minimums = scales + n_blocks * 2 * GST_TILE_ROWS;            /* [n_blocks][16] f16 */
        uint8_t *end = l->has_minimum ? minimums + n_blocks * 2 * GST_TILE_ROWS : minimums;

        for (size_t r = 0; r < GST_TILE_ROWS; r++) {
            size_t row = t * GST_TILE_ROWS + r;
            const uint8_t *p = row < n_rows ? rows + row * row_bytes : NULL;

            for (size_t b = 0; b < n_blocks; b++) {
                uint8_t *q = quants + b * l->quant_bytes * GST_TILE_ROWS + 4 * r;
                size_t at = 2 * (b * GST_TILE_ROWS + r);

                for (size_t g = 0; g < l->quant_bytes / 4; g++)
                    for (size_t i = 0; i < 4; i++)
                        q[4 * GST_TILE_ROWS * g + i] = p ? p[l->header_bytes + 4 * g + i] ^ l->flip : l->zero;
                memset(scales + at, 0, 2);
                if (l->has_minimum)
                    memset(minimums + at, 0, 2);
                if (p) {
                    memcpy(scales + at, p, 2);
                    if (l->has_minimum)
                        memcpy(minimums + at, p + 2, 2);
                    p += l->block_bytes;
                }
            }
        }
        memset(end, 0, (size_t)(quants + tile_bytes - end));
    }
}
