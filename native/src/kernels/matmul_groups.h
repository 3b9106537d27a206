/* matmul_groups.h - the walk through a quantised product that the vector tiers share; the arithmetic of one tile is the tier's own.
 *
 *     for a span of tiles that stays in the second-level cache          (weights come from memory once)
 *         for a group of 1, 2, 4 .. GROUP_TOKENS tokens
 *             for a run of blocks: gather the group's activations       (they stay in the first-level cache)
 *                 for each tile of the span: group_tile()
 *
 * A tier's file includes this after it has defined GROUP_TOKENS and
 *     ALWAYS_INLINE void group_tile(enum gst_pack pack, size_t n_group, const struct tile_run *w, const struct token_group *g,
 *                                   struct vec16 acc[n_group])
 * which adds a run's blocks, in order, to the accumulators; pack and n_group are constants where it is inlined. */
#ifndef GEIST_MATMUL_GROUPS_H
#define GEIST_MATMUL_GROUPS_H

#include "kernels/kernels.h"
#include "kernels/unroll.h"

#include <assert.h>
#include <stdalign.h>
#include <string.h>

#define GROUP_ENTRIES 512       /* (block, token) pairs gathered at once */
#define PREFETCH_BYTES 4096     /* how far ahead weights are asked for */
#define SPAN_BYTES (384u << 10) /* of weights that stay in the second-level cache */

/* Activations of a group's tokens in the order a tile takes them: entry = block * n_group + token. */
struct token_group {
    alignas(64) int8_t q[GROUP_ENTRIES][GST_QUANT_BLOCK];
    alignas(64) int32_t start[GROUP_ENTRIES]; /* what undoes the offset of the weights: -offset * sum */
    int32_t start2[GROUP_ENTRIES];            /* Q6_K: of the block's second half; then start is of the first */
    float scale[GROUP_ENTRIES];
    float shift[GROUP_ENTRIES]; /* types with a minimum: scale * (float)sum */
};
static_assert(GROUP_ENTRIES / GROUP_TOKENS % 8 == 0, "a run begins with a superblock");

/* Some blocks of a tile: pointers to the first of them. */
struct tile_run {
    const uint8_t *quants;
    const uint8_t *scales;   /* f16 [n_blocks][16]; K types [n_blocks / 8][16] */
    const uint8_t *minimums; /* the same */
    const uint8_t *factors;  /* K types: [n_blocks][2][16] */
    size_t n_blocks;
};

/* dw and mw of block b; Q6_K: d. */
ALWAYS_INLINE struct vec16 tile_scale(enum gst_pack pack, const struct tile_run *w, size_t b)
{
    struct vec16 d = vec16_load_f16(w->scales + b / gst_pack_group(pack) * 32);
    return pack == GST_PACK_Q4_K || pack == GST_PACK_Q5_K ? vec16_mul(d, vec16_load_u8(w->factors + b * 32)) : d;
}

ALWAYS_INLINE struct vec16 tile_minimum(enum gst_pack pack, const struct tile_run *w, size_t b)
{
    struct vec16 m = vec16_load_f16(w->minimums + b / gst_pack_group(pack) * 32);
    return gst_pack_group(pack) > 1 ? vec16_negate(vec16_mul(m, vec16_load_u8(w->factors + b * 32 + 16))) : m;
}

/* Asks for the quants of blocks to come; those of the next tile follow on this one's. A hint: an address behind the matrix is harmless.
 * Measured from cold memory: one token only reads, and gains (4-bit types by half) from a far look-ahead into the second-level cache; more
 * tokens compute in between and gain (16 of them by a quarter) from a near one into the first. */
ALWAYS_INLINE void run_prefetch(size_t n_group, const uint8_t *quants, size_t quant_bytes)
{
    UNROLL
    for (size_t i = 0; i < quant_bytes; i += 64) {
        if (n_group == 1)
            _mm_prefetch((const char *)(const void *)(quants + 16384 + i), _MM_HINT_T1);
        else
            _mm_prefetch((const char *)(const void *)(quants + 4096 + i), _MM_HINT_T0);
    }
}

ALWAYS_INLINE void group_tile(enum gst_pack pack, size_t n_group, const struct tile_run *w, const struct token_group *g, struct vec16 *acc);

ALWAYS_INLINE void group_gather(enum gst_pack pack, size_t n_group, const struct gst_qact *a, size_t n_all_blocks, size_t token,
                                size_t block, size_t n_blocks, struct token_group *g)
{
    const int32_t offset = gst_pack_offset(pack);
    for (size_t t = 0; t < n_group; t++) {
        size_t from = (token + t) * n_all_blocks + block;
        for (size_t b = 0; b < n_blocks; b++) {
            size_t entry = b * n_group + t;
            memcpy(g->q[entry], a->q + (from + b) * GST_QUANT_BLOCK, GST_QUANT_BLOCK);
            g->scale[entry] = a->scale[from + b];
            g->start[entry] = -offset * a->sum[from + b];
            if (pack == GST_PACK_Q6_K) {
                int32_t first = 0;
                for (size_t i = 0; i < 16; i++)
                    first += g->q[entry][i];
                g->start[entry] = -offset * first;
                g->start2[entry] = -offset * (a->sum[from + b] - first);
            }
            if (gst_pack_has_minimum(pack))
                g->shift[entry] = a->scale[from + b] * (float)a->sum[from + b];
        }
    }
}

