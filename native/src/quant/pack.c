/* pack.c - rows of a file into tiles of 16 rows; kernels/kernels.h draws them. */
#include "quant/quant.h"

bool quant_packed_bytes(enum gst_pack pack, size_t n_rows, size_t n_cols, size_t *tile_bytes, size_t *bytes)
{
    size_t n_blocks = n_cols / GST_QUANT_BLOCK, limit;
    size_t n_tiles = n_rows / GST_TILE_ROWS + (n_rows % GST_TILE_ROWS != 0);

    *tile_bytes = *bytes = 0;
    if (pack < 0 || pack >= GST_PACK_COUNT || n_cols % (GST_QUANT_BLOCK * gst_pack_group(pack)))
        return false;
    if (!gst_mul_size(n_blocks, 1024, &limit)) /* more than a block takes in any layout */
        return false;
    *tile_bytes = gst_round_up(gst_pack_parts(pack, n_blocks).end, 64);
    return gst_mul_size(n_tiles, *tile_bytes, bytes);
}

/* The values of row r of a tile into its block; of 16 rows, together, every byte is written. */
static void values_put(enum gst_pack pack, const uint8_t u[GST_QUANT_BLOCK], size_t r, uint8_t *block)
{
    const size_t n = 4 * GST_TILE_ROWS; /* bytes of a group */
    unsigned bits = gst_pack_bits(pack);
    uint8_t *to = block + 4 * r;

    if (bits == 8) {
        for (size_t g = 0; g < 8; g++)
            memcpy(to + n * g, u + 4 * g, 4);
        return;
    }
    for (size_t i = 0; i < 16; i++)
        to[n * (i / 4) + i % 4] = (uint8_t)((u[i] & 15) | (u[i + 16] & 15) << 4);
    for (size_t i = 0; i < 4 && bits == 5; i++) {
        unsigned high = 0;

        for (size_t g = 0; g < 8; g++)
            high |= (u[4 * g + i] >> 4 & 1u) << g;
        to[4 * n + i] = (uint8_t)high;
    }
    for (size_t i = 0; i < 8 && bits == 6; i++) {
        unsigned high = 0;

        for (size_t g = 0; g < 4; g++)
            high |= (u[4 * (i / 4 * 4 + g) + i % 4] >> 4 & 3u) << 2 * g;
        to[(4 + i / 4) * n + i % 4] = (uint8_t)high;
    }
}

void quant_pack(enum gst_pack pack, const uint8_t *rows, size_t n_rows, size_t n_cols, size_t tile_begin, size_t tile_end, uint8_t *tiles)
{
    size_t n_blocks = n_cols / GST_QUANT_BLOCK, group = gst_pack_group(pack);
    size_t row_bytes = n_blocks / group * quant_group_bytes(pack), quant_bytes = gst_pack_quant_bytes(pack);
    struct gst_tile_parts parts = gst_pack_parts(pack, n_blocks);
    struct quant_block nothing = {.u = {0}}; /* of a row that is not there */
    size_t tile_bytes, bytes;

    if (!quant_packed_bytes(pack, n_rows, n_cols, &tile_bytes, &bytes))
        return;
    memset(nothing.u, gst_pack_offset(pack), sizeof nothing.u);
    for (size_t t = tile_begin; t < tile_end; t++) {
        uint8_t *tile = tiles + t * tile_bytes;

        for (size_t r = 0; r < GST_TILE_ROWS; r++) {
            size_t row = t * GST_TILE_ROWS + r;

            for (size_t b = 0; b < n_blocks; b++) {
                struct quant_block block = nothing;
                size_t at = 2 * (b / group * GST_TILE_ROWS + r);

                if (row < n_rows)
                    quant_block_read(pack, rows + row * row_bytes, b, &block);
                values_put(pack, block.u, r, tile + b * quant_bytes);
                memcpy(tile + parts.scales + at, block.d, 2);
                if (gst_pack_has_minimum(pack))
                    memcpy(tile + parts.minimums + at, block.m, 2);
                if (group > 1)
                    for (size_t i = 0; i < 2; i++)
                        tile[parts.factors + (2 * b + i) * GST_TILE_ROWS + r] = block.s[i];
            }
        }
        memset(tile + parts.end, 0, tile_bytes - parts.end);
    }
}
