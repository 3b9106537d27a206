/* quant.h - weight types of a GGUF: sizes, exact dequantisation of a row, packing into the layout of kernels.h. */
#ifndef GEIST_QUANT_H
#define GEIST_QUANT_H

#include "base/base.h"
#include "kernels/kernels.h"

/* Type numbers as in the file format. */
enum ggml_type { GGML_F32 = 0, GGML_F16 = 1, GGML_Q4_0 = 2, GGML_Q4_1 = 3, GGML_Q8_0 = 8, GGML_BF16 = 30 };

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

/* y [n] = the exact values of one row of n (a multiple of block_values) values; f32. */
void quant_dequantize_row(const struct quant_type *t, const void *row, size_t n, float *y);

/* Bytes of a tile of 16 rows, and of the whole packed matrix; false on overflow. */
bool quant_packed_bytes(enum gst_pack pack, size_t n_rows, size_t n_cols, size_t *tile_bytes, size_t *bytes);
/* Packs tiles [tile_begin, tile_end) of `rows` (as in the file, row bytes contiguous) into `tiles`; every byte of them is written. */
void quant_pack(enum gst_pack pack, const uint8_t *rows, size_t n_rows, size_t n_cols, size_t tile_begin, size_t tile_end, uint8_t *tiles);

#endif
