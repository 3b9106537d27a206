/* quant.h - weight types of a GGUF: sizes, exact dequantisation of a row, packing into the layout of kernels.h. */
#ifndef GEIST_QUANT_H
#define GEIST_QUANT_H

#include "base/base.h"
#include "kernels/kernels.h"

/* Type numbers as in the file format. */
enum ggml_type {
    GGML_F32 = 0,
    GGML_F16 = 1,
    GGML_Q4_0 = 2,
    GGML_Q4_1 = 3,
    GGML_Q5_0 = 6,
    GGML_Q5_1 = 7,
    GGML_Q8_0 = 8,
    GGML_Q4_K = 12,
    GGML_Q5_K = 13,
    GGML_Q6_K = 14,
    GGML_BF16 = 30,
};

struct quant_type {
    const char *name; /* "Q8_0" */
    uint32_t number;
    uint32_t block_values; /* values of a block; 1 for floats */
    uint32_t block_bytes;
    bool supported;     /* this engine computes with it */
    enum gst_pack pack; /* GST_PACK_NONE for floats */
    enum gst_float_type float_type;
};

/* The traits of a type number, also of well-known types that are not supported (so that a message can name them); NULL if unknown. */
const struct quant_type *quant_type_of(uint32_t number);

/* One block of 32 values as a file's row holds it, taken apart. */
struct quant_block {
    uint8_t u[GST_QUANT_BLOCK]; /* w + gst_pack_offset */
    uint8_t d[2], m[2];         /* little-endian f16: scale; minimum (types that have one) */
    uint8_t s[2];               /* K types: Q4_K, Q5_K 6-bit scale and minimum; Q6_K int8 scales of the two halves */
};

/* Block b of a row; its type is named by `pack`, which is not GST_PACK_NONE. In blocks.c. */
void quant_block_read(enum gst_pack pack, const uint8_t *row, size_t b, struct quant_block *out);
/* Bytes of what a row holds for gst_pack_group blocks. */
size_t quant_group_bytes(enum gst_pack pack);

/* y [n] = the exact values of one row of n (a multiple of block_values) values; f32. */
void quant_dequantize_row(const struct quant_type *t, const void *row, size_t n, float *y);

/* Bytes of a tile of 16 rows, and of the whole packed matrix; false on overflow. */
bool quant_packed_bytes(enum gst_pack pack, size_t n_rows, size_t n_cols, size_t *tile_bytes, size_t *bytes);
/* Packs tiles [tile_begin, tile_end) of `rows` (as in the file, row bytes contiguous) into `tiles`; every byte of them is written. */
void quant_pack(enum gst_pack pack, const uint8_t *rows, size_t n_rows, size_t n_cols, size_t tile_begin, size_t tile_end, uint8_t *tiles);

#endif