/* Tokens token .. token + n_group - 1 with tiles [tile_begin, tile_end). */
ALWAYS_INLINE void group_product(enum gst_pack pack, size_t n_group, const struct gst_packed *w, size_t tile_begin, size_t tile_end,
                                 const struct gst_qact *a, size_t token, float *y, size_t y_stride)
{
    size_t n_all_blocks = w->n_cols / GST_QUANT_BLOCK;
    struct gst_tile_parts parts = gst_pack_parts(pack, n_all_blocks);
    struct token_group g;

    for (size_t block = 0; block < n_all_blocks; block += GROUP_ENTRIES / n_group) {
        size_t n_blocks = n_all_blocks - block < GROUP_ENTRIES / n_group ? n_all_blocks - block : GROUP_ENTRIES / n_group;
        group_gather(pack, n_group, a, n_all_blocks, token, block, n_blocks, &g);

        for (size_t tile = tile_begin; tile < tile_end; tile++) {
            const uint8_t *bytes = w->tiles + tile * w->tile_bytes;
            size_t halves = block / gst_pack_group(pack) * GST_TILE_ROWS * 2;
            struct tile_run run = {bytes + block * gst_pack_quant_bytes(pack), bytes + parts.scales + halves,
                                   bytes + parts.minimums + halves, bytes + parts.factors + block * GST_TILE_ROWS * 2, n_blocks};
            size_t row = tile * GST_TILE_ROWS;
            size_t n_rows = w->n_rows - row < GST_TILE_ROWS ? w->n_rows - row : GST_TILE_ROWS;

            /* Between the runs of a long row the sums wait in y. */
            struct vec16 acc[GROUP_TOKENS];
            UNROLL
            for (size_t t = 0; t < n_group; t++)
                acc[t] = block == 0 ? vec16_set1(0.0f) : vec16_load_first(y + (token + t) * y_stride + row, n_rows);
            group_tile(pack, n_group, &run, &g, acc);
            UNROLL
            for (size_t t = 0; t < n_group; t++)
                vec16_store_first(y + (token + t) * y_stride + row, n_rows, acc[t]);
        }
    }
}

ALWAYS_INLINE void matmul_groups(enum gst_pack pack, const struct gst_packed *w, size_t tile_begin, size_t tile_end,
                                 const struct gst_qact *a, size_t n_tokens, float *y, size_t y_stride)
{
    size_t span = w->tile_bytes < SPAN_BYTES ? SPAN_BYTES / w->tile_bytes : 1;
    if (n_tokens <= GROUP_TOKENS && (n_tokens & (n_tokens - 1)) == 0)
        span = tile_end - tile_begin; /* one group: every weight is read once anyway */

    for (size_t begin = tile_begin; begin < tile_end; begin += span) {
        size_t end = tile_end - begin < span ? tile_end : begin + span;
        size_t token = 0;
        while (token < n_tokens) {
            size_t left = n_tokens - token;
#if GROUP_TOKENS >= 16
            if (left >= 16) {
                group_product(pack, 16, w, begin, end, a, token, y, y_stride);
                token += 16;
                continue;
            }
            if (left >= 8) {
                group_product(pack, 8, w, begin, end, a, token, y, y_stride);
                token += 8;
                continue;
            }
#endif
            if (left >= 4) {
                group_product(pack, 4, w, begin, end, a, token, y, y_stride);
                token += 4;
            } else if (left >= 2) {
                group_product(pack, 2, w, begin, end, a, token, y, y_stride);
                token += 2;
            } else {
                group_product(pack, 1, w, begin, end, a, token, y, y_stride);
                token += 1;
            }
        }
    }
}

#define MATMUL(pack, name)                                                                                                                 \
    static void name(const struct gst_packed *w, size_t tile_begin, size_t tile_end, const struct gst_qact *a, size_t n_tokens, float *y,  \
                     size_t y_stride)                                                                                                      \
    {                                                                                                                                      \
        matmul_groups(pack, w, tile_begin, tile_end, a, n_tokens, y, y_stride);                                                            \
    }

MATMUL(GST_PACK_Q8_0, matmul_q8_0)
MATMUL(GST_PACK_Q4_0, matmul_q4_0)
MATMUL(GST_PACK_Q4_1, matmul_q4_1)
MATMUL(GST_PACK_Q5_0, matmul_q5_0)
MATMUL(GST_PACK_Q5_1, matmul_q5_1)
MATMUL(GST_PACK_Q4_K, matmul_q4_k)
MATMUL(GST_PACK_Q5_K, matmul_q5_k)
MATMUL(GST_PACK_Q6_K, matmul_q6_k)

#define MATMUL_KERNELS                                                                                                                     \
    [GST_PACK_Q8_0] = matmul_q8_0, [GST_PACK_Q4_0] = matmul_q4_0, [GST_PACK_Q4_1] = matmul_q4_1, [GST_PACK_Q5_0] = matmul_q5_0,            \
    [GST_PACK_Q5_1] = matmul_q5_1, [GST_PACK_Q4_K] = matmul_q4_k, [GST_PACK_Q5_K] = matmul_q5_k, [GST_PACK_Q6_K] = matmul_q6_k

#endif
